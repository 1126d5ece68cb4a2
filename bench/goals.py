"""How bench.py measures, and the table it prints."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
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


def conclude(goals: list[Goal], skipped: dict[str, str] | None = None) -> int:
    """Print the table, with what was not measured and why; the exit status: 1 when a goal is missed."""
    width = max(len(goal.name) for goal in goals)
    for goal in goals:
        bound = f"{'>=' if goal.at_least else '<='} {goal.limit:g} {goal.unit}"
        verdict = "ok" if goal.met else "MISSED"
        print(f"{goal.name:{width}}  {goal.value:10.3f} {goal.unit:3}  goal {bound:12}  {verdict}")
    for name, reason in (skipped or {}).items():
        print(f"{name:{width}}  skipped: {reason}")
    return int(not all(goal.met for goal in goals))


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def apart(function: Callable, *arguments):
    """The function's result, worked out in a fresh process, so its memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()
