import functools
import math

import pytest
import torch
from device import DEVICE

import losses
from losses import (
    anchor_advantages,
    clipped_surrogate,
    discounted_returns,
    gae,
    group_advantages,
    kl_to_reference,
    masked_mean,
    value_loss,
    whiten,
)

NAN, INF = float("nan"), float("inf")
tensor = functools.partial(torch.tensor, device=DEVICE)


def close(actual, expected, tolerance=1e-5):
    expected = torch.as_tensor(expected, dtype=actual.dtype, device=actual.device)
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=tolerance, atol=tolerance)


def row(*numbers):
    """Make one row of a batch, (1, T)."""
    return tensor([numbers], dtype=torch.float32)


def everywhere(x):
    return torch.ones_like(x, dtype=torch.bool)


def with_gradient(loss, logprobs, *arguments):
    """Return the loss of each token, and the gradient of its sum with respect to the first argument."""
    logprobs = logprobs.clone().requires_grad_()
    value = loss(logprobs, *arguments)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    return value.detach(), gradient


def surrogate(*arguments):
    """Return the loss of `clipped_surrogate`, per token."""
    return clipped_surrogate(*arguments)[0]


def clipped(*arguments):
    """Return the mask of clipped tokens of `clipped_surrogate`."""
    return clipped_surrogate(*arguments)[1]


# Group advantages


def test_an_advantage_compares_an_episode_with_its_own_group():
    rewards, ids = tensor([1.0, 0, 0, 0, 1, 1, 1, 1]), tensor([7, 7, 7, 7, 3, 3, 3, 3])
    advantages = group_advantages(rewards, ids)
    # group 7: mean 1/4, variance (9/16 + 3/16) / 3 = 1/4, std 1/2: (1 - 1/4) / (1/2) = 1.5
    assert close(advantages[:4], [1.5, -0.5, -0.5, -0.5])
    assert advantages[4:].tolist() == [0, 0, 0, 0]


def test_two_successes_among_eight_episodes():
    # mean 1/4, variance (2 * 9/16 + 6 * 1/16) / 7 = 0.214286, std 0.462910
    advantages = group_advantages(
        tensor([1.0, 1, 0, 0, 0, 0, 0, 0]), torch.zeros(8, dtype=torch.long, device=DEVICE)
    )
    assert close(advantages, [1.620185] * 2 + [-0.540062] * 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_shuffled_rows_give_the_same_bits_shuffled(dtype, normalize_std):
    # On the CPU, where advantages are computed. A GPU adds in the order in which its threads arrive
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(40, generator=generator, dtype=dtype)
    ids = torch.randint(0, 5, (40,), generator=generator)
    advantages = group_advantages(rewards, ids, normalize_std)
    for _ in range(50):
        shuffled = torch.randperm(40, generator=generator)
        again = group_advantages(rewards[shuffled], ids[shuffled], normalize_std)
        assert torch.equal(again, advantages[shuffled])


def test_uneven_interleaved_groups_only_centred():
    rewards, ids = tensor([1.0, 1, 0, 0, 0]), tensor([0, 1, 0, 1, 0])
    # group 0 is [1, 0, 0], mean 1/3; group 1 is [1, 0], mean 1/2
    assert close(group_advantages(rewards, ids, False), [2 / 3, 1 / 2, -1 / 3, -1 / 2, -1 / 3])


def test_within_each_group_advantages_sum_to_zero_with_unit_std():
    rewards = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ids = torch.arange(5, device=DEVICE).repeat_interleave(8)
    advantages = group_advantages(rewards.flatten(), ids).reshape(5, 8)
    assert advantages.sum(1).abs().max() < 1e-5
    assert (advantages.std(1) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -9.7, 1e8 / 3])
def test_equal_rewards_give_exactly_zero_beside_a_group_with_spread(dtype, value):
    rewards = tensor([0.0] * 3 + [1.0] + [value] * 7, dtype=dtype)
    advantages = group_advantages(rewards, tensor([0] * 4 + [1] * 7))
    assert advantages[4:].tolist() == [0] * 7
    assert close(advantages[:4], [-0.5, -0.5, -0.5, 1.5])


def test_a_group_of_one_gets_zero():
    assert group_advantages(tensor([5.0, -3.0]), tensor([0, 1])).tolist() == [0, 0]


def test_a_reward_that_is_not_finite_leaves_its_group():
    rewards = tensor([1.0, NAN, 0.0, INF, 0.0, -INF, NAN])
    # [1, 0, 0] stay: mean 1/3, std sqrt((4/9 + 1/9 + 1/9) / 2) = 0.577350; group 1 holds only the last NaN
    advantages = group_advantages(rewards, tensor([0, 0, 0, 0, 0, 0, 1]))
    assert close(advantages, [1.154701, 0, -0.577350, 0, -0.577350, 0, 0])
    assert advantages[[1, 3, 5, 6]].tolist() == [0, 0, 0, 0]


def test_the_epsilon_is_added_to_the_standard_deviation():
    # std of [0, sqrt(2) 1e-6] is 1e-6, so A = 0.707107e-6 / (1e-6 + 1e-6)
    rewards = tensor([0.0, math.sqrt(2) * 1e-6], dtype=torch.float64)
    assert close(group_advantages(rewards, tensor([0, 0])), [-0.353553, 0.353553])


def test_advantages_of_low_precision_rewards_are_fp32_and_of_doubles_double():
    ids = tensor([0, 0])
    assert group_advantages(tensor([1.0, 0.0], dtype=torch.bfloat16), ids).dtype is torch.float32
    assert group_advantages(tensor([1.0, 0.0], dtype=torch.float64), ids).dtype is torch.float64
    assert group_advantages(tensor([]), tensor([], dtype=torch.long)).tolist() == []


# GiGPO


def test_step_returns_are_discounted_to_the_end_of_the_episode():
    assert close(discounted_returns(tensor([0.0, 0, 10]), 0.95), [9.025, 9.5, 10])
    assert close(discounted_returns(tensor([1.0, 2, 4]), 0.5), [1 + 0.5 * 4, 2 + 0.5 * 4, 4])
    assert close(discounted_returns(tensor([1.0, 2, 4]), 1.0), [7.0, 6, 4])


def test_anchor_groups_never_cross_tasks():
    returns, anchors = tensor([1.0, 5.0, 0.0]), [("g1", "room"), ("g2", "room"), ("g1", "room")]
    assert close(anchor_advantages(returns, anchors, normalize_std=False), [0.5, 0, -0.5])
    # std of [1, 0] is 0.707107
    assert close(anchor_advantages(returns, anchors), [0.707106, 0, -0.707106])
    assert anchor_advantages(returns, anchors)[1] == 0


def test_a_state_seen_twice_in_one_episode_is_compared_with_itself():
    returns, anchors = tensor([4.0, 7.0, 8.0]), [("g", "hall"), ("g", "desk"), ("g", "hall")]
    assert close(anchor_advantages(returns, anchors, False), [-2.0, 0, 2])  # hall: mean of 4 and 8 is 6


def test_any_hashable_can_be_an_anchor():
    anchors = [None, (1, "a"), b"x", 3, None]
    assert close(anchor_advantages(tensor([1.0, 2, 3, 4, 5]), anchors, False), [-2.0, 0, 0, 0, 2])


# PPO's advantages


def test_gae_by_hand():
    # delta = [-0.1 + 0.18, -0.2 + 0.27, -0.3 + 0.36, 1 - 0.4] = [0.08, 0.07, 0.06, 0.6]; A = delta + 0.72 A'
    advantages, returns = gae(tensor([0.0, 0, 0, 1]), tensor([0.1, 0.2, 0.3, 0.4]), 0.9, 0.8)
    assert close(advantages, [0.385453, 0.424240, 0.492, 0.6])
    assert close(returns, [0.485453, 0.624240, 0.792, 1.0])


def test_undiscounted_gae_is_the_future_reward_minus_the_value():
    advantages, returns = gae(tensor([1.0, 0, 3]), tensor([0.5, 0.25, 8]), 1.0, 1.0)
    assert close(advantages, [4 - 0.5, 3 - 0.25, 3 - 8.0])
    assert close(returns, [4.0, 3, 3])


def test_the_value_after_the_last_token_is_0():
    rewards, values = tensor([0.0, 0.0]), tensor([0.5, 0.6])
    # delta = [0.9 * 0.6 - 0.5, 0 - 0.6] = [0.04, -0.6], A_0 = 0.04 - 0.72 * 0.6
    assert close(gae(rewards, values, 0.9, 0.8)[0], [-0.392, -0.6])


def test_gae_keeps_a_nan_visible():
    advantages, _ = gae(tensor([0.0, NAN, 1.0]), tensor([0.0, 0, 0]), 1.0, 1.0)
    assert advantages.isnan().tolist() == [True, True, False]


def test_whitening_uses_the_sample_standard_deviation_of_the_masked_tokens():
    mask = tensor([[True, False], [True, False]])
    # mean 2, std of [1, 3] with ddof 1 is 1.414214
    assert close(whiten(tensor([[1.0, 99.0], [3.0, NAN]]), mask), [[-0.707106, 0], [0.707106, 0]])


def test_whitening_needs_two_tokens():
    advantages = row(3.0, 7.0)
    assert whiten(advantages, tensor([[True, False]])).tolist() == [[3, 0]]
    assert whiten(advantages, tensor([[False, False]])).tolist() == [[0, 0]]


def test_replayed_tokens_are_whitened_by_the_on_policy_statistics_without_entering_them():
    mask, on_policy = tensor([[True, True, True, False]]), tensor([[True, True, False, False]])
    # mean 2 and std 1.414214 of [1, 3]: (9 - 2) / 1.414214 = 4.949747
    assert close(whiten(row(1, 3, 9, 5), mask, on_policy), [[-0.707106, 0.707106, 4.949747, 0]])
    one = tensor([[True, False, False, False]])
    assert whiten(row(1, 3, 9, 5), mask, one).tolist() == [[1, 3, 9, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whitening_without_spread_only_centres(dtype):
    on_policy = tensor([[True] * 7 + [False]])
    whitened = whiten(tensor([[0.1] * 7 + [2.1]], dtype=dtype), everywhere(on_policy), on_policy)
    assert whitened[0, :7].tolist() == [0] * 7
    assert close(whitened[0, 7:], [2.0])


# The clipped surrogate


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [
        (1, 2.0, -1.2, 0),  # cut at 1 + 0.2
        (1, 1.1, -1.1, -1.1),
        (1, 0.5, -0.5, -0.5),  # no cut from below for a good action
        (-1, 0.5, 0.8, 0),  # cut at 1 - 0.2
        (-1, 0.9, 0.9, 0.9),
        (-1, 2.0, 2.0, 2.0),  # no cut from above for a bad one
        (-3, 2.0, 6.0, 6.0),
        (0, 2.0, 0, 0),
    ],
)
def test_on_policy_rows_reduce_to_ppo(advantage, ratio, loss, gradient):
    old = row(-1.3)
    arguments = old, old, row(advantage), everywhere(old), 0.2
    value, slope = with_gradient(surrogate, old + math.log(ratio), *arguments)
    assert close(value, [[loss]]) and close(slope, [[gradient]])


def test_the_clip_moves_with_its_centre():
    # c = 2 and eps = 0.2: cut at 1.8 and 2.2; pi/pi_old = 0.85, 0.95, 1.05, 1.15 is r = 1.7, 1.9, 2.1, 2.3
    old = row(-1, -1, -1, -1)
    logprobs, behavior, mask = old + row(0.85, 0.95, 1.05, 1.15).log(), old - math.log(2), everywhere(old)
    value, slope = with_gradient(surrogate, logprobs, old, behavior, row(1, 1, 1, 1), mask, 0.2)
    assert close(value, [[-1.7, -1.9, -2.1, -2.2]]) and close(slope, [[-1.7, -1.9, -2.1, 0]])
    value, slope = with_gradient(surrogate, logprobs, old, behavior, row(-2, -2, -2, -2), mask, 0.2)
    assert close(value, [[3.6, 3.8, 4.2, 4.6]]) and close(slope, [[0, 3.8, 4.2, 4.6]])


def test_a_replayed_token_that_a_clip_centred_at_1_would_drop_keeps_its_gradient():
    # c = e^0.3 = 1.349859: cut at 1.549859, not 1.2. r = e^0.31 = 1.363425 is below, e^0.5 = 1.648721 above
    arguments = row(-0.7, -0.7), row(-1, -1), row(1, 1), everywhere(row(1, 1)), 0.2
    value, slope = with_gradient(surrogate, row(-0.69, -0.5), *arguments)
    assert close(value, [[-1.363425, -1.549859]])
    assert close(slope, [[-1.363425, 0]])
    # the control: cut at 1.2, below both
    value, slope = with_gradient(surrogate, row(-0.69, -0.5), *arguments, False)
    assert close(value, [[-1.2, -1.2]]) and close(slope, [[0, 0]])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_before_the_first_step_nothing_is_clipped_for_any_behaviour_policy(advantage):
    # c from e^-50 to e^10, some of them beyond the cut at e^-20
    old = torch.linspace(-60, 0, 601, device=DEVICE).unsqueeze(0)
    arguments = old, torch.full_like(old, -10.0), torch.full_like(old, advantage), everywhere(old), 0.2
    value, slope = with_gradient(surrogate, old, *arguments)
    assert torch.equal(value, slope) and (slope * advantage < 0).all()
    assert not clipped(old, *arguments).any()


@pytest.mark.parametrize(
    ("c", "low", "high"),
    [(0.1, -1, 3), (0.5, 0.6, 1.4), (1, 0.8, 1.2), (2, 0.9, 1.1), (10, 0.98, 1.02)],
)
def test_the_trust_region_in_terms_of_the_old_policy(c, low, high):
    """The policy may move by eps / c from the old one: [low, high] in pi / pi_old."""
    old = row(-2, -2)
    arguments = old, old - math.log(c), row(1, 1), everywhere(old), 0.2
    assert clipped(old + row(high * 0.999, high * 1.001).log(), *arguments).tolist() == [[False, True]]
    arguments = old, old - math.log(c), row(-1, -1), everywhere(old), 0.2
    below = [1e-6, 1e-6] if low < 0 else [low * 1.001, low * 0.999]
    assert clipped(old + row(*below).log(), *arguments).tolist() == [[False, low > 0]]


def test_the_clipped_mask_marks_exactly_the_tokens_without_gradient():
    generator = torch.Generator().manual_seed(2)
    logprobs, old, behavior, advantages = (
        torch.randn(4, 4, 200, generator=generator).to(DEVICE) * 0.4
    ).unbind(0)
    mask = torch.rand(4, 200, generator=generator).to(DEVICE) < 0.7
    arguments = old, behavior, advantages, mask, 0.2
    _, slope = with_gradient(surrogate, logprobs, *arguments)
    hit = clipped(logprobs, *arguments)
    assert torch.equal(hit, (slope == 0) & mask)
    assert 100 < hit.sum() < 400


def test_the_clipped_mask_depends_on_the_sign_of_the_advantage_and_on_the_mask():
    ratios, old = row(0.5, 1.0, 1.5, 1.5), row(0, 0, 0, 0)
    mask = tensor([[True, True, True, False]])
    for advantage, expected in [(1.0, [0, 0, 1, 0]), (-1.0, [1, 0, 0, 0]), (0.0, [0, 0, 0, 0])]:
        hit = clipped(ratios.log(), old, old, torch.full_like(old, advantage), mask, 0.2)
        assert hit.tolist() == [[bool(x) for x in expected]]


def test_no_gradient_reaches_the_old_and_the_behaviour_policy():
    logprobs, old, behavior = (tensor([[-x] * 3], requires_grad=True) for x in (1.0, 1.1, 1.3))
    surrogate(logprobs, old, behavior, row(1, -1, 2), everywhere(old), 0.2).sum().backward()
    kl_to_reference(logprobs, old, everywhere(old)).sum().backward()
    assert logprobs.grad is not None and old.grad is None and behavior.grad is None


def test_low_precision_inputs_are_computed_in_fp32():
    half = {name: tensor([[x]], dtype=torch.bfloat16) for name, x in [("old", -1.0), ("behavior", -6.0)]}
    one, mask = tensor([[1.0]], dtype=torch.bfloat16), tensor([[True]])
    loss = surrogate(half["old"], half["old"], half["behavior"], one, mask, 0.2)
    assert loss.dtype is torch.float32
    assert close(loss, [[-148.413159]], 1e-6)  # e^5; the nearest bfloat16 is 148
    assert kl_to_reference(one, one, mask).dtype is torch.float32
    assert value_loss(one, one, one, mask, 0.5).dtype is torch.float32


# KL to the reference


def test_kl_by_hand():
    # d = log 2: 2 - 1 - 0.693147; d = -log 2: 0.5 - 1 + 0.693147; slopes 1 - e^d
    arguments = row(math.log(2) - 1, -math.log(2) - 1, -1), everywhere(row(1, 1, 1))
    value, slope = with_gradient(kl_to_reference, row(-1, -1, -1), *arguments)
    assert close(value, [[0.306853, 0.193147, 0]])
    assert close(slope, [[-1, 0.5, 0]])
    assert value[0, 2] == 0 and slope[0, 2] == 0


def test_kl_estimates_one_direction_and_as_a_loss_follows_the_other():
    """p = [0.7, 0.3] against ref = [0.5, 0.5]: KL(p || ref) = 0.08228, d KL(ref || p) / d logit = 0.2."""
    logit = tensor(math.log(0.7 / 0.3), requires_grad=True)
    logprobs = torch.stack([logit, tensor(0.0)]).log_softmax(0).unsqueeze(0)
    kl = kl_to_reference(logprobs, row(0.5, 0.5).log(), everywhere(row(1, 1)))
    expectation = (logprobs.exp().detach() * kl).sum()
    expectation.backward()
    assert close(expectation.detach(), 0.082283)
    assert close(logit.grad, 0.2)


# The value loss


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        (0.3, 0.245, -0.7),  # inside the clip: (0.3 - 1)^2 / 2
        (1.0, 0.125, 0),  # held at 0.5: (0.5 - 1)^2 / 2, and nothing more to gain
        (-1.0, 2.0, -2.0),  # moving away: (-1 - 1)^2 / 2 exceeds the clipped 1.125
    ],
)
def test_the_value_may_gain_by_a_move_of_at_most_the_clip(value, loss, gradient):
    arguments = row(0.0), row(1.0), everywhere(row(1)), 0.5  # old value 0, return 1
    result, slope = with_gradient(value_loss, row(value), *arguments)
    assert close(result, [[loss]]) and close(slope, [[gradient]])


# Overflow, masks, NaN

MASK = tensor([[True, False, True], [False, True, True]])
LOSSES = {
    "surrogate": lambda *x: surrogate(*x, MASK, 0.2),
    "kl": lambda logprobs, ref, *_: kl_to_reference(logprobs, ref, MASK),
    "value": lambda values, old, returns, _: value_loss(values, old, returns, MASK, 0.5),
    "mean": lambda values, *_: masked_mean(values, MASK, 4),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [1e4, -1e4, INF, -INF, NAN])
def test_masked_values_change_nothing(name, garbage):
    generator = torch.Generator().manual_seed(3)
    clean = torch.randn(4, 2, 3, generator=generator).to(DEVICE).unbind(0)
    dirty = [torch.where(MASK, x, garbage) for x in clean]
    value, slope = with_gradient(LOSSES[name], *clean)
    again, slope_again = with_gradient(LOSSES[name], *dirty)
    assert torch.equal(value, again) and torch.equal(slope, slope_again)
    assert (slope[~MASK] == 0).all() and (slope[MASK] != 0).any()
    if name != "mean":
        assert (value[~MASK] == 0).all()
    if name == "surrogate":
        assert not clipped(*dirty, MASK, 0.2)[~MASK].any()
        assert torch.equal(whiten(clean[0], MASK), whiten(dirty[0], MASK))


def test_a_masked_log_ratio_of_300_changes_nothing():
    mask, old = tensor([[True, False]]), row(0, 0)
    value, slope = with_gradient(surrogate, row(0, 300), old, old, row(1, 1), mask, 0.2)
    assert masked_mean(value, mask, 1) == -1
    assert slope.tolist() == [[-1, 0]]


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("old", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("behavior", [-200.0, 0.0, 200.0])
def test_extreme_log_ratios_leave_losses_and_gradients_finite(advantage, old, behavior):
    arguments = row(old), row(behavior), row(advantage), everywhere(row(0)), 0.2
    for result in with_gradient(surrogate, row(0), *arguments):
        assert result.isfinite().all()
    for result in with_gradient(kl_to_reference, row(0), row(old), everywhere(row(0))):
        assert result.isfinite().all()


def test_a_log_ratio_is_clamped_at_20():
    arguments = row(-200), row(-200), row(-1), everywhere(row(0)), 0.2
    assert close(surrogate(row(0), *arguments), [[485165195.41]], 1e-6)  # e^20


def test_clamping_leaves_ordinary_ratios_bit_identical(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    draws = torch.rand(3, 8, 100, generator=generator).to(DEVICE)
    logprobs, old, behavior = (draws * 5).unbind(0)  # |difference| < 5
    advantages = torch.randn(8, 100, generator=generator).to(DEVICE)
    arguments = old, behavior, advantages, everywhere(old), 0.2
    cut = [
        *with_gradient(surrogate, logprobs, *arguments),
        kl_to_reference(logprobs, old, arguments[3]),
    ]
    monkeypatch.setattr(losses, "MAX_LOG_RATIO", INF)
    uncut = [
        *with_gradient(surrogate, logprobs, *arguments),
        kl_to_reference(logprobs, old, arguments[3]),
    ]
    assert all(torch.equal(x, y) for x, y in zip(cut, uncut, strict=True))


@pytest.mark.parametrize("argument", range(4))
def test_a_nan_on_an_action_token_stays_visible(argument):
    inputs = [row(-1, -1), row(-1, -1), row(-2, -2), row(1, 1)]
    inputs[argument][0, 0] = NAN
    mask = everywhere(inputs[0])
    loss = surrogate(*inputs, mask, 0.2)
    assert loss.isnan().tolist() == [[True, False]]
    assert masked_mean(loss, mask, 2).isnan()
    if argument < 2:
        assert kl_to_reference(inputs[0], inputs[1], mask).isnan().tolist() == [[True, False]]
    assert value_loss(inputs[0], inputs[1], inputs[3], mask, 0.5).isnan()[0, 0] == (argument in (0, 1, 3))


def test_shapes_are_never_broadcast_and_masks_are_bool():
    x, mask = torch.zeros(2, 3, device=DEVICE), torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    for wrong in (x[:, :1], x[0], x.long()):
        for i in range(4):
            inputs = [x] * 4
            inputs[i] = wrong
            with pytest.raises(AssertionError):
                surrogate(*inputs, mask, 0.2)
            with pytest.raises(AssertionError):
                clipped(*inputs, mask, 0.2)
            if i < 2:
                with pytest.raises(AssertionError):
                    kl_to_reference(*inputs[:2], mask)
            if i < 3:
                with pytest.raises(AssertionError):
                    value_loss(*inputs[:3], mask, 0.5)
        with pytest.raises(AssertionError):
            whiten(wrong, mask)
        with pytest.raises(AssertionError):
            masked_mean(wrong, mask, 6)
    for use in (
        lambda: masked_mean(x, mask.float(), 6),
        lambda: masked_mean(x, mask, tensor([6, 6])),
        lambda: whiten(x, mask, mask[:1]),
        lambda: group_advantages(x[0], tensor([0, 0])),
        lambda: group_advantages(x[0], x[0]),
        lambda: anchor_advantages(x[0], ["a", "b"]),
        lambda: discounted_returns(x, 1.0),
        lambda: gae(x[0], x[0, :2], 1.0, 1.0),
    ):
        with pytest.raises(AssertionError):
            use()


# One mean for each source and optimizer step


def test_micro_batches_add_up_to_one_mean():
    one, three = (
        masked_mean(row(1), everywhere(row(1)), 4),
        masked_mean(row(0, 0, 0), everywhere(row(0, 0, 0)), 4),
    )
    assert one + three == 0.25  # one token of loss 1 among four; the mean of two means would be 0.5


def test_a_mean_over_no_tokens_is_zero():
    values = row(3, NAN)
    for count in (0, tensor(0)):
        mean, slope = with_gradient(
            lambda x, count=count: masked_mean(x, everywhere(x), count), values[:, :1]
        )
        assert mean == 0 and slope == 0
    assert masked_mean(values, tensor([[True, False]]), tensor(2)) == 1.5


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradient_does_not_depend_on_the_split_of_rows(size):
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(8, 6, 3, generator=generator, dtype=torch.float64).to(DEVICE)
    columns = torch.randn(4, 8, 6, generator=generator, dtype=torch.float64).to(DEVICE)
    old, behavior, ref, advantages = columns.unbind(0)
    mask = torch.arange(6, device=DEVICE) < tensor([1, 6, 2, 5, 3, 4, 6, 1]).unsqueeze(
        1
    )  # rows of different lengths

    def gradient(rows):
        weights = tensor([0.1] * 3, dtype=torch.float64, requires_grad=True)
        for i in range(0, 8, rows):
            part = slice(i, i + rows)
            logprobs = features[part] @ weights
            loss = surrogate(logprobs, old[part], behavior[part], advantages[part], mask[part], 0.2)
            loss = loss + 0.01 * kl_to_reference(logprobs, ref[part], mask[part])
            masked_mean(loss, mask[part], mask.sum()).backward()
        return weights.grad

    assert close(gradient(size), gradient(8), 1e-12)
    assert gradient(8).abs().min() > 1e-3


def test_a_token_is_within_the_centre_if_neither_c_nor_its_inverse_is_above_the_bound():
    c = torch.tensor([[1.0, 2.9, 3.1, 0.34, 0.33, 3.1, 1.0]], dtype=torch.double)
    mask = torch.tensor([[True, True, True, True, True, False, False]])
    behavior = torch.full_like(c, -1.0)
    old = behavior + c.log()
    within = losses.within_centre(old, behavior, mask, 3.0)  # 1 / 3 = .333
    assert within.tolist() == [[True, True, False, True, False, False, False]]
    old[0, 2] = math.nan  # stays in, so that the loss shows it
    assert losses.within_centre(old, behavior, mask, 3.0)[0, 2]
    assert losses.within_centre(old, behavior, mask, 3.0)[~mask].sum() == 0
