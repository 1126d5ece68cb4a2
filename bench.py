"""Every speed claim of this project, measured as ratios or limits in one run: `python bench.py alfworld | webshop`.

Each prints one table and exits 1 when a goal is missed. Times are CPU-seconds of one thread: on a shared machine
absolute ones mean little, ratios of two things measured in turn hold. docs/PERFORMANCE.md shows results.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """One line of the table: what was measured against what it has to be."""

    name: str
    value: float
    unit: str  # "x", "ms", "MB", "s", ...
    limit: float
    at_least: bool  # else: at most

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def conclude(goals: list[Goal]) -> int:
    """Print the table; the exit status: 1 when a goal is missed."""
    width = max(len(goal.name) for goal in goals)
    for goal in goals:
        bound = f"{'>=' if goal.at_least else '<='} {goal.limit:g} {goal.unit}"
        verdict = "ok" if goal.met else "MISSED"
        print(f"{goal.name:{width}}  {goal.value:10.3f} {goal.unit:3}  goal {bound:12}  {verdict}")
    return int(not all(goal.met for goal in goals))


# --- ALFWorld: the engine beside the stock one --------------------------------------------------------------


# --- WebShop: times and memory ------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    return parser.parse_args(argv).run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
