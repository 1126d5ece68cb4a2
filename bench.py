"""Every speed claim of this project, measured in one run: `python bench.py alfworld | webshop`.

Each prints one table and exits 1 when a goal is missed. Times are CPU-seconds of one thread: on a shared
machine absolute ones mean little, ratios of two things measured in turn hold. docs/PERFORMANCE.md shows
results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import webshop


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


def webshop_products(source: Path, folder: Path, count: int) -> None:
    """Files in the official format: `count` products, each mixed from five real ones and three new words."""
    rng = random.Random(0)
    small, nouns = webshop.SETS["small"], webshop.TITLE_NOUNS
    read = {name: json.loads((source / name).read_text(encoding="utf-8")) for name in (*small, nouns)}
    products, facts, title_nouns = read[small[0]], read[small[1]], read[nouns]
    (folder / webshop.COLORS).write_bytes((source / webshop.COLORS).read_bytes())
    names = [f"G{i:09d}" for i in range(count)]
    new_facts, new_nouns = {}, {}
    with open(folder / webshop.SETS["all"][0], "w", encoding="utf-8") as file:
        for i, name in enumerate(names):
            base, *others = rng.choices(products, k=5)
            parts = ("full_description", "small_description", "customization_options", "pricing")
            mixed = base | {part: other[part] for part, other in zip(parts, others, strict=True)}
            words = " ".join(f"{rng.choice('bcdfg')}{rng.randrange(10**6)}" for _ in range(3))
            mixed |= {"asin": name, "name": f"{base['name']} {words}"}
            file.write(("[" if i == 0 else ",") + json.dumps(mixed))
            new_facts[name], new_nouns[name] = facts[base["asin"]], title_nouns[base["asin"]]
        file.write("]")
    (folder / webshop.SETS["all"][1]).write_text(json.dumps(new_facts))
    (folder / nouns).write_text(json.dumps(new_nouns))


def webshop_times(shop: webshop.WebShop, episodes: int) -> dict[str, list[float]]:
    """CPU-ms of each step of scripted shopping, with the page's text and actions, by kind of step."""
    times = {"search": [], "buy": [], "other": []}
    for index in random.Random(0).sample(range(len(shop.goals)), episodes):
        session = shop.session(index)

        def step(kind: str, action: str, session=session) -> None:
            start = time.process_time()
            turn = session.step(action)
            assert turn.text and turn.available_actions
            times[kind].append(1000 * (time.process_time() - start))

        step("search", f"search[{session.goal.instruction_text}]")
        step("other", "click[next >]")
        step("other", "click[< prev]")
        step("search", f"search[{' '.join(shop.products[session.goal.asin].title.split()[:3])}]")
        if not session.page.hits:
            continue
        step("other", f"click[{session.page.hits[0].asin}]")
        for values in session.page.product.options.values():
            step("other", f"click[{values[-1]}]")
        for name in ("description", "< prev", "features", "< prev"):
            step("other", f"click[{name}]")
        step("buy", "click[buy now]")
    return times


def bench_webshop(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(args.webshop_data)
        if args.products:
            webshop_products(data, Path(scratch), args.products)
            data = Path(scratch)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        start = time.process_time()
        shop = webshop.WebShop(data)
        loading = time.process_time() - start
    times = webshop_times(shop, 300)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{shop!r}; {', '.join(f'{len(values)} {kind}' for kind, values in times.items())} steps")
    if args.products:
        print(
            f"peak memory {memory:.0f} MB ({before:.0f} MB of it before loading, while the file was written)"
        )
    large = args.products > 10_000
    return conclude(
        [
            Goal("start: load and index", loading, "s", 120 if large else 6, at_least=False),
            Goal("a search, median", median["search"], "ms", 30 if large else 1, at_least=False),
            Goal("any other step, median", median["other"], "ms", 0.2, at_least=False),
            Goal("buying, median", median["buy"], "ms", 0.5, at_least=False),
            *([] if large else [Goal("peak memory", memory, "MB", 300, at_least=False)]),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shop = commands.add_parser("webshop", help="times and memory of the shop")
    shop.add_argument(
        "--webshop_data", default=os.environ.get("WEBSHOP_DATA", "."), help="folder of the files"
    )
    shop.add_argument("--products", type=int, default=0, help="generate that many products and load those")
    shop.set_defaults(run=bench_webshop)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
