"""ALFWorld and WebShop as environments: which games, what a turn shows, what counts as success."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import envs
import flags
from chat import Dialogue, parse_action, reply_text, window_message
from envs import AlfWorld, Corpus, EnvironmentCrashed, WebShop
from games import alfworld_engine, webshop
from rollout import World

ROOT = Path(__file__).parent.parent
SHOP = ROOT.parent / "shared" / "data" / "webshop"
ODD_TEXTS = [
    *[
        "",
        " ",
        "\n",
        "\t\r",
        "\x00",
        "a" * 5000,
        "é",
        "漢字",
        "🙂",
        "\ud800",
        "İ",
        "[SEP]",
        "<|im_end|>",
        "%s{}",
    ],
    *[
        "[",
        "]",
        "[]",
        "[[",
        "]]",
        "search",
        "search[",
        "search[]",
        "search[ ]",
        "search]x[",
        "click",
        "click[]",
    ],
    *[
        "search[<r>]",
        "search[<a>]",
        "search[a\nb]",
        "click[a]b]",
        "click[search]",
        "click[buy now]]",
        "buy[x]",
    ],
    *["search[\x00]", "search[🙂 é]", "search[" + "a b " * 900 + "]", "CLICK[BUY NOW]", "click[page 1]"],
    *[
        "go to",
        "go to ",
        "go to nowhere 1",
        "take",
        "take  from ",
        "move to",
        "use",
        "open \\",
        "help",
        "examine",
    ],
]


def in_another_process(code: str, **environment) -> str:
    """What it prints, with another order of sets and another random state."""
    command = [sys.executable, "-c", f"import random; random.seed(99)\n{code}"]
    settings = {**os.environ, "PYTHONHASHSEED": "77", **environment}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=True)
    return done.stdout


# --- ALFWorld: the games ------------------------------------------------------------------------------------


def a_game(folder: Path, split: str, task: str, trial: str = "trial_1", solvable=True) -> Path:
    path = folder / "json_2.1.1" / split / task / trial / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"grammar": "x" * 5000, "solvable": solvable, "walkthrough": ["look"]}))
    return path


@pytest.fixture
def tree(tmp_path):
    """Games in no order, two of one task, and what is not to be played."""
    kept = [
        a_game(tmp_path, "train", "pick_two_obj_and_place-Pen-None-Bed-301"),
        a_game(tmp_path, "train", "look_at_obj_in_light-Mug-None-DeskLamp-308", "trial_2"),
        a_game(tmp_path, "train", "look_at_obj_in_light-Mug-None-DeskLamp-308", "trial_1"),
        a_game(tmp_path, "valid_seen", "pick_and_place_simple-Mug-None-Desk-308"),
    ]
    a_game(tmp_path, "train", "pick_and_place_with_movable_recep-Pen-Mug-Desk-308")
    a_game(tmp_path, "train", "pick_heat_then_place_in_recep-AppleSliced-None-Desk-3")
    a_game(tmp_path, "train", "pick_and_place_simple-Pen-None-Desk-309", solvable=False)
    (tmp_path / "json_2.1.1" / "train" / "look_at_obj_in_light-Pen-None-DeskLamp-1" / "t").mkdir(parents=True)
    return tmp_path, kept


def test_a_split_is_the_sorted_list_of_its_playable_files(tree):
    folder, kept = tree
    assert envs.alfworld_games(str(folder), "train") == (kept[2], kept[1], kept[0])
    assert envs.alfworld_games(str(folder), "valid_seen") == (kept[3],)
    assert envs.alfworld_games(str(folder / "json_2.1.1"), "valid_seen") == (kept[3],)


def test_the_folder_may_stand_in_the_environment_or_where_the_download_puts_it(tree, monkeypatch, tmp_path):
    folder, kept = tree
    envs.alfworld_games.cache_clear()
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    assert len(envs.alfworld_games(None, "train")) == 3
    envs.alfworld_games.cache_clear()
    monkeypatch.delenv("ALFWORLD_DATA")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(ValueError, match=str(tmp_path / "home" / ".cache" / "alfworld" / "json_2.1.1")):
        envs.alfworld_games(None, "train")
    (tmp_path / "home" / ".cache").mkdir(parents=True)
    (tmp_path / "home" / ".cache" / "alfworld").symlink_to(folder)
    assert len(envs.alfworld_games(None, "valid_seen")) == 1
    envs.alfworld_games.cache_clear()


DAMAGED = ["{", '{"grammar": "x", "solvable": tr', "[]", "", "\x00\x93\xff}", None]  # None: a folder


def damage(path: Path, content: str | None) -> None:
    path.unlink()
    path.mkdir() if content is None else path.write_text(content, encoding="latin-1")


def test_damaged_files_are_left_out_of_every_split_with_one_warning_each(tree):
    folder, _ = tree
    for split in ("train", "valid_seen", "valid_unseen"):
        for number, content in enumerate(DAMAGED):
            damage(a_game(folder, split, "pick_and_place_simple-Cup-None-Desk-1", f"{number}"), content)
    for split, kept, all in (("train", 3, 10), ("valid_seen", 1, 7)):
        first = folder / "json_2.1.1" / split / "pick_and_place_simple-Cup-None-Desk-1" / "0" / "game.tw-pddl"
        with pytest.warns(UserWarning) as told:
            assert len(envs.alfworld_games(str(folder), split)) == kept
        (warning,) = told
        assert str(warning.message).startswith(f"6 of {all} ALFWorld game files cannot be read: {first}, ")
        assert str(warning.message).endswith(
            "/2/game.tw-pddl, ...; they are left out; `alfworld-download -f` unpacks them again"
        )
    with pytest.raises(ValueError, match=r"^6 of 6 ALFWorld game files cannot be read: .*`alfworld-download"):
        envs.alfworld_games(str(folder), "valid_unseen")


def test_the_vocabulary_does_without_files_that_are_damaged_within(tmp_path):
    whole, *others = (a_game(tmp_path, "train", f"pick_and_place_simple-Cup-None-Desk-{n}") for n in range(6))
    listed = "(:objects Cup_bar_1 - object Cup_bar_2 - object loc_bar_3_bar_4 - location) (:init"
    whole.write_text(json.dumps({"pddl_problem": listed, "grammar": "Your task is to: find a cup."}))
    contents = ("{]}", "{}", '{"pddl_problem": 3, "grammar": ""}', '{"pddl_problem": "", "grammar": ""}')
    for path, content in zip(others, (*contents, None), strict=True):
        damage(path, content)
    with pytest.warns(UserWarning) as told:
        words = envs.alfworld_vocabulary((*others, whole))
    (warning,) = told
    assert str(warning.message).startswith(f"5 of 6 ALFWorld game files cannot be read: {others[0]}, ")
    assert words[-7:] == ("find", "a", "cup.", "go to", "cup", "cup 1", "cup 2")  # and no "loc 1"
    with pytest.raises(ValueError, match=r"^5 of 5 ALFWorld game files cannot be read: .*`alfworld-download"):
        envs.alfworld_vocabulary(tuple(others))


def test_a_package_that_is_missing_is_named_before_the_games_are(tmp_path, monkeypatch):
    monkeypatch.setattr(alfworld_engine, "PACKAGES", ("alfworld-not-here",))
    alfworld_engine._versions.cache_clear()
    told = "^--env alfworld: ALFWorld needs the package alfworld-not-here: .* -r requirements/alfworld.txt"
    with pytest.raises(flags.UsageError, match=told):
        flags.environment(flags.Args(env="alfworld", alfworld_data=str(tmp_path / "nothing")))
    alfworld_engine._versions.cache_clear()


def test_missing_games_are_answered_with_the_command_that_fetches_them(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(alfworld_engine, "check_installed", lambda: None)
    with pytest.raises(ValueError, match=r"no ALFWorld games in .*/valid_unseen; .*`alfworld-download`"):
        envs.alfworld_games(str(tree[0]), "valid_unseen")
    with pytest.raises(flags.UsageError, match=r"^--alfworld_data .*: no ALFWorld games in .*download"):
        flags.environment(flags.Args(env="alfworld", alfworld_data=str(tmp_path / "nothing")))


def test_task_types_are_the_columns_of_table_1():
    assert AlfWorld.task_types == ("Pick", "Look", "Clean", "Heat", "Cool", "Pick2")
    assert set(AlfWorld.columns) == set(alfworld_engine.TASK_TYPES)


def test_the_sizes_are_those_of_the_lists(few_games, tmp_path):
    env = AlfWorld(few_games)
    assert {split: env.size(split) for split in ("train", *env.eval_splits)} == {
        **{"train": 6, "valid_seen": 2, "valid_unseen": 1}
    }
    assert (env.step_limit, env.eval_splits) == (50, ("valid_seen", "valid_unseen"))
    fingerprint = env.fingerprint
    assert AlfWorld(few_games).fingerprint == fingerprint
    first, *others = env.games["train"]
    other = tmp_path.joinpath(*first.parts[-4:])
    other.parent.mkdir(parents=True)
    for content, same in ((first.read_bytes(), True), (first.read_bytes() + b" ", False)):
        other.write_bytes(content)
        env.games["train"] = (other, *others)
        assert (env.fingerprint == fingerprint) == same  # of names and sizes, wherever the folder is
    env.games = {**AlfWorld(few_games).games, "valid_seen": env.games["valid_seen"][:1]}
    assert env.fingerprint != fingerprint


# --- ALFWorld: a turn ---------------------------------------------------------------------------------------

LOOK, PICK = 0, 1  # places in the sorted list of the few games


def test_a_game_of_each_type_and_how_it_begins(few_games):
    env = AlfWorld(few_games)
    views = [env.reset("train", index) for index in range(6)]
    assert [view.task_type for view in views] == ["Look", "Pick", "Clean", "Cool", "Heat", "Pick2"]
    assert [view.task for view in views] == [
        "look at bowl under the desklamp",
        "put some creditcard on armchair",
        "clean some soapbar and put it in garbagecan",
        "put a cool pot in diningtable",
        "put a hot mug in sidetable",
        "put two soapbar in garbagecan",
    ]
    for view in views:
        assert view.observation.startswith(
            "You are in the middle of a room. Looking quickly around you, you see"
        )
        assert "Welcome" not in view.observation and "task" not in view.observation
        assert view.notes.startswith("search ")
        assert not (view.done or view.success or view.outcome)


def test_help_is_not_offered_and_the_others_are_the_engines(few_games):
    env = AlfWorld(few_games)
    view = env.reset("train", PICK)
    path = env.games["train"][PICK]
    offered = alfworld_engine.Game(path).reset().admissible
    assert "help" in offered and list(view.admissible) == [
        command for command in offered if command != "help"
    ]
    assert env.step("help").observation.startswith("Available commands:")  # a player may still ask


def test_the_stored_solution_wins_every_type_and_only_the_last_command_does(few_games):
    env = AlfWorld(few_games)
    for index in range(6):
        env.reset("train", index)
        views = [env.step(command) for command in env._game.walkthrough]
        assert [view.success for view in views] == [False] * (len(views) - 1) + [True]
        assert [view.outcome for view in views] == [0.0] * (len(views) - 1) + [1.0]
        assert [view.done for view in views] == [view.success for view in views]


def test_done_is_not_success(few_games, monkeypatch):
    class Ended(alfworld_engine.Game):
        def _state(self, text):
            state = super()._state(text)
            return alfworld_engine.State(state.text, state.admissible, won=False, done=True)

    monkeypatch.setattr(alfworld_engine, "Game", Ended)
    env = AlfWorld(few_games)
    env.reset("train", PICK)
    view = env.step("look")
    assert (view.done, view.success, view.outcome) == (True, False, 0.0)


def test_fifty_looks_win_nothing(few_games):
    env = AlfWorld(few_games)
    env.reset("train", LOOK)
    views = [env.step(env.look_around) for _ in range(env.step_limit + 5)]
    assert {(view.done, view.success, view.outcome) for view in views} == {(False, False, 0.0)}


def test_what_is_not_admissible_changes_nothing(few_games):
    env = AlfWorld(few_games)
    before = env.reset("train", PICK)
    for text in ODD_TEXTS:
        view = env.step(text)
        assert view.observation == "Nothing happens." or text == "help"
        assert (view.admissible, view.notes, view.done) == (before.admissible, before.notes, False)


def test_notes_are_no_part_of_the_anchor(few_games):
    env = AlfWorld(few_games)
    env.reset("train", PICK)
    arrival = next(command for command in env._admissible if command.startswith("go to"))
    first = env.step(arrival)
    env.step("go to sofa 1" if arrival != "go to sofa 1" else "look")
    again = env.step(arrival)
    assert first.observation == again.observation.replace("Nothing happens.", first.observation)
    assert first.notes not in first.observation


def test_members_of_a_group_begin_alike_here_and_in_another_process(few_games):
    one, other = AlfWorld(few_games), AlfWorld(few_games)
    other.reset("train", PICK)
    other.step("inventory")
    view = one.reset("train", LOOK)
    assert other.reset("train", LOOK) == view == one.reset("train", LOOK)
    code = f"import envs; print(envs.AlfWorld({few_games!r}).reset('train', {LOOK}), end='')"
    assert in_another_process(code) == str(view)


def test_two_environments_share_nothing(few_games):
    one, other = AlfWorld(few_games), AlfWorld(few_games)
    one.reset("train", LOOK)
    start = other.reset("train", LOOK)
    for command in one._game.walkthrough:
        won = one.step(command)
        idle = other.step("inventory")
        assert idle.observation == "You are not carrying anything."
        assert (idle.admissible, idle.notes) == (start.admissible, start.notes)
    assert (won.success, idle.success) == (True, False)


def test_a_broken_game_file_is_a_crash_and_the_next_game_is_played(few_games, tmp_path):
    broken = a_game(tmp_path, "train", "pick_and_place_simple-Mug-None-Desk-308")
    env = AlfWorld(few_games)
    env.games = {**env.games, "train": (broken, tmp_path / "pick_and_place" / "gone", *env.games["train"])}
    env.reset("train", 2)
    for index in (0, 1):
        with pytest.raises(EnvironmentCrashed, match="pick_and_place"):
            env.reset("train", index)
    assert env.reset("train", 2).task_type == "Look"


def test_a_damaged_game_is_played_as_far_as_it_can_be(few_games, tmp_path):
    env = AlfWorld(few_games)
    game = json.loads(env.games["train"][PICK].read_text())
    path = tmp_path / "pick_and_place_simple-CreditCard" / "trial" / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**game, "walkthrough": None}))
    env.games = {**env.games, "train": (path,)}
    assert env.reset("train", 0).task == "put some creditcard on armchair"
    assert env.step("look").observation != "Nothing happens."
    with pytest.raises(EnvironmentCrashed, match=r"trial/game.tw-pddl: the game has no walkthrough"):
        env.searching_expert()

    sentence = '"rhs": "You are not carrying anything."'
    assert game["grammar"].count(sentence) == 1
    round_in_circles = game["grammar"].replace(sentence, '"rhs": "#inventory.feedback#"')
    path.write_text(json.dumps({**game, "grammar": round_in_circles}))
    env.reset("train", 0)
    with pytest.raises(EnvironmentCrashed, match=r"trial/game.tw-pddl: maximum recursion depth exceeded"):
        env.step("inventory")

    path.write_bytes(path.read_bytes().replace(b"carrying", b"carry\xff\xff\xff", 1))
    with pytest.raises(EnvironmentCrashed, match="UnicodeDecodeError: .* can't decode byte 0xff") as crash:
        env.reset("train", 0)
    assert len(str(crash.value)) < len(str(path)) + 250  # such an error holds the whole file


# --- ALFWorld: the tiny model's words -----------------------------------------------------------------------

SAID = [  # what ALFWorld's grammar can answer, beside what the episodes below hear
    "This is a normal bowl 1. In it, you see nothing.",
    "This is a hot and clean sliced mug 1.",
    "This is a cool and clean mug 1.",
    "This is a cold mug 1.",
    "This desklamp 1 is on.",
    "This desklamp 1 is off.",
    "There's nothing special about mug 1.",
    "You don't see any switch on the desklamp 1.",
    "You turn off the desklamp 1.",
    "You sliced the mug 1 with the mug 1.",
    "You are carrying: a mug 1.",
    "You are facing the diningtable 1, and diningtable 2. Next to it, you see nothing.",
    "The cabinet 1 is closed.",
    "You close the cabinet 1.",
]


def test_the_vocabulary_knows_every_word_of_an_episode(few_games):
    from chat import Chat
    from demo.tiny_model import tiny_tokenizer

    env = AlfWorld(few_games)
    chat = Chat(tiny_tokenizer(env.vocabulary))
    unknown = chat.tokenizer.unk_token_id
    for text in SAID:
        assert unknown not in chat.encode(text), text
    rng = random.Random(0)
    for index in range(env.size("train")):
        view, past = env.reset("train", index), []
        for turn in range(25):
            prompt = window_message("short", view, past[-2:], turn)
            assert unknown not in chat.encode(prompt), prompt
            for action in view.admissible:
                assert chat.decode(chat.reply(action)) == action
            action = env.searching_expert() if rng.random() < 0.6 else rng.choice(view.admissible)
            past.append((view.observation, action))
            view = env.step(action)


def test_a_thing_is_one_token_as_often_as_a_game_has_it(few_games):
    words = set(AlfWorld(few_games).vocabulary)
    assert {"soapbar 1", "soapbar 2", "garbagecan 1", "diningtable 1", "desklamp 1"} <= words
    assert "garbagecan 2" not in words and "desklamp" in words


# --- WebShop: the goals -------------------------------------------------------------------------------------

needs_packages = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("nltk", "rapidfuzz", "regex")),
    reason="needs pip install -r requirements/webshop.txt",
)
needs_shop = pytest.mark.skipif(not SHOP.exists(), reason=f"there are no WebShop files in {SHOP}")
CUTS = [f"cut a{i}" for i in range(1, 41)]
SIZES = ["8.4 ounce  |  250 ml", '65x43\xa0cm (25.5"x17")', "café ü", *(f"size b{i}" for i in range(4, 51))]


def product(asin, name, **others):
    return {
        "asin": asin,
        "name": name,
        "full_description": "",
        "small_description": ["washable"],
        "product_category": "Home › Kitchen",
        "category": "garden",
        "query": "aprons",
        "pricing": "$12.5",
        "customization_options": "",
    } | others


def write_toy(folder: Path, cuts=CUTS) -> str:
    """Aprons of 40 cuts in 50 sizes: 2,000 goals; a kettle sold at $20 to $80; no files of people's goals."""
    listed = {"cut": cuts, "size": SIZES}
    choices = {name: [{"value": value} for value in values] for name, values in listed.items()}
    products = [
        product("B000000001", "Red Apron", customization_options=choices),
        product("B000000002", "Steel Kettle", query="kettles", pricing="$20 to $80", category="electronics"),
    ]
    wishes = {
        "B000000001": {"instruction": "Find me red aprons", "instruction_attributes": ["red", "washable"]},
        "B000000002": {"instruction": "Find me kettles", "instruction_attributes": ["steel"]},
    }
    files = {
        "items_shuffle_1000.json": products,
        "items_ins_v2_1000.json": {asin: {"attributes": ["x"], **wish} for asin, wish in wishes.items()},
        "title_nouns_spacy_sm380.json": {"B000000001": ["apron"], "B000000002": ["kettle"]},
        "color_set.json": ["red"],
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return str(folder)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_toy(tmp_path_factory.mktemp("shop"))


@needs_packages
def test_the_splits_are_disjoint_and_hold_every_goal(toy):
    env = WebShop(toy)
    assert len(env.shop.goals) == 2001
    assert [env.size(split) for split in ("test", "validation", "train")] == [500, 1000, 501]
    for split, first, last in (("test", 0, 499), ("validation", 500, 1499), ("train", 1500, 2000)):
        for index, goal in ((0, first), (env.size(split) - 1, last)):
            env.reset(split, index)
            assert env._session.goal_index == goal
    assert set(env.eval_splits) == {"validation", "test"}


@needs_shop
@needs_packages
def test_the_sizes_of_the_official_thousand_products():
    env = WebShop(str(SHOP))
    assert [env.size(split) for split in ("test", "validation", "train")] == [500, 1000, 5410]
    sought = {product.category for product in env.shop.products.values()}
    assert sought == set(env.task_types)
    with pytest.raises(ValueError, match=r"has 13 human goals; training begins at 1500"):
        WebShop(str(SHOP), goals="human")
    assert env.fingerprint == WebShop(str(SHOP), products="small").fingerprint


GOALS = (
    "import envs, hashlib; env = envs.WebShop({!r}); texts = [g.instruction_text for g in env.shop.goals];"
    "print(hashlib.sha256('|'.join(texts).encode()).hexdigest(), env.reset('train', 3).task, end='')"
)


@needs_packages
def test_a_goal_has_one_text_for_all_members_and_in_every_process(toy, capsys):
    one, other = WebShop(toy), WebShop(toy)
    other.reset("train", 5)
    assert one.reset("train", 3) == other.reset("train", 3) == one.reset("train", 3)
    exec(GOALS.format(toy))
    assert in_another_process(GOALS.format(toy)) == capsys.readouterr().out


@needs_packages
def test_a_shop_leaves_the_global_random_state_alone(tmp_path):
    random.seed(5)
    before = random.getstate()
    env = WebShop(write_toy(tmp_path))
    env.reset("train", 0)
    env.step("search[red]")
    assert random.getstate() == before


@needs_packages
def test_environments_share_the_shop_and_nothing_else(toy):
    one, other = WebShop(toy), WebShop(toy)
    assert one.shop is other.shop
    one.reset("train", 0)
    start = other.reset("train", 0)
    one.step("search[red aprons]")
    one.step("click[b000000001]")
    assert other.step("click[no such thing]") == start


# --- WebShop: what a turn shows, what counts ----------------------------------------------------------------


def plain_goal(env: WebShop, split: str) -> tuple[int, str, str]:
    """The first game of the split that seeks an apron of a size without odd blanks; the clicks it takes."""
    first = env.ranges[split][0]
    for index in range(env.size(split)):
        options = env.shop.goals[first + index].goal_options
        if options and options["size"].startswith("size b"):
            return index, f"click[{options['cut']}]", f"click[{options['size']}]"
    raise AssertionError("there is none")


def bought(env: WebShop, split: str, index: int, *clicks: str):
    env.reset(split, index)
    for action in ("search[red aprons]", "click[b000000001]", *clicks):
        view = env.step(action)
        assert not view.done
    return env.step("click[buy now]")


@needs_packages
def test_pages_without_the_instruction_and_the_actions_they_offer(toy):
    env = WebShop(toy)
    index, cut, size = plain_goal(env, "train")
    view = env.reset("train", index)
    wish = f"cut: {cut[6:-1]}, and size: {size[6:-1]}"
    assert view.task.startswith(f"Find me red aprons with {wish}, and price lower than ")
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
def test_every_button_can_be_clicked_by_a_reply(toy, style):
    """Also "Next >", "< Prev", and names with runs of blanks, which a reply's action cannot hold."""
    env = WebShop(toy)
    env.reset("train", 0)
    pages = [("search[red aprons]", "page 1"), ("click[next >]", "page 2"), ("click[< prev]", "page 1")]
    for action, page in pages:
        parsed, valid = parse_action(style, reply_text(style, action))
        assert valid and env.step(parsed).brief.startswith(page)
    view = env.step("click[b000000001]")
    assert len(view.admissible) == 96
    for action in view.admissible:
        assert parse_action(style, reply_text(style, action)) == (action, True)
    for action, shown in (
        ("click[8.4 ounce | 250 ml]", "size 8.4 ounce  |  250 ml"),
        ('click[65x43 cm (25.5"x17")]', 'size 65x43\xa0cm (25.5"x17")'),
    ):
        assert action in view.admissible
        assert env.step(action).notes == shown
    assert env.step("click[description]").brief == "Description"
    assert env.step("click[< prev]").brief.startswith("item")


@needs_packages
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_right_purchase_is_a_success(toy, split):
    env = WebShop(toy)
    view = bought(env, split, *plain_goal(env, split))
    assert (view.done, view.success, view.outcome) == (True, True, 1.0)


@needs_packages
def test_a_partly_right_purchase_counts_on_the_panel_alone_unless_its_score_is_asked_for(toy):
    # red and washable, one of two options, the price: (2 + 1 + 1) / (2 + 2 + 1)
    for split, reward, outcome in (
        ("train", "success", 0.0),
        ("train", "score", 0.8),
        ("validation", "success", 0.8),
        ("validation", "score", 0.8),
        ("test", "success", 0.8),
    ):
        env = WebShop(toy, reward=reward)
        index, cut, _ = plain_goal(env, split)
        view = bought(env, split, index, cut)
        assert (view.done, view.success, view.outcome) == (True, False, outcome)


@needs_packages
def test_who_never_buys_earns_nothing(toy):
    env = WebShop(toy, reward="score")
    index, cut, size = plain_goal(env, "train")
    env.reset("train", index)
    for action in ("search[red aprons]", "click[b000000001]", cut, size, "buy now"):
        view = env.step(action)
        assert (view.done, view.success, view.outcome) == (False, False, 0.0)


@needs_packages
def test_the_last_page_which_tells_the_reward_is_not_shown(toy):
    env = WebShop(toy)
    view = bought(env, "train", 0)
    assert "Your score" in env._session.page.text
    assert (view.observation, view.brief, view.admissible) == ("", "", ())
    assert "score" not in "".join([view.task, view.notes])


@needs_packages
def test_any_text_may_come_as_an_action(toy):
    env = WebShop(toy)
    start = env.reset("train", 0)
    for text in ODD_TEXTS:
        view = env.step(text)
        assert not view.done
        if not text.startswith("search[") or text in ("search[", "search[]"):
            assert view == start
        start = env.reset("train", 0)


@needs_packages
def test_an_oracle_earns_every_goal_of_a_batch_of_episodes(toy):
    from chat import Chat
    from demo.tiny_model import tiny_tokenizer

    env = WebShop(toy)
    chat = Chat(tiny_tokenizer(env.vocabulary))
    dialogue = Dialogue(chat, "short", "window", 1, 2000, 64)
    world = World(lambda: WebShop(toy), None, dialogue, group_size=1)
    episodes = world.demonstrations(30, 1.0, 0.0)
    # The official reward compares what it reads of a size with that blank in it: no purchase satisfies it.
    episodes = [episode for episode in episodes if "\xa0" not in episode.task]
    assert {(episode.outcome, episode.success) for episode in episodes} == {(1.0, True)}
    assert {len(episode.steps) for episode in episodes} <= {3, 5}  # a kettle has no options
    assert all(step.valid for episode in episodes for step in episode.steps)


# --- WebShop: what is missing -------------------------------------------------------------------------------


@needs_packages
def test_missing_files_are_named(toy, tmp_path, monkeypatch):
    with pytest.raises(ValueError) as caught:
        WebShop(str(tmp_path))
    for name in (
        "items_shuffle_1000.json",
        "items_ins_v2_1000.json",
        "color_set.json",
        "princeton-nlp/WebShop",
    ):
        assert name in str(caught.value)
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    envs.webshop_of.cache_clear()
    with pytest.raises(flags.UsageError, match="^--env webshop: .* --webshop_data, or in .WEBSHOP_DATA"):
        flags.environment(flags.Args(env="webshop"))
    monkeypatch.setenv("WEBSHOP_DATA", toy)
    assert WebShop().size("train") == 501
    envs.webshop_of.cache_clear()


@needs_packages
def test_too_few_goals_to_train_on_are_refused(tmp_path):
    data = write_toy(tmp_path, cuts=CUTS[:29])
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
def test_what_is_not_installed_is_named_with_the_remedy(toy, monkeypatch):
    monkeypatch.setattr(webshop.importlib.util, "find_spec", lambda name: None)
    envs.webshop_of.cache_clear()
    with pytest.raises(flags.UsageError, match="^--env webshop: .*nltk.*-r requirements/webshop.txt"):
        flags.environment(flags.Args(env="webshop", webshop_data=toy))


# --- WebShop: the tiny model's tokens -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat():
    """Of a small text; what it can spell does not depend on it."""
    from chat import Chat
    from demo.tiny_model import tiny_tokenizer

    texts = ("find me red shoes, size 9", "search[]", "click[buy now]", "click[back to search]")
    return Chat(tiny_tokenizer(Corpus(texts * 20, ("b09npml43m", "b000000001"), 400)))


@pytest.mark.parametrize(
    "action",
    [
        *("search[Red Shoes]", "click[Buy Now]", "click[next >]", "click[< prev]", "click[B09NPML43M]"),
        *('search[24" x 36", 5.5 oz]', 'click[65x43 cm (25.5"x17" inches)]', "click[women's 8 | men's 6]"),
        *("click[a[b]", "click[a]b]", "click[[x]]", "search[[[]]]", "search[]", "buy", "[", "]"),
        *(
            "search[café crème ü ß]",
            "search[漢字 🙂]",
            "search[İ ﬀ]",
            "click[№ 5 – ½ ″]",
            "search[a_b-c/d\\e%f#g]",
        ),
        *("search[<user> <end>]", "search[{x} $9.99 & more!]", "search[xb09npml43mx]", "search[1234567890]"),
        *("search[two  blanks]", "search[a\tb\nc]"),
    ],
)
def test_an_action_survives_the_tokens(chat, action):
    assert chat.decode(chat.reply(action)) == action.lower()
    assert chat.tokenizer.unk_token_id not in chat.encode(action)


def test_a_word_has_the_same_tokens_in_brackets_and_out(chat):
    inside, outside = chat.encode("search[red shoes]"), chat.encode("find red shoes now")
    words = chat.encode("red shoes")
    for tokens in (inside, outside):
        assert words in [tokens[i : i + len(words)] for i in range(len(tokens))]
    name = chat.tokenizer.convert_tokens_to_ids("b09npml43m")
    assert name in chat.encode("click[b09npml43m]") and name in chat.encode("page 1; B09NPML43M red shoes")
