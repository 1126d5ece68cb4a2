"""The ALFWorld engine: the stock engine's answers, isolation, the cache, what a dropped game leaves."""

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
CLEAN = "pick_clean_then_place_in_recep-SoapBar-None-Toilet-428"  # the smallest: translated in 0.1 s


def missing() -> str:
    """Why games cannot be played here; empty when they can."""
    try:
        for package in alfworld_engine.PACKAGES:
            importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        return f"{error.name} is not installed"
    return "" if DATA.is_dir() else "the shared data is not here"


needs_games = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="session")
def traces() -> dict[str, dict]:
    """What the stock engine answered, by the name of the game's folder."""
    recorded = json.loads((DATA / "traces_stock.json").read_text())
    return {trace["game"].split("/")[-3]: trace for trace in recorded}


def unpack(archive: str, names: set[str], folder: Path) -> dict[str, Path]:
    """Those games of the archive, by the name of their folder."""
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
    """A folder of translated games that the tests share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def nothing_in_memory():
    forget()
    alfworld_engine._warned.clear()


def replay(game: Game, trace: dict) -> None:
    """Every answer is the recorded one."""
    state, start = game.reset(), trace["reset"]
    assert (state.text, state.admissible, state.won) == (start["text"], start["admissible"], start["won"])
    for step in trace["steps"]:
        state = game.step(step["command"])
        assert state.text == step["text"], step["command"]
        assert state.admissible == step["admissible"], step["command"]
        assert (state.won, state.done) == (step["won"], step["done"]), step["command"]


# --- Command line -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, told", [
    (["--processes", "0"], "--processes 0: must be at least 1"),
    (["--processes", "-2"], "--processes -2: must be at least 1"),
    ([], "no game.tw-pddl below "),
])  # fmt: skip
def test_a_wrong_command_line_is_a_usage_error(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(alfworld_engine, "check_installed", lambda: None)
    monkeypatch.setattr(sys, "argv", ["alfworld_engine.py", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as exit:
        alfworld_engine.main()
    assert exit.value.code == 2 and told in capsys.readouterr().err


def test_the_command_line_names_a_package_that_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(alfworld_engine, "PACKAGES", ("alfworld-not-here",))
    monkeypatch.setattr(sys, "argv", ["alfworld_engine.py", str(tmp_path)])
    alfworld_engine._versions.cache_clear()
    with pytest.raises(SystemExit) as exit:
        alfworld_engine.main()
    alfworld_engine._versions.cache_clear()
    told = "ALFWorld needs the package alfworld-not-here: pip install -r requirements/alfworld.txt"
    assert exit.value.code == 2 and told in capsys.readouterr().err


@needs_games
def test_games_that_cannot_be_translated_are_listed(tmp_path, monkeypatch, capfd):
    (tmp_path / "pick_and_place_simple" / "game.tw-pddl").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["alfworld_engine.py", str(tmp_path)])
    monkeypatch.setenv("RSPO_CACHE", str(tmp_path))
    assert alfworld_engine.main() == 1
    out, err = capfd.readouterr()
    assert out == f"0 of 1 games can be played; the cache: {tmp_path}/alfworld\n"
    assert "pick_and_place_simple/game.tw-pddl" in err and "Traceback" not in err


# --- Exactness ----------------------------------------------------------------------------------------------


@needs_games
@pytest.mark.parametrize("name", [LOOK, CLEAN])
def test_answers_are_those_of_the_stock_engine(name, games, traces, cache):
    game = Game(games[name], cache)
    replay(game, traces[name])
    replay(game, traces[name])  # now from what is remembered


@needs_games
@pytest.mark.slow
def test_all_recorded_games_are_answered_alike(traces, tmp_path):
    paths = unpack("all_games_tw-pddl.tar.xz", set(traces), tmp_path)
    trials = {name: trace["game"].split("/")[-2] for name, trace in traces.items()}
    assert len(paths) == len(trials) == 12
    with tarfile.open(DATA / "all_games_tw-pddl.tar.xz") as packed:  # a folder may hold several trials
        for member in packed:
            parts = Path(member.name).parts
            if parts[-1] == "game.tw-pddl" and trials.get(parts[-3]) == parts[-2]:
                paths[parts[-3]].write_bytes(packed.extractfile(member).read())
    for name, path in paths.items():
        replay(Game(path, tmp_path / "cache"), traces[name])


@needs_games
def test_the_walkthrough_wins_with_its_last_command_and_nothing_else_ends_a_game(games, cache):
    game = Game(games[LOOK], cache)
    assert game.task_type == "look_at_obj_in_light"
    game.reset()
    states = [game.step("look") for _ in range(60)] + [game.step(command) for command in game.walkthrough]
    assert [(state.won, state.done) for state in states[:-1]] == [(False, False)] * (len(states) - 1)
    assert (states[-1].won, states[-1].done) == (True, True)
    assert not game.reset().won


@needs_games
def test_what_is_not_admissible_changes_nothing(games, cache):
    game = Game(games[LOOK], cache)
    before = game.reset()
    for command in ("", "Look", "take everything", "go to nowhere 1"):
        state = game.step(command)
        assert (state.text, state.admissible) == ("Nothing happens.", before.admissible)
    assert game.step("  look \n").text == game.step("look").text != "Nothing happens."


@needs_games
def test_what_is_forgotten_is_worked_out_again(games, cache, monkeypatch):
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
def test_games_side_by_side_do_not_touch_each_other(games, traces, cache):
    look, clean, idle = Game(games[LOOK], cache), Game(games[CLEAN], cache), Game(games[LOOK], cache)
    at_rest = [game.reset() for game in (look, clean, idle)][2]
    steps = zip(traces[LOOK]["steps"], traces[CLEAN]["steps"], strict=False)
    for for_look, for_clean in steps:
        assert look.step(for_look["command"]).text == for_look["text"]
        assert clean.step(for_clean["command"]).text == for_clean["text"]
    assert idle.step("nonsense").admissible == at_rest.admissible


@needs_games
def test_a_changed_list_of_commands_stays_the_callers(games, cache):
    first, second = Game(games[CLEAN], cache), Game(games[CLEAN], cache)
    state = first.reset()
    commands = list(state.admissible)
    state.admissible.clear()
    assert first.reset().admissible == second.reset().admissible == commands


@needs_games
def test_argv_and_stdout_stay_as_they_are(games, tmp_path, capsys):
    argv, content, stdout = sys.argv, list(sys.argv), sys.stdout
    Game(games[CLEAN], tmp_path).reset()
    assert sys.argv is argv and sys.argv == content and sys.stdout is stdout
    assert capsys.readouterr() == ("", "")


@needs_games
def test_a_closed_game_and_one_not_begun_say_so(games, cache):
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
    monkeypatch.setattr(alfworld_engine, "translate", None)  # a second translation would fail
    assert Game(games[CLEAN], tmp_path).reset() == start
    (file,) = tmp_path.iterdir()
    assert isinstance(json.loads(zlib.decompress(file.read_bytes()[32:])), dict)  # plain data
    assert clear_cache(tmp_path) == 1 and not list(tmp_path.iterdir())


@needs_games
@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"", lambda b: b[:99] + b"?" + b[100:]])
def test_a_damaged_entry_is_noticed_and_made_again(games, tmp_path, damage):
    start = Game(games[CLEAN], tmp_path).reset()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    forget()
    with pytest.warns(UserWarning, match="damaged"):
        assert Game(games[CLEAN], tmp_path).reset() == start
    assert file.read_bytes() == whole


@needs_games
def test_an_entry_that_holds_something_else_is_made_again(games, tmp_path):
    start = Game(games[CLEAN], tmp_path).reset()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    alfworld_engine._save(file, b'{"walkthrough": []}')
    forget()
    with pytest.warns(UserWarning, match="not a translated game"):
        assert Game(games[CLEAN], tmp_path).reset() == start
    assert file.read_bytes() == whole


@needs_games
def test_without_a_folder_to_write_in_games_are_played_and_one_warning_says_so(games, tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"  # cannot be made, whoever runs this
    with pytest.warns(UserWarning, match="translated games cannot be") as caught:
        Game(games[CLEAN], folder).reset()
        forget()
        Game(games[CLEAN], folder).reset()
    assert len(caught) == 1


@needs_games
def test_the_entry_belongs_to_the_content(games, tmp_path):
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
def test_processes_warm_one_cache_together(games, tmp_path, cache):
    text = Game(games[CLEAN], cache).reset().text  # the libraries are loaded before the fork
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.starmap(warm, [(games[CLEAN], tmp_path)] * 4, chunksize=1) == [text] * 4
    assert [file.suffix for file in tmp_path.iterdir()] == [".game"]


def test_the_folder_of_the_cache(monkeypatch):
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
def test_a_broken_file_is_named(change, games, tmp_path, capsys):
    path = tmp_path / "pick_and_place" / "game.tw-pddl"
    path.parent.mkdir()
    path.write_text(change(json.loads(games[CLEAN].read_text())))
    argv, stdout = list(sys.argv), sys.stdout
    with pytest.raises(ValueError, match="pick_and_place/game.tw-pddl"):
        Game(path, tmp_path / "cache")
    assert sys.argv == argv and sys.stdout is stdout
    assert not (tmp_path / "cache").exists()


def test_a_missing_package_is_named_with_the_remedy(tmp_path, monkeypatch):
    path = tmp_path / "pick_and_place" / "game.tw-pddl"
    path.parent.mkdir()
    path.write_text("{}")
    monkeypatch.setattr(alfworld_engine, "PACKAGES", ("no-such-package",))
    alfworld_engine._versions.cache_clear()
    with pytest.raises(ImportError, match="no-such-package: pip install -r requirements/alfworld.txt"):
        Game(path, tmp_path / "cache")
    alfworld_engine._versions.cache_clear()


def test_the_task_type_is_the_last_one_that_the_path_names():
    path = "/pick_and_place/x/pick_heat_then_place_in_recep-Mug-None-Desk-21/trial/game.tw-pddl"
    assert task_type(path) == "pick_heat_then_place_in_recep"
    assert task_type("pick_two_obj_and_place-Box-None-Sofa-1/game.tw-pddl") == "pick_two_obj_and_place"
    with pytest.raises(ValueError, match="/games/mine.tw-pddl: the path names none of the task types"):
        task_type("/games/mine.tw-pddl")


# --- The parts, on a game made by hand: no package needed ---------------------------------------------------


def lamp() -> dict:
    """A lamp to push and pull. Atoms: 0 on, 1 pushed, 2 won (derived: on). A literal is 2 * atom + [true]."""
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
        "conditions": _packed([[], [1], [0]]),  # pull when on, push when off
        "effects": _packed([[], [0, 3], [1, 3]]),
        "uncertain": [],
        "goal": [5],
        "axioms": [[[5, [1]]]],
        "start": [],
        "default": [],
        "deniable": [0],
    }


def test_a_game_made_by_hand():
    table = _Table(lamp())
    text, node = table.start()
    assert (text, node.admissible, node.won) == ("A lamp.", ("look", "push"), False)
    assert table.follow(node, "look")[0] == "You see the lamp 1. It is new."
    assert table.follow(node, "pull") == ("Nothing happens.", node)
    text, lit = table.follow(node, "push")
    assert (text, lit.admissible, lit.won) == ("You see the lamp 1. It is on.", ("look", "pull"), True)
    text, dark = table.follow(lit, "pull")
    # Off again, but not as at the start: that it is off has been said since.
    assert (text, dark.admissible, dark.won) == ("You see the lamp 1. It was on.", ("look", "push"), False)
    assert table.follow(dark, "push")[1] is lit


def test_expressions_of_a_game_file_are_never_run():
    assert _expression("o.indefinite + ' ' + o.name") == [
        *["+", ["+", ["of", "o", "indefinite"], ["text", " "]]],
        ["of", "o", "name"],
    ]
    for code in ("__import__('os').getcwd()", "o.name.__class__", "[o]", "o.name * 2"):
        with pytest.raises(ValueError, match="does not know"):
            _expression(code)


# --- What is left behind ------------------------------------------------------------------------------------


@needs_games
@pytest.mark.slow
def test_two_thousand_episodes_leave_nothing_behind(games, cache, monkeypatch):
    def resident() -> float:  # MB
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1000

    monkeypatch.setattr(alfworld_engine, "N_TABLES", 1)  # so every other game is loaded anew
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
