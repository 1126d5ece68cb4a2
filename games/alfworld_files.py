"""Lists ALFWorld's game files and the words in them."""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ALFWORLD_WORDS = (
    "nothing happens inventory look examine open close closed take move clean heat cool use slice sliced "
    "from to with using pick up turn on off facing next carrying not anything this there's special about "
    "normal hot cold don't any switch search seen holding no action | ; : , ."
)


@functools.lru_cache
def alfworld_games(data: str | None, split: str) -> tuple[Path, ...]:
    """The split's game files, sorted: those the official loader plays. A warning names those that are damaged
    and left out, as far as their beginnings and ends tell. ValueError if there are none, or none is whole."""
    folder = Path(data or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser()
    folder = folder if folder.name == "json_2.1.1" else folder / "json_2.1.1"
    games = sorted((folder / split).glob("*/*/game.tw-pddl"))
    left_out = ("movable", "Sliced")  # kinds of task that the text games do not support
    games = [path for path in games if not any(word in path.parent.parent.name for word in left_out)]
    if not games:
        raise ValueError(
            f"no ALFWorld games in {folder / split}; fetch them with `alfworld-download` (of the package "
            "alfworld, see requirements/alfworld.txt) and give the folder that holds json_2.1.1 with "
            "--alfworld_data, or in $ALFWORLD_DATA"
        )
    solvable = {path: _solvable(path) for path in games}
    _tell_damaged([path for path in games if solvable[path] is None], games, "they are left out")
    return tuple(path for path in games if solvable[path])


def _solvable(path: Path) -> bool | None:
    """What the file says of itself, in its last lines; None where it is no whole game file."""
    try:
        with open(path, "rb") as file:
            first = file.read(1)
            file.seek(max(0, path.stat().st_size - 4096))
            last = file.read().rstrip()
    except OSError:
        return None
    return b'"solvable": false' not in last if first == b"{" and last.endswith(b"}") else None


def _tell_damaged(damaged: list[Path], games: Sequence[Path], so: str) -> None:
    """One warning for all; ValueError if these are all the games."""
    if damaged:
        names = ", ".join(map(str, damaged[:3])) + (", ..." if len(damaged) > 3 else "")
        told = f"{len(damaged)} of {len(games)} ALFWorld game files cannot be read: {names}"
        remedy = "`alfworld-download -f` unpacks them again"
        if len(damaged) == len(games):
            raise ValueError(f"{told}; {remedy}")
        warnings.warn(f"{told}; {so}; {remedy}", stacklevel=3)


@functools.lru_cache
def alfworld_vocabulary(games: tuple[Path, ...]) -> tuple[str, ...]:
    """Every word that these games and the prompts about them say; "mug 1" is one, as are all that occur.

    A warning names the files that are damaged; ValueError if all are.
    """
    words, most, damaged = dict.fromkeys(ALFWORLD_WORDS.split()), {}, []
    for path in games:
        try:
            game = json.loads(path.read_text())
            listed = game["pddl_problem"].partition("(:objects")[2].partition("(:init")[0]
            task = re.search(r"Your task is to: ([^\"]*)", game["grammar"])[1]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            damaged.append(path)
            continue
        # Mug_bar__plus_01_..._bar_... is a thing, Sink_bar__..._bar_SinkBasin one that belongs to another
        names = re.findall(r"([A-Za-z]+)_bar_\S*?(?:_bar_([A-Z][A-Za-z]+))?(?=\s)", listed)
        for kind, count in Counter((part or whole).lower() for whole, part in names).items():
            most[kind] = max(most.get(kind, 0), count)
        words |= dict.fromkeys(task.split())
    _tell_damaged(damaged, games, "the tiny model does not learn their words")
    most.pop("loc", None)  # where one can stand: no text says it
    things = [f"{kind} {number}" for kind, count in most.items() for number in range(1, count + 1)]
    return (*words, "go to", *most, *things)
