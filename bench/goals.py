"""Goals of the benchmarks: how times are measured, and the table of results."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Goal:
    """One line of the table: a measured value and its bound. Exactly one of the two bounds is set."""

    name: str
    value: float
    unit: str  # "x", "ms", "MB", "s", ...
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        """True if the value is within its bound."""
        return self.value <= self.at_most if self.at_least is None else self.value >= self.at_least

    @property
    def bound(self) -> str:
        """The bound as text, for example ">= 4 x"."""
        sign, limit = ("<=", self.at_most) if self.at_least is None else (">=", self.at_least)
        return f"{sign} {limit:g} {self.unit}"


def conclude(goals: list[Goal], skipped: dict[str, str] | None = None) -> int:
    """Print the table and return the exit status, which is 1 if a goal is missed.

    skipped: the reason for each goal that was not measured.
    """
    width = max(len(goal.name) for goal in goals)
    for goal in goals:
        verdict = "ok" if goal.met else "MISSED"
        print(f"{goal.name:{width}}  {goal.value:10.3f} {goal.unit:3}  goal {goal.bound:12}  {verdict}")
    for name, reason in (skipped or {}).items():
        print(f"{name:{width}}  skipped: {reason}")
    return int(not all(goal.met for goal in goals))


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU time of a call in seconds."""
    start = time.process_time()
    call()
    return time.process_time() - start


def kilobytes(name: str) -> int:
    """Return a value of /proc/self/status: VmRSS, this process's memory, or VmHWM, its peak."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


class PeakMemory:
    """The memory of this process beyond what it had when the object was made."""

    def __init__(self):
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is the present memory
        self.before = kilobytes("VmRSS")

    def gigabytes(self) -> float:
        """Return the largest memory since then."""
        return (kilobytes("VmHWM") - self.before) * 1024 / 1e9


def apart(function: Callable, *arguments):
    """Return the function's result, computed in a new process, so that its memory can be measured."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()
