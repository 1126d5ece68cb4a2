"""Tests of WebShop: recordings of the official program if the data is there, and a toy shop."""

import importlib.util
import json
import math
import random
import re
import tracemalloc
from collections import Counter
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from games import webshop, webshop_search

PACKAGES = ("nltk", "rapidfuzz", "regex")
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in PACKAGES),
    reason="needs pip install -r requirements/webshop.txt",
)
DATA = Path(__file__).parent.parent.parent.parent / "shared" / "data" / "webshop"
RECORDED = DATA / "transcripts"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="needs WebShop's files and recordings")


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


# --- A toy shop -------------------------------------------------------------------------------------------


def record(asin, name, **others):
    out = {
        "asin": asin,
        "name": name,
        "full_description": f"A {name.lower()} for every day.",
        "small_description": [f"{name}, made with care ", "washable "],
        "product_category": "Home › Kitchen › Things",
        "category": "garden",
        "query": " Kitchen Things ",
        "pricing": "$12.5",
        "customization_options": "",
        "images": ["x"],
    }
    return out | others


def options(**values):
    return {name: [{"value": value} for value in listed] for name, listed in values.items()}


ODD_NAMES = ["Search", "buy now", "Description", "attributes", "next >", "< prev", "back to search"]
PRODUCTS = [
    record(
        "B000000001",
        "Red Cotton Apron",
        pricing="$20.00 to $30.00",
        customization_options=options(Color=["Red", "Blue/Green", "red "], Size=["Small", 'X "L"', "café"]),
    ),
    record(
        "B000000002",
        "Blue Cotton Apron & Cap <new>",
        pricing="",
        small_description=["", " \n ", "   ", "it's \u00a0fine"],
        customization_options=options(Fit=["blue", "small"], Color=["small", "blue", "color"], Empty=[""]),
    ),
    record(
        "B000000003", "Steel Kettle", pricing="$1,200.99", full_description="\n", small_description="boils"
    ),
    record("B000000004", "Steel Pan", full_description="", customization_options=options(odd=ODD_NAMES)),
    record("B000000001", "A second product of that name"),
    record("B00000000001", "A name too long"),
    record("nan", "No name"),
    record("B000000005", "Wooden Spoon", query="spoons", product_category="Tools › Wood", pricing="$985"),
    record("B000000006", "Kettle Steel", customization_options={"Size": None}, full_description="   "),
    *[record(f"B0000001{i:02d}", f"Glass Bowl {'deep ' * (i % 4)}No {i}") for i in range(23)],
]
ATTRIBUTES = {
    item["asin"]: {"attributes": ["cotton", "machine washable", "daily wear"][: i % 4]}
    for i, item in enumerate(PRODUCTS)
}
for asin, text, wanted in [
    ("B000000001", "Find me cotton aprons", ["cotton", "washable"]),
    ("B000000002", "Find me caps & <aprons>", ["cotton"]),
    ("B000000003", "Find me a kettle", ["boils"]),
    ("B000000004", "Find me pans", ["steel"]),
    ("B000000005", "Find me spoons", ["washable", "gold"]),
]:
    ATTRIBUTES[asin] |= {"instruction": text, "instruction_attributes": wanted}
HUMAN = {
    "B000000001": [
        {
            "instruction": "i want it red.",
            "instruction_attributes": ["cotton"],
            "instruction_options": ["red"],
        },
        {"instruction": "nothing", "instruction_attributes": [], "instruction_options": []},
    ],
    "B000000009": [{"instruction": "gone", "instruction_attributes": ["x"], "instruction_options": []}],
}
COLORS = ["blue", "green", "red"]


def write_shop(folder, products=PRODUCTS, attributes=ATTRIBUTES, nouns=None):
    titles = {item["asin"]: item["name"].lower().split() for item in products}
    files = {
        "items_shuffle_1000.json": products,
        "items_ins_v2_1000.json": attributes,
        "color_set.json": COLORS,
    }
    files |= {
        "items_human_ins.json": HUMAN,
        "title_nouns_spacy_sm380.json": titles if nouns is None else nouns,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory):
    return write_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def toy(toy_folder):
    return webshop.WebShop(toy_folder)


def goal_of(shop, asin):
    return next(i for i, goal in enumerate(shop.goals) if goal.asin == asin)


# --- A slow reference of the official rules: pages are HTML, and observations are parsed from it ----------


class Parsed(HTMLParser):
    """The visible texts of a page with their tags, and the names that can be clicked."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.nodes, self.buttons, self.links, self.values = [], [], [], [], {}
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "input":
            self.values[attributes["value"]] = attributes["name"]
        elif tag != "br":
            self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.tags.pop() == tag

    def handle_data(self, data):
        if not data.strip(" \n\t\r\f"):  # as in BeautifulSoup
            data = "\n" if "\n" in data else " "
        self.nodes.append((self.tags[-1], data))
        {"button": self.buttons, "a": self.links}.get(self.tags[-1], []).append(data)


class Official:
    """One session by the official rules, on the records of the product file."""

    def __init__(self, shop, records, index):
        self.shop, self.index, self.goal = shop, index, shop.goals[index]
        self.records = {}
        for item in records:
            if len(item["asin"]) == 10:
                self.records.setdefault(item["asin"], item)
        self.start()

    def start(self):
        self.name, self.asin, self.options, self.seen, self.keywords = "", None, {}, set(), None
        self.url = f"http://127.0.0.1:3000/{self.index}"
        self.html = f"<h2>WebShop</h2><h4>Instruction: <br>{escape(self.goal.instruction_text)}</h4>"
        self.html += "<button>Search</button>"

    def head(self):
        return f"<h4>Instruction:<br>{escape(self.goal.instruction_text)}</h4><button>Back to Search</button>"

    def values_of(self, item):
        out = {}
        for name, values in (item["customization_options"] or {}).items():
            if values is not None:
                out[name.lower()] = [one["value"].strip().replace("/", " | ").lower() for one in values]
        return out

    def price_of(self, item):
        amounts = re.findall(r"\$([\d.,]+)", item.get("pricing") or "") or ["100"]
        return " to ".join(f"${float(amount.replace(',', ''))}" for amount in amounts)

    def results(self, number):
        self.number, self.asin, self.options = number, None, {}
        found = [asin for asin, _ in self.shop.search(" ".join(self.keywords), 50)]
        self.url = f"http://127.0.0.1:3000/search_results/{self.index}/{'+'.join(self.keywords)}/{number}"
        self.html = self.head() + f"<h3>Page {number} (Total results: {len(found)})</h3>"
        self.html += "<button>&lt; Prev</button>" * (number > 1) + "<button>Next &gt;</button>"
        for asin in found[(number - 1) * 10 : number * 10]:
            item = self.records[asin]
            self.html += f"<a>{asin}</a><h4>{escape(item['name'])}</h4><h5>{self.price_of(item)}</h5>"

    def place(self):
        return f"{self.index}/{self.asin}/{'+'.join(self.keywords)}/{self.number}"

    def item_page(self):
        item = self.records[self.asin]
        self.url = f"http://127.0.0.1:3000/item_page/{self.place()}/{json.dumps(self.options)}"
        self.html = self.head() + "<button>&lt; Prev</button>"
        for name, values in self.values_of(item).items():
            self.html += f"<h4>{escape(name)}</h4>"
            for value in values:
                self.html += (
                    f'<input name="{escape(name)}" value="{escape(value)}"><label>{escape(value)}</label>'
                )
        self.html += (
            f"<h2>{escape(item['name'])}</h2><h4>Price: {self.price_of(item)}</h4><h4>Rating: N.A.</h4>"
        )
        names = ["Description", "Features", "Reviews"]
        if self.shop.show_attributes:
            names.append("Attributes")
        for name in [*names, "Buy Now"]:
            self.html += f"<button>{name}</button>"

    def sub_page(self, name):
        item = self.records[self.asin]
        body = ""
        if name == "Description":
            body = f"<p>{escape(item['full_description'])}</p>"
        elif name == "Features":
            bullets = item["small_description"]
            for bullet in bullets if isinstance(bullets, list) else [bullets]:
                body += f"<p> {escape(bullet)}</p>"
        elif name == "Attributes":
            for attribute in self.shop.products[self.asin].attributes:
                body += f"<p> {attribute}</p>"
            body += f"<h5>{item['category']}</h5><h5>{escape(item['query'].strip().lower())}</h5>"
            body += f"<h5>{escape(item['product_category'])}</h5>"
        self.url = f"http://127.0.0.1:3000/item_sub_page/{self.place()}/{name}/{self.options}"
        self.html = self.head() + "<button>&lt; Prev</button>" + body

    def buy(self):
        reward = self.reward()
        shown = json.dumps(self.options, sort_keys=True)
        shown = re.sub("[<>&']", lambda found: f"\\u{ord(found[0]):04x}", shown)
        self.url = f"http://127.0.0.1:3000/done/{self.index}/{self.asin}/{self.options}"
        rows = [("asin", self.asin), ("options", shown), ("attrs", "None"), ("category", "None")]
        rows += [("query", "None"), ("product category", "None")]
        names = ["asin", "options", "attrs", "price upper", "instuction text", "category", "product category"]
        self.html = "<h1>Thank you for shopping with us!</h1><h3>Your code: </h3><pre>None</pre>"
        self.html += "<p> (Paste it in your MTurk interface.)</p><h2>Purchased</h2>"
        self.html += "".join(f"<h4>{name}<pre>{escape(value)}</pre></h4>" for name, value in rows)
        self.html += "<h2>Target</h2>" + "".join(f"<h4>{name}</h4>" for name in [*names, "query"])
        self.html += "<h4>Goal <pre>None</pre></h4><h2>Reward</h2><h3>Your score (min 0.0, max 1.0)"
        self.html += f"<pre>{reward}</pre></h3><h4>Reward Details <pre>None</pre></h4>"
        return reward

    def reward(self):
        from rapidfuzz import fuzz, utils

        def alike(a, b):
            a, b = ("".join(c for c in text if not 128 <= ord(c) <= 255) for text in (a, b))
            score = fuzz.token_set_ratio(utils.default_process(a), utils.default_process(b))
            return math.floor(score + 0.5) > 85

        def colored(value):
            for color in self.shop._colors:
                if color in value:
                    return color
            return value

        item, wish = self.records[self.asin], self.records[self.goal.asin]
        nouns, aim = self.shop._nouns[self.asin], self.shop._nouns[self.goal.asin]
        common = sum(1 for word in set(aim) if word in nouns)
        score = common / len(aim) if aim else 0.2
        shared = {part.strip() for part in item["product_category"].split("›")}
        shared &= {part.strip() for part in wish["product_category"].split("›")}
        same_query = item["query"].strip().lower() == wish["query"].strip().lower()
        if aim and common == 0:
            kind = 0.0
        elif score < 0.1:
            kind = 0.1
        elif same_query or len(shared) >= 2 or score > 0.2:
            kind = 1.0
        else:
            kind = 0.5

        bullets = item["small_description"]
        bullets = " ".join(bullets if isinstance(bullets, list) else [bullets])
        points = 0
        for attribute in self.goal.attributes:
            inside = [attribute in text.lower() for text in (item["name"], bullets, item["full_description"])]
            own = [alike(one, attribute) for one in self.shop.products[self.asin].attributes]
            points += any(inside + own)
        wanted = self.goal.goal_options
        if isinstance(wanted, dict):
            pairs = wanted.items()
            wanted = [value if value in self.shop._colors else str((name, value)) for name, value in pairs]
        else:
            wanted = [colored(value) for value in wanted]
        for one in wanted:
            points += any(alike(colored(value), one) for value in self.options.values())
        points += self.shop.products[self.asin].price <= self.goal.price_upper
        return points / (len(self.goal.attributes) + len(wanted) + 1) * kind

    def step(self, action):
        found = re.match(r"(.+)\[(.+)\]", action)
        name, argument = (found[1], found[2].lower()) if found else ("", "")
        page = Parsed(self.html)
        kinds = ("search_results", "item_page", "item_sub_page", "done")
        known = next((kind for kind in kinds if kind in self.url), "")
        reward, done = 0, False
        if name == "search":
            self.keywords = argument.split(" ")
            self.results(1)
        elif name == "click" and argument in self.clickables() and argument != "search":
            if argument == "buy now":
                reward, done = self.buy(), True
            elif argument == "back to search":
                self.start()
            elif argument == "next >" and known == "search_results":
                self.results(self.number + 1)
            elif argument == "< prev" and known == "search_results":
                self.results(self.number - 1)
            elif argument == "< prev" and known == "item_page":
                self.results(self.number)
            elif argument == "< prev" and known == "item_sub_page":
                self.item_page()
            elif argument in ("description", "features", "reviews", "attributes"):
                self.sub_page(argument.capitalize())
            else:
                if argument in page.values:
                    self.options = self.options | {page.values[argument]: argument}
                elif argument.upper() in page.links:
                    self.asin = argument.upper()
                    self.seen.add(self.asin)
                self.item_page()
        return reward, done

    def clickables(self):
        page = Parsed(self.html)
        return list(dict.fromkeys([one.lower() for one in page.buttons + page.links] + list(page.values)))

    def text(self):
        return " [SEP] ".join(node.strip() for _, node in Parsed(self.html).nodes if node != "\n")

    def text_rich(self):
        out = ""
        for tag, node in Parsed(self.html).nodes:
            if node == "\n":
                continue
            if tag == "button":
                out += f"[button] {node} [button_]\n"
            elif tag == "label" and f'"{node}"' in self.url:
                out = f"You have clicked {node}.\n{out}  [clicked button] {node} [clicked button_]\n"
            elif tag == "label":
                out += f"  [button] {node} [button_]\n"
            elif tag == "a":
                mark = "clicked button" if node in self.seen else "button"
                out += f"\n[{mark}] {node} [{mark}_]\n"
            else:
                out += f"{node}\n"
        return out


def play_against_the_rules(shop, records, rng, episodes, steps):
    """Play at random, and compare every answer with the reference. Returns how often each page was seen."""
    words = [word for item in records for word in item["name"].split()]
    queries = ["search_results", "item_page", "item_sub_page", "done", '"small"', '"blue" x', "<r>", "<c>"]
    queries += ["the", "glass bowl", "Cotton Apron", '"red"', "a [b] c", "café", "{'size'"]
    counts = Counter()
    for _ in range(episodes):
        index = rng.randrange(len(shop.goals))
        rules, session = Official(shop, records, index), shop.session(index)
        turn = session.reset()
        for _ in range(steps):
            names = rules.clickables()
            assert turn.text == rules.text()
            assert turn.text_rich == rules.text_rich()
            assert turn.url == rules.url
            assert turn.available_actions == {
                "has_search_bar": rules.html.startswith("<h2>"),
                "clickables": names,
            }
            roll = rng.random()
            if roll < 0.8 and names:
                action = f"click[{rng.choice(names)}]"
            elif roll < 0.95 or not names:
                action = f"search[{rng.choice([rng.choice(queries), ' '.join(rng.sample(words, 3))])}]"
            else:
                action = rng.choice(["", "click[nothing]", "think[x]", "click[search]", "x\nclick[buy now]"])
            reward, done = rules.step(action)
            turn = session.step(action)
            assert (turn.reward, turn.done, turn.score is not None) == (reward, done, done)
            counts[turn.page.kind] += 1
    return counts


@pytest.mark.parametrize("episodes", [20, pytest.param(80, marks=pytest.mark.slow)])
def test_random_play_follows_the_rules(toy, episodes):
    counts = play_against_the_rules(toy, PRODUCTS, random.Random(1), episodes, steps=40)
    assert len(counts) == 5 and min(counts.values()) > episodes / 4


def test_random_play_follows_the_rules_with_attributes_shown(toy_folder):
    shop = webshop.WebShop(toy_folder, goals="human", show_attributes=True)
    play_against_the_rules(shop, PRODUCTS, random.Random(2), episodes=25, steps=40)


@needs_data
@pytest.mark.slow
def test_random_play_follows_the_rules_on_the_official_products(official):
    records = read(DATA / "items_shuffle_1000.json")
    play_against_the_rules(official("synthetic"), records, random.Random(3), episodes=200, steps=40)


# --- Recordings of the official program -------------------------------------------------------------------


@pytest.fixture(scope="module")
def official():
    shops = {}

    def shop_of(goals, show_attributes=False):
        key = goals, show_attributes
        if key not in shops:
            shops[key] = webshop.WebShop(DATA, goals=goals, show_attributes=show_attributes)
        return shops[key]

    return shop_of


@needs_data
@pytest.mark.parametrize(
    "path", sorted(RECORDED.glob("ep*.json")), ids=lambda path: path.stem if DATA.exists() else ""
)
def test_a_recorded_episode_has_the_same_answers(official, path):
    episode = read(path)
    # Special queries are plain text here, so their episode is only played, not compared.
    special = episode["name"] == "ep17_special_queries"
    shop = official(episode["goal_set"].partition("_")[0], bool(episode["env"].get("show_attrs")))
    session = shop.session(episode["goal_idx"])
    turns = [(session.reset(), episode["reset"])]
    turns += [(session.step(step["action"]), step) for step in episode["steps"]]
    for turn, recorded in turns:
        if special:
            continue
        assert turn.text == recorded["text"]
        assert turn.text_rich == recorded["text_rich"]
        assert turn.available_actions == recorded["available_actions"]
        assert turn.url == recorded["url"]
        assert (turn.reward, turn.done) == (recorded.get("reward", 0), recorded.get("done", False))
        info = recorded.get("reward_info")
        assert (turn.score is None) == (info is None)
        if info:
            score = turn.score
            assert (score.r_type, score.attributes) == (info["r_type"], info["r_att"])
            assert (score.options, score.price) == (info.get("r_option"), info["r_price"])
            assert score.title_score == info["title_score"]
            assert (score.query_match, score.category_match) == (info["query_match"], info["category_match"])


@needs_data
@pytest.mark.parametrize(("goals", "count"), [("synthetic", 6910), ("human", 13)])
def test_goals_equal_the_official_ones_with_seed_0(official, goals, count):
    recorded = read(RECORDED / f"goals_{goals}_seed0.json")["goals"]
    assert len(official(goals).goals) == len(recorded) == count
    for mine, theirs in zip(official(goals).goals, recorded, strict=True):
        assert (mine.asin, mine.instruction_text) == (theirs["asin"], theirs["instruction_text"])
        assert (list(mine.attributes), mine.price_upper) == (theirs["attributes"], theirs["price_upper"])
        wishes = mine.goal_options
        assert (wishes if isinstance(wishes, dict) else list(wishes)) == theirs["goal_options"]


@needs_data
def test_prices_equal_the_official_ones_with_seed_0(official):
    recorded = read(RECORDED / "product_prices_seed0.json")
    assert {asin: product.price for asin, product in official("synthetic").products.items()} == recorded


@needs_data
def test_every_query_has_lucenes_hits_in_lucenes_order(official):
    queries, answers = read(DATA / "queries.json"), read(DATA / "lucene_truth.json")
    pairs = []
    for kind in queries:
        pairs += zip(queries[kind], answers[kind], strict=True)
    assert len(pairs) == 715
    for query, answer in pairs:
        mine = official("synthetic").search(query)
        assert [asin for asin, _ in mine] == [asin for asin, _ in answer]
        # Lucene's scores were recorded with four decimals; equal ones differ by a millionth in the recording.
        assert [score for _, score in mine] == pytest.approx([score for _, score in answer], abs=1e-4)


@needs_data
def test_458_goals_cannot_be_reached_with_their_own_product(official):
    shop = official("synthetic")
    unreachable = []
    for i, goal in enumerate(shop.goals):
        if shop.judge(shop.products[goal.asin], goal.goal_options, goal).reward < 1:
            unreachable.append(i)
    assert len(unreachable) == 458
    assert unreachable == read(DATA / "goals_not_solvable_with_own_product_seed0.json")


@needs_data
def test_the_rule_agent_has_the_official_score(official):
    """The agent searches, opens the first hit, clicks each "name: value" in the instruction, and buys."""
    rewards = []
    for i in range(500):
        session = official("synthetic").session(i)
        wish = session.goal.instruction_text.partition(", and price")[0]
        session.step(f"search[{wish}]")
        product = session.step(f"click[{session.page.hits[0].asin}]").page.product
        for name, values in product.options.items():
            for value in values:
                if f"{name}: {value}" in wish:
                    session.step(f"click[{value}]")
        rewards.append(session.step("click[buy now]").reward)
    assert round(sum(rewards) / 500, 3) == 0.793
    assert rewards.count(1.0) == 287  # of 500: 57.4 %


@needs_data
def test_a_title_finds_its_product(official):
    shop = official("synthetic")
    products = random.Random(0).sample(list(shop.products.values()), 100)
    first_pages = [[asin for asin, _ in shop.search(product.title, 10)] for product in products]
    assert sum(product.asin in page for product, page in zip(products, first_pages, strict=True)) >= 98


# --- Loading ----------------------------------------------------------------------------------------------


def test_the_toy_shop_is_loaded(toy):
    assert repr(toy) == "WebShop(small: 29 products, 29 documents, 24 goals)"  # 3 records are left out
    apron = toy.products["B000000001"]
    assert apron.options == {"color": ("red", "blue | green", "red"), "size": ("small", 'x "l"', "café")}
    assert (apron.price_tag, 20 <= apron.price <= 30) == ("$20.0 to $30.0", True)
    assert (toy.products["B000000002"].price_tag, toy.products["B000000002"].price) == ("$100.0", 100.0)
    assert (toy.products["B000000003"].price_tag, toy.products["B000000003"].price) == ("$1200.99", 1200.99)
    assert toy.products["B000000003"].bullets == ("boils",)
    assert toy.products["B000000006"].options == {}
    assert toy.products["B000000004"].query == "kitchen things"
    assert apron.document.endswith('color: red, blue | green, red, and size: small, x "l", café')


def test_each_choice_of_options_is_a_goal(toy):
    goals = [goal for goal in toy.goals if goal.asin == "B000000001"]
    assert Counter((goal.goal_options["color"], goal.goal_options["size"]) for goal in goals) == {
        (color, size): 1 + (color == "red")
        for color in ("red", "blue | green")
        for size in ("small", 'x "l"', "café")
    }
    assert len({goal.price_upper for goal in goals}) == 1  # drawn once for the product
    one = next(goal for goal in goals if goal.goal_options == {"color": "blue | green", "size": "café"})
    limit = f", and price lower than {one.price_upper:.2f} dollars"
    assert one.instruction_text == f"Find me cotton aprons with color: blue | green, and size: café{limit}"
    assert one.price_upper % 10 == 0 and one.price_upper > toy.products["B000000001"].price


def test_price_limits_are_multiples_of_ten_above_the_price():
    above = {webshop._price_limit(12.5, random.Random(i))[0] for i in range(100)}
    assert above == {30.0, 40.0, 50.0}  # the larger of two of 20, 30, 40, 50
    assert webshop._price_limit(970.0, random.Random(0)) == (990.0, ", and price lower than 990.00 dollars")
    assert webshop._price_limit(980.0, random.Random(0)) == (1_000_000, "")  # only 990 is left
    assert webshop._price_limit(2000.0, random.Random(0)) == (1_000_000, "")


def test_human_goals_are_read(toy_folder):
    shop = webshop.WebShop(toy_folder, goals="human")
    (goal,) = shop.goals  # goals without attributes or without a product are left out
    assert goal.instruction_text.startswith("i want it red, and price lower than ")
    assert goal.goal_options == ("red",)


def test_goals_depend_only_on_the_seed(toy_folder):
    random.seed(1)
    before = random.getstate()
    first = webshop.WebShop(toy_folder, seed=5)
    assert random.getstate() == before
    random.seed(2)
    second, other = webshop.WebShop(toy_folder, seed=5), webshop.WebShop(toy_folder, seed=6)
    assert list(first.goals) == list(second.goals)
    assert first.products == second.products
    assert list(first.goals) != list(other.goals)
    assert [goal.asin for goal in first.goals] == [goal.asin for goal in other.goals]  # the order is fixed
    assert first.goals[-1] == first.goals[23] and first.goals[2:4] == [first.goals[2], first.goals[3]]


def test_the_error_of_missing_files_names_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(webshop, "_has_spacy", lambda: False)
    names = ["items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins.json", "color_set.json"]
    names += ["title_nouns_spacy_sm380.json", "spacy", "princeton-nlp/WebShop"]
    with pytest.raises(FileNotFoundError) as caught:
        webshop.WebShop(tmp_path, goals="human")
    assert all(name in str(caught.value) for name in names)
    (tmp_path / "items_shuffle.json").write_text("[]")
    with pytest.raises(FileNotFoundError, match=r"items_ins_v2\.json"):
        webshop.WebShop(tmp_path)


def test_files_of_different_product_sets_raise_an_error(tmp_path):
    write_shop(tmp_path, attributes={asin: fact for asin, fact in list(ATTRIBUTES.items())[:3]})
    with pytest.raises(ValueError, match="26 of 29 products .* belong to different product sets"):
        webshop.WebShop(tmp_path)
    with pytest.warns(UserWarning, match="26 of 29 products"):
        webshop.WebShop(tmp_path, goals="human")


def test_two_product_sets_in_one_folder_need_a_choice(tmp_path):
    write_shop(tmp_path)
    (tmp_path / "items_shuffle.json").write_text(json.dumps(PRODUCTS[:3]))
    (tmp_path / "items_ins_v2.json").write_text(json.dumps(ATTRIBUTES))
    with pytest.raises(ValueError, match="choose one with --webshop_products"):
        webshop.WebShop(tmp_path)
    assert repr(webshop.WebShop(tmp_path, product_set="all")).startswith("WebShop(all: 3 products")
    assert repr(webshop.WebShop(tmp_path, product_set="small")).startswith("WebShop(small: 29 products")


def test_titles_without_nouns_need_spacy(tmp_path, monkeypatch):
    write_shop(tmp_path, nouns={"B000000001": ["apron"]})
    monkeypatch.setattr(webshop, "_has_spacy", lambda: False)
    with pytest.raises(ValueError, match="lacks titles .* spacy download"):
        webshop.WebShop(tmp_path)
    monkeypatch.setattr(webshop, "_has_spacy", lambda: True)
    monkeypatch.setattr(webshop, "_spacy_nouns", lambda title: title.lower().split())
    shop = webshop.WebShop(tmp_path)
    assert shop._title_nouns(shop.products["B000000003"]) == ["steel", "kettle"]
    assert shop._title_nouns(shop.products["B000000001"]) == ["apron"]


def test_the_error_of_missing_packages_says_how_to_install_them(toy_folder, monkeypatch):
    monkeypatch.setattr(webshop.importlib.util, "find_spec", lambda name: None)
    remedy = "needs nltk, rapidfuzz, regex: pip install -r requirements"
    with pytest.raises(ModuleNotFoundError, match=remedy):
        webshop.WebShop(toy_folder)


def test_colors_are_read_from_an_official_checkout(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "web_agent_site" / "engine").mkdir(parents=True)
    code = "import os\nCOLOR_SET = ['grey', 'red']\nraise SystemExit\n"  # it must be read, not run
    (tmp_path / "web_agent_site" / "engine" / "normalize.py").write_text(code)
    write_shop(tmp_path / "data")
    (tmp_path / "data" / "color_set.json").unlink()
    assert webshop.WebShop(tmp_path / "data")._colors == ["grey", "red"]


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 20])
def test_streamed_json_equals_json(tmp_path, chunk):
    path = tmp_path / "x.json"
    for value in [
        [],
        {},
        [1, 23, -4.5e3, None, 'a]}\\"', {"k": [1, {"x": "é\u2028😀"}]}],
        {"a": [1], "b,:": {}, "c": "x"},
    ]:
        for indent in (None, 2):
            path.write_text(json.dumps(value, indent=indent), encoding="utf-8")
            read = list(webshop.stream_json(path, chunk))
            assert (dict(read) if isinstance(value, dict) else read) == value


@pytest.mark.parametrize("text", ["", "3", '[{"a": 1}, {"b"', "[1, 2", '{"a": 1', '[{"a": }]'])
def test_the_error_of_damaged_json_names_the_file(tmp_path, text):
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json"):
        list(webshop.stream_json(tmp_path / "broken.json"))


# --- Search -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Women's 2.5x4 T-Shirt, 1,000 pcs.", ["Women's", "2.5x4", "T", "Shirt", "1,000", "pcs"]),
        ("color:red a.b 3.5.6 x_1 __ _a_ 5' 'q'", ["color:red", "a.b", "3.5.6", "x_1", "_a_", "5", "q"]),
        ("❤️❤ ★ 👨‍💼👍🏽 1️⃣ #️⃣ 🇺🇸🇩🇪 ® →", ["❤️", "❤", "★", "👨‍💼", "👍🏽", "1️⃣", "#️⃣", "🇺🇸", "🇩🇪", "®"]),
        (
            "漢字 ひら カタカナ 한국어 ไทย é e\u0301x",
            ["漢", "字", "ひ", "ら", "カタカナ", "한국어", "ไทย", "é", "e\u0301x"],
        ),
        ("x" * 600, ["x" * 255, "x" * 255, "x" * 90]),
        ("", []),
    ],
)
def test_words_are_split_as_in_lucene(text, words):
    assert webshop_search.words(text) == words


def test_terms_are_stems_without_stop_words():
    text = "The women's RUNNING shoes, to be used daily; it is"
    assert webshop_search.terms(text) == ["women", "run", "shoe", "us", "daili"]
    assert webshop_search.terms("ponies’s cats' as") == ["poni", "cat"]


def test_lengths_are_rounded_as_in_lucene():
    """Up to 40 they are exact. Of a larger length minus 24, only the four leading bits remain."""
    rounded = {0: 0, 24: 24, 39: 39, 40: 40, 41: 40, 55: 54, 56: 56, 59: 56, 60: 60, 107: 104}
    rounded[24 + 0b1111_1111] = 24 + 0b1111_0000
    rounded[24 + 0b1000_1111_1] = 24 + 0b1000_0000_0
    rounded[1000] = 24 + 960
    lengths = np.array(list(rounded))
    assert webshop_search._rounded_lengths(lengths).tolist() == list(rounded.values())


def slow_search(documents, names, query):
    """BM25 by its formula, one document at a time."""
    bags = [Counter(webshop_search.terms(text)) for text in documents]
    mean = sum(sum(bag.values()) for bag in bags) / len(bags)
    out = []
    for name, bag in zip(names, bags, strict=True):
        length, score = sum(bag.values()), 0.0
        if length >= 24:
            kept = max((length - 24).bit_length() - 4, 0)
            length = 24 + (length - 24 >> kept << kept)
        for term in webshop_search.terms(query):
            df = sum(term in other for other in bags)
            if bag[term]:
                idf = math.log(1 + (len(bags) - df + 0.5) / (df + 0.5))
                score += idf * bag[term] / (bag[term] + 0.9 * (1 - 0.4 + 0.4 * length / mean))
        if score:
            out.append((name, score))
    return sorted(out, key=lambda hit: (-round(hit[1], 5), hit[0]))


def test_search_equals_the_formula_of_bm25(monkeypatch):
    rng = random.Random(0)
    vocabulary = [f"w{i}q" for i in range(40)]
    weights = [1 / (i + 1) for i in range(40)]
    documents = [" ".join(rng.choices(vocabulary, weights, k=rng.randrange(90))) for _ in range(90)]
    documents[20:40] = documents[:20]  # equal scores
    names = [f"N{i:03d}" for i in rng.sample(range(90), 90)]
    whole = webshop_search.Index(iter(documents), names)
    monkeypatch.setattr(webshop_search.Index, "BLOCK", 100)
    blocks = webshop_search.Index(documents, names)
    for _ in range(40):
        query = " ".join(rng.choices([*vocabulary, "unknown"], k=rng.randrange(6)))
        found = whole.search(query, 20)
        assert found == blocks.search(query, 20)
        expected = slow_search(documents, names, query)[:20]
        assert [names[i] for i in found[0]] == [name for name, _ in expected]
        assert found[1] == pytest.approx([score for _, score in expected], rel=1e-5)


def test_an_empty_index_finds_nothing():
    assert webshop_search.Index([], []).search("anything") == ([], [])
    assert webshop_search.Index(["", "the"], ["a", "b"]).search("the anything") == ([], [])
    with pytest.raises(ValueError, match="2 documents and 1 names"):
        webshop_search.Index(["a", "b"], ["a"])


def test_special_queries_are_plain_text(toy):
    for query in ("<r>", "<a> cotton", "<c>", "<q> kitchen things"):
        session = toy.session(0)
        session.step(f"search[{query}]")
        assert session.page.hits == toy.found(re.sub("[<>]", "", query))


# --- Sessions and their pages -----------------------------------------------------------------------------


def test_only_a_purchase_earns_a_reward(toy):
    index = goal_of(toy, "B000000002")
    session, goal = toy.session(index), toy.goals[index]
    for action in ["search[cap]", "click[b000000002]"]:
        turn = session.step(action)
        assert (turn.reward, turn.done, turn.score) == (0, False, None)
    for value in goal.goal_options.values():
        turn = session.step(f"click[{value}]")
        assert (turn.reward, turn.done, turn.score) == (0, False, None)
    last = session.step("click[buy now]")
    assert (last.done, last.score.r_type, last.score.attributes, last.score.price) == (True, 1.0, 1.0, True)
    again = session.step("click[buy now]")  # the last page has no buttons
    assert (again.reward, again.done) == (0, False)
    assert session.step("search[kettle]").page.kind == "search_results"  # but a search still works


def test_the_reward_is_the_share_of_matched_wishes(toy):
    """The spoon has the attribute washable, not gold; no options are wanted; its price is within the limit.

    So its reward is (1 + 0 + 1) / 3.
    """
    goal = toy.goals[goal_of(toy, "B000000005")]
    assert (goal.price_upper, goal.instruction_text) == (1_000_000, "Find me spoons")
    own = toy.judge(toy.products["B000000005"], {}, goal)
    assert (own.reward, own.attributes, own.options, own.price) == (2 / 3, 0.5, None, True)
    kettle = toy.judge(toy.products["B000000003"], {}, goal)  # its title has no noun of the wanted title
    assert (kettle.r_type, kettle.title_score, kettle.reward) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("bought", "wanted", "r_type"),
    [
        ("a", "a", 1.0),
        ("a b", "a b c d e f g h i", 1.0),  # 2/9 > 0.2
        ("a", "a b c d e", 0.5),  # exactly 0.2 is not enough
        ("a", "a b c d e f g h i j", 0.5),  # 0.1
        ("a", "a b c d e f g h i j k", 0.1),
        ("a", "b", 0.0),
        ("a", "", 0.5),  # without wanted nouns the score is 0.2
        ("a", "a a a a a", 0.5),  # a repeated noun lowers the score: 1/5
    ],
)
def test_titles_decide_about_the_kind_of_product(toy, bought, wanted, r_type):
    """Spoon and kettle have different queries and categories, so only their titles count."""
    spoon, kettle = toy.products["B000000005"], toy.products["B000000003"]
    goal = webshop.Goal(spoon.asin, "", ("x",), {}, 1e6)
    nouns = {kettle.asin: bought.split(), spoon.asin: wanted.split()}
    score = webshop.judge(kettle, {}, goal, spoon, lambda product: nouns[product.asin], [])
    assert score.r_type == r_type


@pytest.mark.parametrize(
    ("chosen", "wanted", "matches"),
    [
        ({"color": "red"}, {"color": "red"}, True),
        ({"color": "dark red"}, {"color": "dark red"}, True),
        ({"color": "redwood"}, {"color": "redwood"}, False),  # chosen: "red"; wanted: "('color', 'redwood')"
        ({"size": "x-large"}, {"size": "x-large"}, True),
        ({"size": "small"}, {"size": "large"}, False),
        ({"color": "dark red"}, ("light red",), True),  # in human goals both become "red"
        ({"size": "red"}, {"color": "red"}, True),  # the name of the option is not compared
        ({}, ("red",), False),
    ],
)
def test_options_match_by_the_official_rule(toy, chosen, wanted, matches):
    product = toy.products["B000000003"]
    goal = webshop.Goal(product.asin, "", ("boils",), wanted, 1e6)
    assert toy.judge(product, chosen, goal).options == float(matches)


def test_only_the_rich_text_shows_clicked_options(toy):
    session = toy.session(goal_of(toy, "B000000001"))
    session.step("search[apron]")
    plain = session.step("click[b000000001]")
    clicked = session.step("click[small]")
    assert clicked.text == plain.text
    assert clicked.text_rich.startswith("You have clicked small.\nInstruction:\n")
    assert "  [clicked button] small [clicked button_]\n" in clicked.text_rich
    quoted = session.step('click[x "l"]')
    assert quoted.page.options == {"size": 'x "l"'}
    assert "clicked" not in quoted.text_rich  # a value with a quotation mark is never shown as clicked


def test_query_text_can_look_like_a_click(toy):
    session = toy.session(0)
    session.step('search[apron "small" and "blue green"]')
    assert "You have clicked small." in session.step("click[b000000001]").text_rich
    session.step("search[search_results apron]")
    session.step("click[b000000001]")
    turn = session.step("click[< prev]")  # the page counts as page 1 of results, so this goes to page 0
    assert turn.text.partition("Search [SEP] ")[2].startswith("Page 0 (Total results: ")


def test_a_value_of_two_options_belongs_to_the_later_option(toy):
    session = toy.session(0)
    for action in ["search[cap]", "click[b000000002]", "click[blue]", "click[small]"]:
        turn = session.step(action)
    assert turn.page.options == {"color": "small"}
    assert turn.available_actions["clickables"].count("blue") == 1


def test_each_text_of_a_page_is_made_only_on_demand(toy):
    page = toy.session(0).step("search[apron]").page
    assert page.text and "text_rich" not in vars(page) and "clickables" not in vars(page)
    page = toy.session(0).step("search[apron]").page
    assert page.text_rich and "text" not in vars(page)


def test_sessions_are_independent_and_can_be_reset(toy):
    first, second = toy.session(0), toy.session(0)
    opening = first.reset().text
    for action in ["search[apron]", "click[b000000001]", "click[small]"]:
        first.step(action)
    assert second.step("nothing").text == opening
    second.step("search[apron]")
    assert "clicked button" not in second.step("click[b000000001]").text_rich
    assert first.reset().text == opening
    first.step("search[apron]")
    assert "clicked button" not in first.step("").text_rich


def test_a_session_takes_less_than_five_kilobytes(toy):
    tracemalloc.start()
    sessions = [toy.session(i % len(toy.goals)) for i in range(500)]
    for session in sessions:
        assert session.step("search[glass bowl]").text
    size = tracemalloc.get_traced_memory()[0] / len(sessions)
    tracemalloc.stop()
    assert size < 5000  # bytes, with the text of the page


@pytest.mark.parametrize("index", [-1, 24, 10**9])
def test_an_unknown_goal_raises_an_error(toy, index):
    with pytest.raises(IndexError, match=r"the goals are 0\.\.23"):
        toy.session(index)


def test_unknown_goals_and_product_sets_raise_errors(toy_folder):
    with pytest.raises(ValueError, match="synthetic"):
        webshop.WebShop(toy_folder, goals="robots")
    with pytest.raises(ValueError, match="small, all"):
        webshop.WebShop(toy_folder, product_set="100")


PIECES = [
    "search",
    "click",
    "[",
    "]",
    "[[",
    "\n",
    "\\",
    "(.+)",
    "$^",
    "{0}",
    "%s",
    "'",
    '"',
    "\x00",
    "\ud800",
]
PIECES += ["é", "B000000001", "b000000001", "buy now", "< prev", "next >", "back to search", "small", "❤️"]
PIECES += ["漢字", "\u202e", "<r>", "<|im_end|>", "</action>", " ", "\t", "_" * 300, "y" * 300, "x" * 3000]
PIECES += ["\u200d" * 50, "ß", "İ"]


def test_no_text_breaks_a_session(toy):
    rng, kinds = random.Random(7), Counter()
    session = toy.session(0)
    for _ in range(10_000):
        text = "".join(rng.choices(PIECES, k=rng.randrange(6)))
        names = list(session.page.clickables) or ["buy now"]
        click = f"click[{rng.choice(names)}]"
        action = rng.choice([text, f"search[{text}]", f"click[{text}]", f"search[{text} bowl]", *[click] * 8])
        turn = session.step(action)
        assert turn.text + turn.text_rich + turn.url
        kinds[turn.page.kind] += 1
    assert len(kinds) == 5 and min(kinds.values()) > 100


@pytest.mark.parametrize(
    "action",
    [
        "[" * 200_000,
        "]" * 200_000,
        f"search[{'_' * 10_000}]",
        f"search[{'[]' * 50_000}",
        "search[a]" * 50_000,
    ],
)
def test_very_long_actions_take_little_time(toy, action):
    assert toy.session(0).step(action).reward == 0


ACTIONS = [
    "",
    "a[b]",
    "search[a]",
    "search[a] b",
    "search[a [b] c]",
    "a[b][c]",
    "[a]",
    "search[]",
    "search[[]]",
]
ACTIONS += [
    "x\ny[z]",
    "search[a\nb]",
    "search[a]\n]",
    "search[a]]",
    " search[A]",
    "[[a]",
    "a[]]",
    "][",
    "a][b]",
]
ACTIONS += ["search[É]"]


@pytest.mark.parametrize("action", ACTIONS)
def test_actions_are_parsed_as_by_the_official_pattern(action):
    found = re.match(r"(.+)\[(.+)\]", action)
    assert webshop.parse_action(action) == ((found[1], found[2].lower()) if found else ("", ""))


def test_random_brackets_are_parsed_as_by_the_official_pattern():
    rng = random.Random(0)
    for _ in range(20_000):
        action = "".join(rng.choices("[]a\n", [3, 3, 3, 0.3], k=rng.randrange(9)))
        found = re.match(r"(.+)\[(.+)\]", action)
        assert webshop.parse_action(action) == ((found[1], found[2]) if found else ("", ""))


def test_spacy_is_found_without_importing_it():
    assert webshop._has_spacy() == bool(
        importlib.util.find_spec("spacy") and importlib.util.find_spec("en_core_web_sm")
    )


@needs_data
@pytest.mark.slow
def test_the_benchmark_loads_a_generated_file(capsys):
    from bench.__main__ import main

    main(["webshop", "--webshop_data", str(DATA), "--products", "3000"])  # its goals for speed do not count
    assert "WebShop(all: 3000 products, 3000 documents, " in capsys.readouterr().out
