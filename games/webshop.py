"""WebShop (Yao et al. 2022) as a library: the shop, its goals, its pages and its reward.

It gives the same answers as the official program (princeton-nlp/WebShop, text environment), down to the last
digit of the reward. It needs only the official data files, no web server, Java, browser or network. The order
of this file is: products, goals, reward, pages, sessions. The search engine is webshop_search.py.

The shop has its own random generator. It draws the prices of products that are sold in a range, and the price
limits of goals. `seed` gives the same goals as the official program after random.seed(seed).

Left out: the special queries <r>, <a>, <c> and <q>, which this engine reads as plain text (two of them crash
the official program); images; and reviews, as the official data has none.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import re
import warnings
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from sys import intern
from typing import NamedTuple

from games import webshop_search

HITS, PAGE_SIZE = 50, 10  # products that a search finds, and products on one page
NO_LIMIT = 1_000_000  # the price limit of a goal without one
SOURCE = "the official repository princeton-nlp/WebShop: its setup.sh downloads it (-d small or -d all)"
SETS = {  # product set -> its files of products and of attributes
    "small": ("items_shuffle_1000.json", "items_ins_v2_1000.json"),
    "all": ("items_shuffle.json", "items_ins_v2.json"),
}
HUMAN_GOALS, TITLE_NOUNS, COLORS = "items_human_ins.json", "title_nouns_spacy_sm380.json", "color_set.json"


# --- Products ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the shop."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]  # the text of the page "Features"
    category: str
    query: str  # a query for products of its kind
    product_category: str  # "Home & Kitchen › Furniture › ..."
    options: dict[str, tuple[str, ...]]  # {"color": ("black", "blue | red"), ...}
    attributes: tuple[str, ...]
    price_tag: str  # "$9.99" or "$9.99 to $12.99"
    price: float  # drawn from the range, if there is one

    @property
    def document(self) -> str:
        """The text of the product that the search engine indexes."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.bullets[:1], options]).lower()


_ENDS = tuple(" \t\r\n,:]}")  # the characters that can follow a value


def stream_json(path: Path, chunk: int = 1 << 20) -> Iterator:
    """Yield the elements of a JSON array, or the (key, value) pairs of an object.

    The file is read in pieces of `chunk` characters, so it need not fit into memory. Raises ValueError if the
    file is damaged.
    """
    decode, gap = json.JSONDecoder().raw_decode, re.compile(r"[\s,:]*")
    with open(path, encoding="utf-8") as file:
        buffer = file.read(chunk)
        at = gap.match(buffer).end()
        opening, at = buffer[at : at + 1], at + 1
        if opening not in ("[", "{"):
            raise ValueError(f"{path}: expected a JSON array or object")
        values, fault = [], None
        while True:
            at = gap.match(buffer, at).end()
            if buffer[at : at + 1] == ("]" if opening == "[" else "}"):
                return
            try:
                value, end = decode(buffer, at)
            except json.JSONDecodeError as error:
                end, fault = len(buffer), error
            if buffer[end : end + 1] not in _ENDS:  # the buffer ends within the value, so read more
                more = file.read(max(chunk, end - at))  # doubles the buffer, so the time is linear
                if not more:
                    raise ValueError(f"{path} is damaged or truncated: {fault}") from fault
                buffer, at = buffer[at:] + more, 0
                continue
            at = end
            values.append(value)
            if opening == "[" or len(values) == 2:
                yield values[0] if opening == "[" else tuple(values)
                values = []


def _prices(pricing: str | None) -> list[float]:
    """Return the amounts in a text such as "$9.99 to $12.99", at most two. The default price is 100.0."""
    parts = [re.sub(r"[^\d.]", "", part) for part in (pricing or "").split("$")[1:]]
    return [float(part) for part in parts][:2] or [100.0]


def _product(record: dict, attributes: Sequence[str], rng: random.Random) -> Product:
    """Make a product from its record in the product file."""
    prices = _prices(record.get("pricing"))
    bullets = record["small_description"]
    options = {}
    for name, values in (record["customization_options"] or {}).items():
        if values is not None:
            names = [value["value"].strip().replace("/", " | ").lower() for value in values]
            options[intern(name.lower())] = tuple(names)
    return Product(
        asin=record["asin"],
        title=record["name"],
        description=record["full_description"],
        bullets=tuple(bullets) if isinstance(bullets, list) else (bullets,),
        category=intern(record["category"]),
        query=intern(record["query"].lower().strip()),
        product_category=intern(record["product_category"]),
        options=options,
        attributes=tuple(attributes),
        price_tag=" to ".join(f"${price}" for price in prices),
        price=prices[0] if len(prices) == 1 else rng.uniform(*prices),
    )


class _Instruction(NamedTuple):
    """The recipe of goals: of one goal, or of one for each choice of the product's options."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] | None  # None: each choice of the product's options is a goal


def _load(folder: Path, goals: str, rng: random.Random, product_set: str):
    """Read the products and their instructions, both by ASIN."""
    products_file, attributes_file = (folder / name for name in SETS[product_set])
    facts = dict(stream_json(attributes_file))
    human = dict(stream_json(folder / HUMAN_GOALS)) if goals == "human" else {}
    products: dict[str, Product] = {}
    instructions: dict[str, list[_Instruction]] = {}
    unknown = []
    for record in stream_json(products_file):
        asin = record["asin"]
        if asin == "nan" or len(asin) > 10 or asin in products:
            continue
        if asin not in facts:
            unknown.append(asin)
        fact = facts.get(asin, {})
        attributes = [intern(name) for name in fact.get("attributes", ["DUMMY_ATTR"])]
        products[asin] = _product(record, attributes, rng)
        if goals == "human":
            instructions[asin] = []
            for one in human.get(asin, ()):
                wanted, options = tuple(one["instruction_attributes"]), tuple(one["instruction_options"])
                if wanted:
                    instruction = _Instruction(one["instruction"].strip("."), wanted, options)
                    instructions[asin].append(instruction)
        elif fact.get("instruction") is not None:
            wanted = tuple(intern(name) for name in fact["instruction_attributes"])
            instructions[asin] = [_Instruction(fact["instruction"], wanted, None)]
    if unknown:
        counts = f"{len(unknown)} of {len(products)} products"
        problem = f"{counts} in {products_file} have no entry in {attributes_file}"
        if goals == "synthetic":
            raise ValueError(
                f"{problem} (first: {unknown[0]}): the two files belong to different product sets"
            )
        warnings.warn(f"{problem}: these products get no attributes", stacklevel=4)
    return products, instructions


# --- Goals ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Goal:
    """A product to buy, and the attributes, options and price that count for the reward."""

    asin: str
    instruction_text: str
    attributes: tuple[str, ...]
    goal_options: dict[str, str] | tuple[str, ...]  # synthetic goals: {"color": "red"}; human goals: ("red",)
    price_upper: float


class Goals(Sequence):
    """All goals in their fixed order. A goal is made on demand, as the full product set has millions."""

    def __init__(self, products: dict[str, Product], instructions: dict, rng: random.Random):
        self._recipes = []  # (product, instruction, price limit, text of the limit)
        starts = [0]  # the goals of recipe i are starts[i] to starts[i + 1] - 1, before they are shuffled
        for asin, product in products.items():
            for instruction in instructions.get(asin, ()):
                limit, text = _price_limit(product.price, rng)
                self._recipes.append((product, instruction, limit, text))
                count = 1
                if instruction.options is None:
                    for values in product.options.values():
                        count *= len(values)
                starts.append(starts[-1] + count)
        self._starts = array("q", starts)
        self._order = array("q", range(starts[-1]))
        random.Random(233).shuffle(self._order)  # 233 is the seed in the official program

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = self._order[index]
        recipe = bisect_right(self._starts, place) - 1
        product, instruction, limit, limit_text = self._recipes[recipe]
        if instruction.options is not None:
            text, options = instruction.text, instruction.options
        else:
            options = _combination(product.options, place - self._starts[recipe])
            wishes = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = f"{instruction.text} with {wishes}" if wishes else instruction.text
        return Goal(product.asin, text + limit_text, instruction.attributes, options, limit)


def _price_limit(price: float, rng: random.Random) -> tuple[float, str]:
    """Draw the price limit of a goal, and write its text.

    Two of the next four multiples of ten above the price are drawn, and the larger one is the limit. There is
    no limit if fewer than two multiples up to 990 are above the price.
    """
    above = [10.0 * i for i in range(1, 100) if 10.0 * i > price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(rng.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _combination(options: dict[str, tuple[str, ...]], index: int) -> dict[str, str]:
    """Return the index-th choice of one value per option, in order of names. The last varies fastest."""
    names = sorted(options)
    chosen = {}
    for name in reversed(names):
        index, place = divmod(index, len(options[name]))
        chosen[name] = options[name][place]
    return {name: chosen[name] for name in names}


# --- Reward -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a purchase.

    reward = r_type * (matched attributes + matched options + price) / (attributes + options + 1), with the
    numbers of attributes and options of the goal in the denominator.
    """

    reward: float
    r_type: float  # 1, 0.5, 0.1 or 0: how close the kind of the product is to the goal's
    attributes: float  # the share of the goal's attributes that match
    options: float | None  # the share of the goal's options that match; None if the goal has no options
    price: bool  # the price is within the limit
    title_score: float
    query_match: bool
    category_match: bool


_LATIN_1 = dict.fromkeys(range(128, 256))  # characters that are removed before texts are compared


@lru_cache(maxsize=65536)
def _plain(text: str) -> str:
    from rapidfuzz.utils import default_process

    return default_process(text.translate(_LATIN_1))


@lru_cache(maxsize=65536)
def _similar(a: str, b: str) -> bool:
    from rapidfuzz.fuzz import token_set_ratio

    return round(token_set_ratio(_plain(a), _plain(b))) > 85


def _title_score(bought: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the share of the wanted title's nouns that the bought title contains.

    As in the official program, a noun that occurs twice in the wanted title lowers the share, even if both
    titles are the same.
    """
    return len(set(bought) & set(wanted)) / len(wanted) if wanted else 0.2


def _parts(product: Product) -> set[str]:
    return {part.strip() for part in product.product_category.split("›")}


def judge(
    bought: Product,
    chosen: dict[str, str],
    goal: Goal,
    wanted: Product,
    nouns: Callable[[Product], Sequence[str]],
    colors: Sequence[str],
) -> Score:
    """Score a purchase with the official reward.

    bought, chosen: the product and its chosen options, {name: value}. wanted: the product of the goal. nouns:
    a function that gives the nouns in the title of a product. colors: the color names, in official order.
    """
    title_score = _title_score(nouns(bought), nouns(wanted))
    query_match = bought.query == wanted.query
    category_match = len(_parts(bought) & _parts(wanted)) >= 2
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:
        r_type = 0.1 if title_score else 0.0

    texts = [bought.title.lower(), " ".join(bought.bullets).lower(), bought.description.lower()]
    attributes = 0
    for wish in goal.attributes:
        in_text = any(wish in text for text in texts)
        attributes += in_text or any(_similar(attribute, wish) for attribute in bought.attributes)

    def color_of(option):
        return next((color for color in colors if color in option), option)

    # As in the official program, the wish of a synthetic goal is a pair (name, value). A color replaces the
    # pair only if it equals one of the two, as `in` compares the elements of a pair. Else str(pair) is
    # compared. The wish of a human goal is a string, and a color that it contains replaces it.
    wishes = goal.goal_options
    if isinstance(wishes, dict):
        wishes = wishes.items()
    wishes = [str(color_of(wish)) for wish in wishes]
    values = [color_of(value) for value in chosen.values()]
    options = sum(any(_similar(value, wish) for value in values) for wish in wishes)

    price = bought.price <= goal.price_upper
    total = (attributes + options + price) / (len(goal.attributes) + len(wishes) + 1)
    return Score(
        reward=total * r_type,
        r_type=r_type,
        attributes=attributes / len(goal.attributes),
        options=options / len(wishes) if wishes else None,
        price=price,
        title_score=title_score,
        query_match=query_match,
        category_match=category_match,
    )


# --- Pages ------------------------------------------------------------------------------------------------

SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
_KINDS = ("search_results", "item_page", "item_sub_page", "done")  # in the order of the tests of a URL


class _Node(NamedTuple):
    """A piece of visible text."""

    kind: str  # "plain", "button", "product" (a link) or "option" (a value of an option)
    text: str
    option: str = ""  # the name of the option


@dataclass(frozen=True)
class Page:
    """A page of a session. Its texts are made on demand and then kept."""

    goal_index: int
    instruction: str
    kind: str = "index"  # or one of _KINDS
    show_attributes: bool = False
    query: str = ""
    number: int = 1  # the number of the page among the pages of results
    hits: tuple[Product, ...] = field(default=(), repr=False)
    product: Product | None = None
    options: dict[str, str] = field(default_factory=dict)  # the chosen options
    sub_page: str = ""  # one of SUB_PAGES
    visited: frozenset[str] = frozenset()  # ASINs that were opened since the page with the search bar
    reward: float = 0.0  # the last page shows it

    @cached_property
    def url(self) -> str:
        """The URL in the official program. Some of its rules search for texts in the URL."""
        start = "http://127.0.0.1:3000"
        words = self.query.replace(" ", "+")
        match self.kind:
            case "index":
                return f"{start}/{self.goal_index}"
            case "search_results":
                return f"{start}/search_results/{self.goal_index}/{words}/{self.number}"
            case "done":
                return f"{start}/done/{self.goal_index}/{self.product.asin}/{self.options}"
        item = f"{self.goal_index}/{self.product.asin}/{words}/{self.number}"
        if self.kind == "item_page":
            return f"{start}/item_page/{item}/{json.dumps(self.options)}"
        return f"{start}/item_sub_page/{item}/{self.sub_page}/{self.options}"

    @property
    def shown(self) -> tuple[Product, ...]:
        """The products on this page of results."""
        return self.hits[(self.number - 1) * PAGE_SIZE : self.number * PAGE_SIZE]

    @property
    def kind_in_url(self) -> str:
        """The kind of page that the official program reads from the URL. A query can mislead it."""
        return next((kind for kind in _KINDS if kind in self.url), "index")

    def _nodes(self) -> Iterator[_Node]:
        if self.kind == "done":
            yield from _receipt(self.product.asin, self.options, self.reward)
            return
        if self.kind == "index":
            yield _Node("plain", "WebShop")
            yield _Node("plain", "Instruction: ")
            yield _Node("plain", self.instruction)
            yield _Node("button", "Search")
            return
        yield _Node("plain", "Instruction:")
        yield _Node("plain", self.instruction)
        yield _Node("button", "Back to Search")
        if self.kind == "search_results":
            yield _Node("plain", f"Page {self.number} (Total results: {len(self.hits)})")
            if self.number > 1:
                yield _Node("button", "< Prev")
            yield _Node("button", "Next >")
            for product in self.shown:
                yield _Node("product", product.asin)
                yield _Node("plain", product.title)
                yield _Node("plain", product.price_tag)
            return
        yield _Node("button", "< Prev")
        product = self.product
        if self.kind == "item_page":
            for name, values in product.options.items():
                yield _Node("plain", name)
                for value in values:
                    yield _Node("option", value, name)
            yield _Node("plain", product.title)
            yield _Node("plain", f"Price: {product.price_tag}")
            yield _Node("plain", "Rating: N.A.")
            for name in SUB_PAGES[: 4 if self.show_attributes else 3]:
                yield _Node("button", name)
            yield _Node("button", "Buy Now")
        elif self.sub_page == "Description":
            yield _Node("plain", product.description)
        elif self.sub_page == "Features":
            for bullet in product.bullets:
                yield _Node("plain", f" {bullet}")
        elif self.sub_page == "Attributes":
            for attribute in product.attributes:
                yield _Node("plain", f" {attribute}")
            for text in (product.category, product.query, product.product_category):
                yield _Node("plain", text)

    def _visible(self) -> Iterator[_Node]:
        """Yield the nodes as an HTML parser does: no empty nodes or line breaks, and blanks as one blank."""
        for node in self._nodes():
            if node.text.strip(" \n\t\f\r"):
                yield node
            elif node.text and "\n" not in node.text:
                yield node._replace(text=" ")

    @cached_property
    def text(self) -> str:
        """The official observation mode "text": the visible texts, joined by [SEP]."""
        return " [SEP] ".join(node.text.strip() for node in self._visible())

    @cached_property
    def text_rich(self) -> str:
        """The official observation mode "text_rich": one line per text, with marks for buttons and clicks."""
        lines, clicked = [], []
        for kind, text, _ in self._visible():
            is_clicked = False
            if kind == "product":
                is_clicked = text in self.visited
            elif kind == "option":
                is_clicked = f'"{text}"' in self.url  # official rule; a query with quotes can meet it too
            if kind == "plain":
                lines.append(text)
                continue
            mark = "clicked button" if is_clicked else "button"
            lead = {"product": "\n", "option": "  ", "button": ""}[kind]
            lines.append(f"{lead}[{mark}] {text} [{mark}_]")
            if is_clicked and kind == "option":
                clicked.append(f"You have clicked {text}.")
        return "".join(f"{line}\n" for line in clicked[::-1] + lines)

    @cached_property
    def clickables(self) -> dict[str, _Node]:
        """The nodes that can be clicked, by name: buttons, then products, then values of options.

        A value that two options have belongs to the later option. A value with the name of a button replaces
        the button.
        """
        nodes = list(self._nodes())
        out = {node.text.lower(): node for node in nodes if node.kind == "button"}
        out |= {node.text.lower(): node for node in nodes if node.kind == "product"}
        out |= {node.text: node for node in nodes if node.kind == "option"}
        return out

    @property
    def available_actions(self) -> dict:
        """The actions in the form of the official program."""
        return {"has_search_bar": self.kind == "index", "clickables": list(self.clickables)}


# The texts of the last page. The official program leaves most of its fields empty.
_RECEIPT = (
    "Thank you for shopping with us!|Your code: |None| (Paste it in your MTurk interface.)|Purchased|asin|"
    "ASIN|options|OPTIONS|attrs|None|category|None|query|None|product category|None|Target|asin|options|"
    "attrs|price upper|instuction text|category|product category|query|Goal |None|Reward|"
    "Your score (min 0.0, max 1.0)|REWARD|Reward Details |None"
)


def _receipt(asin: str, options: dict[str, str], reward: float) -> Iterator[_Node]:
    """Yield the texts of the last page. They show the reward, so the agent must not see them."""
    shown = json.dumps(options, sort_keys=True)
    for character in "<>&'":
        shown = shown.replace(character, f"\\u{ord(character):04x}")
    filled = {"ASIN": asin, "OPTIONS": shown, "REWARD": str(reward)}
    for text in _RECEIPT.split("|"):
        yield _Node("plain", filled.get(text, text))


# --- The shop and its sessions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer to one action: the next page and the reward. `score` is set only by a purchase."""

    page: Page
    reward: float = 0.0
    done: bool = False
    score: Score | None = None

    # Together with `reward` and `done`, these are the fields that the official program returns.

    @property
    def text(self) -> str:
        return self.page.text

    @property
    def text_rich(self) -> str:
        return self.page.text_rich

    @property
    def url(self) -> str:
        return self.page.url

    @property
    def available_actions(self) -> dict:
        return self.page.available_actions


def parse_action(action: str) -> tuple[str, str]:
    """Parse an action: "search[Red Shoes]" -> ("search", "red shoes"). Any other text gives ("", "").

    The result is the same as with the official pattern (.+)\\[(.+)\\], matched at the start of the action.
    Unlike the pattern, this takes linear time.
    """
    line = action.split("\n", 1)[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 0))
    return (line[:start], line[start + 1 : end].lower()) if start > 0 else ("", "")


class Session:
    """One customer with one goal. A session holds only its current page, so it needs little memory.

    As in the official program, a session still answers after a purchase.
    """

    __slots__ = ("shop", "goal_index", "goal", "page")

    def __init__(self, shop: WebShop, goal_index: int):
        if not 0 <= goal_index < len(shop.goals):
            raise IndexError(f"there is no goal {goal_index}: the goals are 0..{len(shop.goals) - 1}")
        self.shop, self.goal_index, self.goal = shop, goal_index, shop.goals[goal_index]
        self.reset()

    def reset(self) -> Turn:
        """Go to the page with the search bar."""
        self.page = Page(
            self.goal_index, self.goal.instruction_text, show_attributes=self.shop.show_attributes
        )
        return Turn(self.page)

    def step(self, action: str) -> Turn:
        """Carry out search[...] or click[...]. Other texts and clicks on unknown names change nothing."""
        name, argument = parse_action(action)
        score = None
        if name == "search":
            self.page = self._results(argument, 1)
        elif name == "click" and argument != "search" and argument in self.page.clickables:
            if argument == "buy now":
                score = self.shop.judge(self.page.product, self.page.options, self.goal)
                self.page = replace(self.page, kind="done", reward=score.reward)
            else:
                self.page = self._clicked(argument)
        return Turn(self.page, score.reward if score else 0.0, score is not None, score)

    def progress(self) -> float:
        """Return the score of the purchase. Before it, return half of the score that it would have now.

        That is half of the score of the open product with the chosen options, and 0 while none is open.
        """
        page = self.page
        if page.kind == "done":
            return page.reward
        if page.product is None:
            return 0.0
        return self.shop.judge(page.product, page.options, self.goal).reward / 2

    def _results(self, query: str, number: int) -> Page:
        """Return a page of results."""
        page = self.page
        hits = page.hits if query == page.query else self.shop.found(query)
        return replace(
            page, kind="search_results", query=query, number=number, hits=hits, product=None, options={}
        )

    def _clicked(self, name: str) -> Page:
        """Return the page after a click on the name, in the order of the official rules."""
        page = self.page
        if name == "back to search":
            return Page(self.goal_index, page.instruction, show_attributes=page.show_attributes)
        if name in ("< prev", "next >"):
            kind = page.kind_in_url
            if kind == "search_results":
                return self._results(page.query, page.number + (1 if name == "next >" else -1))
            if name == "< prev" and kind == "item_page":
                return self._results(page.query, page.number)
        for sub_page in SUB_PAGES:
            if name == sub_page.lower():
                return replace(page, kind="item_sub_page", sub_page=sub_page)
        kind, text, option = page.clickables[name]
        if kind == "product":
            product = self.shop.products[text]
            return replace(page, kind="item_page", product=product, visited=page.visited | {text})
        options = page.options | {option: name} if kind == "option" else page.options
        return replace(page, kind="item_page", options=options)


class WebShop:
    """The shop: its products by ASIN in the order of the file (`products`), its goals, search and sessions.

    Sessions share the shop and do not change it.
    """

    def __init__(
        self,
        data_dir: str | Path,
        seed: int = 0,
        goals: str = "synthetic",
        show_attributes: bool = False,
        product_set: str | None = None,
    ):
        """Load the shop.

        data_dir: the folder of the official files.
        seed: for the prices and the price limits.
        goals: "synthetic" or "human".
        show_attributes: show the attributes of a product on a page of their own.
        product_set: "small" (1,000 products) or "all"; needed only if the folder contains both.
        Raises FileNotFoundError for missing files, ModuleNotFoundError for missing packages, and ValueError
        for wrong arguments or damaged files.
        """
        if goals not in ("synthetic", "human"):
            raise ValueError(f'goals must be "synthetic" or "human", not {goals!r}')
        _check_packages()
        folder = Path(data_dir)
        self.product_set = _check_files(folder, goals, product_set)
        self.show_attributes = show_attributes
        self._colors = _colors(folder)
        nouns_file = folder / TITLE_NOUNS
        self._nouns = dict(stream_json(nouns_file)) if nouns_file.exists() else {}

        rng = random.Random(seed)
        self.products, instructions = _load(folder, goals, rng, self.product_set)
        if not self._nouns.keys() >= self.products.keys() and not _has_spacy():
            products_file = SETS[self.product_set][0]
            raise ValueError(f"{nouns_file} lacks titles of {products_file}: install {_GET_NOUNS}")
        self._list = list(self.products.values())
        self.goals = Goals(self.products, instructions, rng)
        documents = (product.document for product in self._list)
        self._index = webshop_search.Index(documents, list(self.products))

    def __repr__(self) -> str:
        sizes = f"{len(self.products)} products, {self._index.size} documents, {len(self.goals)} goals"
        return f"WebShop({self.product_set}: {sizes})"

    def search(self, query: str, k: int = HITS) -> list[tuple[str, float]]:
        """Find the k best products for a query: (ASIN, BM25 score), best first. ASINs order equal scores."""
        numbers, scores = self._index.search(query, k)
        return [(self._list[i].asin, score) for i, score in zip(numbers, scores, strict=True)]

    def found(self, query: str) -> tuple[Product, ...]:
        """Return the products on the pages of results, best first."""
        numbers, _ = self._index.search(query, HITS)
        return tuple(self._list[i] for i in numbers)

    def session(self, goal_index: int) -> Session:
        """Start a session. Raises IndexError if there is no such goal."""
        return Session(self, goal_index)

    def judge(self, bought: Product, chosen: dict[str, str], goal: Goal) -> Score:
        """Score a purchase. `chosen` holds the chosen options, {name: value}."""
        return judge(bought, chosen, goal, self.products[goal.asin], self._title_nouns, self._colors)

    def _title_nouns(self, product: Product) -> list[str]:
        if product.asin not in self._nouns:
            self._nouns[product.asin] = _spacy_nouns(product.title)
        return self._nouns[product.asin]


def _check_packages() -> None:
    missing = [name for name in ("nltk", "rapidfuzz", "regex") if not importlib.util.find_spec(name)]
    if missing:
        raise ModuleNotFoundError(
            f"WebShop needs {', '.join(missing)}: pip install -r requirements/webshop.txt", name=missing[0]
        )


def _check_files(folder: Path, goals: str, product_set: str | None) -> str:
    """Choose the product set, and raise FileNotFoundError that names every missing file and its source."""
    if product_set is not None and product_set not in SETS:
        raise ValueError(f"product_set must be one of {', '.join(SETS)}, not {product_set!r}")
    present = [name for name, files in SETS.items() if all((folder / file).exists() for file in files)]
    if product_set is None and len(present) == 2:
        both = " and ".join(SETS)
        raise ValueError(f"{folder} contains both product sets, {both}: choose one with --webshop_products")
    if product_set is None and present:
        product_set = present[0]
    elif product_set is None:  # neither is complete: name the missing files of the set that was begun
        product_set = "all" if (folder / SETS["all"][0]).exists() else "small"
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; WebShop's files come from {SOURCE}")
    needed = [*SETS[product_set], HUMAN_GOALS] if goals == "human" else SETS[product_set]
    missing = [file for file in needed if not (folder / file).exists()]
    if not (folder / COLORS).exists() and not _normalizer(folder).exists():
        missing.append(COLORS)
    if not (folder / TITLE_NOUNS).exists() and not _has_spacy():
        missing.append(f"{TITLE_NOUNS} (or spaCy with en_core_web_sm)")
    if missing:
        raise FileNotFoundError(
            f"WebShop's data in {folder} lacks {', '.join(missing)}; get the files from the repository "
            "princeton-nlp/WebShop, as docs/RUNNING.md says"
        )
    return product_set


def _normalizer(folder: Path) -> Path:
    """Return the path of the source file with the colors, in the official checkout around `folder`."""
    return folder.resolve().parent / "web_agent_site" / "engine" / "normalize.py"


def _colors(folder: Path) -> list[str]:
    """Read the color names of the reward, in official order."""
    if (folder / COLORS).exists():
        return list(stream_json(folder / COLORS))
    for node in ast.parse(_normalizer(folder).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "COLOR_SET":
            return ast.literal_eval(node.value)
    raise ValueError(f"{_normalizer(folder)} contains no list COLOR_SET")


_GET_NOUNS = (
    "spaCy, which finds the nouns of titles for the reward: pip install spacy && "
    "python -m spacy download en_core_web_sm"
)


def _has_spacy() -> bool:
    return all(importlib.util.find_spec(name) for name in ("spacy", "en_core_web_sm"))


@lru_cache(maxsize=1)
def _spacy():
    import spacy

    return spacy.load("en_core_web_sm", exclude=["ner", "parser", "lemmatizer"])


def _spacy_nouns(title: str) -> list[str]:
    return [token.text.lower() for token in _spacy()(title) if token.pos_ in ("NOUN", "PROPN")]
