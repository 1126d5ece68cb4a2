"""ALFWorld's game files on disk: the list of a split's games, and the words that they contain.

`alfworld_games` lists the files of a split that can be played, `alfworld_splits` those of all splits.
`alfworld_vocabulary` reads the words for the tiny model. Damaged files are left out with one warning. If no
file is left, ValueError is raised. To list thousands of games quickly, a file in the usual layout
is read only at its end. Damage further inside is found by `alfworld_vocabulary`, or when the game is played.
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections import Counter
from pathlib import Path

UNSUPPORTED = ("movable", "Sliced")  # parts of a task's folder name; the text games do not support such tasks
OFFICIAL_COUNTS = {"train": 3553, "valid_seen": 140, "valid_unseen": 134}  # playable games of the download
TAIL = 4096  # bytes at the end of a game file that contain its "solvable" and its walkthrough
# The end of a game file in the usual layout: the last two entries of the outermost object. The list has no
# brackets inside it, so the closing brace at the end belongs to the object that has "solvable".
USUAL_END = re.compile(
    rb'[,{]\s*"solvable"\s*:\s*(true|false)\s*,\s*"walkthrough"\s*:\s*\[[^][{}\\]*\]\s*\}\s*$'
)

# Words of the engine's sentences and of the prompts. The words of objects and tasks come from the game files.
ALFWORLD_WORDS = (
    "nothing happens inventory look examine open close closed take move clean heat cool use slice sliced "
    "from to with using pick up turn on off facing next carrying not anything this there's special about "
    "normal hot cold don't any switch search seen holding no action | ; : , ."
)


@functools.lru_cache
def alfworld_splits(data: str | None) -> dict[str, tuple[Path, ...]]:
    """List the games of every split (`alfworld_games`).

    Warns if a split has another number of games than the official download.
    """
    games = {split: alfworld_games(data, split) for split in OFFICIAL_COUNTS}
    others = []
    for split, official in OFFICIAL_COUNTS.items():
        if len(games[split]) != official:
            others.append(f"{len(games[split]):,} games in {split} (official: {official:,})")
    if others:
        warnings.warn(
            f"ALFWorld has {', '.join(others)}; results do not compare with published ones; "
            "`alfworld-download` fetches all games",
            stacklevel=2,
        )
    return games


@functools.lru_cache
def alfworld_games(data: str | None, split: str) -> tuple[Path, ...]:
    """List the split's game files that the official loader plays, sorted by path.

    data: the folder that contains json_2.1.1, or json_2.1.1 itself. None: $ALFWORLD_DATA, or the folder that
    alfworld-download uses. Raises ValueError if the split has no game that can be played.
    """
    folder = Path(data or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser()
    if folder.name != "json_2.1.1":
        folder = folder / "json_2.1.1"
    games = []
    for path in sorted((folder / split).glob("*/*/game.tw-pddl")):
        task = path.parent.parent.name
        if not any(word in task for word in UNSUPPORTED):
            games.append(path)
    if not games:
        raise ValueError(
            f"no ALFWorld games in {folder / split}; fetch them with `alfworld-download` (of the package "
            "alfworld, see requirements/alfworld.txt) and give the folder that holds json_2.1.1 with "
            "--alfworld_data, or in $ALFWORLD_DATA"
        )
    playable, damaged = [], []
    for path in games:
        solvable = _is_solvable(path)
        if solvable is None:
            damaged.append(path)
        elif solvable:
            playable.append(path)
    _warn_of_damage(damaged, len(games), "they are left out")
    if not playable:
        raise ValueError(
            f"none of the {len(games)} ALFWorld games in {folder / split} is marked as solvable; "
            "`alfworld-download -f` unpacks them again"
        )
    return tuple(playable)


def _is_solvable(path: Path) -> bool | None:
    """Return True if the game's JSON has a true "solvable"; None if the file is damaged.

    The official loader skips a game whose "solvable" is false or missing. A file in the usual layout is read
    only at its end. Any other file is parsed.
    """
    try:
        with open(path, "rb") as file:
            first = file.read(1)
            file.seek(max(0, path.stat().st_size - TAIL))
            usual = USUAL_END.search(file.read())
        if first == b"{" and usual:
            return usual[1] == b"true"
        return bool(json.loads(path.read_bytes()).get("solvable"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


@functools.lru_cache
def alfworld_vocabulary(games: tuple[Path, ...]) -> tuple[str, ...]:
    """Collect every word in these games and in the prompts about them.

    A numbered object, for example "mug 1", is one word. Objects are numbered up to the largest count in any
    game. Raises ValueError if all files are damaged.
    """
    words = dict.fromkeys(ALFWORLD_WORDS.split())  # a dict keeps the order
    largest_count: dict[str, int] = {}
    damaged = []
    for path in games:
        try:
            game = json.loads(path.read_text())
            objects = game["pddl_problem"].partition("(:objects")[2].partition("(:init")[0]
            task = re.search(r"Your task is to: ([^\"]*)", game["grammar"])[1]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            damaged.append(path)
            continue
        for kind, count in _count_objects(objects).items():
            largest_count[kind] = max(largest_count.get(kind, 0), count)
        words |= dict.fromkeys(task.split())
    _warn_of_damage(damaged, len(games), "the tiny model does not learn their words")
    largest_count.pop("loc", None)  # a position in the room; no text mentions it
    numbered = []
    for kind, count in largest_count.items():
        numbered += [f"{kind} {number}" for number in range(1, count + 1)]
    return (*words, "go to", *largest_count, *numbered)


def _count_objects(objects: str) -> Counter[str]:
    """Count the objects of each kind in the (:objects ...) section of a planning problem.

    A name is "Mug_bar__plus_01..." or, for a part of another object, "Sink_bar_..._bar_SinkBasin". The kinds
    are "mug" and "sinkbasin".
    """
    names = re.findall(r"([A-Za-z]+)_bar_\S*?(?:_bar_([A-Z][A-Za-z]+))?(?=\s)", objects)
    return Counter((part or whole).lower() for whole, part in names)


def _warn_of_damage(damaged: list[Path], n_games: int, consequence: str) -> None:
    """Name the damaged files: one warning if some of the games are damaged, ValueError if all are."""
    if not damaged:
        return
    names = ", ".join(str(path) for path in damaged[:3])
    if len(damaged) > 3:
        names += ", ..."
    problem = f"{len(damaged)} of {n_games} ALFWorld game files cannot be read: {names}"
    remedy = "`alfworld-download -f` unpacks them again"
    if len(damaged) == n_games:
        raise ValueError(f"{problem}; {remedy}")
    warnings.warn(f"{problem}; {consequence}; {remedy}", stacklevel=3)
