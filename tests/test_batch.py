"""Rows of episodes, columns of rows, batches."""

import random

import pytest
import torch
from device import DEVICE
from torch import tensor

from batch import Row, micro_batches, pad_rows, put, rows_of, split_rows, take
from buffer import Step, StopReason, Trajectory


def step(prompt_ids=(1, 2), action_ids=(3,), observation="room", **more):
    logprobs = [-0.5] * len(action_ids)
    return Step(list(prompt_ids), list(action_ids), logprobs, observation, "look", True, **more)


def episode(outcome=1.0, advantage=None, task="task", steps=None, stop=StopReason.FINISHED):
    steps = [step(advantage=advantage)] if steps is None else steps
    return Trajectory(task, "find the mug", "pick", steps, outcome, outcome == 1.0, stop)


# Rows of episodes


def three_turns(append_only):
    """Make three turns of ten action tokens (100.., 200.., 300..), ten tokens of observation between them."""
    steps, seen = [], [1, 2]
    for turn in (1, 2, 3):
        action = list(range(100 * turn, 100 * turn + 10))
        steps.append(step(seen, action))
        seen = seen + action + [9] * 10 if append_only else [1, 2, turn]
    return episode(steps=steps)


ACTIONS = [*range(100, 110), *range(200, 210), *range(300, 310)]


@pytest.mark.parametrize(("append_only", "lengths"), [(True, [52]), (False, [12, 13, 13])])
def test_the_action_mask_shows_exactly_the_sampled_tokens(append_only, lengths):
    rows = rows_of(three_turns(append_only))
    assert [len(row.input_ids) for row in rows] == lengths  # append-only: 2 + 10 + 10 + 10 + 10 + 10
    batch = pad_rows(rows, 0, DEVICE)
    assert batch.input_ids[batch.action_mask].tolist() == ACTIONS
    assert sum(row.action_tokens for row in rows) == 30
    assert [x for row in rows for x in tensor(row.input_ids)[row.action_mask].tolist()] == ACTIONS


def test_a_turn_starts_a_new_row_when_its_prompt_does_not_extend_the_last():
    steps = [
        step([1], [10, 11]),
        step([1, 10, 11, 2], [20]),
        step([1, 2], [30]),
        step([1, 2, 30, 4], [40, 41]),
    ]
    first, second = rows_of(episode(steps=steps))
    assert first.input_ids == [1, 10, 11, 2, 20] and first.spans == [(0, 1, 3), (1, 4, 5)]
    assert second.input_ids == [1, 2, 30, 4, 40, 41] and second.spans == [(2, 2, 3), (3, 4, 6)]


def test_rows_carry_the_advantages_and_log_probs_of_their_steps():
    steps = [
        step([1], [10, 11], advantage=0.5, behavior_logprobs=[-1.0, -2.0]),
        step([1, 10, 11, 2], [20], advantage=-0.5, behavior_logprobs=[-3.0]),
        step([1, 2], [30, 31], advantage=2.0, behavior_logprobs=[-4.0, -5.0]),
    ]
    first, second = rows_of(episode(steps=steps))
    assert first.advantages.tolist() == [0, 0.5, 0.5, 0, -0.5]
    assert first.behavior_logprobs.tolist() == [0, -1, -2, 0, -3]
    assert second.advantages.tolist() == [0, 0, 2, 2] and second.behavior_logprobs.tolist() == [0, 0, -4, -5]


def test_a_column_that_a_step_lacks_is_none():
    steps = [step([1], [10], advantage=0.5), step([1, 10, 2], [20])]
    (row,) = rows_of(episode(steps=steps))
    assert row.advantages is None and row.behavior_logprobs is None


def test_a_column_needs_one_number_per_action_token():
    with pytest.raises(ValueError, match="step 1 of task .* has 1 behavior_logprobs for 2 action tokens"):
        rows_of(episode(steps=[step(behavior_logprobs=[-1.0]), step((9,), (3, 4), behavior_logprobs=[-1.0])]))


def test_take_and_put_convert_columns_to_one_number_per_action_token():
    steps = [step([1], [10, 11]), step([1, 10, 11, 2], [20]), step([5], [30])]
    rows = rows_of(episode(steps=steps))
    put(rows, "old_values", tensor([1.0, 2.0, 3.0, 4.0]))
    assert [row.old_values.tolist() for row in rows] == [[0, 1, 2, 0, 3], [0, 4]]
    assert take(rows, "old_values").tolist() == [1, 2, 3, 4]
    with pytest.raises(RuntimeError):
        put(rows, "old_values", tensor([1.0, 2.0]))


def test_making_rows_does_not_change_the_steps():
    trajectory, untouched = three_turns(True), three_turns(True)
    rows_of(trajectory)[0].input_ids.append(77)
    assert trajectory == untouched


def test_rows_are_padded_on_the_right_and_columns_with_them():
    rows = [Row(episode(), [5, 6, 7], [(0, 1, 2)]), Row(episode(), [8, 9], [(0, 1, 2)])]
    batch = pad_rows(rows, 3, DEVICE)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 3]]
    assert batch.attention_mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.action_mask.tolist() == [[False, True, False], [False, True, False]]
    batch.store("old_logprobs", tensor([[0.0, -1, 0], [0, -2, 99]], requires_grad=True, device=DEVICE))
    assert rows[0].old_logprobs.tolist() == [0, -1, 0] and rows[1].old_logprobs.tolist() == [0, -2]
    assert not rows[0].old_logprobs.requires_grad and rows[0].old_logprobs.device.type == "cpu"
    assert batch.column("old_logprobs").device == batch.input_ids.device
    assert batch.column("old_logprobs").tolist() == [[0, -1, 0], [0, -2, 0]]
    for wrong in (torch.zeros(2, 1), torch.zeros(1, 3), torch.zeros(2, 4)):
        with pytest.raises(AssertionError):
            batch.store("old_logprobs", wrong)


def test_micro_batches_hold_every_row_once_within_the_token_budget():
    lengths = [3, 40, 7, 7, 1, 12, 5, 20, 2, 6]
    rows = [Row(episode(), [i] * length, [(0, 0, length)]) for i, length in enumerate(lengths)]
    batches = list(micro_batches(rows, 24, 99, DEVICE))
    assert sorted(row.input_ids[0] for batch in batches for row in batch.rows) == list(range(10))
    # 40 exceeds the budget and is a batch of its own; then 20 | 12, 7 | 7, 6, 5 | 3, 2, 1
    assert [list(batch.input_ids.shape) for batch in batches] == [[1, 40], [1, 20], [2, 12], [3, 7], [3, 3]]
    assert sum(int(batch.action_mask.sum()) for batch in batches) == sum(lengths)
    assert list(micro_batches([], 24, pad_id=99)) == []


def test_short_rows_with_one_prompt_are_in_one_micro_batch():
    def row(name, prompt, reply):
        return Row(episode(), [name] * prompt + [9] * reply, [(0, prompt, prompt + reply)])

    rows = [row(1, 6, 2), row(2, 6, 3), row(1, 6, 4), row(2, 6, 1), row(3, 2, 7), row(3, 2, 1)]
    batches = list(micro_batches(rows, 20, 0, DEVICE))
    names = [[(row.input_ids[0], len(row.input_ids)) for row in batch.rows] for batch in batches]
    # 10 and 8 tokens after prompt 1; 9 and 7 after prompt 2; the rows of prompt 3 are mostly reply
    assert names == [[(1, 10), (1, 8)], [(2, 9), (2, 7)], [(3, 9), (3, 3)]]
    widths = [batch.input_ids.shape for batch in micro_batches(rows, 27, 0, DEVICE)]
    assert [list(width) for width in widths] == [[2, 10], [3, 9], [1, 3]]  # 1, 1 | 2, 2, 3 | 3


def test_minibatches_have_about_equally_many_turns():
    rows = [row for n in (1, 2, 3, 2) for row in rows_of(episode(steps=[step()] * n))]
    runs = split_rows(rows, 4, random.Random(0))
    assert [sum(len(row.spans) for row in run) for run in runs] == [2, 2, 2, 2]
    assert sorted(id(row) for run in runs for row in run) == sorted(map(id, rows))


def test_no_minibatch_is_empty_if_there_are_enough_rows():
    chat = [[2, 6, 3, *[5, 1, 2, 7, 3] * i] for i in range(14)]  # an append-only chat of 14 turns is one row
    long = rows_of(episode(steps=[step(prompt, [5, 1]) for prompt in chat]))
    short = [row for _ in range(3) for row in rows_of(episode(steps=[step()]))]
    assert len(long) == 1
    for seed in range(20):
        runs = split_rows(long + short, 4, random.Random(seed))
        assert [len(run) for run in runs] == [1, 1, 1, 1]
    runs = split_rows(short, 5, random.Random(0))
    assert sum(map(len, runs)) == 3 and len(runs) == 5
    assert split_rows([], 3, random.Random(0)) == [[], [], []]
