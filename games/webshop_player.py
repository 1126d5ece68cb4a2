"""A scripted customer of WebShop for the demonstrations of the warm start, and short texts of pages.

`advice` is the rule agent. It searches for the instruction, opens the first hit, clicks the options that the
instruction names, and buys. It often fails, because the first hit can be another product. `brief` shortens a
page for the tiny model, which reads only a few hundred tokens. A real language model gets the full text.
"""

from __future__ import annotations

import re

from games.webshop import Page, Product

SMALL_WORDS = {"with", "for", "and", "in", "of", "&"}
OPTION_NAME = r"(?: with|, and) (?:(?! with )[a-z &/.])+: "  # as in "shoes with color: red, and size: 9"
TITLES, TITLE_WORDS, VALUES = 5, 4, 5  # `brief` keeps so many hits, words of a title, values of an option


def query(instruction: str) -> str:
    """Write the query: the instruction without small words, names of options and the price limit."""
    wish = instruction.partition(", and price lower than")[0].removeprefix("Find me ").lower()
    words = re.sub(OPTION_NAME, " ", wish).replace(",", " ").split()
    return " ".join(word for word in words if word not in SMALL_WORDS)


def wanted(product: Product, instruction: str) -> dict[str, str]:
    """Return the options of the product that the instruction names, with their values.

    An instruction names an option as "size: large", or only by its value, "large". Of several values the
    longest one counts.
    """
    text = instruction.partition(", and price lower than")[0].lower() + ","
    out = {}
    for name, values in product.options.items():
        with_name = [value for value in values if f"{name}: {value}," in text]
        by_value = [value for value in values if f" {value} " in text or f" {value}," in text]
        if with_name or by_value:
            out[name] = max(with_name or by_value, key=len)
    return out


def advice(page: Page) -> str:
    """Return the rule agent's action on this page."""
    if page.kind == "index":
        return f"search[{query(page.instruction)}]"
    if page.kind == "search_results":
        return f"click[{page.shown[0].asin.lower()}]" if page.shown else "click[back to search]"
    if page.kind == "item_sub_page":
        return "click[< prev]"
    for name, value in wanted(page.product, page.instruction).items():
        if name not in page.options and page.clickables[value].option == name:
            return f"click[{value}]"
    return "click[buy now]"


def haste(page: Page) -> str:
    """Return a hasty action: turn the page of results, or buy before the options are chosen."""
    return {"search_results": "click[next >]", "item_page": "click[buy now]"}.get(page.kind, "click[< prev]")


def brief(page: Page) -> str:
    """Shorten a page: no buttons, and long titles and lists end in "..."."""
    if page.kind == "search_results":
        lines = []
        for hit in page.shown:
            lines.append(f"{hit.asin} {_cut(hit.title.split(), TITLE_WORDS)} {hit.price_tag};")
        return f"page {page.number}; {_cut(lines, TITLES)}"
    if page.kind == "item_page":
        product = page.product
        parts = ["item"]
        for name, values in product.options.items():
            parts.append(f"{name}: {_cut([f'{value},' for value in values], VALUES)}")
        parts += [_cut(product.title.split(), TITLE_WORDS), product.price_tag]
        return "; ".join(parts)
    return page.sub_page or "search bar"


def _cut(words: list[str], length: int) -> str:
    return " ".join(words if len(words) <= length else [*words[:length], "..."])
