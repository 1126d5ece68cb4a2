"""`python bench.py alfworld | webshop`: the engine beside the stock one; times and memory of the shop."""

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

# --- ALFWorld: the engine beside the stock one --------------------------------------------------------------


def alfworld_games(data: Path, n: int) -> list[str]:
    """n game files of valid_seen, the task types in turn."""
    by_type: dict[str, list[str]] = {name: [] for name in alfworld_engine.TASK_TYPES}
    folder = data / "json_2.1.1" / "valid_seen"
    for path in sorted(str(path) for path in folder.rglob(alfworld_engine.GAME_FILE)):
        by_type[alfworld_engine.task_type(path)].append(path)
    found = [path for paths in itertools.zip_longest(*by_type.values()) for path in paths if path]
    if len(found) < n:
        sys.exit(f"{len(found)} games below {folder}; {n} are needed")
    return found[:n]


def alfworld_compared(path: str, cache: str, n_steps: int = 15) -> dict[str, float]:
    """One game in both engines, the same commands: CPU-milliseconds of one reset, of one step, of opening."""
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
    alfworld_engine.forget()  # so that our steps, too, meet each state for the first time
    opening = cpu_seconds(lambda: alfworld_engine.Game(path, cache).reset())
    game = alfworld_engine.Game(path, cache)
    reset = cpu_seconds(lambda: [game.reset() for _ in range(1000)]) / 1000
    first_steps = cpu_seconds(lambda: [game.step(command) for command in commands])
    game.reset()
    known_steps = cpu_seconds(lambda: [game.step(command) for command in commands])
    seconds = {
        **{
            "stock reset": stock_reset,
            "our reset": reset,
            "opening": opening,
            "first contact": first_contact,
        },
        **{"stock step": stock_steps / n_steps, "our step": first_steps / n_steps},
        "known step": known_steps / n_steps,
    }
    return {name: 1000 * value for name, value in seconds.items()}


def resident() -> float:
    """This process's memory in MB."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1000


def alfworld_episodes(paths: list[str], cache: str, episodes: int, steps: int) -> list[float]:
    """A new Game for each episode, the games in turn; the memory after each quarter of them."""
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
    """The memory of a process that has all these games open, each played so far."""
    rng, games = random.Random(0), [alfworld_engine.Game(path, cache) for path in paths]
    for game in games:
        state = game.reset()
        for _ in range(steps):
            state = game.step(rng.choice(state.admissible))
    return resident()


def bench_alfworld(args: argparse.Namespace) -> int:
    """The engine beside the stock one, six games of different types; then 128 games in memory.

    "reset" is the repeated reset of an open game, in both engines; "opening" makes a Game from the cache on
    disk and resets it; the first contact also translates the game. The 128 games are translated into the
    usual cache folder, once.
    """
    if args.alfworld_data is None:
        sys.exit("--alfworld_data (or $ALFWORLD_DATA): the folder that holds json_2.1.1")
    paths = alfworld_games(args.alfworld_data, 128)
    with tempfile.TemporaryDirectory() as cache:
        rows = apart(alfworld_rows, paths[:6], cache)
        kilobytes = statistics.mean(file.stat().st_size for file in Path(cache).iterdir()) / 1000
    print("CPU-milliseconds:")
    for path, row in zip(paths, rows, strict=False):
        times = ", ".join(f"{name} {value:.3f}" for name, value in row.items())
        print(f"  {alfworld_engine.task_type(path):29}  {times}")
    print(f"on disk: {kilobytes:.0f} kB a game", flush=True)
    cache = str(alfworld_engine.cache_folder())
    apart(alfworld_episodes, paths, cache, 128, 0)  # what is not translated yet, in a process of its own
    together = apart(alfworld_together, paths, cache, 50)
    sizes = apart(alfworld_episodes, paths, cache, 2000, 10)
    print(f"memory after 500, 1,000, 1,500 and 2,000 episodes of 128 games: {sizes} MB")

    def ratio(stock: str, ours: str) -> float:
        return statistics.median(row[stock] / row[ours] for row in rows)

    return conclude(
        [
            Goal("reset: stock / ours", ratio("stock reset", "our reset"), "x", 30, True),
            Goal("reset: stock / ours with opening the game", ratio("stock reset", "opening"), "x", 30, True),
            Goal(
                "step: stock / ours, states not seen before", ratio("stock step", "our step"), "x", 15, True
            ),
            Goal("128 games open in one process", together, "MB", 1200, False),
            Goal("growth from episode 500 to 2,000", sizes[-1] - sizes[0], "MB", 30, False),
        ]
    )


def alfworld_rows(paths: list[str], cache: str) -> list[dict[str, float]]:
    alfworld_compared(paths[0], cache, 1)  # imports the libraries
    alfworld_engine.clear_cache(cache)
    return [alfworld_compared(path, cache) for path in paths]


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
    if args.webshop_data is None:
        sys.exit("--webshop_data (or $WEBSHOP_DATA): the folder of WebShop's files")
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
    print(f"{shop!r}; {', '.join(f'{len(values)} {kind}' for kind, values in times.items())} steps")
    print(f"buying, the slowest of the other steps: median {median['buy']:.3f} ms")
    if args.products:
        print(
            f"peak memory {memory:.0f} MB ({before:.0f} MB of it before loading, while the file was written)"
        )
    large = args.products > 10_000
    return conclude(
        [
            Goal("start: load and index", loading, "s", 120 if large else 6, at_least=False),
            Goal("a search, median", median["search"], "ms", 30 if large else 1, at_least=False),
            Goal("any other step, buying too, median", other, "ms", 0.2, at_least=False),
            *([] if large else [Goal("peak memory", memory, "MB", 300, at_least=False)]),
        ]
    )
