"""What an episode is, how it becomes rows for the loss, and the replay buffer (RSPO Figure 2, section 4.2.1).

`Step`, `Trajectory` and `Group` are the records every other file passes around. Token ids flow from the
sampler to the loss unchanged: text is never tokenised a second time. The reward swap is nothing more than the
choice of which reward is read, `trajectory.reward("dense")` or `trajectory.reward("outcome")`; neither
overwrites the other.

Shapes: B rows, T tokens (columns) of the longest row, S steps (turns) of an episode, N episodes of a group.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean, pvariance

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class StopReason(Enum):
    FINISHED = "finished"  # the environment ended the episode
    STEP_LIMIT = "step limit"  # it ran out of turns: a failure
    TOKEN_LIMIT = "token limit"  # its next prompt would not fit the model: a failure
    CRASHED = "crashed"  # the environment broke: not the policy's fault, kept out of training


@dataclass
class Step:
    """One turn: the tokens shown, the tokens answered, and what they meant to the environment."""

    prompt_ids: list[int]  # every token before this action, as the policy saw it
    action_ids: list[int]  # the sampled tokens, with the end-of-turn token if it was sampled
    sampler_logprobs: list[float]  # one for each action token, at the sampling temperature
    observation: str  # raw text acted on; GiGPO's anchor
    action: str  # what was sent to the environment, "" if the reply was invalid
    valid: bool  # the reply held one well-formed action
    truncated: bool = False  # the reply hit the token limit before it ended
    dense_score: float | None = None  # from the step reward model (Eq. 5)
    behavior_logprobs: list[float] | None = None  # log pi_B of the action tokens, from the trainer's pass
    advantage: float | None = None  # A_off, computed where the group was whole


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

    def step_rewards(self, which: str) -> list[float]:
        """The reward on each of the S steps: the outcome on the last one, or every step's own dense score."""
        if which == "outcome":
            return [0.0] * (len(self.steps) - 1) + [self.outcome] if self.steps else []
        if which != "dense":
            raise ValueError(f"reward {which!r} is unknown: it is 'outcome' or 'dense'")
        scores = [step.dense_score for step in self.steps]
        if None in scores:
            raise ValueError(
                f"step {scores.index(None)} of task {self.task_id} has no dense score: score it first"
            )
        return scores

    def reward(self, which: str) -> float:
        """The episode's reward: its outcome, or the sum of its dense step scores (Eq. 6)."""
        return sum(self.step_rewards(which))

    @property
    def usable(self) -> bool:
        """False for an episode that leaves its group: crashed, empty, or its outcome is not a number."""
        return self.stop_reason is not StopReason.CRASHED and bool(self.steps) and math.isfinite(self.outcome)

    @property
    def invalid_actions(self) -> int:
        return sum(not step.valid for step in self.steps)

    @property
    def repeated_states(self) -> int:
        """Steps whose observation already occurred earlier in this episode (Table 3)."""
        return len(self.steps) - len({step.observation for step in self.steps})

    def to_dict(self) -> dict:
        """Plain data that JSON gives back unchanged; `from_dict` makes an equal trajectory of it."""
        steps = [dict(vars(step)) for step in self.steps]
        return {**vars(self), "steps": steps, "stop_reason": self.stop_reason.value}

    @classmethod
    def from_dict(cls, data: dict) -> Trajectory:
        steps = [Step(**step) for step in data["steps"]]
        return cls(**{**data, "steps": steps, "stop_reason": StopReason(data["stop_reason"])})


def endings(trajectories: list[Trajectory]) -> str:
    """How often episodes ended in which way, in words."""
    counts = Counter(trajectory.stop_reason.value for trajectory in trajectories)
    return ", ".join(f"{count} x {end}" for end, count in sorted(counts.items()))


@dataclass
class Group:
    """The N episodes of one task. Advantages are computed while the group is whole."""

    task_id: str
    trajectories: list[Trajectory]


@dataclass
class Row:
    """One sequence for the loss: consecutive turns of an episode whose prompts extend each other.

    `spans` holds (step index, start, end): the step's action tokens are columns start..end-1. Every tensor is
    (T,) and describes the token at its column; off the action columns it is 0.
    """

    trajectory: Trajectory
    input_ids: list[int]
    spans: list[tuple[int, int, int]]
    old_logprobs: Tensor | None = field(default=None, repr=False)
    behavior_logprobs: Tensor | None = field(default=None, repr=False)
    ref_logprobs: Tensor | None = field(default=None, repr=False)
    advantages: Tensor | None = field(default=None, repr=False)
    old_values: Tensor | None = field(default=None, repr=False)
    returns: Tensor | None = field(default=None, repr=False)

    @property
    def action_mask(self) -> Tensor:
        """True on the columns of action tokens (T,)."""
        mask = torch.zeros(len(self.input_ids), dtype=torch.bool)
        for _, start, end in self.spans:
            mask[start:end] = True
        return mask

    @property
    def action_tokens(self) -> int:
        return sum(end - start for _, start, end in self.spans)

    def spread(self, per_step: list[list[float]] | list[float]) -> Tensor:
        """A number for each step of the episode, or one per action token, put on this row's columns (T,)."""
        assert len(per_step) == len(self.trajectory.steps), "one entry for each step of the whole episode"
        column = torch.zeros(len(self.input_ids))
        for index, start, end in self.spans:
            values = per_step[index]
            if isinstance(values, list):
                assert len(values) == end - start, f"step {index}: {len(values)} values, {end - start} tokens"
                values = torch.tensor(values)
            column[start:end] = values
        return column


def rows_of(trajectory: Trajectory) -> list[Row]:
    """The episode as rows: a turn joins the row before it if its prompt extends that row, else starts one.

    So one code path serves both contexts: append-only chat gives one row per episode, a fresh prompt per turn
    gives one row per turn. Nothing is cut: the action tokens of all rows are the action tokens of all steps.
    """
    rows: list[Row] = []
    for index, step in enumerate(trajectory.steps):
        start = len(step.prompt_ids)
        if rows and step.prompt_ids[: len(rows[-1].input_ids)] == rows[-1].input_ids:
            row = rows[-1]
            row.input_ids = step.prompt_ids + step.action_ids
        else:
            row = Row(trajectory, step.prompt_ids + step.action_ids, [])
            rows.append(row)
        row.spans.append((index, start, start + len(step.action_ids)))
    return rows


@dataclass
class Batch:
    """Rows padded on the right to one width, all (B, T): input_ids long, attention_mask, action_mask bool."""

    rows: list[Row]
    input_ids: Tensor
    attention_mask: Tensor
    action_mask: Tensor

    def column(self, name: str) -> Tensor:
        """The rows' tensors of that name (old_logprobs, ...), padded with 0 to (B, T), where the batch is."""
        columns = [getattr(row, name) for row in self.rows]
        return pad_sequence(columns, batch_first=True).to(self.input_ids.device)

    def store(self, name: str, values: Tensor) -> None:
        """Give each row its part of `values` (B, T), as a float tensor on the CPU."""
        assert values.shape == self.input_ids.shape, f"{name} is {tuple(values.shape)}, not (B, T)"
        for row, value in zip(self.rows, values.detach().float().cpu(), strict=True):
            setattr(row, name, value[: len(row.input_ids)].clone())


def pad_rows(rows: list[Row], pad_id: int, device: str | torch.device = "cpu") -> Batch:
    """The rows side by side, the shorter ones filled up with `pad_id` on the right."""
    # frombuffer because torch.tensor(list) takes five times as long
    ids = [torch.frombuffer(array("q", row.input_ids), dtype=torch.long) for row in rows]
    input_ids = pad_sequence(ids, batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    attention_mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
    action_mask = pad_sequence([row.action_mask for row in rows], batch_first=True)
    return Batch(rows, input_ids.to(device), attention_mask.to(device), action_mask.to(device))


def micro_batches(
    rows: list[Row], tokens: int, pad_id: int, device: str | torch.device = "cpu"
) -> Iterator[Batch]:
    """All rows in batches of like length, at most `tokens` padded tokens each (a longer row goes alone)."""
    batch: list[Row] = []  # its first row is its widest
    for row in sorted(rows, key=lambda row: len(row.input_ids), reverse=True):
        if batch and (len(batch) + 1) * len(batch[0].input_ids) > tokens:
            yield pad_rows(batch, pad_id, device)
            batch = []
        batch.append(row)
    if batch:
        yield pad_rows(batch, pad_id, device)


@dataclass
class _Entry:
    """What the replay buffer ranks, draws and evicts as one: an episode, or a whole group."""

    trajectories: list[Trajectory]
    group: int  # serial number of the group it came from, in the order of arrival
    score: list[float]  # what the strategy goes by, the lowest first
    draws: int = 0


def _outcomes(trajectories: list[Trajectory]) -> list[float]:
    return [trajectory.outcome for trajectory in trajectories]


def _has_spread(trajectories: list[Trajectory]) -> bool:
    return len(set(_outcomes(trajectories))) > 1


class ReplayBuffer:
    """The episodes that B collected, from which the updates of A draw (D of Algorithm 1, section 4.2.1)

    strategy "reward"    highest outcome first, then A_off > 0: better than the mean of its own group
             "variance"  largest variance of the outcomes in the group it came from first
             "random"    in any order
    unit     "episode"   episodes are ranked one by one
             "group"     whole groups are, "reward" by their mean outcome; one without spread is never drawn,
                         as a group of successes alone would come first and A_off = 0 in all of it

    Outcomes are 0 or 1, so ties are the rule. They go to what was drawn least often, then to the seeded
    generator, never to the order of arrival. Drawing does not remove: of five successes every update gets all
    five, of many each gets others. `capacity` counts episodes, whatever the unit; the last in rank go first.
    """

    def __init__(
        self, strategy: str = "reward", unit: str = "episode", capacity: int | None = None, seed: int = 0
    ):
        if strategy not in ("reward", "variance", "random"):
            raise ValueError(f"strategy {strategy!r} is unknown: choose 'reward', 'variance' or 'random'")
        if unit not in ("episode", "group"):
            raise ValueError(f"unit {unit!r} is unknown: choose 'episode' or 'group'")
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity {capacity} holds no episode: give 1 or more, or None for no limit")
        self.strategy, self.unit, self.capacity = strategy, unit, capacity
        self.rejected = 0  # episodes left out as not usable, since the start
        self._entries: list[_Entry] = []
        self._groups_seen = 0
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return sum(len(entry.trajectories) for entry in self._entries)

    def add(self, groups: list[Group]) -> None:
        """Takes in the usable episodes of whole groups, their advantages already on the steps."""
        for group in groups:
            usable = [trajectory for trajectory in group.trajectories if trajectory.usable]
            self.rejected += len(group.trajectories) - len(usable)
            if not usable:
                continue
            if self.unit == "group" and self.capacity is not None and len(usable) > self.capacity:
                raise ValueError(f"capacity {self.capacity} is below a group of {len(usable)}: raise it")
            for members in [[trajectory] for trajectory in usable] if self.unit == "episode" else [usable]:
                self._entries.append(_Entry(members, self._groups_seen, self._score(members, usable)))
            self._groups_seen += 1
        if self.capacity is not None and len(self) > self.capacity:
            self._entries = list(self._best_first())
            while len(self) > self.capacity:
                self._entries.pop()

    def _score(self, members: list[Trajectory], group: list[Trajectory]) -> list[float]:
        """What the strategy ranks an entry by, made of floats of which the lowest come first."""
        if self.strategy == "random":
            return []
        if self.strategy == "variance":
            return [-pvariance(_outcomes(group))]
        if self.unit == "group":  # those without spread last: they are never drawn, so they are evicted first
            return [float(not _has_spread(group)), -fmean(_outcomes(group))]
        (episode,) = members
        return [-episode.outcome, float(not sum(step.advantage or 0.0 for step in episode.steps) > 0)]

    def _best_first(self) -> Iterator[_Entry]:
        """The entries off a heap; their serial numbers keep it from ever comparing two entries."""
        heap = []
        for serial, entry in enumerate(self._entries):
            draws = 0 if self.strategy == "random" else entry.draws
            heap.append((entry.score, draws, self._random.random(), serial, entry))
        heapq.heapify(heap)
        while heap:
            yield heapq.heappop(heap)[-1]

    def sample(self, n: int) -> list[Trajectory]:
        """The n distinct episodes ranked first, or all there are; as whole groups, those that fit in n."""
        if n < 0:
            raise ValueError(f"{n} episodes cannot be drawn: ask for 0 or more")
        drawn: list[Trajectory] = []
        for entry in self._best_first():
            if self.unit == "group" and not _has_spread(entry.trajectories):
                continue
            if len(drawn) + len(entry.trajectories) <= n:
                drawn += entry.trajectories
                entry.draws += 1
        return drawn

    def keep_newest(self, groups: int) -> None:
        """Keeps what came from the newest `groups` groups (RSPO_H: A's own latest episodes)."""
        if groups < 0:
            raise ValueError(f"{groups} groups cannot be kept: give 0 or more")
        newest = set(heapq.nlargest(groups, {entry.group for entry in self._entries}))
        self._entries = [entry for entry in self._entries if entry.group in newest]

    def clear(self) -> None:
        self._entries = []

    def state_dict(self) -> dict:
        """All that later draws depend on, episodes included, as plain data that JSON gives back unchanged."""
        entries = [
            {**vars(entry), "trajectories": [trajectory.to_dict() for trajectory in entry.trajectories]}
            for entry in self._entries
        ]
        version, numbers, gauss = self._random.getstate()
        return {
            "entries": entries,
            "groups_seen": self._groups_seen,
            "rejected": self.rejected,
            "random": [version, list(numbers), gauss],
        }

    def load_state_dict(self, state: dict) -> None:
        self._entries = [
            _Entry(**{**entry, "trajectories": [Trajectory.from_dict(t) for t in entry["trajectories"]]})
            for entry in state["entries"]
        ]
        self._groups_seen, self.rejected = state["groups_seen"], state["rejected"]
        version, numbers, gauss = state["random"]
        self._random.setstate((version, tuple(numbers), gauss))
