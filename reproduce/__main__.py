"""Run an experiment from start to end: `python -m reproduce NAME`.

It trains every arm with every seed and writes NAME.md, NAME.json and NAME.png. By default it runs one process
per core. Ctrl-C writes the tables of the runs that have finished. After Ctrl-C or a kill, the same command
continues. Runs that several experiments share are trained once. docs/RUNNING.md describes the tables and the
rule of the verdicts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import signal
import sys
from pathlib import Path

from config import PRESETS
from flags import COMMAND_LINE, UsageError, prepare
from record.checkpoint import write_text
from reproduce import figure, tables
from reproduce.arms import EXPERIMENTS, STARTS, Experiment
from reproduce.markdown import markdown
from reproduce.reuse import Known, is_known, read_known
from reproduce.runs import (
    Plan,
    check_same,
    core_seconds,
    plan_runs,
    read_quietly,
    run_all,
    with_preparing_runs,
)

# The sizes of a short run, which checks the command but not the claims
QUICK = """--total_updates 6 --eval_games 60 --warm_start 200 --warm_start_episodes 600
    --reward_model_episodes 300"""

# A run of a tiny model: one core, and 45 updates of published RSPO (6,720 episodes on Household)
TINY_RUN = ["--threads", "1", "--ranks", "1", "--total_updates", "45"]
SET_BY_ARMS = [
    "method",
    "algo",
    "dense_reward",
    "seed",
    "eval_every",
    "resume",
    "resume_from",
    "eval_only",
    "plan",
]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m reproduce",
        description=__doc__,
        epilog="All other flags are passed to train.py in every run: --model DIR, --webshop_data DIR, ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"{', '.join(EXPERIMENTS)} or all")
    parser.add_argument(
        "--list", action="store_true", help="print the experiments, their runs and their cost"
    )
    parser.add_argument("--seeds", default="0,200,400", help="seeds, separated by commas [0,200,400]")
    names = ",".join(STARTS)
    parser.add_argument("--starts", default=names, help=f"starts of pays, separated by commas [{names}]")
    parser.add_argument("--quick", action="store_true", help="one seed, one start, short runs: a check")
    parser.add_argument("--env", default="household", help="environment of train.py [household]")
    papers = [name for name in PRESETS if name.startswith("paper")]
    parser.add_argument("--preset", choices=papers, help="preset of train.py, in place of --env")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="folder [runs/reproduce]")
    parser.add_argument(
        "--reuse",
        type=Path,
        nargs="+",
        default=[],
        metavar="JSON",
        help="NAME.json of earlier calls; the runs that they hold are not trained again",
    )
    parser.add_argument("--processes", type=int, help="runs at the same time [one per core; with --preset 1]")
    return parser


def read_seeds(text: str) -> list[int]:
    """Return the seeds of --seeds. Raises UsageError."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {text}: must be whole numbers; give for example 0,200,400") from None
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise UsageError(f"--seeds {text}: must differ and be 0 or more; give for example 0,200,400")
    return seeds


def read_starts(text: str) -> list[str]:
    """Return the starts of --starts. Raises UsageError."""
    starts = text.split(",")
    for name in starts:
        if name not in STARTS:
            raise UsageError(f"--starts {text}: there is no start {name!r}; give {', '.join(STARTS)}")
    return starts


def scale_of(args: argparse.Namespace, more: list[str]) -> tuple[str, list[str]]:
    """Return the name of the scale, which is a folder, and the flags of every run. Raises UsageError.

    more: flags of train.py from the command line.
    """
    name = args.preset or args.env
    flags = ["--preset", name] if args.preset else ["--env", name, *TINY_RUN]
    if args.quick:
        name, flags = f"{name}-quick", flags + QUICK.split()
    for flag in COMMAND_LINE.read(more):
        if flag in SET_BY_ARMS:
            raise UsageError(f"--{flag}: the experiments set it; leave it out (--seeds sets the seeds)")
    flags += more
    prepare(flags)  # prints warnings of likely slips, once
    return name, flags


def list_experiments(experiments: dict[str, Experiment], scale: list[str], seeds: list[int]) -> None:
    """Print the experiments with their runs and the estimated cost on Household."""
    print(f"{'NAME':8} {'runs':>5} {'core hours':>11}  question (cost: the tiny model on Household)")
    everything: dict[Path, float] = {}
    for name, experiment in experiments.items():
        runs = with_preparing_runs(plan_runs([experiment], scale, seeds, Path("runs")))
        cost = {run.folder: core_seconds(run) for run in runs}
        everything |= cost
        print(f"{name:8} {len(runs):5} {sum(cost.values()) / 3600:11.1f}  {experiment.question}")
    hours = sum(everything.values()) / 3600
    print(f"{'all':8} {len(everything):5} {hours:11.1f}  arms that experiments share are run once")


def experiments_at(scale: list[str], quick: bool, starts: list[str]) -> dict[str, Experiment]:
    """Return the experiments. Only Household with a warm start has several starts; --quick has one.

    starts: the starts that are kept in an experiment with several.
    """
    flags = read_quietly(scale)
    several = flags.env == "household" and flags.warm_start and not quick
    kept = starts if several else ["default"]
    experiments = {}
    for name, one in EXPERIMENTS.items():
        if len(one.starts) > 1:
            one = dataclasses.replace(one, starts=tuple(start for start in one.starts if start in kept))
        experiments[name] = one
    return experiments


def write_results(
    experiments: dict[str, Experiment], plan: Plan, seeds: list[int], folder: Path, command: str, known: Known
) -> None:
    """Write the tables and the figure of every experiment."""
    for name, experiment in experiments.items():
        report = tables.report_of(name, experiment, plan, seeds, command, known)
        write_text(folder / f"{name}.json", json.dumps(report, indent=1) + "\n")
        write_text(folder / f"{name}.md", markdown(report))
        figure.draw(report, folder / f"{name}.png")
        print(f"written: {folder / name}.md, .json and .png")


def plan_of(args: argparse.Namespace, more: list[str]) -> tuple[dict[str, Experiment], list[int], Path, Plan]:
    """Return the experiments, the seeds, the folder and the runs. Raises UsageError."""
    if args.name not in [*EXPERIMENTS, "all"]:
        given = "NAME: is missing" if args.name is None else f"{args.name}: there is no such experiment"
        raise UsageError(f"{given}; give {', '.join(EXPERIMENTS)} or all")
    if args.processes is None:
        args.processes = 1 if args.preset else os.cpu_count() or 1
    if args.processes < 1:
        raise UsageError(f"--processes {args.processes}: must be 1 or more; or leave it out")
    seeds = read_seeds(args.seeds)
    scale_name, scale = scale_of(args, more)
    experiments = experiments_at(scale, args.quick, read_starts(args.starts))
    if args.name != "all":
        experiments = {args.name: experiments[args.name]}
    if args.quick:
        seeds = seeds[:1]
    folder = args.out / scale_name
    return experiments, seeds, folder, plan_runs(list(experiments.values()), scale, seeds, folder / "runs")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args, more = parser().parse_known_args(argv)
    try:
        if args.list:
            _, scale = scale_of(args, more)
            experiments = experiments_at(scale, args.quick, read_starts(args.starts))
            list_experiments(experiments, scale, read_seeds(args.seeds))
            return 0
        experiments, seeds, folder, plan = plan_of(args, more)
        known = read_known(args.reuse, plan, list(experiments.values()))
        runs = with_preparing_runs({key: run for key, run in plan.items() if not is_known(key, plan, known)})
        for run in runs:
            check_same(run)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = shlex.join(["python", "-m", "reproduce", *argv])
    # A kill stops the runs, as Ctrl-C does. In a script's background they would inherit an ignored SIGINT.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        failed = run_all(runs, args.processes)
    except KeyboardInterrupt:
        if known or any(run.finished for run in plan.values()):
            write_results(experiments, plan, seeds, folder, command, known)
        print(f"stopped; continue with: {command}", file=sys.stderr)
        return 130
    write_results(experiments, plan, seeds, folder, command, known)
    if failed:
        names = ", ".join(run.name for run in failed)
        print(f"error: {len(failed)} runs failed ({names}); {command} tries them again", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        status = 1
    sys.exit(status)
