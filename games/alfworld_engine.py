"""An engine for ALFWorld's text games. It gives the same answers as TextWorld's engine in much less time.

`Game(path)` plays one `game.tw-pddl` (Shridhar et al. 2021), in two steps:

1. `alfworld_translation.translate` runs once for each game file. The libraries ground the planning task (Fast
   Downward's translator) and parse the grammar of the sentences (TextWorld). The result is plain data. This
   takes 0.2 to 1 s. The data is cached on disk (`cache_folder`), so later processes start in milliseconds.
2. `_Table` plays that data. A state is two integers with one bit for each atom. Bitwise operations find the
   possible commands of all operators at once, and sentences are made by walking trees. The results are
   cached for the states that were visited, up to a limit.

While it plays, the engine needs only Python's integers, lists and strings, and no planner library. Therefore
games cannot influence each other, a closed game leaves nothing in memory, and equal files share one table.

Three oddities of the stock engine decide its texts, so they are kept:
* A sentence counts a fact as denied only after an effect made it false, not if it is false from the start.
* One entity cannot take two places in one condition.
* Sentences see the effects of an operator even if the condition of the effect is not met.

tests/games/compare_alfworld.py compares this engine with the stock engine, step by step.

Left out: planning (`policy_commands`, the experts), TextWorld's other information (score, facts, inventory),
and features that these games do not use, such as commands whose text depends on the state (ValueError).

    python -m games.alfworld_engine DIR --processes n     # translate every game below DIR beforehand
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

FORMAT = 1  # version of the cached data; increase it when the result of `translate` changes
PACKAGES = ("textworld", "alfworld", "fast-downward-textworld")
N_TABLES = 64  # tables that stay in memory after their last game is closed
N_TRANSITIONS = 2000  # transitions that a table caches: about 1 MB


@dataclass(frozen=True)
class State:
    """The information that a player gets after a command."""

    text: str
    admissible: list[str]  # sorted, as in the stock engine
    won: bool
    done: bool  # the game has ended; only a win ends it, so this equals `won`


class Game:
    """One play of one game file. Games are independent, even if they play the same file."""

    def __init__(self, path: str | os.PathLike, cache: str | os.PathLike | None = None):
        """Load the game from the cache, or translate it.

        cache: the folder of translated games, by default `cache_folder()`.
        Raises ValueError if the file is not an ALFWorld game or its path contains no task type, and
        ImportError if ALFWorld is not installed.
        """
        self.path = os.path.abspath(path)
        self.task_type = task_type(self.path)
        self._table = _table(self.path, cache_folder() if cache is None else Path(cache))
        self._node = None
        # Commands that win the game from its start. Empty if the file contains none.
        self.walkthrough: list[str] = list(self._table.walkthrough)

    def reset(self) -> State:
        """Start the game again. Raises RuntimeError if the game is closed."""
        if self._table is None:
            raise RuntimeError(f"{self.path}: the game is closed")
        text, self._node = self._table.start()
        return self._state(text)

    def step(self, command: str) -> State:
        """Carry out the command. A command that is not admissible changes nothing.

        Commands still work after a win. Raises RuntimeError before the first `reset`.
        """
        node = self._node
        if node is None:
            raise RuntimeError(f"{self.path}: call reset() before step()")
        command = command.strip()
        text, self._node = node.next.get(command) or self._table.follow(node, command)
        return self._state(text)

    def close(self) -> None:
        """Release the game. It cannot be played any more."""
        self._table = self._node = None

    def _state(self, text: str) -> State:
        return State(text, list(self._node.admissible), self._node.won, self._node.won)


def task_type(path: str) -> str:
    """Find the task type in the path: the last part of the path that contains one of TASK_TYPES decides."""
    for part in reversed(Path(path).parts):
        for name in TASK_TYPES:
            if name in part:
                return name
    raise ValueError(f"{path}: the path contains none of the task types {', '.join(TASK_TYPES)}")


# --- Play: states as bits -----------------------------------------------------------------------------------


class _Node:
    """One state of a game, and the transitions that were taken from it."""

    __slots__ = ("true", "denied", "applicable", "admissible", "won", "next")

    def __init__(self, true: int, denied: int, applicable: int, admissible: tuple[str, ...], won: bool):
        self.true = true  # bits of the atoms that are true, without derived atoms
        self.denied = denied  # bits of the atoms that an effect made false
        self.applicable = applicable  # bits of the operators that are possible
        self.admissible = admissible
        self.won = won
        self.next = {}  # command -> (text, node)


class _Table:
    """A translated game. All games of equal files share it and keep only their node.

    Operators are numbered in the order of their commands, then in the planner's order. So the bits of the
    applicable operators, from the lowest, give the admissible commands in the stock engine's order. The first
    applicable operator of a command is the one that the stock engine carries out.
    """

    def __init__(self, data: dict):
        self.walkthrough = data["walkthrough"]
        self._sentences = Sentences(data)
        self._actions = []  # (feedback, placeholders)
        for feedback, placeholders in data["actions"]:
            self._actions.append((feedback, [tuple(placeholder) for placeholder in placeholders]))
        self._commands = data["commands"]
        self._place = {command: place for place, command in enumerate(self._commands)}
        self._command_of = array("i", data["command_of"])
        self._action_of = array("i", data["action_of"])
        self._arguments = _Rows(data["arguments"])
        self._effects = _Rows(data["effects"])
        self._uncertain: dict[int, list] = {}  # operator -> its conditional effects: (condition, literal)
        for number, condition, literal in data["uncertain"]:
            self._uncertain.setdefault(number, []).append((_Condition(condition), literal))
        self._index_conditions(_Rows(data["conditions"]))
        self._goal = _Condition(data["goal"])
        self._layers = []  # the axioms by layer: (head, condition)
        for layer in data["axioms"]:
            self._layers.append([(head, _Condition(body)) for head, body in layer])
        self._default = _bits(data["default"])
        self._deniable = _bits(data["deniable"])
        self._beginning = _bits(data["start"])
        self._lock = threading.Lock()
        self._nodes: dict[tuple[int, int], _Node] = {}  # (true, denied) -> node
        self._lists: dict[int, tuple[str, ...]] = {}  # applicable operators -> admissible commands
        self._n_transitions = 0
        self._first = None  # (text, node) of the start

    def _index_conditions(self, conditions: _Rows) -> None:
        """Prepare the search for applicable operators. Sets of operators are bits.

        self._forbidden maps an atom to the operators that need it to be false. self._places has an entry for
        the first required atom of each operator, one for the second, and so on: (operators that have no such
        atom, {atom: operators that need it to be true}).
        """
        self._every = (1 << len(conditions)) - 1
        self._forbidden: dict[int, int] = {}
        self._places: list[tuple[int, dict[int, int]]] = []
        required: list[dict[int, int]] = []
        for number, condition in enumerate(conditions):
            bit, place = 1 << number, 0
            for literal in condition:
                atom = literal >> 1
                if literal % 2 == 0:
                    self._forbidden[atom] = self._forbidden.get(atom, 0) | bit
                    continue
                if place == len(required):
                    required.append({})
                required[place][atom] = required[place].get(atom, 0) | bit
                place += 1
        self._tested = _bits(self._forbidden)  # the atoms in any condition
        for operators_of in required:
            without = self._every
            for operators in operators_of.values():
                without &= ~operators
            self._places.append((without, operators_of))
            self._tested |= _bits(operators_of)

    def start(self) -> tuple[str, _Node]:
        """Return the text and the state at the start of the game."""
        with self._lock:
            if self._first is None:
                node = self._node(self._beginning, 0)
                text = self._sentences.derive([["rule", "intro"]], {}, node.true, node.denied)
                self._first = text, node
            return self._first

    def follow(self, node: _Node, command: str) -> tuple[str, _Node]:
        """Carry out the command in this state. Returns the answer and the next state."""
        if command not in node.admissible:
            return NOTHING, node
        number = bisect.bisect_left(self._command_of, self._place[command])
        while not node.applicable >> number & 1:
            number += 1
        true, denied = node.true, node.denied
        for literal in self._effects[number]:
            true = _put(true, literal)
            denied = _put(denied, literal ^ 1)  # the opposite literal
        if number in self._uncertain:
            before = self._with_axioms(node.true)
            for condition, literal in self._uncertain[number]:
                if condition.holds(before):
                    true = _put(true, literal)
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
        """Free all cached states, so that the memory of a table stays limited."""
        for node in self._nodes.values():
            node.next = {}
        self._nodes.clear()
        self._lists.clear()
        self._n_transitions = 0
        self._first = None  # its node would keep alive every state that was reached from it

    def _node(self, true: int, denied: int) -> _Node:
        """Return the node of a state. It is made if the state is new."""
        node = self._nodes.get((true, denied))
        if node is None:
            known = self._with_axioms(true)
            applicable = self._applicable(known)
            if applicable not in self._lists:
                places = dict.fromkeys(self._command_of[number] for number in _numbers(applicable))
                self._lists[applicable] = tuple(self._commands[place] for place in places)
            node = _Node(true, denied, applicable, self._lists[applicable], self._goal.holds(known))
            self._nodes[true, denied] = node
        return node

    def _with_axioms(self, true: int) -> int:
        """Add the derived atoms: layer by layer, apply the axioms until the state stays the same."""
        true |= self._default
        for axioms in self._layers:
            before = None
            while before != true:
                before = true
                for head, condition in axioms:
                    if condition.holds(true):
                        true = _put(true, head)
        return true

    def _applicable(self, true: int) -> int:
        """Return the operators that are possible in a state."""
        atoms = list(_numbers(true & self._tested))
        blocked = 0
        for atom in atoms:
            blocked |= self._forbidden.get(atom, 0)
        applicable = self._every & ~blocked
        for without, operators_of in self._places:
            met = without
            for atom in atoms:
                if atom in operators_of:
                    met |= operators_of[atom]
            applicable &= met
        return applicable


class _Condition:
    """A list of literals, 2 * atom + [true], that must all hold."""

    __slots__ = ("positive", "negative")

    def __init__(self, literals: list[int]):
        self.positive = _bits(literal >> 1 for literal in literals if literal % 2)
        self.negative = _bits(literal >> 1 for literal in literals if not literal % 2)

    def holds(self, true: int) -> bool:
        return true & self.positive == self.positive and not true & self.negative


class _Rows:
    """Lists of integers, stored in one array: separate lists would be thousands of objects for each game."""

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


def _put(bits: int, literal: int) -> int:
    """Make the literal true: set or clear the bit of its atom."""
    bit = 1 << (literal >> 1)
    return bits | bit if literal % 2 else bits & ~bit


def _numbers(bits: int):
    """Yield the places of the set bits, from the lowest."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


# --- The cache: translated games in memory and on disk ------------------------------------------------------

_tables: OrderedDict[str, _Table] = OrderedDict()  # the N_TABLES tables that were used last, by key
_tables_lock = threading.Lock()


def cache_folder() -> Path:
    """Return the folder of translated games: $RSPO_CACHE/alfworld, else rspo/alfworld in the user's cache."""
    if os.environ.get("RSPO_CACHE"):
        return Path(os.environ["RSPO_CACHE"]) / "alfworld"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rspo" / "alfworld"


def forget() -> None:
    """Free the translated games in memory. The files in the cache and games in play remain."""
    with _tables_lock:
        _tables.clear()


def clear_cache(folder: str | os.PathLike | None = None) -> int:
    """Remove the translated games from memory and from the folder. Returns the number of removed files.

    A file has about 40 kB. All 4,027 games of ALFWorld have about 150 MB.
    """
    forget()
    folder = Path(folder or cache_folder())
    files = [*folder.glob("*.game"), *folder.glob("*.part")]
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def check_installed() -> None:
    """Raise ImportError, with the command to install it, if ALFWorld is not installed."""
    _versions()


@functools.cache
def _versions() -> str:
    """Return the versions of the packages that a translation depends on, as part of the cache's key."""
    try:
        return " ".join(f"{name}=={importlib.metadata.version(name)}" for name in PACKAGES)
    except importlib.metadata.PackageNotFoundError as error:
        message = f"ALFWorld needs the package {error.name}: pip install -r requirements/alfworld.txt"
        raise ImportError(message) from error


def _table(path: str, folder: Path) -> _Table:
    """Return the table of a game file: from memory, from the folder, or translated."""
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
            warnings.warn(
                f"{file}: not a translated game ({error!r}); the game is translated again", stacklevel=4
            )
    text = json.dumps(_translated(path, content), separators=(",", ":")).encode()
    _save(file, text)
    return _Table(json.loads(text))  # the same lists as a later process reads from the file


def _translated(path: str, content: bytes) -> dict:
    try:
        return translate(json.loads(content))
    except ImportError:
        raise
    except (Exception, SystemExit) as error:  # the libraries' parsers raise many kinds of errors, and exit
        raise ValueError(f"{path}: this file cannot be translated: {_brief(error)}") from error


def _brief(error: BaseException) -> str:
    """Shorten an error to one line. Some errors of the parsers contain the whole file."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200, placeholder=' ...')}"


def _load(file: Path) -> dict | None:
    """Read a file of the cache. Returns None if it is missing or damaged."""
    try:
        stored = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(file.parent, f"translated games cannot be read: {error.strerror}")
        return None
    digest, packed = stored[:32], stored[32:]
    if hashlib.sha256(packed).digest() != digest:
        warnings.warn(f"{file}: damaged; the game is translated again", stacklevel=5)
        return None
    return json.loads(zlib.decompress(packed))


def _save(file: Path, text: bytes) -> None:
    """Write a file of the cache. It appears only when it is complete, as other processes may write it too."""
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
        _warn_once(file.parent, f"translated games cannot be stored: {error.strerror}")


_warned: set[Path] = set()


def _warn_once(folder: Path, problem: str) -> None:
    if folder not in _warned:
        _warned.add(folder)
        warnings.warn(f"{folder}: {problem}", stacklevel=6)


# --- Command line -------------------------------------------------------------------------------------------


def _warm(path: str) -> str | None:
    """Translate one game into the cache. Returns the error message if that fails."""
    try:
        Game(path).close()
    except (ValueError, OSError) as error:
        return str(error)
    return None


def main() -> int:
    """Translate every game below a folder. Returns the exit status: 1 if a game failed."""
    from concurrent.futures import ProcessPoolExecutor

    parser = argparse.ArgumentParser(
        prog="python -m games.alfworld_engine",
        description="Translate every ALFWorld game below a folder into the cache.",
    )
    parser.add_argument("folder", type=Path, help="for example the folder json_2.1.1")
    parser.add_argument("--processes", type=int, default=1, help="games translated at the same time")
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
        errors = [error for error in pool.map(_warm, paths, chunksize=8) if error]
    for error in errors:
        print(error, file=sys.stderr)
    print(f"{len(paths) - len(errors)} of {len(paths)} games are in the cache {cache_folder()}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
