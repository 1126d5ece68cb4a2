"""Tests of WebShop as an environment: splits, views, rewards, missing files, the tiny model's tokens.

Most tests use a toy shop of two products. They are skipped without the packages of requirements/webshop.txt.
"""

import importlib.util
import json
import random
from pathlib import Path

import pytest
from env_helpers import ODD_TEXTS, ROOT, run_in_new_process

import envs
import flags
from chat import Dialogue, parse_action, reply_text
from dense.shaped import WithProgress
from envs import Corpus, WebShop
from games import webshop
from games.webshop_player import query

SHOP = ROOT.parent / "shared" / "data" / "webshop"
needs_packages = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("nltk", "rapidfuzz", "regex")),
    reason="needs pip install -r requirements/webshop.txt",
)
needs_shop = pytest.mark.skipif(not SHOP.exists(), reason=f"there are no WebShop files in {SHOP}")
CUTS = [f"cut a{i}" for i in range(1, 41)]
SIZES = ["8.4 ounce  |  250 ml", '65x43\xa0cm (25.5"x17")', "café ü", *(f"size b{i}" for i in range(4, 51))]


def product(asin: str, name: str, **others) -> dict:
    """A record of the products file."""
    common = {"full_description": "", "small_description": ["washable"], "category": "garden"}
    common |= {"product_category": "Home › Kitchen", "query": "aprons", "pricing": "$12.5"}
    return {"asin": asin, "name": name, "customization_options": "", **common, **others}


def write_toy(folder: Path, cuts=CUTS, sizes=SIZES) -> str:
    """Write a shop: an apron of 40 cuts in 50 sizes (2,000 goals) and a kettle sold at $20 to $80 (one goal).

    The folder has no files of human goals.
    """
    options = {
        name: [{"value": value} for value in values] for name, values in (("cut", cuts), ("size", sizes))
    }
    products = [
        product("B000000001", "Red Apron", customization_options=options),
        product("B000000002", "Steel Kettle", query="kettles", pricing="$20 to $80", category="electronics"),
    ]
    instructions = {
        "B000000001": {"instruction": "Find me red aprons", "instruction_attributes": ["red", "washable"]},
        "B000000002": {"instruction": "Find me kettles", "instruction_attributes": ["steel"]},
    }
    files = {
        "items_shuffle_1000.json": products,
        "items_ins_v2_1000.json": {asin: {"attributes": ["x"], **i} for asin, i in instructions.items()},
        "title_nouns_spacy_sm380.json": {"B000000001": ["apron"], "B000000002": ["kettle"]},
        "color_set.json": ["red"],
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return str(folder)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("shop"))


# --- the goals ----------------------------------------------------------------------------------------------


@needs_packages
def test_the_splits_are_disjoint_and_contain_every_goal(toy):
    env = WebShop(toy)
    assert len(env.shop.goals) == 2001
    assert [env.size(split) for split in ("test", "validation", "train")] == [500, 1000, 501]
    assert set(env.eval_splits) == {"validation", "test"}
    for split, first, last in (("test", 0, 499), ("validation", 500, 1499), ("train", 1500, 2000)):
        for index, goal in ((0, first), (env.size(split) - 1, last)):
            assert env.reset(split, index).task == env.shop.goals[goal].instruction_text


@pytest.mark.slow
@needs_shop
@needs_packages
def test_the_sizes_of_the_official_thousand_products():
    env = WebShop(str(SHOP))
    assert [env.size(split) for split in ("test", "validation", "train")] == [500, 1000, 5410]
    categories = {product.category for product in env.shop.products.values()}
    assert categories == set(env.task_types)
    texts = [goal.instruction_text for goal in env.shop.goals]
    assert sorted(env.substitutes) == [2407, 4208, 4408, 6766]  # with the words of goals 1083, 1372, 71, 98
    assert [texts.index(texts[goal]) for goal in env.substitutes] == [1083, 1372, 71, 98]
    with pytest.raises(ValueError, match=r"has 13 human goals; training begins at 1500"):
        WebShop(str(SHOP), goals="human")
    assert env.fingerprint == WebShop(str(SHOP), products="small").fingerprint


@needs_packages
def test_training_never_plays_a_goal_with_the_words_of_a_held_out_goal(tmp_path):
    # the second "cut a1" makes 50 goals with the words of others: 41 cuts x 50 sizes and the kettle
    data = write_toy(tmp_path, cuts=[*CUTS, "cut a1"])
    with pytest.warns(UserWarning) as caught:
        env = WebShop(data)
        WebShop(data)
    goals = env.shop.goals
    held_out = {env.reset(split, i).task for split in env.eval_splits for i in range(env.size(split))}
    assert held_out == {goal.instruction_text for goal in goals[:1500]}  # panels are as before
    own = [goal.instruction_text for goal in goals[1500:]]
    repeated = [i for i, text in enumerate(own) if text in held_out]
    assert env.size("train") == 551 and 20 < len(repeated) < 50
    played = [env.reset("train", i).task for i in range(551)]
    assert not held_out & set(played)
    assert [i for i in range(551) if played[i] != own[i]] == repeated  # all others keep their index
    assert all(played[i] == next(text for text in own[i:] + own if text not in held_out) for i in repeated)
    (warning,) = caught
    assert str(warning.message).startswith(
        f"{len(repeated)} of 551 WebShop training goals equal a held-out goal word for word; "
    )
    envs.load_shop.cache_clear()


@needs_packages
def test_a_shop_whose_training_goals_are_all_held_out_is_refused(tmp_path):
    with pytest.raises(ValueError, match="^every WebShop training goal equals a held-out goal"):
        WebShop(write_toy(tmp_path, cuts=["cut"] * 31, sizes=["size"] * 50))


GOALS = (
    "import envs, hashlib; env = envs.WebShop({!r}); texts = [g.instruction_text for g in env.shop.goals];"
    "print(hashlib.sha256('|'.join(texts).encode()).hexdigest(), env.reset('train', 3).task, end='')"
)


@needs_packages
def test_a_goal_has_the_same_text_in_every_environment_and_process(toy, capsys):
    one, other = WebShop(toy), WebShop(toy)
    other.reset("train", 5)
    assert one.reset("train", 3) == other.reset("train", 3) == one.reset("train", 3)
    exec(GOALS.format(toy))
    assert run_in_new_process(GOALS.format(toy)) == capsys.readouterr().out


@needs_packages
def test_a_shop_leaves_the_global_random_state_alone(tmp_path):
    random.seed(5)
    before = random.getstate()
    env = WebShop(write_toy(tmp_path))
    env.reset("train", 0)
    env.step("search[red]")
    assert random.getstate() == before


@needs_packages
def test_environments_share_the_shop_but_no_state(toy):
    one, other = WebShop(toy), WebShop(toy)
    assert one.shop is other.shop
    one.reset("train", 0)
    start = other.reset("train", 0)
    one.step("search[red aprons]")
    one.step("click[b000000001]")
    assert other.step("click[no such thing]") == start


# --- views and rewards --------------------------------------------------------------------------------------


def plain_goal(env: WebShop, split: str) -> tuple[int, str, str]:
    """Return a game of the split that seeks an apron without odd blanks in its size, and its two clicks."""
    first = env.ranges[split].start
    for index in range(env.size(split)):
        options = env.shop.goals[first + index].goal_options
        if options and options["size"].startswith("size b"):
            return index, f"click[{options['cut']}]", f"click[{options['size']}]"
    raise AssertionError("there is no such game")


@needs_packages
def test_progress_is_half_of_the_score_of_the_open_product_until_it_is_bought(toy):
    env = WithProgress(WebShop(toy, reward="score"))
    index, cut, size = plain_goal(env, "train")
    # The goal has 2 attributes, 2 options and a price limit. The apron's title and bullets meet 3 of these 5
    # before an option is chosen: 3/5 / 2 = 0.3. Each right option adds 1/5 / 2.
    shown = [env.reset("train", index)]
    for action in (
        "search[red apron]",
        "click[b000000001]",
        cut,
        "click[description]",
        "click[< prev]",
        size,
    ):
        shown.append(env.step(action))
    assert [view.progress for view in shown] == pytest.approx([0, 0, 0.3, 0.4, 0.4, 0.4, 0.5])
    assert env.step("click[buy now]").progress == 1
    env.reset("train", index)
    for action in ("search[red apron]", "click[b000000001]", cut):
        env.step(action)
    assert env.step("click[back to search]").progress == 0
    for action in ("search[red apron]", "click[b000000001]"):
        env.step(action)
    bought = env.step("click[buy now]")
    assert bought.progress == bought.outcome == pytest.approx(0.6)


def buy(env: WebShop, split: str, index: int, *clicks: str):
    """Buy the apron after these clicks, and return the last view."""
    env.reset(split, index)
    for action in ("search[red aprons]", "click[b000000001]", *clicks):
        view = env.step(action)
        assert not view.done
    return env.step("click[buy now]")


@needs_packages
def test_views_show_pages_without_the_instruction_and_with_their_actions(toy):
    env = WebShop(toy)
    index, cut, size = plain_goal(env, "train")
    view = env.reset("train", index)
    options = f"cut: {cut[6:-1]}, and size: {size[6:-1]}"
    assert view.task.startswith(f"Find me red aprons with {options}, and price lower than ")
    assert (view.observation, view.task_type) == ("Search", "garden")
    assert view.admissible == ("search[<your query>]",)
    view = env.step("search[red aprons]")
    assert view.observation == (
        "Back to Search [SEP] Page 1 (Total results: 1) [SEP] Next > [SEP] "
        "B000000001 [SEP] Red Apron [SEP] $12.5"
    )
    assert view.admissible == ("click[back to search]", "click[next >]", "click[b000000001]")
    view = env.step("click[b000000001]")
    assert view.observation.startswith("Back to Search [SEP] < Prev [SEP] cut [SEP] cut a1 [SEP] cut a2")
    assert view.observation.endswith("[SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now")
    assert {"click[buy now]", "click[cut a7]", "click[< prev]"} <= set(view.admissible)
    assert view.notes == ""
    view = env.step("click[cut a7]")
    assert view.notes == "cut cut a7"
    assert (view.done, view.outcome, view.success) == (False, 0.0, False)


@needs_packages
@pytest.mark.parametrize("style", ["think", "short"])
def test_a_reply_can_click_every_button(toy, style):
    """Buttons include "Next >", "< Prev" and names with runs of blanks, which no action can contain."""
    env = WebShop(toy)
    env.reset("train", 0)
    pages = [("search[red aprons]", "page 1"), ("click[next >]", "page 2"), ("click[< prev]", "page 1")]
    for action, page in pages:
        parsed, valid = parse_action(style, reply_text(style, action))
        assert valid and env.step(parsed).brief.startswith(page)
    view = env.step("click[b000000001]")
    assert len(view.admissible) == 96  # 40 cuts, 50 sizes and 6 buttons
    for action in view.admissible:
        assert parse_action(style, reply_text(style, action)) == (action, True)
    for action, notes in (
        ("click[8.4 ounce | 250 ml]", "size 8.4 ounce  |  250 ml"),
        ('click[65x43 cm (25.5"x17")]', 'size 65x43\xa0cm (25.5"x17")'),
    ):
        assert action in view.admissible
        assert env.step(action).notes == notes
    assert env.step("click[description]").brief == "Description"
    assert env.step("click[< prev]").brief.startswith("item")


@needs_packages
@pytest.mark.parametrize("split", ["train", "test"])
def test_buying_what_the_goal_asks_for_is_a_success(toy, split):
    env = WebShop(toy)
    view = buy(env, split, *plain_goal(env, split))
    assert (view.done, view.success, view.outcome) == (True, True, 1.0)


@needs_packages
@pytest.mark.parametrize(
    "split, reward, outcome",
    [
        ("train", "success", 0.0),
        ("train", "score", 0.8),
        ("validation", "success", 0.8),
        ("validation", "score", 0.8),
        ("test", "success", 0.8),
    ],
)
def test_a_partly_right_purchase_counts_in_held_out_splits_or_with_reward_score(toy, split, reward, outcome):
    # red and washable, one of two options, the price: (2 + 1 + 1) / (2 + 2 + 1) = 0.8
    env = WebShop(toy, reward=reward)
    index, cut, _ = plain_goal(env, split)
    view = buy(env, split, index, cut)
    assert (view.done, view.success, view.outcome) == (True, False, outcome)


@needs_packages
def test_an_episode_without_a_purchase_has_no_reward(toy):
    env = WebShop(toy, reward="score")
    index, cut, size = plain_goal(env, "train")
    env.reset("train", index)
    for action in ("search[red aprons]", "click[b000000001]", cut, size, "buy now"):
        view = env.step(action)
        assert (view.done, view.success, view.outcome) == (False, False, 0.0)


@needs_packages
def test_the_last_page_with_the_reward_is_not_shown(toy):
    env = WebShop(toy)
    view = buy(env, "train", 0)
    session = env.shop.session(env.ranges["train"].start)
    for action in ("search[red aprons]", "click[b000000001]", "click[buy now]"):
        turn = session.step(action)
    assert "Your score" in turn.page.text
    assert (view.observation, view.brief, view.admissible) == ("", "", ())
    assert "score" not in "".join([view.task, view.notes])


@needs_packages
def test_any_text_may_be_an_action(toy):
    env = WebShop(toy)
    start = env.reset("train", 0)
    for text in ODD_TEXTS:
        view = env.step(text)
        assert not view.done
        if not text.startswith("search[") or text in ("search[", "search[]"):
            assert view == start
        start = env.reset("train", 0)


@pytest.mark.slow
@needs_packages
def test_the_scripted_customer_solves_every_goal_of_the_toy_shop(toy):
    pytest.importorskip("transformers")
    from chat import Chat
    from demo.tiny_model import tiny_tokenizer
    from demo.warm_start import demonstrations
    from rollout import World

    env = WebShop(toy)
    chat = Chat(tiny_tokenizer(env.vocabulary))
    dialogue = Dialogue(chat, "short", "window", 1, 2000, 64)
    world = World(lambda: WebShop(toy), None, dialogue, group_size=1)
    episodes = demonstrations(world, 30, expert_share=1.0, hesitation_share=0.0)
    # The official reward compares what it reads of a size with that blank in it: no purchase satisfies it
    episodes = [episode for episode in episodes if "\xa0" not in episode.task]
    assert {(episode.outcome, episode.success) for episode in episodes} == {(1.0, True)}
    assert {len(episode.steps) for episode in episodes} <= {3, 5}  # the kettle has no options
    assert all(step.valid for episode in episodes for step in episode.steps)


# --- missing files and packages -----------------------------------------------------------------------------


@needs_packages
def test_the_wandering_customer_has_read_another_training_goal(toy):
    env = WebShop(toy)
    view = env.reset("test", 0)
    queries = {env.wandering_expert(f"goal {i}") for i in range(20)}
    own = env.searching_expert()
    training = [
        env.shop.goals[i].instruction_text
        for i in range(*WebShop.ranges["train"].indices(len(env.shop.goals)))
    ]
    assert {f"search[{query(text)}]" for text in training} >= queries
    assert len(queries - {own}) > 1 and env.wandering_expert("goal 3") == env.wandering_expert("goal 3")
    assert env.step(own).task == view.task  # the page keeps its instruction


def test_the_error_names_all_missing_files_and_their_source(tmp_path):
    with pytest.raises(ValueError) as caught:
        WebShop(str(tmp_path))
    for name in ("items_shuffle_1000.json", "items_ins_v2_1000.json", "color_set.json"):
        assert name in str(caught.value)
    assert "princeton-nlp/WebShop" in str(caught.value)


@needs_packages
def test_the_folder_comes_from_the_flag_or_the_variable(toy, monkeypatch):
    envs.load_shop.cache_clear()
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    with pytest.raises(flags.UsageError, match="^--env webshop: .* --webshop_data, or in .WEBSHOP_DATA"):
        flags.environment(flags.Args(env="webshop"))
    monkeypatch.setenv("WEBSHOP_DATA", toy)
    assert WebShop().size("train") == 501
    envs.load_shop.cache_clear()


@needs_packages
def test_too_few_goals_to_train_on_are_an_error(tmp_path):
    data = write_toy(tmp_path, cuts=CUTS[:29])  # 29 cuts x 50 sizes and the kettle
    with pytest.raises(ValueError, match=r"has 1451 synthetic goals; training begins at 1500"):
        WebShop(data)


@needs_packages
def test_flags_choose_the_goals_and_the_reward(toy):
    args = flags.Args(env="webshop", webshop_data=toy)
    assert flags.env_maker(args)().reward == "success"
    args = flags.Args(env="webshop", webshop_data=toy, webshop_reward="score")
    assert flags.env_maker(args)().reward == "score"
    args = flags.Args(env="webshop", webshop_data=toy, webshop_goals="human")
    with pytest.raises(flags.UsageError, match="items_human_ins.json"):
        flags.environment(args)


@needs_packages
def test_a_missing_package_is_an_error_with_the_command_that_installs_it(toy, monkeypatch):
    monkeypatch.setattr(webshop.importlib.util, "find_spec", lambda name: None)
    envs.load_shop.cache_clear()
    with pytest.raises(flags.UsageError, match="^--env webshop: .*nltk.*-r requirements/webshop.txt"):
        flags.environment(flags.Args(env="webshop", webshop_data=toy))


# --- tokens of the tiny model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat():
    """A chat with a tokenizer that was trained on a small text. It can spell every text."""
    pytest.importorskip("transformers")
    from chat import Chat
    from demo.tiny_model import tiny_tokenizer

    texts = ("find me red shoes, size 9", "search[]", "click[buy now]", "click[back to search]")
    return Chat(tiny_tokenizer(Corpus(texts * 20, ("b09npml43m", "b000000001"), 400)))


ACTIONS = ["search[Red Shoes]", "click[Buy Now]", "click[next >]", "click[< prev]", "click[B09NPML43M]"]
ACTIONS += ['search[24" x 36", 5.5 oz]', 'click[65x43 cm (25.5"x17" inches)]', "click[women's 8 | men's 6]"]
ACTIONS += ["click[a[b]", "click[a]b]", "click[[x]]", "search[[[]]]", "search[]", "buy", "[", "]"]
ACTIONS += ["search[café crème ü ß]", "search[漢字 🙂]", "search[İ ﬀ]", "click[№ 5 – ½ ″]"]
ACTIONS += ["search[a_b-c/d\\e%f#g]", "search[<user> <end>]", "search[{x} $9.99 & more!]"]
ACTIONS += ["search[xb09npml43mx]", "search[1234567890]", "search[two  blanks]", "search[a\tb\nc]"]


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_survives_the_tokens(chat, action):
    assert chat.decode(chat.reply(action)) == action.lower()
    assert chat.tokenizer.unk_token_id not in chat.encode(action)


def test_a_word_has_the_same_tokens_in_brackets_and_outside(chat):
    inside, outside = chat.encode("search[red shoes]"), chat.encode("find red shoes now")
    words = chat.encode("red shoes")
    for tokens in (inside, outside):
        assert words in [tokens[i : i + len(words)] for i in range(len(tokens))]
    name = chat.tokenizer.convert_tokens_to_ids("b09npml43m")
    assert name in chat.encode("click[b09npml43m]") and name in chat.encode("page 1; B09NPML43M red shoes")
