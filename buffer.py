"""The records of an episode and the replay buffer (RSPO Figure 2, section 4.2.1).

`Step`, `Trajectory` and `Group` are the records that every other file passes around. A trajectory holds both
rewards: `reward("dense")` sums the scores of its steps, `reward("outcome")` is the environment's verdict.
Neither overwrites the other. So the reward swap changes no record: it only reads the outcome instead of the
scores (`rspo.swap_rewards`).

Left out: priorities that decay, importance weights of the draw, and storage on disk. The buffer is emptied
after every loop or keeps only its newest groups, so it stays small.

Shapes: S steps (turns) of an episode, N episodes of a group.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, mean, pvariance


class StopReason(Enum):
    FINISHED = "finished"  # the environment ended the episode
    STEP_LIMIT = "step limit"  # the turns ran out: a failure
    TOKEN_LIMIT = "token limit"  # the next prompt would be too long for the model: a failure
    CRASHED = "crashed"  # the environment broke: not the policy's fault, so never trained on


@dataclass
class Step:
    """One turn: a prompt, the reply to it, and the action that the environment received."""

    prompt_ids: list[int]  # all tokens before the reply, as the policy saw them
    action_ids: list[int]  # the sampled tokens of the reply, with the end-of-turn token if it was sampled
    sampler_logprobs: list[float]  # one for each action token, at the sampling temperature
    observation: str  # raw text of the environment; GiGPO's anchor
    action: str  # sent to the environment; "" if the reply was invalid
    valid: bool  # the reply contained exactly one well-formed action
    truncated: bool = False  # the reply reached the token limit before it ended
    dense_score: float | None = None  # set by the dense reward (Eq. 5)
    progress_gain: float | None = None  # progress in this turn, if recorded (dense/shaped.py)
    behavior_logprobs: list[float] | None = None  # log pi_B of the action tokens, from the trainer's pass
    advantage: float | None = None  # computed inside the episode's whole group
    log_centre: float | None = None  # mean of log(pi_old / pi_B) over its tokens, when last replayed
    log_ratio: float | None = None  # mean of log(pi / pi_B), at the last optimizer step on them


@dataclass
class Trajectory:
    """One episode. `outcome` is the environment's verdict in [0, 1], never scaled, shaped or overwritten."""

    task_id: str
    task: str
    task_type: str
    steps: list[Step]
    outcome: float
    success: bool
    stop_reason: StopReason

    def step_rewards(self, reward: str) -> list[float]:
        """Return the reward of each of the S steps.

        "outcome" puts the outcome on the last step and 0 on the others; "dense" returns the dense scores.
        Raises ValueError for another name, or if a step has no dense score yet.
        """
        if reward == "outcome":
            return [0.0] * (len(self.steps) - 1) + [self.outcome] if self.steps else []
        if reward != "dense":
            raise ValueError(f"reward {reward!r} is unknown: it is 'outcome' or 'dense'")
        scores = [step.dense_score for step in self.steps]
        if None in scores:
            raise ValueError(
                f"step {scores.index(None)} of task {self.task_id} has no dense score: score it first"
            )
        return scores

    def reward(self, reward: str) -> float:
        """Return the episode's reward: its outcome, or the sum of its dense scores (Eq. 6)."""
        return sum(self.step_rewards(reward))

    @property
    def usable(self) -> bool:
        """True if the episode can be trained on: not crashed, at least one step, a finite outcome."""
        return self.stop_reason is not StopReason.CRASHED and bool(self.steps) and math.isfinite(self.outcome)

    @property
    def invalid_actions(self) -> int:
        return sum(not step.valid for step in self.steps)

    @property
    def repeated_states(self) -> int:
        """Count the steps whose observation already occurred earlier in this episode (Table 3)."""
        return len(self.steps) - len({step.observation for step in self.steps})

    def to_dict(self) -> dict:
        """Return plain data that survives JSON unchanged. `from_dict` restores an equal trajectory."""
        steps = [dict(vars(step)) for step in self.steps]
        return {**vars(self), "steps": steps, "stop_reason": self.stop_reason.value}

    @classmethod
    def from_dict(cls, data: dict) -> Trajectory:
        """Restore a trajectory from the output of `to_dict`."""
        steps = [Step(**step) for step in data["steps"]]
        return cls(**{**data, "steps": steps, "stop_reason": StopReason(data["stop_reason"])})


def endings(trajectories: list[Trajectory]) -> str:
    """Count the stop reasons in words, for example "2 x crashed, 14 x finished"."""
    counts = Counter(trajectory.stop_reason.value for trajectory in trajectories)
    return ", ".join(f"{count} x {end}" for end, count in sorted(counts.items()))


@dataclass
class Group:
    """The N episodes of one task. Advantages are computed inside the whole group."""

    task_id: str
    trajectories: list[Trajectory]

    def usable_episodes(self, reward: str = "outcome") -> list[Trajectory]:
        """Return the usable episodes whose `reward` ("outcome" or "dense") is finite."""
        episodes = [episode for episode in self.trajectories if episode.usable]
        return [episode for episode in episodes if math.isfinite(episode.reward(reward))]


@dataclass
class _Entry:
    """The unit that the replay buffer ranks and draws: one episode, or one whole group."""

    trajectories: list[Trajectory]
    group: int  # serial number of the group that the episodes come from
    score: list[float]  # rank under the strategy; the lowest is drawn first
    update: int = 0  # A's updates when the episodes were played
    draws: int = 0  # number of times that it was drawn so far


def _outcomes(trajectories: list[Trajectory]) -> list[float]:
    return [trajectory.outcome for trajectory in trajectories]


def _has_spread(trajectories: list[Trajectory]) -> bool:
    return len(set(_outcomes(trajectories))) > 1


class ReplayBuffer:
    """Episodes of B, or earlier ones of A, from which A's updates draw (D of Algorithm 1, section 4.2.1).

    Strategies, and which episodes they draw first:
        "reward"    highest outcome, then A_off > 0 (better than the mean of the episode's own group)
        "variance"  largest variance of the outcomes in the episode's group
        "random"    no preference, and draw counts are ignored too
        "positive"  only episodes with A_off > 0 and an outcome above their group's mean: fewest draws so far,
                    then largest A_off (not in the paper)
    Ties are common, as most outcomes are 0 or 1. A tie goes to the episode with the fewest draws so far. If
    these are equal too, a seeded random number decides.

    Drawing does not remove an episode. If the buffer holds five successes, all k updates learn from these
    five. If it holds many, the draw counts spread the updates over different ones.

    unit "episode" ranks and draws single episodes, "group" whole groups. With "group", groups with equal
    outcomes are skipped, because their advantages are 0.
    """

    def __init__(self, strategy: str = "reward", unit: str = "episode", seed: int | str = 0):
        if strategy not in ("reward", "variance", "random", "positive"):
            known = "'reward', 'variance', 'random' or 'positive'"
            raise ValueError(f"strategy {strategy!r} is unknown: it is {known}")
        if unit not in ("episode", "group"):
            raise ValueError(f"unit {unit!r} is unknown: it is 'episode' or 'group'")
        self.strategy, self.unit = strategy, unit
        self._entries: list[_Entry] = []
        self._groups_seen = 0
        self._random = random.Random(seed)
        self.last_draw: list[tuple[Trajectory, int]] = []  # the last draw's episodes and their ages

    def __len__(self) -> int:
        """Count the episodes in the buffer."""
        return sum(len(entry.trajectories) for entry in self._entries)

    def add(self, groups: list[Group], update: int = 0) -> None:
        """Add the usable episodes of whole groups. Their steps must have their advantages already.

        update: the number of A's updates when the episodes were played. `draw_metrics` reads it.
        """
        for group in groups:
            usable = group.usable_episodes()
            if not usable:
                continue
            units = [usable] if self.unit == "group" else [[episode] for episode in usable]
            for members in units:
                score = self._score(members, usable)
                self._entries.append(_Entry(members, self._groups_seen, score, update))
            self._groups_seen += 1

    def _score(self, members: list[Trajectory], group: list[Trajectory]) -> list[float]:
        """Return the entry's rank under the strategy: floats, compared in order, the lowest first."""
        if self.strategy == "random":
            return []
        if self.strategy == "variance":
            return [-pvariance(_outcomes(group))]
        if self.unit == "group":
            return [-fmean(_outcomes(group))]
        (episode,) = members
        advantages = [step.advantage or 0.0 for step in episode.steps]
        if self.strategy == "positive":
            # A_off alone is not enough: if one of eight failures has an invalid reply, the other seven have
            # A_off > 0. `mean` is exact: turns of equal advantage leave no rounding error.
            is_better = episode.outcome > mean(_outcomes(group))
            return [-mean(advantages) if is_better else 0.0]
        return [-episode.outcome, float(not sum(advantages) > 0)]

    def _best_first(self) -> Iterator[_Entry]:
        """Yield the entries from a heap, best first. Serial numbers differ, so entries are never compared."""
        heap = []
        for serial, entry in enumerate(self._entries):
            draws = 0 if self.strategy == "random" else entry.draws
            rank = [*entry.score, draws]
            if self.strategy == "positive":
                rank = [draws, *entry.score]
            heap.append((rank, self._random.random(), serial, entry))
        heapq.heapify(heap)
        while heap:
            yield heapq.heappop(heap)[-1]

    def sample(self, n: int) -> list[Trajectory]:
        """Draw the n best-ranked distinct episodes, or all if there are fewer.

        "positive" draws only the episodes that it accepts, even if they are fewer than n. With unit "group",
        whole groups are drawn as long as they fit into n. Raises ValueError if n < 0.
        """
        if n < 0:
            raise ValueError(f"{n} episodes cannot be drawn: give 0 or more")
        drawn: list[Trajectory] = []
        for entry in self._best_first():
            if self.unit == "group" and not _has_spread(entry.trajectories):
                continue
            if self.strategy == "positive" and entry.score[0] >= 0:
                continue
            if len(drawn) + len(entry.trajectories) <= n:
                drawn += entry.trajectories
                entry.draws += 1
        return drawn

    def keep_newest(self, groups: int) -> None:
        """Keep only the episodes of the newest `groups` groups."""
        if groups < 0:
            raise ValueError(f"{groups} groups cannot be kept: give 0 or more")
        newest = set(heapq.nlargest(groups, {entry.group for entry in self._entries}))
        self._entries = [entry for entry in self._entries if entry.group in newest]

    def draw_metrics(self, drawn: list[Trajectory], update: int) -> dict[str, float]:
        """Return the number of episodes in the buffer, and the mean and largest age of the drawn episodes.

        update: A's updates so far. The age of an episode is the number of A's updates since it was played.
        """
        played = {id(episode): entry.update for entry in self._entries for episode in entry.trajectories}
        ages = [update - played[id(episode)] for episode in drawn]
        self.last_draw = list(zip(drawn, ages, strict=True))
        if not drawn:
            return {}
        return {"buffer_episodes": len(self), "replay_age_mean": fmean(ages), "replay_age_max": max(ages)}

    def clear(self) -> None:
        """Drop all episodes."""
        self._entries = []

    def state_dict(self) -> dict:
        """Return everything that later draws depend on, episodes included, as plain data for JSON."""
        entries = []
        for entry in self._entries:
            trajectories = [trajectory.to_dict() for trajectory in entry.trajectories]
            entries.append({**vars(entry), "trajectories": trajectories})
        version, numbers, gauss = self._random.getstate()
        return {
            "entries": entries,
            "groups_seen": self._groups_seen,
            "random": [version, list(numbers), gauss],
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from the output of `state_dict`: the same episodes, draws and random numbers."""
        self._entries = []
        for entry in state["entries"]:
            trajectories = [Trajectory.from_dict(data) for data in entry["trajectories"]]
            self._entries.append(_Entry(**{**entry, "trajectories": trajectories}))
        self._groups_seen = state["groups_seen"]
        version, numbers, gauss = state["random"]
        self._random.setstate((version, tuple(numbers), gauss))
