"""Play this project's ALFWorld engine beside the stock one and stop at the first difference.

    python tests/compare_alfworld.py --alfworld_data DIR [--games 200] [--seed 0] [--processes 1]

DIR holds json_2.1.1 (by default $ALFWORLD_DATA). The games are drawn from all splits, the six task types in
turn. Each is played by commands at random, the verb drawn first so that rare ones are seen, one in eight not
admissible; every third then, after a second reset, by the stored walkthrough and a few steps beyond the win.
Text, admissible commands, won and done have to be equal everywhere. The stock engine takes some 7 CPU-seconds
a game.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from games.alfworld_engine import GAME_FILE, TASK_TYPES, Game, State, task_type

N_RANDOM, N_BEYOND = 25, 3
NOT_ADMISSIBLE = [
    "",
    "Look",
    "go to nowhere 1",
    "take mug 99 from desk 1",
    "put mug 1 in desk 1",
    "look around",
]


class Stock:
    """The stock engine, read into the same records."""

    def __init__(self, path: str):
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos

        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self._env = textworld.start(path, infos, wrappers=[AlfredDemangler(), AlfredInfos])

    def reset(self) -> State:
        state = self._env.reset()
        return State(state.feedback, state["admissible_commands"], state["won"], bool(state["won"]))

    def step(self, command: str) -> State:
        state, _, done = self._env.step(command)
        return State(state.feedback, state["admissible_commands"], state["won"], done)


def chosen_games(folder: Path, n: int, rng: random.Random) -> list[str]:
    """n game files below the folder, drawn from all splits, the task types in turn."""
    by_type: dict[str, list[str]] = {name: [] for name in TASK_TYPES}
    for path in sorted(str(path) for path in folder.rglob(GAME_FILE)):
        by_type[task_type(path)].append(path)
    for paths in by_type.values():
        rng.shuffle(paths)
    chosen = []
    while len(chosen) < n and any(by_type.values()):
        chosen += [paths.pop() for paths in by_type.values() if paths]
    return chosen[:n]


def random_command(admissible: list[str], rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.08:
        return rng.choice(NOT_ADMISSIBLE)
    if kind < 0.125:  # names that exist, in another place or hand
        return " ".join(rng.choice(admissible).split()[:1] + rng.choice(admissible).split()[1:])
    verb = rng.choice(sorted({command.split()[0] for command in admissible}))
    command = rng.choice([command for command in admissible if command.split()[0] == verb])
    return f"  {command} " if kind < 0.15 else command


def play(path: str, cache: str, seed: int, win: bool) -> int:
    """Both engines through one game; how many states were compared. AssertionError: the first difference."""
    rng = random.Random(f"{seed} {Path(path).parent.name}")
    stock, own = Stock(path), Game(path, cache)
    history: list[str] = []
    n = 0

    def compared(theirs: State, ours: State) -> State:
        nonlocal n
        n += 1
        assert theirs == ours, f"{path}\nafter {history}\nstock {theirs}\nown   {ours}"
        return ours

    state = compared(stock.reset(), own.reset())
    for _ in range(N_RANDOM):
        history.append(random_command(state.admissible, rng))
        state = compared(stock.step(history[-1]), own.step(history[-1]))
    if not win:
        return n
    history.append("(reset)")
    state = compared(stock.reset(), own.reset())
    for command in own.walkthrough:
        history.append(command)
        state = compared(stock.step(command), own.step(command))
    assert state.won, f"{path}: the walkthrough does not win"
    for _ in range(N_BEYOND):
        history.append(random_command(state.admissible, rng))
        state = compared(stock.step(history[-1]), own.step(history[-1]))
    return n


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alfworld_data", type=Path, default=os.environ.get("ALFWORLD_DATA"))
    parser.add_argument("--games", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.alfworld_data is None:
        parser.error("--alfworld_data (or $ALFWORLD_DATA): the folder that holds json_2.1.1")
    paths = chosen_games(args.alfworld_data / "json_2.1.1", args.games, random.Random(args.seed))
    if not paths:
        parser.error(f"no {GAME_FILE} below {args.alfworld_data / 'json_2.1.1'}")
    n_states = 0
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(args.processes) as pool:
        games = [
            pool.submit(play, path, cache, args.seed, (i + i // 6) % 3 == 0) for i, path in enumerate(paths)
        ]
        for number, game in enumerate(games, 1):
            try:
                n_states += game.result()
            except AssertionError as difference:
                print(difference)
                pool.shutdown(cancel_futures=True)
                return 1
            if number % 10 == 0 or number == len(paths):
                print(f"{number} games, {n_states} states: equal", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
