"""An engine for ALFWorld's text games: what TextWorld's engine answers, in a fraction of its time.

`Game(path)` plays one `game.tw-pddl` (Shridhar et al. 2021). Two steps make it:

1. `alfworld_translation.translate`, once for each game file: the libraries ground the planning task (Fast
   Downward's translator) and parse the grammar of the sentences (TextWorld); the result is plain data. It
   takes 0.2 to 1 s and is kept on disk (`cache_folder`), so the second process, and the second run, begin in
   milliseconds.
2. `_Table`, that data made playable. A state is two integers, one bit an atom. Which commands are possible is
   worked out for all operators at once by bitwise logic, a sentence by walking its tree, and both are kept
   for states already seen, up to a limit. Only Python integers, lists and strings take part, no planner
   library: games cannot disturb each other, a dropped one leaves nothing, equal files share one table.

What decides the text is kept exactly, also where it is odd: facts once denied stay known as denied, an entity
cannot fill two places of one condition, and sentences hear of effects whose condition was not met.
tests/compare_alfworld.py plays beside the stock engine.

Left out: planning (`policy_commands`, the experts), TextWorld's other information (score, facts, inventory),
and what these games do not have, such as commands whose wording depends on the state (a ValueError says so).

    python alfworld_engine.py DIR --processes n     # translate every game below DIR beforehand
"""

from __future__ import annotations

import argparse
import bisect
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
import textwrap
import threading
import warnings
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from games.alfworld_translation import Sentences, translate

TASK_TYPES = (
    "pick_and_place",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
NOTHING = "Nothing happens."
GAME_FILE = "game.tw-pddl"

FORMAT = 1  # of the cached data; a change of what `translate` returns raises it
PACKAGES = ("textworld", "alfworld", "fast-downward-textworld")
N_TABLES = 64  # games kept playable in memory after their last Game is gone
N_TRANSITIONS = 2000  # remembered in each game, about 1 MB


@dataclass(frozen=True)
class State:
    """What a player sees. `won` is success; `done` says that the game has ended (here: by a win alone)."""

    text: str
    admissible: list[str]  # in the stock engine's order: sorted
    won: bool
    done: bool


class Game:
    """One play of one game file. Games are independent of each other, also those of one file."""

    def __init__(self, path: str | os.PathLike, cache: str | os.PathLike | None = None):
        """cache: the folder of translated games; by default `cache_folder()`.

        ValueError: the file, which it names, is not such a game, or its path names none of the task types.
        ImportError: ALFWorld is not installed; it says how to.
        """
        self.path = os.path.abspath(path)
        self.task_type = task_type(self.path)
        self._table = _table(self.path, cache_folder() if cache is None else Path(cache))
        self._node = None
        # Commands that win the game from its start, as stored in the file (empty: none are).
        self.walkthrough: list[str] = list(self._table.walkthrough)

    def reset(self) -> State:
        if self._table is None:
            raise RuntimeError(f"{self.path}: the game is closed")
        text, self._node = self._table.start()
        return self._state(text)

    def step(self, command: str) -> State:
        """Carry out the command; what is not admissible changes nothing. A won game can be played on."""
        node = self._node
        if node is None:
            raise RuntimeError(f"{self.path}: reset() comes before step()")
        command = command.strip()
        text, self._node = node.next.get(command) or self._table.follow(node, command)
        return self._state(text)

    def close(self) -> None:
        """Let go of the game; it cannot be played any more."""
        self._table = self._node = None

    def _state(self, text: str) -> State:
        return State(text, list(self._node.admissible), self._node.won, self._node.won)


def task_type(path: str) -> str:
    """Which of TASK_TYPES the path names: its last part that names one counts, not a folder further up."""
    for part in reversed(Path(path).parts):
        for name in TASK_TYPES:
            if name in part:
                return name
    raise ValueError(f"{path}: the path names none of the task types {', '.join(TASK_TYPES)}")


# --- Play: states as bits -----------------------------------------------------------------------------------


class _Node:
    """One state of a game: its bits, what is possible in it, and the transitions that were taken from it."""

    __slots__ = ("true", "denied", "applicable", "admissible", "won", "next")

    def __init__(self, true, denied, applicable, admissible, won):
        self.true, self.denied, self.applicable = true, denied, applicable
        self.admissible, self.won = admissible, won
        self.next = {}  # command -> (text, node)


class _Table:
    """A translated game, ready to be played; shared by all its games, which keep only their node.

    Operators are numbered by their command's place in the alphabet, then in the planner's order: the set bits
    of an applicable set, read upwards, are the admissible commands in the stock engine's order, and the first
    applicable operator of a command is the one that the stock engine would carry out.
    """

    def __init__(self, data: dict):
        self.walkthrough = data["walkthrough"]
        self._sentences = Sentences(data)
        self._actions = [(s, [tuple(p) for p in placeholders]) for s, placeholders in data["actions"]]
        self._commands = data["commands"]
        self._place = dict(zip(self._commands, range(len(self._commands)), strict=True))
        self._command_of, self._action_of = (array("i", data[key]) for key in ("command_of", "action_of"))
        self._arguments, self._effects = _Rows(data["arguments"]), _Rows(data["effects"])
        self._uncertain: dict[int, list] = {}
        for number, body, code in data["uncertain"]:
            self._uncertain.setdefault(number, []).append((*_condition_bits(body), code))
        self._index_conditions(_Rows(data["conditions"]))
        self._goal = _condition_bits(data["goal"])
        self._layers = [[(head, *_condition_bits(body)) for head, body in layer] for layer in data["axioms"]]
        self._default = _bits(data["default"])
        self._deniable = _bits(data["deniable"])
        self._beginning = _bits(data["start"])
        self._lock = threading.Lock()
        self._nodes: dict[tuple[int, int], _Node] = {}
        self._lists: dict[int, tuple[str, ...]] = {}
        self._n_transitions = 0
        self._first = None

    def _index_conditions(self, conditions: _Rows) -> None:
        """For each place in the list of a precondition, which operators ask for what there.

        self._places: [(operators that ask for nothing there, {true atom: operators that ask for it there})].
        """
        self._every = (1 << len(conditions)) - 1
        self._unwanted: dict[int, int] = {}  # atom: operators that ask for it to be false
        wanted: list[dict[int, int]] = []
        for number, condition in enumerate(conditions):
            bit, place = 1 << number, 0
            for code in condition:
                atom = code >> 1
                if not code % 2:
                    self._unwanted[atom] = self._unwanted.get(atom, 0) | bit
                    continue
                if place == len(wanted):
                    wanted.append({})
                wanted[place][atom] = wanted[place].get(atom, 0) | bit
                place += 1
        self._places = []
        for operators_of in wanted:
            free = self._every
            for operators in operators_of.values():
                free &= ~operators
            self._places.append((free, operators_of))
        self._asked = _bits({*self._unwanted, *(atom for operators_of in wanted for atom in operators_of)})

    def start(self) -> tuple[str, _Node]:
        """The text and the state at the beginning."""
        with self._lock:
            if self._first is None:
                node = self._node(self._beginning, 0)
                self._first = self._sentences.derive([["rule", "intro"]], {}, node.true, node.denied), node
            return self._first

    def follow(self, node: _Node, command: str) -> tuple[str, _Node]:
        """What the command answers in this state, and the state it leads to."""
        if command not in node.admissible:
            return NOTHING, node
        number = bisect.bisect_left(self._command_of, self._place[command])
        while not node.applicable >> number & 1:
            number += 1
        true, denied = node.true, node.denied
        for code in self._effects[number]:
            true, denied = _put(true, code), _put(denied, code ^ 1)
        if number in self._uncertain:
            before = self._with_axioms(node.true)
            for positive, negative, code in self._uncertain[number]:
                if before & positive == positive and not before & negative:
                    true = _put(true, code)
        denied &= self._deniable
        feedback, placeholders = self._actions[self._action_of[number]]
        mapping = dict(zip(placeholders, self._arguments[number], strict=True))
        text = self._sentences.derive(feedback, mapping, true, denied)
        with self._lock:
            if self._n_transitions >= N_TRANSITIONS:
                self._forget()
            result = node.next[command] = text, self._node(true, denied)
            self._n_transitions += 1
        return result

    def _forget(self) -> None:
        for node in self._nodes.values():
            node.next = {}
        self._nodes.clear()
        self._lists.clear()
        self._n_transitions = 0
        self._first = None  # or all that is reached from it would stay

    def _node(self, true: int, denied: int) -> _Node:
        node = self._nodes.get((true, denied))
        if node is None:
            known = self._with_axioms(true)
            applicable = self._applicable(known)
            if applicable not in self._lists:
                names = dict.fromkeys(self._command_of[number] for number in _numbers(applicable))
                self._lists[applicable] = tuple(self._commands[name] for name in names)
            positive, negative = self._goal
            won = known & positive == positive and not known & negative
            node = _Node(true, denied, applicable, self._lists[applicable], won)
            self._nodes[true, denied] = node
        return node

    def _with_axioms(self, true: int) -> int:
        """The state with its derived atoms: each layer's rules until nothing changes, then the next layer."""
        true |= self._default
        for rules in self._layers:
            before = None
            while before != true:
                before = true
                for head, positive, negative in rules:
                    if true & positive == positive and not true & negative:
                        true = _put(true, head)
        return true

    def _applicable(self, true: int) -> int:
        atoms = list(_numbers(true & self._asked))
        blocked = 0
        for atom in atoms:
            blocked |= self._unwanted.get(atom, 0)
        applicable = self._every & ~blocked
        for free, place in self._places:
            met = free
            for atom in atoms:
                if atom in place:
                    met |= place[atom]
            applicable &= met
        return applicable


class _Rows:
    """Lists of integers in one array: thousands of small objects less for each game."""

    def __init__(self, packed: list):
        self._flat, self._ends = array("i", packed[0]), array("i", packed[1])

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> array:
        return self._flat[self._ends[number - 1] if number else 0 : self._ends[number]]

    def __iter__(self):
        start = 0
        for end in self._ends:
            yield self._flat[start:end]
            start = end


def _bits(numbers: Iterable[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def _put(bits: int, code: int) -> int:
    """The literal's atom made what the literal says."""
    return bits | 1 << (code >> 1) if code % 2 else bits & ~(1 << (code >> 1))


def _numbers(bits: int):
    """The places of the set bits, upwards."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _condition_bits(codes: list[int]) -> tuple[int, int]:
    """Of literals 2 * atom + [must be true]: the atoms that must be true, and those that must not."""
    return _bits([code >> 1 for code in codes if code % 2]), _bits(
        [code >> 1 for code in codes if not code % 2]
    )


# --- The cache: translated games in memory and on disk ------------------------------------------------------

_tables: OrderedDict[str, _Table] = OrderedDict()  # the last N_TABLES games, by key
_tables_lock = threading.Lock()


def cache_folder() -> Path:
    """Where translated games are kept: $RSPO_CACHE/alfworld, or rspo/alfworld in the user's cache folder."""
    if os.environ.get("RSPO_CACHE"):
        return Path(os.environ["RSPO_CACHE"]) / "alfworld"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rspo" / "alfworld"


def forget() -> None:
    """Let go of the translated games in memory; those on disk and those being played stay."""
    with _tables_lock:
        _tables.clear()


def clear_cache(folder: str | os.PathLike | None = None) -> int:
    """Forget the translated games, in memory and in the folder; how many files that removed.

    A game takes some 40 kB, all 4,027 that ALFWorld has some 150 MB.
    """
    forget()
    files = [*Path(folder or cache_folder()).glob("*.game"), *Path(folder or cache_folder()).glob("*.part")]
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def check_installed() -> None:
    """ImportError where ALFWorld is not installed; it says how to."""
    _versions()


@functools.cache
def _versions() -> str:
    try:
        return " ".join(f"{name}=={importlib.metadata.version(name)}" for name in PACKAGES)
    except importlib.metadata.PackageNotFoundError as error:
        message = f"ALFWorld needs the package {error.name}: pip install -r requirements/alfworld.txt"
        raise ImportError(message) from error


def _table(path: str, folder: Path) -> _Table:
    content = Path(path).read_bytes()
    key = hashlib.sha256(f"{FORMAT} {_versions()}\n".encode() + content).hexdigest()
    with _tables_lock:
        if key in _tables:
            _tables.move_to_end(key)
            return _tables[key]
    table = _build(path, content, folder / f"{key}.game")
    with _tables_lock:
        _tables[key] = table
        while len(_tables) > N_TABLES:
            _tables.popitem(last=False)
    return table


def _build(path: str, content: bytes, file: Path) -> _Table:
    data = _load(file)
    if data is not None:
        try:
            return _Table(data)
        except (LookupError, TypeError, ValueError) as error:
            warnings.warn(f"{file}: not a translated game ({error!r}); translating again", stacklevel=4)
    text = json.dumps(_translated(path, content), separators=(",", ":")).encode()
    _save(file, text)
    return _Table(json.loads(text))  # from the text, as the next process will


def _translated(path: str, content: bytes) -> dict:
    try:
        return translate(json.loads(content))
    except ImportError:
        raise
    except (Exception, SystemExit) as error:  # the libraries' parsers raise all sorts, and exit
        raise ValueError(f"{path}: not a game that can be played: {_brief(error)}") from error


def _brief(error: BaseException) -> str:
    """In a line: some of the parsers' errors hold the whole file."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200, placeholder=' ...')}"


def _load(file: Path) -> dict | None:
    """The data of a cache file; None when there is none, or a damaged one."""
    try:
        stored = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(file.parent, f"translated games cannot be read: {error.strerror}")
        return None
    digest, packed = stored[:32], stored[32:]
    if hashlib.sha256(packed).digest() != digest:
        warnings.warn(f"{file}: damaged; translating the game again", stacklevel=5)
        return None
    return json.loads(zlib.decompress(packed))


def _save(file: Path, text: bytes) -> None:
    """Write a cache file whole or not at all: other processes may be writing the same one."""
    packed = zlib.compress(text)
    part = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
            part.write(hashlib.sha256(packed).digest() + packed)
        os.replace(part.name, file)
    except OSError as error:
        if part is not None:
            Path(part.name).unlink(missing_ok=True)
        _warn_once(file.parent, f"translated games cannot be kept: {error.strerror}")


_warned: set[Path] = set()


def _warn_once(folder: Path, problem: str) -> None:
    if folder not in _warned:
        _warned.add(folder)
        warnings.warn(f"{folder}: {problem}", stacklevel=6)


# --- Command line -------------------------------------------------------------------------------------------


def _warm(path: str) -> str | None:
    """Translate one game into the cache; the complaint, if it cannot be."""
    try:
        Game(path).close()
    except (ValueError, OSError) as error:
        return str(error)
    return None


def main() -> int:
    from concurrent.futures import ProcessPoolExecutor

    parser = argparse.ArgumentParser(
        description="Translate every ALFWorld game below a folder into the cache."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.processes < 1:
        parser.error(f"--processes {args.processes}: must be at least 1")
    try:
        check_installed()
    except ImportError as error:
        parser.error(str(error))
    paths = sorted(str(path) for path in args.folder.rglob(GAME_FILE))
    if not paths:
        parser.error(f"no {GAME_FILE} below {args.folder}")
    with ProcessPoolExecutor(args.processes) as pool:
        complaints = [complaint for complaint in pool.map(_warm, paths, chunksize=8) if complaint]
    print(*complaints, sep="\n", file=sys.stderr, end="\n" if complaints else "")
    print(f"{len(paths) - len(complaints)} of {len(paths)} games can be played; the cache: {cache_folder()}")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
