"""A scripted customer of WebShop, for the demonstrations of a warm start, and pages in few words.

`advice` is the rule agent: it searches the instruction, takes the first hit, clicks the options that the
instruction spells out, and buys. It is not perfect: the first hit may be another product. `brief` shortens a
page for the tiny model, which reads only a few hundred tokens; a real language model gets the whole text.
"""

from __future__ import annotations

import re

from games.webshop import PAGE_SIZE, Page, Product

SMALL_WORDS = {"with", "for", "and", "in", "of", "&"}
OPTION_NAME = r"(?: with|, and) (?:(?! with )[a-z &/.])+: "  # as in "shoes with color: red, and size: 9"
TITLES, TITLE_WORDS, VALUES = 5, 4, 5  # kept of a page of results, of a title, of an option


def query(instruction: str) -> str:
    """What to search for: the words of the instruction that tell products apart, so not the price either."""
    wish = instruction.partition(", and price lower than")[0].removeprefix("Find me ").lower()
    words = re.sub(OPTION_NAME, " ", wish).replace(",", " ").split()
    return " ".join(word for word in words if word not in SMALL_WORDS)


def wanted(product: Product, instruction: str) -> dict[str, str]:
    """The options that the instruction spells out, as "size: large" or as a value alone."""
    text = instruction.partition(", and price lower than")[0].lower() + ","
    out = {}
    for name, values in product.options.items():
        named = [value for value in values if f"{name}: {value}," in text]
        alone = [value for value in values if f" {value} " in text or f" {value}," in text]
        if named or alone:
            out[name] = max(named or alone, key=len)
    return out


def advice(page: Page) -> str:
    """The rule agent's action on this page."""
    if page.kind == "index":
        return f"search[{query(page.instruction)}]"
    if page.kind == "search_results":
        hits = page.hits[(page.number - 1) * PAGE_SIZE : page.number * PAGE_SIZE]
        return f"click[{hits[0].asin.lower()}]" if hits else "click[back to search]"
    if page.kind == "item_sub_page":
        return "click[< prev]"
    for name, value in wanted(page.product, page.instruction).items():
        if name not in page.options and page.clickables[value].option == name:
            return f"click[{value}]"
    return "click[buy now]"


def haste(page: Page) -> str:
    """What one does who does not take the time: buys before the options are chosen, turns the page."""
    return {"search_results": "click[next >]", "item_page": "click[buy now]"}.get(page.kind, "click[< prev]")


def brief(page: Page) -> str:
    """The page in few words: titles and lists of values are cut ("..." says so), buttons left out."""
    if page.kind == "search_results":
        hits = page.hits[(page.number - 1) * PAGE_SIZE : page.number * PAGE_SIZE]
        lines = [f"{hit.asin} {_cut(hit.title.split(), TITLE_WORDS)} {hit.price_tag};" for hit in hits]
        return f"page {page.number}; {_cut(lines, TITLES)}"
    if page.kind == "item_page":
        product = page.product
        options = [
            f"{name}: {_cut([f'{value},' for value in values], VALUES)}"
            for name, values in product.options.items()
        ]
        return "; ".join(["item", *options, _cut(product.title.split(), TITLE_WORDS), product.price_tag])
    return page.sub_page or "search bar"


def _cut(words: list[str], length: int) -> str:
    return " ".join(words if len(words) <= length else [*words[:length], "..."])
