"""Reading the folder of a run for its page: tolerant of old runs, of a run that goes on, of damaged lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from record.panels import title_of

LARGEST = 1e100  # a larger number in a log is damage; an integer beyond 1e308 cannot even become a float


@dataclass
class Run:
    """What a run folder holds. A file that is missing or cannot be read is empty here."""

    folder: Path
    config: dict  # config.json
    lines: list[dict]  # metrics.jsonl
    facts: dict = field(default_factory=dict)  # run.json
    summary: dict = field(default_factory=dict)  # summary.json, written at the end
    reward_fit: dict = field(default_factory=dict)  # the report of the step reward model's fit
    damaged: dict[str, int] = field(default_factory=dict)  # by file: lines that cannot be read

    @property
    def title(self) -> str:
        names = {"method": "?", "algo": "?", "env": "?", "seed": "?"}
        return title_of(names | self.config)

    @property
    def updates(self) -> int:
        """Return A's updates so far."""
        return max((line["update"] for line in self.lines), default=0)

    @property
    def total_updates(self) -> int:
        return number(self.config.get("total_updates")) or self.updates

    @property
    def finished(self) -> bool:
        return bool(self.summary) and self.updates >= self.total_updates

    def of(self, agent: str) -> list[dict]:
        """Return the lines of one agent."""
        return [line for line in self.lines if line["agent"] == agent]

    def panels(self) -> dict[str, list[dict]]:
        """Return the panels of each split."""
        found: dict[str, list[dict]] = {}
        for line in self.of("evaluation"):
            if number(line.get("success")) is not None:
                found.setdefault(line.get("split", ""), []).append(line)
        return found


def read_run(folder: Path) -> Run:
    """Read a run folder. Raises ValueError, with the remedy, if it is none."""
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is not a run folder: {name} is missing; give the --out of a run")
    config = read_json(folder / "config.json")
    if not config:
        raise ValueError(f"{folder / 'config.json'} cannot be read; put it back, or give another run")
    report = read_json(folder / "reward_model" / "reward_model.json").get("report")
    run = Run(
        folder,
        config,
        [],
        read_json(folder / "run.json"),
        read_json(folder / "summary.json"),
        report if isinstance(report, dict) else {},
    )
    for _, line in readable_lines(folder / "metrics.jsonl", run.damaged):
        if is_whole(line):
            run.lines.append(line)
        else:
            run.damaged["metrics.jsonl"] += 1
    return run


def is_whole(line: dict) -> bool:
    """Return True if a line of metrics.jsonl has values of the right types where a page needs them."""
    if not isinstance(line.get("agent"), str) or number(line.get("update")) is None:
        return False
    needed = ["environment_episodes", "seconds_elapsed"]
    if line["agent"] == "evaluation":
        needed += ["success", "outcome", "games"]
    if any(key in line and number(line[key]) is None for key in needed):
        return False
    by_type = line.get("by_type", {})
    if not isinstance(by_type, dict):
        return False
    results = [line, *by_type.values()]
    return all(isinstance(found, dict) and is_interval(found.get("success_interval")) for found in results)


def is_interval(value) -> bool:
    """Return True for a pair of numbers, and for None."""
    return value is None or (isinstance(value, list) and len(value) == 2 and None not in map(number, value))


def read_json(path: Path) -> dict:
    """Return the object in a JSON file; an empty one if it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def readable_lines(path: Path, damaged: dict[str, int]) -> Iterator[tuple[int, dict]]:
    """Yield (offset, object) of every line that can be read. Count the others in `damaged`, by file name.

    An unfinished last line is not counted: a run is writing it. One line is in memory at a time.
    """
    damaged[path.name] = 0
    if not path.is_file():
        return
    offset = 0
    with open(path, "rb") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if isinstance(line, dict):
                yield offset, line
            elif text.endswith(b"\n"):
                damaged[path.name] += 1
            offset += len(text)


def number(value) -> float | None:
    """Return a number below LARGEST as it is; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
        return None
    return value


def points(lines: list[dict], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the values of x and y in the lines where both are finite numbers."""
    pairs = [(number(line.get(x)), number(line.get(y))) for line in lines]
    pairs = [pair for pair in pairs if None not in pair]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def counted(count: float, noun: str) -> str:
    """Return a number with its noun: "1 update", "2,000 updates"."""
    return f"{count:,.0f} {noun}" if count == 1 else f"{count:,.0f} {noun}s"
