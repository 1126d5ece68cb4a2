"""What an episode is, how it becomes rows for the loss, and the replay buffer (RSPO Figure 2, section 4.2.1).

`Step`, `Trajectory` and `Group` are the records every other file passes around. Token ids flow from the sampler to
the loss unchanged: text is never tokenised a second time. The reward swap is nothing more than the choice of which
reward is read, `trajectory.reward("dense")` or `trajectory.reward("outcome")`; neither overwrites the other.

Shapes: B rows, T tokens (columns) of the longest row, S steps (turns) of an episode, N episodes of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor


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
    behavior_logprobs: list[float] | None = (
        None  # log pi_B of each action token, from the trainer's own forward pass
    )
    advantage: float | None = None  # A_off, computed where the group was whole


@dataclass
class Trajectory:
    """One episode. `outcome` is the environment's verdict in [0, 1]; it is never scaled, shaped or overwritten."""

    task_id: str
    task: str
    task_type: str
    steps: list[Step]
    outcome: float
    success: bool
    stop_reason: StopReason

    def step_rewards(self, which: str) -> list[float]:
        """The reward on each of the S steps: the outcome sits on the last one, dense scores on their own (S,)."""
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
        """False for an episode that leaves its group: crashed, empty, or with an outcome that is not a number."""
        return self.stop_reason is not StopReason.CRASHED and bool(self.steps) and math.isfinite(self.outcome)

    @property
    def invalid_actions(self) -> int:
        return sum(not step.valid for step in self.steps)

    @property
    def repeated_states(self) -> int:
        """Steps whose observation already occurred earlier in this episode (Table 3)."""
        return len(self.steps) - len({step.observation for step in self.steps})


@dataclass
class Group:
    """The N episodes of one task. Advantages are computed here, while the group is whole."""

    task_id: str
    trajectories: list[Trajectory]


@dataclass
class Row:
    """One sequence for the loss: consecutive turns of an episode whose prompts extend each other.

    `spans` holds (step index, start, end): the step's action tokens are columns start..end-1. Every tensor is (T,) and
    describes the token at its column; off the action columns it is 0.
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
    def action_tokens(self) -> int:
        return sum(end - start for _, start, end in self.spans)

    def spread(self, per_step: list[list[float]] | list[float]) -> Tensor:
        """Values of the episode's steps (a number each, or one for each action token) put on this row's columns (T,)."""
        column = torch.zeros(len(self.input_ids))
        for index, start, end in self.spans:
            column[start:end] = torch.as_tensor(per_step[index], dtype=torch.float32)
        return column


def rows_of(trajectory: Trajectory) -> list[Row]:
    """The episode as rows: a turn joins the row before it when its prompt extends that row's tokens, else starts one.

    So one code path serves both contexts: append-only chat gives one row per episode, a fresh prompt per turn gives
    one row per turn. Nothing is cut: the action tokens of all rows are the action tokens of all steps.
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
    """Rows padded on the right to one width: input_ids (B, T) long; attention_mask, action_mask (B, T) bool."""

    rows: list[Row]
    input_ids: Tensor
    attention_mask: Tensor
    action_mask: Tensor

    def column(self, name: str) -> Tensor:
        """The rows' tensor of that name (old_logprobs, advantages, ...), padded with 0 to (B, T), on this device."""
        out = torch.zeros(self.input_ids.shape)
        for i, row in enumerate(self.rows):
            out[i, : len(row.input_ids)] = getattr(row, name)
        return out.to(self.input_ids.device)

    def store(self, name: str, values: Tensor) -> None:
        """Give each row its part of `values` (B, T), as a float tensor on the CPU."""
        for row, value in zip(self.rows, values.detach().float().cpu(), strict=True):
            setattr(row, name, value[: len(row.input_ids)].clone())


def pad_rows(rows: list[Row], pad_id: int, device: str | torch.device = "cpu") -> Batch:
    width = max(len(row.input_ids) for row in rows)
    input_ids = torch.full((len(rows), width), pad_id)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    action_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        input_ids[i, : len(row.input_ids)] = torch.tensor(row.input_ids)
        attention_mask[i, : len(row.input_ids)] = True
        for _, start, end in row.spans:
            action_mask[i, start:end] = True
    return Batch(rows, input_ids.to(device), attention_mask.to(device), action_mask.to(device))


def micro_batches(
    rows: list[Row], tokens: int, pad_id: int, device: str | torch.device = "cpu"
) -> Iterator[Batch]:
    """All rows in batches of about equal length, at most `tokens` padded tokens each (a longer row goes alone)."""
    batch: list[Row] = []
    for row in sorted(
        rows, key=lambda row: len(row.input_ids), reverse=True
    ):  # the first row of a batch is its widest
        if batch and (len(batch) + 1) * len(batch[0].input_ids) > tokens:
            yield pad_rows(batch, pad_id, device)
            batch = []
        batch.append(row)
    if batch:
        yield pad_rows(batch, pad_id, device)
