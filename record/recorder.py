"""The recorder between `rspo.train` and the run folder; panels, printed lines and the summary of a run."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from buffer import Group, ReplayBuffer, StopReason, Trajectory
from config import Config
from flags import Args, config_text
from record import checkpoint, transcripts
from record.log import Log
from record.metrics import episode_metrics, panel, progress, start_and_end
from record.panels import panel_table, title_of
from rollout import World
from scale import distributed

LARGE_CENTRE = 10.0  # a replayed token with a larger c = pi_old / pi_B is mentioned, once

# --- printed lines ------------------------------------------------------------------------------------------


def print_line(text: str) -> None:
    """Print on rank 0, above the progress bar."""
    if distributed.rank() == 0:
        tqdm.write(text)


def warn_of_crashes(episodes: list[Trajectory], kind: str) -> None:
    """Print the number of crashed episodes, if there are any. kind: a plural for the episodes."""
    if crashed := sum(episode.stop_reason is StopReason.CRASHED for episode in episodes):
        print_line(f"warning: in {crashed:,} of {len(episodes):,} {kind} the environment crashed")


COEFFICIENTS = """reward_scale invalid_penalty reward_noise implicit_beta kl_coef entropy_coef gigpo_omega
    clip_eps value_clip max_grad_norm critic_learning_rate"""


@contextlib.contextmanager
def causes_of_divergence(args: Args):
    """Add the coefficients that are not at their defaults to the message of a FloatingPointError."""
    try:
        yield
    except FloatingPointError as error:
        values = {name: getattr(args, name) for name in COEFFICIENTS.split()}
        defaults = {name: getattr(Args, name) for name in values}
        changed = [
            f"--{name} {value:g} (default {defaults[name]:g})"
            for name, value in values.items()
            if None not in (value, defaults[name]) and value != defaults[name]
        ]
        remedy = f", or bring closer to its default: {', '.join(changed)}" if changed else ""
        raise FloatingPointError(f"{error}{remedy}") from None


def progress_bar(total: int, label: str, **more) -> tqdm:
    """Return a progress bar of rank 0, counted in updates. Without a terminal it prints every 30 s."""
    seconds = 0.1 if sys.stderr.isatty() else 30.0
    more |= {"dynamic_ncols": True, "mininterval": seconds, "disable": distributed.rank() > 0}
    more |= {"smoothing": 0}  # the time left is estimated from all updates so far, since phases differ
    return tqdm(total=total, desc=label, unit="update", **more)


def advance(bar: tqdm, **values: float) -> None:
    """Move the bar by one update and show the values."""
    bar.set_postfix({name: f"{value:.3f}" for name, value in values.items()}, refresh=False)
    bar.update()


def phase_after(line: dict, config: Config) -> str:
    """Return the phase that begins after a logged line: "loop 4, B 2/3", "loop 4, A 1/3" and so on."""
    loop, agent, k = line["loop"], line["agent"], config.k
    if agent == "explorer" and line["explorer_update"] % k:
        phase = f"B {line['explorer_update'] % k + 1}/{k}"
    elif agent == "explorer" and "collect" in config.buffer_sources:
        phase = "filling the buffer"
    elif agent == "policy" and line["update"] % k == 0:
        loop += 1
        phase = f"B 1/{k}" if config.explores else f"A 1/{k}"
    else:
        done = line["update"] % k if agent == "policy" else 0
        phase = f"A {done + 1}/{k}"
    return f"loop {loop}, {phase}"


# --- the recorder -------------------------------------------------------------------------------------------


class Recorder:
    """Plays and scores for `rspo.train`, measures the times, logs, evaluates A and saves checkpoints.

    It stands in for the world (`collect`) and for the dense reward (`score`, `learn`). Only rank 0 has a log;
    the other ranks write nothing.
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
        identity: dict,
        replay: ReplayBuffer | None = None,
    ):
        """`dense_reward` is None if the method needs none. `started` is the run's time 0 (perf_counter).

        identity: fingerprints of the models that the checkpoints do not contain (record/identity.py).
        replay: the buffer that A's updates draw from. Episodes of a ReplayBuffer are transcribed.
        """
        self.replay = replay
        self.identity = identity
        self.agents: dict[str, object] = {policy.name: policy}  # A, and B once it has played
        self.args, self.folder, self.policy, self.world = args, folder, policy, world
        self.dense_reward, self.log, self.started = dense_reward, log, started
        self.bar: tqdm | None = None
        self.phase = "training"  # the name that the bar shows
        self.seconds: dict[str, float] = defaultdict(float)  # by log key, since the last line
        self.transcribed: set[tuple[str, int]] = set()  # (agent, loop) whose first update is in transcripts
        # Such tokens are left out with --max_centre, and clipped with SPEAR
        self.warned_of_centre = args.max_centre is not None or args.method == "spear"

    def timed(self, phase: str, call: Callable):
        """Return call() and add its time to the next line's seconds_<phase>."""
        started = time.perf_counter()
        result = call()
        self.seconds[f"seconds_{phase}"] += time.perf_counter() - started
        return result

    def collect(self, agent, tasks: int) -> list[Group]:
        """Play the next tasks (`World.collect`)."""
        self.agents[agent.name] = agent
        return self.timed("rollout", lambda: self.world.collect(agent, tasks))

    def score(self, groups: list[Group], **noise) -> None:
        """Set the dense scores (`DenseReward.score`)."""
        self.timed("score", lambda: self.dense_reward.score(groups, **noise))

    def learn(self, groups: list[Group]) -> dict[str, float]:
        """Train the implicit reward (`ImplicitReward.learn`)."""
        return self.timed("learn", lambda: self.dense_reward.learn(groups))

    def write(self, agent: str, updates: int, loop: int, values: dict) -> dict:
        """Log one line and return it."""
        line = {"agent": agent, "update": updates, "loop": loop}
        if agent == "explorer":
            line["explorer_update"] = len(self.log.of("explorer")) + 1
        line |= {"environment_episodes": self.world.episodes, "environment_turns": self.world.turns}
        line |= {**values, **self.seconds, "seconds_elapsed": time.perf_counter() - self.started}
        self.seconds.clear()
        self.log.write(line)
        return line

    def log_update(self, agent: str, groups: list[Group], metrics: dict, updates: int) -> None:
        """Log an update of A or B, or the episodes for the buffer. `updates` counts updates of A."""
        if self.log is None:
            return
        loop = (updates - (agent == "policy")) // self.args.k + 1
        rewards = {
            "policy": self.args.policy_reward,
            "explorer": self.args.explorer_reward,
            "buffer": "outcome",
        }
        line = self.write(agent, updates, loop, {**episode_metrics(groups, rewards[agent]), **metrics})
        if transcripts.is_kept(loop):
            self.transcribe_update(line, groups)
        if left_out := line["left_out_episodes"]:
            crashed = line["crashed_episodes"]
            print_line(
                f"update {updates}: {left_out} episodes of {agent} were left out, {crashed} of them crashed"
            )
        if agent == "policy" and self.args.off_policy_episodes and not line["replayed_episodes"]:
            print_line(f"update {updates}: the replay buffer is empty, so alpha is 0 for this update")
        largest = line.get("centre_max", 0.0)
        if largest > LARGE_CENTRE and not self.warned_of_centre:
            self.warned_of_centre = True
            print_line(
                f"warning: update {updates}: a replayed token has c = pi_old / pi_B = {largest:.1f} and may "
                f"outweigh all others; --max_centre {LARGE_CENTRE:g} leaves such tokens out. Later ones are "
                "only logged, as centre_max"
            )
        self.show(line)

    def show(self, line: dict) -> None:
        """Show the next phase in the progress bar, and after an update of A its metrics too."""
        self.name_phase(phase_after(line, self.args))
        if line["agent"] == "policy":
            advance(self.bar, success=line["success"], KL=line.get("kl_on", 0.0))

    def name_phase(self, phase: str) -> None:
        """Show the name of a phase in the progress bar, at once if there is a terminal."""
        self.phase = phase
        self.bar.set_description(phase, refresh=sys.stderr.isatty())

    def transcribe_update(self, line: dict, groups: list[Group]) -> None:
        """Append the episodes of a logged line that are kept to transcripts.jsonl, and replayed ones."""
        agent, loop, updates, k = line["agent"], line["loop"], line["update"], self.args.k
        episodes, kept = [member for group in groups for member in group.trajectories], []
        if (agent, loop) not in self.transcribed:
            self.transcribed.add((agent, loop))
            kept += transcripts.one_of_each(episodes)
        if agent == "explorer" and line["explorer_update"] % k == 0:
            kept += transcripts.misjudged(episodes)
        for episode in transcripts.distinct(kept):
            self.transcribe(episode, agent, updates, loop)
        if agent == "policy" and isinstance(self.replay, ReplayBuffer) and updates % k == 0:
            ages = {id(episode): age for episode, age in self.replay.last_draw}
            for episode in transcripts.one_of_each([episode for episode, _ in self.replay.last_draw]):
                self.transcribe(episode, "replayed", updates, loop, age=ages[id(episode)])

    def transcribe(self, episode: Trajectory, agent: str, updates: int, loop: int, **more) -> None:
        """Append an episode to transcripts.jsonl."""
        about = {"update": updates, "loop": loop, "agent": agent, **more}
        self.log.write_transcript(transcripts.transcript(episode, self.policy.chat.decode, **about))

    def evaluate(self, updates: int) -> None:
        """Play the panel of every split and log it. The progress bar shows this phase."""
        before = self.phase
        for split in self.args.eval_splits:
            if self.bar is not None:
                self.name_phase(f"loop {updates // self.args.k}, panel {split}")
            play = functools.partial(play_panel, self.args, self.world, self.policy, split)
            episodes, results = self.timed("eval", play)
            if self.log is None:
                continue
            line = self.write("evaluation", updates, updates // self.args.k, results)
            panels = sum(line["split"] == split for line in self.log.of("evaluation"))
            if transcripts.is_kept(panels):
                for episode in transcripts.of_panel(episodes):
                    self.transcribe(episode, "evaluation", updates, line["loop"], split=split)
            print_line(f"update {updates}: solves {line['success']:.1%} of {line['games']} games of {split}")
        if self.bar is not None:
            self.name_phase(before)

    def end_loop(self, updates: int, replay: ReplayBuffer) -> None:
        """Evaluate if that is due, and save a checkpoint. `rspo.train` calls it after every loop."""
        if updates // self.args.eval_every > (updates - self.args.k) // self.args.eval_every:
            self.evaluate(updates)
        distributed.check_alike(self.parameters())
        if self.log is None:
            return
        state = {
            "updates": updates,
            "world": self.world.state_dict(),
            "games": self.world.pool.env.fingerprint,
            "replay": replay.state_dict(),
            "identity": self.identity,
            "config": json.loads(config_text(self.args)),
            "ranks": distributed.world_size(),
            **self.log.state(),
            "seconds": time.perf_counter() - self.started,
        }
        tensors = self.policy.state_dicts()
        if self.args.dense_kind == "implicit":
            tensors |= self.dense_reward.state_dicts()
        saved = checkpoint.Checkpoint(tensors, state)
        checkpoint.write(self.folder, updates, saved, self.args.keep_checkpoints)

    def parameters(self) -> list:
        """Return the weights of A, of B, of their critics and of the implicit reward."""
        parameters = []
        if self.args.dense_kind == "implicit":
            parameters += self.dense_reward.agent.parameters
        for agent in self.agents.values():
            parameters += agent.parameters
            if agent.critic is not None:
                parameters += agent.critic.parameters
        return parameters


# --- panels -------------------------------------------------------------------------------------------------


def play_panel(args: Args, world: World, policy, split: str) -> tuple[list[Trajectory], dict]:
    """Play the fixed panel of a split. Return its episodes, and its results for the log."""
    games = min(args.eval_games, world.pool.env.size(split))
    episodes = world.evaluate(policy, split, games, args.eval_temperature)
    warn_of_crashes(episodes, f"games of {split}")
    results = {"split": split, "temperature": args.eval_temperature, **panel(episodes, world.task_types)}
    return episodes, results


def conclude(
    args: Args, folder: Path, log: Log, seconds: float, draw_curves: Callable, write_page: Callable
) -> None:
    """Write summary.json, curves.png and report.html, and print a table of start and end for each split.

    A failure to write report.html is a warning, because the page can be made at any later time.
    """
    panels = start_and_end(log.lines)
    newest = log.of("evaluation")[-1]
    summary = {
        "splits": {split: progress(start, end) for split, (start, end) in panels.items()},
        "seconds": seconds,
        "eval_temperature": args.eval_temperature,
        "updates": args.total_updates,
        "explorer_updates": len(log.of("explorer")),
        "episodes": newest["environment_episodes"],
        "turns": newest["environment_turns"],
        "method": args.method,
        "algo": args.algo,
        "seed": args.seed,
        "env": args.env,
        "model": args.model,
    }
    checkpoint.write_text(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    title = title_of(vars(args))
    draw_curves(log.lines, folder / "curves.png", title)
    for split, (start, end) in panels.items():
        games = f"{end['games']} games of {split}, temperature {args.eval_temperature}"
        print_line(f"\nsuccess in % on {games}: {title}")
        print_line(panel_table({"start": start, "end": end}))
    try:
        write_page(folder)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        print_line(f"warning: report.html was not made ({why}); python -m record.report {folder} makes it")
    else:
        print_line(f"page: {folder / 'report.html'}")
    print_line(f"curves: {folder / 'curves.png'}\npolicy: {folder / 'policy'}\nall files: {folder}")
