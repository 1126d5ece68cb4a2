"""Tests of the ALFWorld engine: the stock engine's answers, isolation, the cache, and memory."""

import importlib.metadata
import json
import multiprocessing
import random
import sys
import tarfile
import warnings
import zlib
from pathlib import Path

import pytest

from games import alfworld_engine
from games.alfworld_engine import Game, _Table, clear_cache, forget, task_type
from games.alfworld_translation import _expression, _packed

DATA = Path(__file__).parent.parent.parent.parent / "shared" / "data" / "alfworld"
LOOK = "look_at_obj_in_light-Bowl-None-DeskLamp-301"
CLEAN = "pick_clean_then_place_in_recep-SoapBar-None-Toilet-428"  # the smallest game, translated in 0.1 s


def missing() -> str:
    """Return the reason why games cannot be played, or "" if they can."""
    try:
        for package in alfworld_engine.PACKAGES:
            importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        return f"{error.name} is not installed"
    return "" if DATA.is_dir() else f"there are no games in {DATA}"


needs_games = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="session")
def traces() -> dict[str, dict]:
    """The recorded answers of the stock engine, by the name of the game's folder."""
    recorded = json.loads((DATA / "traces_stock.json").read_text())
    return {trace["game"].split("/")[-3]: trace for trace in recorded}


def unpack(archive: str, names: set[str], folder: Path) -> dict[str, Path]:
    """Unpack the games of these names. Returns their paths by name."""
    found = {}
    with tarfile.open(DATA / archive) as packed:
        for member in packed:
            parts = Path(member.name).parts
            if parts[-1] == "game.tw-pddl" and parts[-3] in names and parts[-3] not in found:
                found[parts[-3]] = folder / parts[-3] / parts[-1]
                found[parts[-3]].parent.mkdir()
                found[parts[-3]].write_bytes(packed.extractfile(member).read())
    return found


@pytest.fixture(scope="session")
def games(tmp_path_factory) -> dict[str, Path]:
    return unpack("games.tar.xz", {LOOK, CLEAN}, tmp_path_factory.mktemp("games"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """A cache that tests share, so that a game is translated once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def nothing_in_memory():
    forget()
    alfworld_engine._warned.clear()


def replay(game: Game, trace: dict) -> None:
    """Play the recorded commands and compare every answer with the recorded one."""
    state, start = game.reset(), trace["reset"]
    assert (state.text, state.admissible, state.won) == (start["text"], start["admissible"], start["won"])
    for step in trace["steps"]:
        state = game.step(step["command"])
        assert state.text == step["text"], step["command"]
        assert state.admissible == step["admissible"], step["command"]
        assert (state.won, state.done) == (step["won"], step["done"]), step["command"]


# --- Command line -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, message", [
    (["--processes", "0"], "--processes 0: must be at least 1"),
    (["--processes", "-2"], "--processes -2: must be at least 1"),
    ([], "no game.tw-pddl below "),
])  # fmt: skip
def test_a_wrong_command_line_is_a_usage_error(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(alfworld_engine, "check_installed", lambda: None)
    monkeypatch.setattr(sys, "argv", ["alfworld_engine.py", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as exit:
        alfworld_engine.main()
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_the_command_line_names_a_missing_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(alfworld_engine, "PACKAGES", ("alfworld-not-here",))
    monkeypatch.setattr(sys, "argv", ["alfworld_engine.py", str(tmp_path)])
    alfworld_engine._versions.cache_clear()
    with pytest.raises(SystemExit) as exit:
        alfworld_engine.main()
    alfworld_engine._versions.cache_clear()
    message = "ALFWorld needs the package alfworld-not-here: pip install -r requirements/alfworld.txt"
    assert exit.value.code == 2 and message in capsys.readouterr().err


@needs_games
def test_the_command_line_lists_games_that_cannot_be_translated(tmp_path, monkeypatch, capfd):
    (tmp_path / "pick_and_place_simple" / "game.tw-pddl").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["alfworld_engine.py", str(tmp_path)])
    monkeypatch.setenv("RSPO_CACHE", str(tmp_path))
    assert alfworld_engine.main() == 1
    out, err = capfd.readouterr()
    assert out == f"0 of 1 games are in the cache {tmp_path}/alfworld\n"
    assert "pick_and_place_simple/game.tw-pddl" in err and "Traceback" not in err


# --- Exactness ----------------------------------------------------------------------------------------------


@needs_games
@pytest.mark.parametrize("name", [LOOK, CLEAN])
def test_answers_equal_those_of_the_stock_engine(name, games, traces, cache):
    game = Game(games[name], cache)
    replay(game, traces[name])
    replay(game, traces[name])  # this time from remembered transitions


@needs_games
@pytest.mark.slow
def test_all_recorded_games_have_the_stock_engines_answers(traces, tmp_path):
    paths = unpack("all_games_tw-pddl.tar.xz", set(traces), tmp_path)
    trials = {name: trace["game"].split("/")[-2] for name, trace in traces.items()}
    assert len(paths) == len(trials) == 12
    with tarfile.open(DATA / "all_games_tw-pddl.tar.xz") as packed:  # a folder can contain several trials
        for member in packed:
            parts = Path(member.name).parts
            if parts[-1] == "game.tw-pddl" and trials.get(parts[-3]) == parts[-2]:
                paths[parts[-3]].write_bytes(packed.extractfile(member).read())
    for name, path in paths.items():
        replay(Game(path, tmp_path / "cache"), traces[name])


@needs_games
def test_only_the_last_command_of_the_walkthrough_ends_the_game(games, cache):
    game = Game(games[LOOK], cache)
    assert game.task_type == "look_at_obj_in_light"
    game.reset()
    states = [game.step("look") for _ in range(60)] + [game.step(command) for command in game.walkthrough]
    assert [(state.won, state.done) for state in states[:-1]] == [(False, False)] * (len(states) - 1)
    assert (states[-1].won, states[-1].done) == (True, True)
    assert not game.reset().won


@needs_games
def test_a_command_that_is_not_admissible_changes_nothing(games, cache):
    game = Game(games[LOOK], cache)
    before = game.reset()
    for command in ("", "Look", "take everything", "go to nowhere 1"):
        state = game.step(command)
        assert (state.text, state.admissible) == ("Nothing happens.", before.admissible)
    assert game.step("  look \n").text == game.step("look").text != "Nothing happens."


@needs_games
def test_the_number_of_remembered_transitions_changes_no_answer(games, cache, monkeypatch):
    def played(limit: int) -> list:
        forget()
        monkeypatch.setattr(alfworld_engine, "N_TRANSITIONS", limit)
        game, rng = Game(games[CLEAN], cache), random.Random(0)
        states = [game.reset()]
        for number in range(120):
            states.append(game.step(rng.choice(states[-1].admissible)) if number % 30 else game.reset())
        assert len(game._table._nodes) <= limit + 1
        return states

    assert played(5) == played(2000)


# --- Isolation ----------------------------------------------------------------------------------------------


@needs_games
def test_games_are_independent(games, traces, cache):
    look, clean, idle = Game(games[LOOK], cache), Game(games[CLEAN], cache), Game(games[LOOK], cache)
    look.reset()
    clean.reset()
    start = idle.reset()
    for look_step, clean_step in zip(traces[LOOK]["steps"], traces[CLEAN]["steps"], strict=False):
        assert look.step(look_step["command"]).text == look_step["text"]
        assert clean.step(clean_step["command"]).text == clean_step["text"]
    assert idle.step("nonsense").admissible == start.admissible


@needs_games
def test_a_caller_can_change_its_list_of_commands(games, cache):
    first, second = Game(games[CLEAN], cache), Game(games[CLEAN], cache)
    state = first.reset()
    commands = list(state.admissible)
    state.admissible.clear()
    assert first.reset().admissible == second.reset().admissible == commands


@needs_games
def test_a_translation_prints_nothing_and_keeps_argv_and_stdout(games, tmp_path, capsys):
    argv, content, stdout = sys.argv, list(sys.argv), sys.stdout
    Game(games[CLEAN], tmp_path).reset()
    assert sys.argv is argv and sys.argv == content and sys.stdout is stdout
    assert capsys.readouterr() == ("", "")


@needs_games
def test_a_closed_game_and_a_game_before_reset_raise_errors(games, cache):
    game = Game(games[CLEAN], cache)
    with pytest.raises(RuntimeError, match="reset"):
        game.step("look")
    game.close()
    with pytest.raises(RuntimeError, match="closed"):
        game.reset()


# --- The cache ----------------------------------------------------------------------------------------------


@needs_games
def test_a_game_is_translated_once(games, tmp_path, monkeypatch):
    start = Game(games[CLEAN], tmp_path).reset()
    forget()
    monkeypatch.setattr(alfworld_engine, "translate", None)  # so a second translation would fail
    assert Game(games[CLEAN], tmp_path).reset() == start
    (file,) = tmp_path.iterdir()
    assert isinstance(json.loads(zlib.decompress(file.read_bytes()[32:])), dict)  # a hash, then plain data
    assert clear_cache(tmp_path) == 1 and not list(tmp_path.iterdir())


@needs_games
@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"", lambda b: b[:99] + b"?" + b[100:]])
def test_a_damaged_file_of_the_cache_is_replaced_with_a_warning(games, tmp_path, damage):
    start = Game(games[CLEAN], tmp_path).reset()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    forget()
    with pytest.warns(UserWarning, match="damaged"):
        assert Game(games[CLEAN], tmp_path).reset() == start
    assert file.read_bytes() == whole


@needs_games
def test_a_file_of_the_cache_with_other_content_is_replaced_with_a_warning(games, tmp_path):
    start = Game(games[CLEAN], tmp_path).reset()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    alfworld_engine._save(file, b'{"walkthrough": []}')
    forget()
    with pytest.warns(UserWarning, match="not a translated game"):
        assert Game(games[CLEAN], tmp_path).reset() == start
    assert file.read_bytes() == whole


@needs_games
def test_without_a_writable_cache_games_work_and_there_is_one_warning(games, tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"  # it cannot be made, not even by root
    with pytest.warns(UserWarning, match="translated games cannot be") as caught:
        Game(games[CLEAN], folder).reset()
        forget()
        Game(games[CLEAN], folder).reset()
    assert len(caught) == 1


@needs_games
def test_files_with_different_content_have_different_cache_files(games, tmp_path):
    content = json.loads(games[CLEAN].read_text())
    content["grammar"] = content["grammar"].replace("Your task is to: ", "Your task is to: please ")
    other = tmp_path / CLEAN / "game.tw-pddl"
    other.parent.mkdir()
    other.write_text(json.dumps(content))
    first, second = Game(games[CLEAN], tmp_path / "cache"), Game(other, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    task = first.reset().text.split("Your task is to: ")[1]
    assert second.reset().text.endswith(f"Your task is to: please {task}")


def warm(path: Path, folder: Path) -> str:
    forget()
    return Game(path, folder).reset().text


@needs_games
@pytest.mark.slow
def test_processes_can_fill_one_cache_at_the_same_time(games, tmp_path, cache):
    text = Game(games[CLEAN], cache).reset().text  # this loads the libraries before the fork
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.starmap(warm, [(games[CLEAN], tmp_path)] * 4, chunksize=1) == [text] * 4
    assert [file.suffix for file in tmp_path.iterdir()] == [".game"]


def test_environment_variables_choose_the_folder_of_the_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.delenv("RSPO_CACHE", raising=False)
    assert alfworld_engine.cache_folder() == Path("/somewhere/rspo/alfworld")
    monkeypatch.setenv("RSPO_CACHE", "/elsewhere")
    assert alfworld_engine.cache_folder() == Path("/elsewhere/alfworld")


# --- Errors -------------------------------------------------------------------------------------------------


@needs_games
@pytest.mark.parametrize(
    "change",
    [
        lambda content: "no json",
        lambda content: json.dumps([]),
        lambda content: json.dumps({**content, "pddl_problem": "(define (problem"}),
        lambda content: json.dumps({**content, "pddl_domain": "(define (domain alfred))"}),
        lambda content: json.dumps({**content, "grammar": "action {"}),
    ],
)
def test_the_error_of_a_broken_file_names_the_file(change, games, tmp_path, capsys):
    path = tmp_path / "pick_and_place" / "game.tw-pddl"
    path.parent.mkdir()
    path.write_text(change(json.loads(games[CLEAN].read_text())))
    argv, stdout = list(sys.argv), sys.stdout
    with pytest.raises(ValueError, match="pick_and_place/game.tw-pddl"):
        Game(path, tmp_path / "cache")
    assert sys.argv == argv and sys.stdout is stdout
    assert not (tmp_path / "cache").exists()


def test_the_error_of_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch):
    path = tmp_path / "pick_and_place" / "game.tw-pddl"
    path.parent.mkdir()
    path.write_text("{}")
    monkeypatch.setattr(alfworld_engine, "PACKAGES", ("no-such-package",))
    alfworld_engine._versions.cache_clear()
    with pytest.raises(ImportError, match="no-such-package: pip install -r requirements/alfworld.txt"):
        Game(path, tmp_path / "cache")
    alfworld_engine._versions.cache_clear()


def test_the_task_type_is_the_last_one_in_the_path():
    path = "/pick_and_place/x/pick_heat_then_place_in_recep-Mug-None-Desk-21/trial/game.tw-pddl"
    assert task_type(path) == "pick_heat_then_place_in_recep"
    assert task_type("pick_two_obj_and_place-Box-None-Sofa-1/game.tw-pddl") == "pick_two_obj_and_place"
    with pytest.raises(ValueError, match="/games/mine.tw-pddl: the path contains none of the task types"):
        task_type("/games/mine.tw-pddl")


# --- A hand-made game, which needs no package ---------------------------------------------------------------


def lamp() -> dict:
    """Make a game with a lamp to push and pull.

    Atoms: 0 on, 1 pushed, 2 won (derived: on). A literal is 2 * atom + [true].
    """
    on = ["on", [["l", "lamp"]], [["lamp"]]]
    off = ["not_on", [["l", "lamp"]], [["lamp"]]]
    name = ["each", ["value", ["of", "l", "name"]], None]
    state = [[0, [["text", " It is on."]]], [1, [["text", " It was on."]]], [None, [["text", " It is new."]]]]
    return {
        "walkthrough": ["push"],
        "entities": [["lamp_1", "lamp", "lamp 1"]],
        "rules": {"state": state, "intro": [[None, [["text", "A lamp."]]]]},
        "queries": [[on], [off]],
        "facts": [["on", ["lamp"], [0, 0]]],
        "actions": [[[["text", "You see the "], name, ["text", "."], ["rule", "state"]], [["l", "lamp"]]]],
        "commands": ["look", "pull", "push"],
        "command_of": [0, 1, 2],
        "action_of": [0, 0, 0],
        "arguments": _packed([[0], [0], [0]]),
        "conditions": _packed([[], [1], [0]]),  # pull if on, push if off
        "effects": _packed([[], [0, 3], [1, 3]]),
        "uncertain": [],
        "goal": [5],
        "axioms": [[[5, [1]]]],
        "start": [],
        "default": [],
        "deniable": [0],
    }


def test_a_hand_made_game_is_played_by_the_rules():
    table = _Table(lamp())
    text, node = table.start()
    assert (text, node.admissible, node.won) == ("A lamp.", ("look", "push"), False)
    assert table.follow(node, "look")[0] == "You see the lamp 1. It is new."
    assert table.follow(node, "pull") == ("Nothing happens.", node)
    text, lit = table.follow(node, "push")
    assert (text, lit.admissible, lit.won) == ("You see the lamp 1. It is on.", ("look", "pull"), True)
    text, dark = table.follow(lit, "pull")
    # The lamp is off as at the start, but the fact that it is on is denied, so the text differs.
    assert (text, dark.admissible, dark.won) == ("You see the lamp 1. It was on.", ("look", "push"), False)
    assert table.follow(dark, "push")[1] is lit


def test_expressions_of_a_game_file_are_never_run():
    article = ["+", ["of", "o", "indefinite"], ["text", " "]]
    assert _expression("o.indefinite + ' ' + o.name") == ["+", article, ["of", "o", "name"]]
    for code in ("__import__('os').getcwd()", "o.name.__class__", "[o]", "o.name * 2"):
        with pytest.raises(ValueError, match="does not know"):
            _expression(code)


# --- Memory -------------------------------------------------------------------------------------------------


@needs_games
@pytest.mark.slow
def test_memory_does_not_grow_over_two_thousand_episodes(games, cache, monkeypatch):
    def resident() -> float:  # MB
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1000

    monkeypatch.setattr(alfworld_engine, "N_TABLES", 1)  # so each episode loads its game again
    rng = random.Random(0)
    sizes = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for episode in range(2000):
            game = Game(games[(LOOK, CLEAN)[episode % 2]], cache)
            state = game.reset()
            for _ in range(10):
                state = game.step(rng.choice(state.admissible))
            if episode % 500 == 499:
                sizes.append(resident())
    assert sizes[-1] - sizes[0] < 10, sizes
