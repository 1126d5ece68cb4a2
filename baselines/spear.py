"""SPEAR (arXiv 2509.22601): self-imitation of an agent's own best turns, a baseline: `--method spear`.

There is no agent B. A is trained on outcomes with GRPO or GiGPO. A buffer collects A's own turns with a
positive advantage. When it is full, one update also imitates turns from it, and the buffer is emptied:

    J = J_on + gamma_t J_SIL          gamma_t rises from 0 to gamma along a cosine
    J_SIL = mean over the tokens of the imitated turns of min(r A~, clip(r, 1 - eps, 1 + eps) A~)
    A~ = R - P50                      only turns with A~ > 0 are imitated

r = pi / pi_b, where pi_b is A when it played the turn. R is the return of the turn's episode. P50 is the
median of the mean returns of A's last groups. So A~ falls as A improves. Tokens with a high covariance of
log pi and A~ make A sure of itself too early, so the gradient of a few of them is dropped.

Left out:

* the intrinsic reward for tool calls: in our environments every action is a tool call;
* the changes of SPEAR's stronger GRPO, named Dr.BoT: no KL term, an asymmetric clip, a bound on the loss,
  advantages that are not divided by their std, the covariance clip on fresh tokens, and the removal of
  groups with little spread and of bad replies. So without imitation, SPEAR is `--method outcome`.

docs/DETAILS.md lists the differences from SPEAR's code. Shapes: N action tokens of the imitated turns.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from torch import Tensor

import rspo
from batch import Row, put, rows_of, take
from buffer import Group, Trajectory
from config import Config


def imitation_weight(update: int, config: Config) -> float:
    """gamma_t = gamma (1 - cos(pi t / T)) / 2, and gamma from t = T on

    update: t, the number of this update of A, from 1. T is `spear_warmup`.
    """
    progress = min(update / config.spear_warmup, 1.0)
    return config.spear_weight * (1 - math.cos(math.pi * progress)) / 2


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Cov = (log pi - mean log pi) (A~ - mean A~) of each token (N,), with means over the N tokens."""
    logprobs, advantages = logprobs.double(), advantages.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def tokens_to_drop(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, config: Config, rng: random.Random
) -> list[int]:
    """Return the places of the tokens whose gradient is dropped: a random `spear_cov_share` of the N tokens.

    The candidates are the tokens with spear_cov_low < Cov < spear_cov_high and r <= 1 + eps: the clip leaves
    these a gradient. If the share is above 0 and there are candidates, at least one is sampled.
    """
    if not config.spear_cov_share:
        return []
    cov = covariances(logprobs, advantages)
    in_band = (cov > config.spear_cov_low) & (cov < config.spear_cov_high)
    moves = (logprobs - behavior_logprobs).exp() <= 1 + config.clip_eps
    candidates = (in_band & moves).nonzero().flatten().tolist()
    count = max(1, int(config.spear_cov_share * len(logprobs)))
    return sorted(rng.sample(candidates, min(count, len(candidates))))


def drop_tokens(agent, episodes: list[Trajectory], config: Config, rng: random.Random) -> float:
    """Set A~ of the tokens to drop to 0, so that they give no gradient but still count in the mean.

    Their log pi is that of the agent before the update. Returns the share of dropped tokens.
    """
    rows = [row for episode in episodes for row in rows_of(episode)]
    rspo.score_rows(agent, rows, "old_logprobs", config)
    columns = [take(rows, name) for name in ("old_logprobs", "behavior_logprobs", "advantages")]
    dropped = tokens_to_drop(*columns, config, rng)
    advantages = columns[-1]
    advantages[dropped] = 0.0
    put(rows, "advantages", advantages)
    for row in rows:
        store_advantages(row)
    return len(dropped) / len(advantages)


def store_advantages(row: Row) -> None:
    """Store the row's advantages in its steps, one number per action token."""
    for index, start, end in row.spans:
        row.trajectory.steps[index].advantage = row.advantages[start:end].tolist()


@dataclass
class Kept:
    """The turns of one episode that are in the buffer."""

    trajectory: Trajectory  # its steps are only the turns with a positive advantage
    total: float  # R, the return of the whole episode
    update: int  # A's updates when the episode was played


class TurnBuffer:
    """A's own turns with a positive advantage, and the mean returns of A's last groups."""

    def __init__(self, config: Config):
        self.config = config
        self.episodes: list[Kept] = []
        self.group_means: deque[float] = deque(maxlen=config.spear_baseline_groups)

    def add(self, groups: list[Group], update: int) -> None:
        """Add the turns with a positive advantage, and the groups' mean returns.

        The steps have their advantages and log pi_b. A had `update` updates when the groups were played.
        """
        for group in groups:
            episodes = group.usable_episodes("outcome")
            totals = [sum(rspo.step_returns(episode, "outcome", self.config)) for episode in episodes]
            if totals:
                self.group_means.append(fmean(totals))
            for episode, total in zip(episodes, totals, strict=True):
                steps = [step for step in episode.steps if step.advantage > 0]
                if steps:
                    self.episodes.append(Kept(dataclasses.replace(episode, steps=steps), total, update))

    def draw(self, update: int, rng: random.Random) -> tuple[list[Trajectory], dict[str, float]]:
        """Return the turns to imitate in A's update number `update`, from 0, and metrics of the draw.

        First, turns that are older than `spear_age` leave the buffer. If at least `spear_buffer` of the turns
        left have A~ = R - P50 > 0, `spear_buffer` of these are sampled, and the buffer is emptied. The
        sampled steps have A~ as advantage. With fewer such turns, nothing is sampled.
        """
        self.episodes = [kept for kept in self.episodes if update - kept.update <= self.config.spear_age]
        if not self.group_means:
            return [], {}
        baseline = median(self.group_means)
        better = [kept for kept in self.episodes if kept.total > baseline]
        turns = []
        for place, kept in enumerate(better):
            turns += [(place, index) for index in range(len(kept.trajectory.steps))]
        metrics = {"spear_baseline": baseline, "spear_buffer_turns": len(turns), "spear_turns": 0}
        if len(turns) < self.config.spear_buffer:
            return [], metrics

        chosen = sorted(rng.sample(turns, self.config.spear_buffer))
        ages = [update - better[place].update for place, _ in chosen]
        metrics |= {"spear_turns": len(chosen), "replay_age_mean": fmean(ages), "replay_age_max": max(ages)}
        imitated = []
        for place, kept in enumerate(better):
            steps = []
            for index in [index for other, index in chosen if other == place]:
                step = kept.trajectory.steps[index]
                steps.append(dataclasses.replace(step, advantage=kept.total - baseline))
            if steps:
                imitated.append(dataclasses.replace(kept.trajectory, steps=steps))
        self.episodes = []
        return imitated, metrics

    def state_dict(self) -> dict:
        """Return the turns and the group means as plain data for JSON."""
        episodes = [{**vars(kept), "trajectory": kept.trajectory.to_dict()} for kept in self.episodes]
        return {"episodes": episodes, "group_means": list(self.group_means)}

    def load_state_dict(self, state: dict) -> None:
        """Continue from the output of `state_dict`."""
        self.episodes = []
        for kept in state["episodes"]:
            trajectory = Trajectory.from_dict(kept["trajectory"])
            self.episodes.append(Kept(trajectory, kept["total"], kept["update"]))
        self.group_means.clear()
        self.group_means.extend(state["group_means"])


def train(
    policy,
    world,
    dense_reward,
    config: Config,
    log: Callable[[str, list[Group], dict, int], None] = lambda agent, groups, metrics, updates: None,
    end_loop: Callable[[int, TurnBuffer], None] = lambda updates, replay: None,
    start: int = 0,
    replay: TurnBuffer | None = None,
) -> None:
    """Train `policy`, agent A, by SPEAR until it has had `total_updates` updates.

    The arguments are those of rspo.train. A loop is k updates. `dense_reward` is not used.
    """
    config = dataclasses.replace(config, clip_centre="one", max_centre=None)
    if replay is None:
        replay = TurnBuffer(config)
    for done in range(start, config.total_updates, config.k):
        for number in range(done, done + config.k):
            groups = world.collect(policy, config.on_policy_tasks)
            rspo.set_behavior_logprobs(policy, groups, config)

            rng = random.Random(f"{config.seed} imitation {number}")
            imitated, metrics = replay.draw(number, rng)
            gamma = imitation_weight(number + 1, config)
            metrics["spear_weight"] = gamma
            if imitated:
                metrics["spear_dropped"] = drop_tokens(policy, imitated, config, rng)

            rng = random.Random(f"{config.seed} minibatches {policy.name} {number}")
            weights = (1.0, gamma if imitated else 0.0)
            metrics |= rspo.update(policy, groups, imitated, "outcome", config, rng, weights)
            log("policy", groups, metrics, number + 1)
            replay.add(groups, number)  # `update` has set their advantages
        end_loop(done + config.k, replay)
