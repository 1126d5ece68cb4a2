"""Runs of train.py: their flags and folders, and a loop that runs several at the same time.

Each pair of an arm and a seed is one run. A short preparing run makes start/ and reward_model/ once for all
runs of a start and a seed. These runs receive the two folders as hard links, and a config.json. They are
started with --resume, so a run that was stopped continues. The numbers equal those of `python train.py` with
the arm's flags, which makes the two folders itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flags import WHEN_RESUMED, Args, UsageError, config_text, prepare
from record import checkpoint
from reproduce.arms import ARMS, STARTS, Experiment
from scale.plan import loop_size

ROOT = Path(__file__).parent.parent
PANELS = 7  # evaluations of a run, besides the one at its start
MULTIPLE = 2520  # a multiple of every k up to 10: total_updates while the true value is not known yet
LAST_LINES = 5  # lines shown of the console of a failed run

# The shortest run that makes start/ and reward_model/.
PREPARING = "--method dense --k 1 --total_updates 1 --tasks_per_update 1 --group_size 2 --eval_games 1"


@dataclass(frozen=True)
class Run:
    """A run of train.py in its folder. It starts after its preparing run `source`, whose models it uses."""

    folder: Path
    args: Args
    source: Run | None = None

    @property
    def name(self) -> str:
        """Return the start and the folder's name, such as default/rspo-s0."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def finished(self) -> bool:
        """Return True if the run has written its summary."""
        return (self.folder / "summary.json").is_file()


Plan = dict[tuple[str, str, int], Run]  # by start, arm and seed

# --- the plan -----------------------------------------------------------------------------------------------


def derived(args: Args) -> dict[str, int]:
    """Return the numbers that an arm's flags may contain in braces. `args` are those of published RSPO."""
    per_update = loop_size(args)["episodes"] / args.k
    return {
        "more_tasks": round(per_update / args.group_size),
        "half_turns": args.minibatch_turns // 2,
        "keep": args.tasks_per_update * 21 // 2,
    }


def updates_of(args: Args, episodes: int) -> int:
    """Return the number of A's updates, in whole loops, with which a run plays about this many episodes."""
    return max(1, round(episodes / loop_size(args)["episodes"])) * args.k


def read_quietly(flags: list[str]) -> Args:
    """Return the complete flags, without warnings: not every arm reads every flag of the scale."""
    with contextlib.redirect_stderr(io.StringIO()):
        return prepare(flags)


def args_of(scale: list[str], start: str, arm: str) -> Args:
    """Return the complete flags of an arm. Raises UsageError.

    scale: flags of every run. All arms play as many episodes as published RSPO in its --total_updates. All
    arms evaluate about PANELS times.
    """
    common = [*scale, *STARTS[start].split()]
    published = read_quietly(common)
    budget = loop_size(published)["episodes"] * loop_size(published)["loops"]
    flags = ARMS[arm].flags.format(**derived(published)).split()
    args = read_quietly([*common, *flags, "--total_updates", str(MULTIPLE)])
    updates = updates_of(args, budget)
    panels = max(1, round(updates / PANELS / args.k)) * args.k
    return dataclasses.replace(args, total_updates=updates, eval_every=panels)


def plan_runs(experiments: list[Experiment], scale: list[str], seeds: list[int], folder: Path) -> Plan:
    """Return the runs of the experiments below a folder, seed by seed. Raises UsageError."""
    complete = functools.cache(lambda start, arm: args_of(scale, start, arm))
    prepared = functools.cache(
        lambda start: read_quietly([*scale, *STARTS[start].split(), *PREPARING.split()])
    )
    plan: Plan = {}
    for seed in seeds:
        for experiment in experiments:
            for start in experiment.starts:
                args = dataclasses.replace(prepared(start), seed=seed)
                preparing = Run(folder / start / f"start-s{seed}", args)
                for arm in experiment.arms:
                    args = dataclasses.replace(complete(start, arm), seed=seed)
                    plan[start, arm, seed] = Run(folder / start / f"{arm}-s{seed}", args, preparing)
    return plan


def with_preparing_runs(plan: Plan) -> list[Run]:
    """Return every run once, each after the preparing run that it needs."""
    runs: dict[Path, Run] = {}
    for run in plan.values():
        if run.source:
            runs.setdefault(run.source.folder, run.source)
        runs.setdefault(run.folder, run)
    return list(runs.values())


# CPU seconds on Household, one thread of machine 2 (docs/RESULTS.md), measured with other work beside
SECONDS_TO_START, SECONDS_TO_PREPARE, SECONDS_PER_PANEL = 5.0, 60.0, 1.0
SECONDS_PER_EPISODE, SECONDS_PER_TRAINED_EPISODE = 0.004, 0.014  # of playing and of training


def core_seconds(run: Run) -> float:
    """Estimate the CPU seconds of a run of the tiny model on Household."""
    if run.source is None:
        return SECONDS_TO_PREPARE
    args, loop = run.args, loop_size(run.args)
    trained = loop["updates"] * args.on_policy_tasks * args.episodes_per_task + loop["replayed episodes"]
    loops = args.total_updates // args.k
    panels = 1 + args.total_updates / args.eval_every
    of_a_loop = loop["episodes"] * SECONDS_PER_EPISODE + trained * SECONDS_PER_TRAINED_EPISODE
    return SECONDS_TO_START + panels * SECONDS_PER_PANEL + loops * of_a_loop


# --- one run ------------------------------------------------------------------------------------------------


def check_same(run: Run) -> None:
    """Raise UsageError if the folder holds a run with other flags."""
    path = run.folder / "config.json"
    if not path.is_file():
        return
    present = json.loads(path.read_text())
    if json.loads(config_text(run.args)).keys() - present.keys():  # an older version wrote it
        present = json.loads(config_text(read_quietly(["--config", str(path)]))) | present
    if changes := changes_of(present, run.args):
        remedy = "give another --out, or remove the folder"
        raise UsageError(f"--out: {run.folder} holds a run with {'; '.join(changes[:3])}; {remedy}")


def changes_of(present: dict, args: Args) -> list[str]:
    """Describe the flags of a config.json that differ from `args` and can change a result."""
    wanted = json.loads(config_text(args))
    free = WHEN_RESUMED.replace("--", "").split()
    changes = []
    for name in sorted(present.keys() | wanted.keys()):
        important = name not in free or name in ("total_updates", "eval_every")
        if important and present.get(name) != wanted.get(name):
            changes.append(f"{name} {present.get(name)}, not {wanted.get(name)}")
    return changes


def make_folder(run: Run) -> None:
    """Make the folder of a run, with the models of its preparing run and its config.json."""
    run.folder.mkdir(parents=True, exist_ok=True)
    if (run.folder / "config.json").is_file():
        return
    shared = [run.source.folder / name for name in ("start", "reward_model")] if run.source else []
    for made in shared:
        if made.is_dir() and (made.name == "start" or run.args.dense_kind == "step_model"):
            checkpoint.write_folder(run.folder / made.name, lambda to, made=made: link_files(made, to))
    checkpoint.write_text(run.folder / "config.json", config_text(run.args))


def link_files(source: Path, to: Path) -> None:
    """Fill a folder with hard links to the files of `source`, so that large models are stored once."""
    shutil.copytree(source, to, copy_function=os.link, dirs_exist_ok=True)


def start_process(run: Run) -> subprocess.Popen:
    """Start train.py, or continue it. What it prints is appended to console.log of the run folder."""
    make_folder(run)
    command = [sys.executable, str(ROOT / "train.py"), "--resume", "--out", str(run.folder.resolve())]
    if run.args.model == "tiny" and run.args.ranks == "auto":
        command.append("--ranks=1")  # several runs share the cores; no number may depend on the cores
    with open(run.folder / "console.log", "a") as console:
        return subprocess.Popen(command, cwd=ROOT, stdout=console, stderr=console, start_new_session=True)


def last_lines(run: Run) -> str:
    """Return the last lines of a run's console."""
    text = (run.folder / "console.log").read_text(errors="replace").replace("\r", "\n")
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in lines[-LAST_LINES:])


# --- all runs -----------------------------------------------------------------------------------------------


def run_all(
    runs: list[Run],
    processes: int,
    start: Callable[[Run], subprocess.Popen] = start_process,
    say: Callable[[str], None] = print,
    pause: float = 0.2,
) -> list[Run]:
    """Run all unfinished runs in order, `processes` at the same time. Return the runs that failed.

    A run whose preparing run fails is not started and counts as failed. Ctrl-C stops all processes and raises
    KeyboardInterrupt; the same call then continues.
    """
    waiting = [run for run in runs if not run.finished]
    say(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished")
    active: dict[Run, tuple[subprocess.Popen, float]] = {}
    failed: list[Run] = []
    try:
        while waiting or active:
            for run in [run for run in waiting if run.source in failed]:
                say(f"not started: {run.name}, because {run.source.name} failed")
                waiting.remove(run)
                failed.append(run)
            ready = [run for run in waiting if run.source is None or run.source.finished]
            for run in ready[: processes - len(active)]:
                waiting.remove(run)
                active[run] = start(run), time.monotonic()
            time.sleep(pause)
            for run, (process, started) in list(active.items()):
                if process.poll() is None:
                    continue
                del active[run]
                if run.finished:
                    left = f"{len(waiting) + len(active)} left"
                    say(f"finished: {run.name} in {time.monotonic() - started:.0f} s, {left}")
                else:
                    failed.append(run)
                    say(f"failed: {run.name} with status {process.returncode}:\n{last_lines(run)}")
    except BaseException:
        stop([process for process, _ in active.values()])
        raise
    return failed


def stop(processes: list[subprocess.Popen]) -> None:
    """Interrupt the processes and wait until they have ended."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    for process in processes:
        process.wait()
