"""Tests of WebShop's scripted customer: its queries, choices and purchases, and the short texts of pages."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from games import webshop
from games.webshop import Page, Product
from games.webshop_player import advice, brief, haste, query, wanted

SHOP = Path(__file__).parent.parent.parent.parent / "shared" / "data" / "webshop"
needs_shop = pytest.mark.skipif(
    not SHOP.exists() or not all(importlib.util.find_spec(name) for name in ("nltk", "rapidfuzz", "regex")),
    reason=f"needs WebShop's files in {SHOP}, and pip install -r requirements/webshop.txt",
)


def product(asin="B000000001", title="Red Cotton Apron", price="$12.5", **options) -> Product:
    given = {name.replace("_", " "): values for name, values in options.items()}
    return Product(asin, title, "", (), "garden", "aprons", "Home › Kitchen", given, (), price, 12.5)


APRON = product(color=("red", "blue", "red | blue"), fit_type=("men", "women"), size=("s", "xs", "x-small"))
INSTRUCTION = (
    "Find me machine washable aprons with pockets, and ties for home & kitchen with color: red | blue, "
    "and fit type: women, and size: x-small, and price lower than 30.00 dollars"
)
INDEX = Page(0, INSTRUCTION)
ITEM = replace(INDEX, kind="item_page", product=APRON, query="aprons")


def results(*hits: Product, number=1) -> Page:
    return replace(INDEX, kind="search_results", hits=hits, number=number, query="aprons")


# --- Actions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "instruction, expected",
    [
        (INSTRUCTION, "machine washable aprons pockets ties home kitchen red | blue women x-small"),
        (
            'Find me double sided pillows with printing technology with size: 28" x 28", '
            "and price lower than 30.00 dollars",
            'double sided pillows printing technology 28" x 28"',
        ),
        (
            "Find me binoculars & scopes for bird watching, and price lower than 270.00 dollars",
            "binoculars scopes bird watching",
        ),
        ("Find me Spoons", "spoons"),
        ("i need blue shoes, size 9, and price lower than 60.00 dollars", "i need blue shoes size 9"),
        ("", ""),
    ],
)
def test_a_query_is_the_instruction_without_the_price_and_small_words(instruction, expected):
    assert query(instruction) == expected


@pytest.mark.parametrize(
    "instruction, chosen",
    [
        (INSTRUCTION, {"color": "red | blue", "fit type": "women", "size": "x-small"}),
        ("Find me aprons with color: red, and price lower than 30.00 dollars", {"color": "red"}),
        ("Find me aprons with size: xs", {"size": "xs"}),
        ("i want a red apron for women, size s, and price lower than 9.00 dollars", None),
        ("a RED apron", {"color": "red"}),
        ("a red and blue apron", {"color": "blue"}),  # the longest value counts
        ("a colored apron for a womens club", {}),  # parts of words are no values
        ("an apron, and price lower than 30.00 dollars for men", {}),  # text after the price does not count
    ],
)
def test_options_are_read_from_the_instruction(instruction, chosen):
    everything = {"color": "red", "fit type": "women", "size": "s"}
    assert wanted(APRON, instruction) == (everything if chosen is None else chosen)


def test_advice_searches_opens_the_first_hit_chooses_options_and_buys():
    assert advice(INDEX) == f"search[{query(INSTRUCTION)}]"
    assert advice(results(APRON, product("B000000002"))) == "click[b000000001]"
    assert advice(ITEM) == "click[red | blue]"
    assert advice(replace(ITEM, options={"color": "red | blue"})) == "click[women]"
    chosen = {"color": "red | blue", "fit type": "women", "size": "x-small"}
    assert advice(replace(ITEM, options=chosen)) == "click[buy now]"


def test_advice_does_not_change_chosen_options():
    page = replace(ITEM, options={"color": "blue", "fit type": "men", "size": "s"})
    assert advice(page) == "click[buy now]"


def test_advice_returns_from_other_pages():
    assert advice(results()) == "click[back to search]"
    hits = [product(f"B00000{i:04d}") for i in range(12)]
    assert advice(results(*hits, number=2)) == "click[b000000010]"
    assert advice(results(*hits, number=3)) == "click[back to search]"
    assert advice(replace(ITEM, kind="item_sub_page", sub_page="Reviews")) == "click[< prev]"


def test_a_value_of_two_options_is_clicked_only_for_the_later_option():
    """The button belongs to the later option. Clicking it for the earlier one would never end."""
    both = product(fit=("blue", "small"), color=("small", "blue"))
    page = replace(ITEM, product=both, instruction="a thing with fit: small, and color: blue,")
    assert wanted(both, page.instruction) == {"fit": "small", "color": "blue"}
    assert advice(page) == "click[blue]"
    assert advice(replace(page, options={"color": "blue"})) == "click[buy now]"


def test_hasty_actions_turn_the_page_or_buy():
    assert haste(results(APRON)) == "click[next >]"
    assert haste(ITEM) == "click[buy now]"
    assert haste(replace(ITEM, kind="item_sub_page", sub_page="Features")) == "click[< prev]"
    assert haste(INDEX) not in INDEX.clickables  # there is no hasty action on this page


# --- Short texts of pages -----------------------------------------------------------------------------------


def test_brief_shortens_titles_and_lists():
    assert brief(INDEX) == "search bar"
    assert brief(replace(ITEM, kind="item_sub_page", sub_page="Features")) == "Features"
    assert brief(results()) == "page 1; "
    kettle = product("B000000002", "Steel Kettle for Tea and Coffee", "$1.0 to $2.0")
    assert brief(results(APRON, kettle)) == (
        "page 1; B000000001 Red Cotton Apron $12.5; B000000002 Steel Kettle for Tea ... $1.0 to $2.0;"
    )
    assert brief(ITEM) == (
        "item; color: red, blue, red | blue,; fit type: men, women,; size: s, xs, x-small,; "
        "Red Cotton Apron; $12.5"
    )
    many = product(size=tuple("abcdefg"), title="one two three four five")
    text = "item; size: a, b, c, d, e, ...; one two three four ...; $12.5"
    assert brief(replace(ITEM, product=many)) == text


def test_brief_shows_five_hits_of_a_page():
    hits = [product(f"B00000{i:04d}") for i in range(17)]
    shown = brief(results(*hits, number=2))
    assert shown.startswith("page 2; B000000010 Red")
    assert shown.endswith("B000000014 Red Cotton Apron $12.5; ...")
    assert shown.count("Apron") == 5
    assert brief(results(*hits[:15], number=2)).endswith("B000000014 Red Cotton Apron $12.5;")


# --- The official products ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shop():
    return webshop.WebShop(SHOP)


@needs_shop
def test_the_options_read_from_instructions_equal_the_goals_options(shop):
    for goal in shop.goals[::7]:
        assert wanted(shop.products[goal.asin], goal.instruction_text) == goal.goal_options


@needs_shop
def test_the_rule_agent_has_these_results_on_the_test_goals(shop):
    turns, rewards = [], []
    for index in range(500):
        session, count = shop.session(index), 0
        turn = session.reset()
        while not turn.done and count < 15:
            turn, count = session.step(advice(turn.page)), count + 1
        turns.append(count)
        rewards.append(turn.reward)
    assert sum(reward == 1.0 for reward in rewards) == 293  # 58.6 %
    assert sum(rewards) / 500 == pytest.approx(0.775825, abs=1e-6)
    assert {length: turns.count(length) for length in set(turns)} == {3: 89, 4: 115, 5: 224, 6: 72}


@needs_shop
def test_every_page_of_a_purchase_has_at_most_120_words(shop):
    """The tiny model reads a few hundred tokens, with the instruction among them."""
    longest = 0
    for index in range(1500, 1700):
        session = shop.session(index)
        turn = session.reset()
        while not turn.done:
            longest = max(longest, len(brief(turn.page).split()))
            turn = session.step(advice(turn.page))
    assert longest <= 120
