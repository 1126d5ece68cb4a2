"""Episodes as rows of tokens for the loss, and rows as padded batches.

`rows_of` turns an episode into rows; one code path serves both contexts. A row carries the columns that the
loss reads. Every column describes the token at its own position; only `model.Base.states` shifts columns.
`take` and `put` convert between columns and one number per action token. Token ids reach the loss as the
sampler returned them: text is never tokenised a second time.

Left out: packing several episodes into one row (without a 4-D mask, packed rows attend across episodes), and
padding on the left.

Shapes: B rows, T tokens (columns) of the longest row, S steps of an episode, N action tokens of some rows.
"""

from __future__ import annotations

import bisect
import itertools
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from buffer import Trajectory
from scale import distributed


@dataclass
class Row:
    """One sequence for the loss: consecutive turns, each with a prompt that extends the turn before it.

    `spans` holds (step index, start, end): the action tokens of that step are columns start to end - 1.
    The tensors are columns (T,), 0 where the token is not an action token.
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
    sampler_logprobs: Tensor | None = field(default=None, repr=False)  # of fresh rows
    loss_mask: Tensor | None = field(default=None, repr=False)  # bool; None: all action tokens

    @property
    def action_mask(self) -> Tensor:
        """Return (T,) bool, True at action tokens."""
        mask = torch.zeros(len(self.input_ids), dtype=torch.bool)
        for _, start, end in self.spans:
            mask[start:end] = True
        return mask

    @property
    def action_tokens(self) -> int:
        """Count the action tokens."""
        return sum(end - start for _, start, end in self.spans)

    @property
    def loss_tokens(self) -> int:
        """Count the tokens in the loss: the action tokens, or those of the loss mask."""
        return self.action_tokens if self.loss_mask is None else int(self.loss_mask.sum())

    def column_of(self, name: str) -> Tensor | None:
        """Build a column (T,) from an attribute of the row's steps; None if a step has no value yet.

        A number per step fills all of the step's action tokens; a list holds one number per action token.
        """
        column = torch.zeros(len(self.input_ids))
        for index, start, end in self.spans:
            value = getattr(self.trajectory.steps[index], name)
            if value is None:
                return None
            if isinstance(value, list):
                if len(value) != end - start:
                    counts = f"{len(value)} {name} for {end - start} action tokens; each token needs one"
                    raise ValueError(f"step {index} of task {self.trajectory.task_id} has {counts}")
                value = torch.tensor(value)
            column[start:end] = value
        return column


def rows_of(trajectory: Trajectory) -> list[Row]:
    """Split an episode into rows: a turn joins the current row if its prompt extends it, else it opens a row.

    In this example of two turns, P are prompt tokens, a are action tokens, and ^ marks the action mask. A
    chat that only grows gives one row, a new prompt per turn gives one row per turn:

        turn 1: prompt P1 P2               reply a1 a2        full context, one row:
        turn 2: prompt P1 P2 a1 a2 P3      reply a3               P1 P2 a1 a2 P3 a3
                                                                        ^  ^     ^
        turn 1: prompt P1 P2               reply a1 a2        window context, two rows:
        turn 2: prompt P4 P5 P6            reply a3               P1 P2 a1 a2     P4 P5 P6 a3
                                                                        ^  ^               ^

    Nothing is cut: the rows together hold every action token of every step exactly once. The rows carry the
    steps' advantages and behavior log-probs where these are set.
    """
    rows: list[Row] = []
    for index, step in enumerate(trajectory.steps):
        start = len(step.prompt_ids)
        end = start + len(step.action_ids)
        if rows and step.prompt_ids[: len(rows[-1].input_ids)] == rows[-1].input_ids:
            row = rows[-1]
        else:
            row = Row(trajectory, [], [])
            rows.append(row)
        row.input_ids = step.prompt_ids + step.action_ids
        row.spans.append((index, start, end))
    for row in rows:
        row.advantages = row.column_of("advantage")
        row.behavior_logprobs = row.column_of("behavior_logprobs")
    return rows


def take(rows: list[Row], name: str) -> Tensor:
    """Concatenate a column's values at the action tokens of all rows (N,)."""
    columns = [(getattr(row, name), row.spans) for row in rows]
    return torch.cat([column[start:end] for column, spans in columns for _, start, end in spans])


def put(rows: list[Row], name: str, values: Tensor) -> None:
    """Set a column of each row from one value per action token (N,), as `take` returns them."""
    parts = iter(values.split([end - start for row in rows for _, start, end in row.spans]))
    for row in rows:
        column = torch.zeros(len(row.input_ids))
        for _, start, end in row.spans:
            column[start:end] = next(parts)
        setattr(row, name, column)


def gather_columns(rows: list[Row], places: list[int], names: list[str]) -> None:
    """Gather the named columns over ranks. This rank has set the columns of `rows[i]` for i in `places`.

    Every rank calls this with equal rows and names, and with its own places. A rank sets a column on all of
    its rows or on none. A column that no rank has set stays None.
    """
    if distributed.world_size() == 1:
        return
    local = set(places)
    mine = [row for i, row in enumerate(rows) if i in local]
    others = [row for i, row in enumerate(rows) if i not in local]
    is_mine = torch.tensor([i in local for i, row in enumerate(rows) for _ in range(row.action_tokens)])
    for name in names:
        values = torch.zeros(len(is_mine) + 1)  # the last one counts the ranks that have set the column
        if mine and getattr(mine[0], name) is not None:
            values[:-1][is_mine], values[-1] = take(mine, name), 1
        distributed.sum_tensor(values)
        if values[-1]:
            put(others, name, values[:-1][~is_mine])


def split_rows(rows: list[Row], parts: int, rng: random.Random) -> list[list[Row]]:
    """Shuffle the rows and cut them into minibatches of about equally many turns.

    No part is empty if there are at least as many rows as parts.
    """
    rows = rng.sample(rows, len(rows))
    ends = list(itertools.accumulate(len(row.spans) for row in rows))  # turns of all rows up to this one
    middles = [end - len(row.spans) / 2 for end, row in zip(ends, rows, strict=True)]
    cuts = [0]
    for part in range(1, parts):
        cut = bisect.bisect(middles, ends[-1] * part / parts) if rows else 0
        if len(rows) >= parts:
            cut = max(cut, cuts[-1] + 1)
            cut = min(cut, len(rows) - (parts - part))
        cuts.append(cut)
    cuts.append(len(rows))
    return [rows[start:end] for start, end in itertools.pairwise(cuts)]


@dataclass
class Batch:
    """Rows padded on the right to one width. All tensors are (B, T): input_ids long, the masks bool."""

    rows: list[Row]
    input_ids: Tensor
    attention_mask: Tensor
    action_mask: Tensor

    def column(self, name: str) -> Tensor:
        """Return the rows' column of that name, padded with 0 to (B, T), on the batch's device."""
        columns = [getattr(row, name) for row in self.rows]
        return pad_sequence(columns, batch_first=True).to(self.input_ids.device)

    def store(self, name: str, values: Tensor) -> None:
        """Set a column of each row from `values` (B, T), as a float tensor on the CPU."""
        assert values.shape == self.input_ids.shape, f"{name} is {tuple(values.shape)}, not (B, T)"
        for row, value in zip(self.rows, values.detach().float().cpu(), strict=True):
            setattr(row, name, value[: len(row.input_ids)].clone())


def pad_rows(rows: list[Row], pad_id: int, device: str | torch.device = "cpu") -> Batch:
    """Build a batch: fill shorter rows up with `pad_id` on the right."""
    # torch.frombuffer, because torch.tensor(list) takes five times as long
    ids = [torch.frombuffer(array("q", row.input_ids), dtype=torch.long) for row in rows]
    input_ids = pad_sequence(ids, batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    attention_mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
    masks = [row.action_mask if row.loss_mask is None else row.loss_mask for row in rows]
    action_mask = pad_sequence(masks, batch_first=True)
    return Batch(rows, input_ids.to(device), attention_mask.to(device), action_mask.to(device))


def micro_batches(
    rows: list[Row], tokens: int, pad_id: int, device: str | torch.device = "cpu"
) -> Iterator[Batch]:
    """Yield all rows in batches of similar length, longest first.

    Rows that have the same prompt, and are mostly prompt, stay together. A batch has at most `tokens` tokens,
    padding included; a longer row is a batch of its own.
    """
    families: dict[tuple | int, list[Row]] = {}  # rows with one prompt, which the model reads once
    for place, row in enumerate(sorted(rows, key=lambda row: len(row.input_ids), reverse=True)):
        prompt = row.spans[0][1]
        mostly_prompt = 2 * prompt >= len(row.input_ids)  # other rows differ too much in length
        families.setdefault(tuple(row.input_ids[:prompt]) if mostly_prompt else place, []).append(row)
    batch, width = [], 0
    for row in itertools.chain(*families.values()):
        width = max(width, len(row.input_ids))
        if batch and (len(batch) + 1) * width > tokens:
            yield pad_rows(batch, pad_id, device)
            batch, width = [], len(row.input_ids)
        batch.append(row)
    if batch:
        yield pad_rows(batch, pad_id, device)
