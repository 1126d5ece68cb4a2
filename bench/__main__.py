"""Every speed claim of this project, measured in one run: `python bench.py core | alfworld | webshop`.

Each prints one table and exits 1 when a goal is missed. Times are CPU-seconds of one thread: on a shared
machine absolute ones mean little, ratios of two things measured in turn hold. docs/PERFORMANCE.md shows
results.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench.environments import bench_alfworld, bench_webshop


def bench_core(args: argparse.Namespace) -> int:
    from bench import core as bench_core

    return bench_core.bench_core(args)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    core = commands.add_parser("core", help="playing and learning, beside transformers' generate and TRL")
    core.add_argument("--repeats", type=int, default=3, help="the ratios are medians over so many")
    core.add_argument("--trl", metavar="PYTHON", help="of an environment made by requirements/trl.txt")
    core.set_defaults(run=bench_core)
    shop = commands.add_parser("webshop", help="times and memory of the shop")
    shop.add_argument("--webshop_data", default=os.environ.get("WEBSHOP_DATA"), help="folder of the files")
    shop.add_argument("--products", type=int, default=0, help="generate that many products and load those")
    shop.set_defaults(run=bench_webshop)
    alfworld = commands.add_parser("alfworld", help="the engine beside the stock one")
    alfworld.add_argument(
        "--alfworld_data", type=Path, default=os.environ.get("ALFWORLD_DATA"), help="holds json_2.1.1"
    )
    alfworld.set_defaults(run=bench_alfworld)
    args = parser.parse_args(argv)
    if args.command == "core" and args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be at least 1")
    if args.command == "webshop" and args.products and args.products < 1000:
        parser.error(f"--products {args.products}: give 1,000 or more, or leave it out")
    try:
        return args.run(args)
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    sys.exit(main())
