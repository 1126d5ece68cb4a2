"""Measure every speed claim of this project: `python -m bench core`, `alfworld`, `webshop` or `run`.

The first three print one table and exit with status 1 if a goal is missed. Times are CPU-seconds of one
thread. On a shared machine absolute times mean little, but ratios of two sides that take turns are stable.
`run` has no goal: it shows where the time of a run goes.
docs/PERFORMANCE.md has results. `python -m bench.gpu_check` checks a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench.environments import bench_alfworld, bench_webshop


def bench_core(args: argparse.Namespace) -> int:
    """Run the benchmark of rollouts and updates."""
    from bench import core  # imported here, because torch would count in the memory of the other benchmarks

    return core.bench_core(args)


def bench_run(args: argparse.Namespace) -> int:
    """Run train.py and show where its time goes."""
    from bench import run

    return run.bench_run(args)


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    core = commands.add_parser("core", help="rollouts and updates, beside transformers' generate and TRL")
    core.add_argument("--repeats", type=int, default=3, help="ratios are medians over this many repeats")
    core.add_argument(
        "--trl", metavar="PYTHON", help="the Python of an environment with requirements/trl.txt"
    )
    core.set_defaults(run=bench_core)
    shop = commands.add_parser("webshop", help="times and memory of the WebShop engine")
    shop.add_argument(
        "--webshop_data", default=os.environ.get("WEBSHOP_DATA"), help="folder of WebShop's files"
    )
    shop.add_argument("--products", type=int, default=0, help="generate this many products and load them")
    shop.set_defaults(run=bench_webshop)
    alfworld = commands.add_parser("alfworld", help="the ALFWorld engine beside the official one")
    alfworld.add_argument(
        "--alfworld_data",
        type=Path,
        default=os.environ.get("ALFWORLD_DATA"),
        help="folder that contains json_2.1.1",
    )
    alfworld.set_defaults(run=bench_alfworld)
    whole = commands.add_parser("run", help="where the time of a run goes, by phase")
    whole.add_argument(
        "--functions", type=int, default=0, help="also list this many functions with the most time (slower)"
    )
    whole.set_defaults(run=bench_run)
    args, flags = parser.parse_known_args(argv)  # `run` passes other flags on to train.py
    if flags and args.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    args.flags = flags
    if args.command == "core" and args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be at least 1")
    if args.command == "webshop" and args.products and args.products < 1000:
        parser.error(f"--products {args.products}: too few; give at least 1,000, or leave the flag out")
    try:
        return args.run(args)
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    sys.exit(main())
