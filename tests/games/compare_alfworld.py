"""Compare the ALFWorld engine of this project with the stock engine, up to the first difference.

    python tests/games/compare_alfworld.py --alfworld_data DIR [--games 200] [--seed 0] [--processes 1]

DIR is the folder that contains json_2.1.1 (by default $ALFWORLD_DATA). Games are drawn from all splits, with
the same number of each task type. Both engines play random commands: the verb is drawn first, so that rare
verbs occur, and one command in eight is not admissible. In every third game they also play the stored
walkthrough, after a second reset, and a few steps beyond the win. Text, admissible commands, won and done
must always be equal. The stock engine takes about 7 CPU-seconds per game.
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

from games.alfworld_engine import GAME_FILE, TASK_TYPES, Game, State, task_type  # noqa: E402

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
    """The stock engine, with the interface of `Game`."""

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
    """Draw n game files below the folder, from all splits, with the task types in turn."""
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
    """Draw a command; one in eight is not admissible."""
    kind = rng.random()
    if kind < 0.08:
        return rng.choice(NOT_ADMISSIBLE)
    if kind < 0.125:  # the verb of one command with the rest of another
        return " ".join(rng.choice(admissible).split()[:1] + rng.choice(admissible).split()[1:])
    verb = rng.choice(sorted({command.split()[0] for command in admissible}))
    command = rng.choice([command for command in admissible if command.split()[0] == verb])
    return f"  {command} " if kind < 0.15 else command


def play(path: str, cache: str, seed: int, win: bool) -> int:
    """Play one game with both engines. Returns the number of compared states.

    Raises AssertionError at the first difference.
    """
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
        parser.error(
            "--alfworld_data is missing; give the folder that contains json_2.1.1, or set $ALFWORLD_DATA"
        )
    paths = chosen_games(args.alfworld_data / "json_2.1.1", args.games, random.Random(args.seed))
    if not paths:
        parser.error(f"no {GAME_FILE} below {args.alfworld_data / 'json_2.1.1'}")
    n_states = 0
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(args.processes) as pool:
        games = []
        for i, path in enumerate(paths):
            win = (i + i // 6) % 3 == 0  # every third game, with all task types among them
            games.append(pool.submit(play, path, cache, args.seed, win))
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
