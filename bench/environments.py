"""Measure the engines: `python -m bench alfworld` and `python -m bench webshop`.

`alfworld` compares times with the stock engine and measures memory. `webshop` measures times and memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.goals import Goal, apart, conclude, cpu_seconds
from games import alfworld_engine, webshop

# --- ALFWorld: times beside the stock engine, memory --------------------------------------------------------


def alfworld_games(data: Path, n: int) -> list[str]:
    """Return n game files of valid_seen, with the task types in turn."""
    by_type: dict[str, list[str]] = {name: [] for name in alfworld_engine.TASK_TYPES}
    folder = data / "json_2.1.1" / "valid_seen"
    for path in sorted(str(path) for path in folder.rglob(alfworld_engine.GAME_FILE)):
        by_type[alfworld_engine.task_type(path)].append(path)
    found = [path for path in itertools.chain(*itertools.zip_longest(*by_type.values())) if path]
    if len(found) < n:
        sys.exit(f"error: --alfworld_data {data}: {len(found)} games in {folder}, {n} are needed")
    return found[:n]


def alfworld_compared(path: str, cache: str, n_steps: int = 15) -> dict[str, float]:
    """Play one game in both engines with the same commands; return CPU-milliseconds by operation.

    stock reset, our reset: the repeated reset of an open game.
    opening: make a Game from the cache on disk, and reset it.
    first contact: translate the game, then open it.
    stock step, our step: one step to a state that the engine has not seen before.
    known step: one step to a state that our engine has seen before.
    """
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos

    first_contact = cpu_seconds(lambda: alfworld_engine.Game(path, cache).reset())
    game, rng, commands = alfworld_engine.Game(path, cache), random.Random(0), []
    state = game.reset()
    for _ in range(n_steps):
        commands.append(rng.choice(state.admissible))
        state = game.step(commands[-1])
    infos = textworld.EnvInfos(won=True, admissible_commands=True)
    stock = textworld.start(path, infos, wrappers=[AlfredDemangler(), AlfredInfos])
    stock.reset()
    stock_reset = cpu_seconds(stock.reset)
    stock_steps = cpu_seconds(lambda: [stock.step(command) for command in commands])
    alfworld_engine.forget()  # our engine, too, must reach each state for the first time
    opening = cpu_seconds(lambda: alfworld_engine.Game(path, cache).reset())
    game = alfworld_engine.Game(path, cache)
    reset = cpu_seconds(lambda: [game.reset() for _ in range(1000)]) / 1000
    first_steps = cpu_seconds(lambda: [game.step(command) for command in commands])
    game.reset()
    known_steps = cpu_seconds(lambda: [game.step(command) for command in commands])
    seconds = {
        "stock reset": stock_reset,
        "our reset": reset,
        "opening": opening,
        "first contact": first_contact,
        "stock step": stock_steps / n_steps,
        "our step": first_steps / n_steps,
        "known step": known_steps / n_steps,
    }
    return {name: 1000 * value for name, value in seconds.items()}


def resident() -> float:
    """Return this process's memory in MB."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1000


def alfworld_episodes(paths: list[str], cache: str, episodes: int, steps: int) -> list[float]:
    """Play episodes with the games in turn, each in a new Game; return the MB after each quarter of them."""
    rng, sizes = random.Random(0), []
    for episode in range(episodes):
        game = alfworld_engine.Game(paths[episode % len(paths)], cache)
        state = game.reset()
        for _ in range(steps):
            state = game.step(rng.choice(state.admissible))
        if (episode + 1) % (episodes // 4) == 0:
            sizes.append(resident())
    return sizes


def alfworld_together(paths: list[str], cache: str, steps: int) -> float:
    """Open all games, play each for some steps, and return this process's memory in MB."""
    rng, games = random.Random(0), [alfworld_engine.Game(path, cache) for path in paths]
    for game in games:
        state = game.reset()
        for _ in range(steps):
            state = game.step(rng.choice(state.admissible))
    return resident()


def bench_alfworld(args: argparse.Namespace) -> int:
    """Compare the engines on six games of different types, then measure the memory of 128 games.

    The six games are translated in a temporary cache. The 128 games are translated once, in the usual cache.
    """
    if args.alfworld_data is None:
        sys.exit("error: no --alfworld_data or $ALFWORLD_DATA; name the folder that contains json_2.1.1")
    paths = alfworld_games(args.alfworld_data, 128)
    with tempfile.TemporaryDirectory() as cache:
        rows = apart(alfworld_rows, paths[:6], cache)
        kilobytes = statistics.mean(file.stat().st_size for file in Path(cache).iterdir()) / 1000
    print("CPU-milliseconds:")
    for path, row in zip(paths, rows, strict=False):
        times = ", ".join(f"{name} {value:.3f}" for name, value in row.items())
        print(f"  {alfworld_engine.task_type(path):29}  {times}")
    print(f"on disk: {kilobytes:.0f} kB per game", flush=True)
    cache = str(alfworld_engine.cache_folder())
    apart(alfworld_episodes, paths, cache, 128, 0)  # translates missing games in a process of its own
    together = apart(alfworld_together, paths, cache, 50)
    sizes = apart(alfworld_episodes, paths, cache, 2000, 10)
    print(f"memory after 500, 1,000, 1,500 and 2,000 episodes of 128 games: {sizes} MB")

    def ratio(stock: str, ours: str) -> float:
        return statistics.median(row[stock] / row[ours] for row in rows)

    opening = "reset: stock / ours with opening the game"
    unseen = "step: stock / ours, states not seen before"
    goals = [
        Goal("reset: stock / ours", ratio("stock reset", "our reset"), "x", at_least=30),
        Goal(opening, ratio("stock reset", "opening"), "x", at_least=30),
        Goal(unseen, ratio("stock step", "our step"), "x", at_least=15),
        Goal("128 games open in one process", together, "MB", at_most=1200),
        Goal("growth from episode 500 to 2,000", sizes[-1] - sizes[0], "MB", at_most=30),
    ]
    return conclude(goals)


def alfworld_rows(paths: list[str], cache: str) -> list[dict[str, float]]:
    """Compare the engines on each game; run in a process of its own."""
    alfworld_compared(paths[0], cache, 1)  # imports the libraries, whose time must not count
    alfworld_engine.clear_cache(cache)
    return [alfworld_compared(path, cache) for path in paths]


# --- WebShop: times and memory ------------------------------------------------------------------------------


def webshop_products(source: Path, folder: Path, count: int) -> None:
    """Write files in the official format. Each product is mixed from five real ones and three new words."""
    rng = random.Random(0)
    small, nouns = webshop.SETS["small"], webshop.TITLE_NOUNS
    products, facts, title_nouns = (
        json.loads((source / name).read_text(encoding="utf-8")) for name in (small[0], small[1], nouns)
    )
    (folder / webshop.COLORS).write_bytes((source / webshop.COLORS).read_bytes())
    names = [f"G{i:09d}" for i in range(count)]
    new_facts, new_nouns = {}, {}
    with open(folder / webshop.SETS["all"][0], "w", encoding="utf-8") as file:
        for i, name in enumerate(names):
            base, *others = rng.choices(products, k=5)
            mixed = dict(base)
            parts = ("full_description", "small_description", "customization_options", "pricing")
            for part, other in zip(parts, others, strict=True):
                mixed[part] = other[part]
            words = " ".join(f"{rng.choice('bcdfg')}{rng.randrange(10**6)}" for _ in range(3))
            mixed |= {"asin": name, "name": f"{base['name']} {words}"}
            file.write(("[" if i == 0 else ",") + json.dumps(mixed))
            new_facts[name], new_nouns[name] = facts[base["asin"]], title_nouns[base["asin"]]
        file.write("]")
    (folder / webshop.SETS["all"][1]).write_text(json.dumps(new_facts))
    (folder / nouns).write_text(json.dumps(new_nouns))


def webshop_times(shop: webshop.WebShop, episodes: int) -> dict[str, list[float]]:
    """Play scripted episodes; return the CPU-milliseconds of each step by kind: search, buy, other.

    A step includes the page's text and its available actions.
    """
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
    """Measure the start, the steps and the memory of WebShop; return the exit status.

    Large product sets have other goals, and no goal for memory.
    """
    if args.webshop_data is None:
        sys.exit("error: no --webshop_data or $WEBSHOP_DATA; name the folder of WebShop's files")
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
    other = statistics.median(times["other"] + times["buy"])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    counts = ", ".join(f"{len(values)} {kind}" for kind, values in times.items())
    print(f"{shop!r}; {counts} steps")
    print(f"buying, the slowest of the other steps: median {median['buy']:.3f} ms")
    if args.products:
        print(f"peak memory {memory:.0f} MB; {before:.0f} MB before loading, when the files were written")
    large = args.products > 10_000
    goals = [
        Goal("start: load and index", loading, "s", at_most=120 if large else 6),
        Goal("a search, median", median["search"], "ms", at_most=30 if large else 1),
        Goal("any other step, buying too, median", other, "ms", at_most=0.2),
    ]
    if not large:
        goals.append(Goal("peak memory", memory, "MB", at_most=300))
    return conclude(goals)
