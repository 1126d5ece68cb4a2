"""Tests of ALFWorld as an environment: games, views, success, crashes, vocabulary.

They are skipped without ALFWorld's package and games. conftest.py unpacks the few games.
"""

import json
import random

import pytest
from env_helpers import ODD_TEXTS, run_in_new_process

import flags
from envs import AlfWorld, EnvironmentCrashed
from games import alfworld_engine

LOOK, PICK = 0, 1  # indices of games in the train split of the few games


# --- the games ----------------------------------------------------------------------------------------------


def test_a_missing_package_is_an_error_even_if_the_games_are_missing_too(tmp_path, monkeypatch):
    monkeypatch.setattr(alfworld_engine, "PACKAGES", ("alfworld-not-here",))
    alfworld_engine._versions.cache_clear()
    message = "^--env alfworld: ALFWorld needs the package alfworld-not-here: .* -r requirements/alfworld.txt"
    with pytest.raises(flags.UsageError, match=message):
        flags.environment(flags.Args(env="alfworld", alfworld_data=str(tmp_path / "nothing")))
    alfworld_engine._versions.cache_clear()


def test_missing_games_are_an_error_of_the_flag_that_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(alfworld_engine, "check_installed", lambda: None)
    with pytest.raises(flags.UsageError, match=r"^--alfworld_data .*: no ALFWorld games in .*download"):
        flags.environment(flags.Args(env="alfworld", alfworld_data=str(tmp_path / "nothing")))


def test_task_types_are_the_columns_of_table_1():
    assert AlfWorld.task_types == ("Pick", "Look", "Clean", "Heat", "Cool", "Pick2")
    assert set(AlfWorld.columns) == set(alfworld_engine.TASK_TYPES)


def test_the_sizes_of_the_splits_are_the_lengths_of_the_file_lists(few_games):
    env = AlfWorld(few_games)
    assert [env.size(split) for split in ("train", "valid_seen", "valid_unseen")] == [6, 2, 1]
    assert (env.step_limit, env.eval_splits) == (50, ("valid_seen", "valid_unseen"))


def test_the_fingerprint_depends_on_names_and_sizes_but_not_on_the_folder(few_games, tmp_path):
    env = AlfWorld(few_games)
    fingerprint = env.fingerprint
    assert AlfWorld(few_games).fingerprint == fingerprint
    first, *others = env.games["train"]
    moved = tmp_path.joinpath(*first.parts[-4:])
    moved.parent.mkdir(parents=True)
    env.games["train"] = (moved, *others)
    moved.write_bytes(first.read_bytes())
    assert env.fingerprint == fingerprint
    moved.write_bytes(first.read_bytes() + b" ")
    assert env.fingerprint != fingerprint
    env.games = {**AlfWorld(few_games).games, "valid_seen": env.games["valid_seen"][:1]}
    assert env.fingerprint != fingerprint


# --- a turn -------------------------------------------------------------------------------------------------


slow = pytest.mark.slow  # translating a game takes about 0.3 s


@pytest.mark.parametrize(
    "index, task_type, task",
    [
        (LOOK, "Look", "look at bowl under the desklamp"),
        (PICK, "Pick", "put some creditcard on armchair"),
        pytest.param(2, "Clean", "clean some soapbar and put it in garbagecan", marks=slow),
        pytest.param(3, "Cool", "put a cool pot in diningtable", marks=slow),
        pytest.param(4, "Heat", "put a hot mug in sidetable", marks=slow),
        pytest.param(5, "Pick2", "put two soapbar in garbagecan", marks=slow),
    ],
)
def test_the_first_view_of_a_game(few_games, index, task_type, task):
    view = AlfWorld(few_games).reset("train", index)
    assert (view.task_type, view.task) == (task_type, task)
    start = "You are in the middle of a room. Looking quickly around you, you see"
    assert view.observation.startswith(start)
    assert "Welcome" not in view.observation and "task" not in view.observation
    assert view.notes.startswith("search ")
    assert not (view.done or view.success or view.outcome)


def test_all_commands_of_the_engine_but_help_are_admissible(few_games):
    env = AlfWorld(few_games)
    view = env.reset("train", PICK)
    commands = list(alfworld_engine.Game(env.games["train"][PICK]).reset().admissible)
    commands.remove("help")
    assert list(view.admissible) == commands
    assert env.step("help").observation.startswith("Available commands:")  # a player may still use it


@slow
def test_the_stored_solution_wins_every_type_with_its_last_command(few_games):
    env = AlfWorld(few_games)
    for index in range(6):
        env.reset("train", index)
        walkthrough = alfworld_engine.Game(env.games["train"][index]).walkthrough
        views = [env.step(command) for command in walkthrough]
        wins = [False] * (len(views) - 1) + [True]
        assert [view.success for view in views] == wins
        assert [view.outcome for view in views] == [float(win) for win in wins]
        assert [view.done for view in views] == wins


def test_done_is_not_success(few_games, monkeypatch):
    class EndedGame(alfworld_engine.Game):
        def _state(self, text):
            state = super()._state(text)
            return alfworld_engine.State(state.text, state.admissible, won=False, done=True)

    monkeypatch.setattr(alfworld_engine, "Game", EndedGame)
    env = AlfWorld(few_games)
    env.reset("train", PICK)
    view = env.step("look")
    assert (view.done, view.success, view.outcome) == (True, False, 0.0)


def test_looking_around_for_the_whole_episode_wins_nothing(few_games):
    env = AlfWorld(few_games)
    env.reset("train", LOOK)
    views = [env.step(env.look_around) for _ in range(env.step_limit + 5)]
    assert {(view.done, view.success, view.outcome) for view in views} == {(False, False, 0.0)}


def test_an_action_that_is_not_admissible_changes_nothing(few_games):
    env = AlfWorld(few_games)
    before = env.reset("train", PICK)
    for text in ODD_TEXTS:
        view = env.step(text)
        assert view.observation == "Nothing happens." or text == "help"
        assert (view.admissible, view.notes, view.done) == (before.admissible, before.notes, False)


def test_a_second_visit_has_the_same_observation_without_notes(few_games):
    env = AlfWorld(few_games)
    view = env.reset("train", PICK)
    here, elsewhere = [command for command in view.admissible if command.startswith("go to")][:2]
    first = env.step(here)
    assert env.step(elsewhere).observation != first.observation
    second = env.step(here)
    assert second.observation == first.observation  # one anchor
    assert second.notes != first.notes and first.notes not in first.observation


def test_a_game_starts_alike_in_every_environment_and_process(few_games):
    one, other = AlfWorld(few_games), AlfWorld(few_games)
    other.reset("train", PICK)
    other.step("inventory")
    view = one.reset("train", LOOK)
    assert other.reset("train", LOOK) == view == one.reset("train", LOOK)
    code = f"import envs; print(envs.AlfWorld({few_games!r}).reset('train', {LOOK}), end='')"
    assert run_in_new_process(code) == str(view)


def test_two_environments_share_no_state(few_games):
    one, other = AlfWorld(few_games), AlfWorld(few_games)
    one.reset("train", LOOK)
    start = other.reset("train", LOOK)
    for command in alfworld_engine.Game(one.games["train"][LOOK]).walkthrough:
        won = one.step(command)
        idle = other.step("inventory")
        assert idle.observation == "You are not carrying anything."
        assert (idle.admissible, idle.notes) == (start.admissible, start.notes)
    assert (won.success, idle.success) == (True, False)


# --- damaged games ------------------------------------------------------------------------------------------


def test_after_a_crash_the_next_game_is_played(few_games, tmp_path):
    broken = tmp_path / "pick_and_place_simple-Mug" / "trial" / "game.tw-pddl"
    broken.parent.mkdir(parents=True)
    broken.write_text(json.dumps({"grammar": "x", "solvable": True, "walkthrough": ["look"]}))
    missing = tmp_path / "pick_and_place" / "missing"
    env = AlfWorld(few_games)
    env.games = {**env.games, "train": (broken, missing, *env.games["train"])}
    env.reset("train", 2)
    for index in (0, 1):
        with pytest.raises(EnvironmentCrashed, match="pick_and_place"):
            env.reset("train", index)
    assert env.reset("train", 2).task_type == "Look"


@pytest.fixture
def rewritten(few_games, tmp_path):
    """An environment, one of its games as a dict, and the path of its only game, which is not written yet."""
    env = AlfWorld(few_games)
    game = json.loads(env.games["train"][PICK].read_text())
    path = tmp_path / "pick_and_place_simple-CreditCard" / "trial" / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    env.games = {**env.games, "train": (path,)}
    return env, game, path


def test_a_game_without_a_solution_can_be_played_but_not_demonstrated(rewritten):
    env, game, path = rewritten
    path.write_text(json.dumps({**game, "walkthrough": None}))
    assert env.reset("train", 0).task == "put some creditcard on armchair"
    assert env.step("look").observation != "Nothing happens."
    with pytest.raises(EnvironmentCrashed, match=r"trial/game.tw-pddl: the game has no walkthrough"):
        env.searching_expert()


def test_a_grammar_that_contains_itself_is_a_crash(rewritten):
    env, game, path = rewritten
    sentence = '"rhs": "You are not carrying anything."'
    assert game["grammar"].count(sentence) == 1
    path.write_text(
        json.dumps({**game, "grammar": game["grammar"].replace(sentence, '"rhs": "#inventory.feedback#"')})
    )
    env.reset("train", 0)
    with pytest.raises(EnvironmentCrashed, match=r"trial/game.tw-pddl: maximum recursion depth exceeded"):
        env.step("inventory")


def test_a_file_that_is_not_utf_8_is_a_crash_with_a_short_message(rewritten):
    env, game, path = rewritten
    path.write_bytes(json.dumps(game).encode().replace(b"carrying", b"carry\xff\xff\xff", 1))
    with pytest.raises(EnvironmentCrashed, match="UnicodeDecodeError: .* can't decode byte 0xff") as crash:
        env.reset("train", 0)
    assert len(str(crash.value)) < len(str(path)) + 250  # the error's own text is as long as the file


# --- the vocabulary of the tiny model -----------------------------------------------------------------------

RARE_ANSWERS = [  # sentences of ALFWorld's grammar that the episodes below do not show
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


@slow
def test_the_vocabulary_contains_every_word_of_an_episode(few_games):
    pytest.importorskip("transformers")
    from chat import Chat, window_message
    from demo.tiny_model import tiny_tokenizer

    env = AlfWorld(few_games)
    chat = Chat(tiny_tokenizer(env.vocabulary, env.silent_words))
    unknown = chat.tokenizer.unk_token_id
    for text in RARE_ANSWERS:
        assert unknown not in chat.encode(text), text
    rng = random.Random(0)
    for index in range(env.size("train")):
        view = env.reset("train", index)
        past = []
        for turn in range(25):
            prompt = window_message("short", view, past[-2:], turn)
            assert unknown not in chat.encode(prompt), prompt
            for action in view.admissible:
                assert chat.decode(chat.reply(action)) == action
            action = env.searching_expert() if rng.random() < 0.6 else rng.choice(view.admissible)
            past.append((view.observation, action))
            view = env.step(action)


def test_an_object_is_one_word_for_each_number_in_a_game(few_games):
    words = set(AlfWorld(few_games).vocabulary)
    assert {"soapbar 1", "soapbar 2", "garbagecan 1", "diningtable 1", "desklamp 1"} <= words
    assert "garbagecan 2" not in words and "desklamp" in words
