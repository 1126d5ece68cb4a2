"""What stands between `rspo.train` and the run folder: times, log lines, panels, checkpoints."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from buffer import Group, ReplayBuffer, StopReason, Trajectory
from flags import Args
from record import checkpoint, report
from record.log import Log
from record.metrics import episode_metrics, panel, progress, start_and_end
from rollout import World
from scale import distributed


def say(text: str) -> None:
    """A line for people, that leaves the progress bar whole."""
    if distributed.rank() == 0:
        tqdm.write(text)


def warn_of_crashes(episodes: list[Trajectory], what: str) -> None:
    if crashed := sum(episode.stop_reason is StopReason.CRASHED for episode in episodes):
        say(f"warning: in {crashed:,} of {len(episodes):,} {what} the environment crashed")


def bar(total: int, what: str, **more) -> tqdm:
    """A progress bar; where nobody watches, a line now and then."""
    pause = 0.1 if sys.stderr.isatty() else 30.0
    more |= {"dynamic_ncols": True, "mininterval": pause, "disable": distributed.rank() > 0}
    return tqdm(total=total, desc=what, unit="update", **more)


class Recorder:
    """Between rspo.train and what it calls: times, logs and shows it, evaluates A, saves checkpoints.

    Ranks other than 0 have no log, and write nothing.
    """

    def __init__(
        self,
        args: Args,
        folder: Path,
        policy,
        world: World,
        dense_reward,
        log: Log | None,
        started: float,
    ):
        self.args, self.folder, self.policy, self.world = args, folder, policy, world
        self.dense_reward, self.log, self.started = dense_reward, log, started
        self.bar: tqdm | None = None
        self.phases: dict[str, float] = defaultdict(float)
        self.told: set[tuple] = set()  # (agent, loop) that have a transcript

    def timed(self, phase: str, call: Callable):
        started = time.perf_counter()
        result = call()
        self.phases[f"seconds_{phase}"] += time.perf_counter() - started
        return result

    def collect(self, agent, tasks: int) -> list[Group]:
        return self.timed("rollout", lambda: self.world.collect(agent, tasks))

    def score(self, groups: list[Group], **noise) -> None:
        self.timed("score", lambda: self.dense_reward.score(groups, **noise))

    def write(self, agent: str, update: int, loop: int, values: dict) -> dict:
        line = {"agent": agent, "update": update, "loop": loop}
        if agent == "explorer":
            line["explorer_update"] = len(self.log.of("explorer")) + 1
        line |= {"environment_episodes": self.world.episodes, "environment_turns": self.world.turns}
        line |= {**values, **self.phases, "seconds_elapsed": time.perf_counter() - self.started}
        self.phases.clear()
        self.log.write(line)
        return line

    def log_update(self, agent: str, groups: list[Group], metrics: dict, step: int) -> None:
        """rspo.train's `log`."""
        if self.log is None:
            return
        loop = (step - (agent == "policy")) // self.args.k + 1
        rewards = {
            "policy": self.args.policy_reward,
            "explorer": self.args.explorer_reward,
            "buffer": "outcome",
        }
        line = self.write(agent, step, loop, {**episode_metrics(groups, rewards[agent]), **metrics})
        if (agent, loop) not in self.told:
            self.told.add((agent, loop))
            episodes = [member for group in groups for member in group.trajectories]
            self.transcribe(report.telling(episodes), agent, step)
        if left_out := line.get("left_out_episodes"):
            crashed = line["crashed_episodes"]
            say(f"update {step}: {left_out} episodes of {agent} were left out, {crashed} of them crashed")
        if agent == "policy":
            if self.args.off_policy_episodes and not line["replayed_episodes"]:
                say(f"update {step}: the replay buffer is empty, so alpha is 0 for this update")
            self.show(line)

    def show(self, line: dict) -> None:
        dense = [past["dense_reward"] for past in self.log.lines if "dense_reward" in past]
        shown = {"success": line["success"], "reward": dense[-1] if dense else line["outcome"]}
        shown |= {"KL": line.get("kl_on", 0.0), "clip": line["clip_fraction_on"]}
        self.bar.set_postfix({name: f"{value:.3f}" for name, value in shown.items()}, refresh=False)
        self.bar.update()

    def transcribe(self, episodes: list[Trajectory], agent: str, step: int) -> None:
        for episode in episodes:
            self.log.write_transcript(
                report.transcript(episode, self.policy.chat.decode, update=step, agent=agent)
            )

    def evaluate(self, step: int) -> None:
        """Play the panel of every split and log it."""
        for split in self.args.eval_splits:
            call = functools.partial(play_panel, self.args, self.world, self.policy, split)
            played, panel = self.timed("eval", call)
            if self.log is None:
                continue
            by_type = {episode.task_type: episode for episode in reversed(played)}
            self.transcribe(list(by_type.values()), "evaluation", step)
            line = self.write("evaluation", step, step // self.args.k, panel)
            say(f"update {step}: solves {line['success']:.1%} of {line['games']} games of {split}")

    def end_loop(self, step: int, replay: ReplayBuffer) -> None:
        """rspo.train's `end_loop`."""
        if step // self.args.eval_every > (step - self.args.k) // self.args.eval_every:
            self.evaluate(step)
        distributed.check_alike(self.policy.parameters)
        if self.log is None:
            return
        state = {
            "step": step,
            "world": self.world.state_dict(),
            "games": self.world.pool.env.fingerprint,
            "replay": replay.state_dict(),
            "sizes": self.log.sizes(),
            "seconds": time.perf_counter() - self.started,
        }
        saved = checkpoint.Checkpoint(self.policy.state_dicts(), state)
        checkpoint.write(self.folder, step, saved, self.args.keep_checkpoints)


def play_panel(args: Args, world: World, policy, split: str) -> tuple[list[Trajectory], dict]:
    """A split's fixed panel, and what is reported of it."""
    played = world.evaluate(
        policy, split, min(args.eval_games, world.pool.env.size(split)), args.eval_temperature
    )
    warn_of_crashes(played, f"games of {split}")
    about = {"split": split, "temperature": args.eval_temperature}
    return played, {**about, **panel(played, world.task_types)}


def conclude(args: Args, folder: Path, log: Log, seconds: float) -> None:
    """summary.json, curves.png, and a table of start and end for each split."""
    panels = start_and_end(log.lines)
    end = log.of("evaluation")[-1]
    summary = {
        "splits": {split: progress(*both) for split, both in panels.items()},
        "seconds": seconds,
        "eval_temperature": args.eval_temperature,
        "updates": args.total_updates,
        "explorer_updates": len(log.of("explorer")),
        "episodes": end["environment_episodes"],
        "turns": end["environment_turns"],
        "method": args.method,
        "algo": args.algo,
        "seed": args.seed,
        "env": args.env,
        "model": args.model,
    }
    checkpoint.write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    title = report.title_of(vars(args))
    report.draw_curves(log.lines, folder / "curves.png", title)
    for split, (start, end) in panels.items():
        games = f"{end['games']} games of {split}, temperature {args.eval_temperature}"
        say(f"\nsuccess in % on {games}: {title}")
        say(report.panel_table({"start": start, "end": end}))
    say(f"curves: {folder / 'curves.png'}   policy: {folder / 'policy'}   all of it: {folder}")
