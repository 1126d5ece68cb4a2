"""The arithmetic of RSPO: advantages, the clipped surrogate with a moving centre, KL, value loss (Eq. 1-4).

Pure functions of tensors and floats, in the order in which an update uses them. They need no model and no
config, and torch is the only package. Two sums are written out in rspo.py: (1 - alpha) J_on + alpha J_off
and A_episode + omega A_step. The entropy bonus needs the whole vocabulary, so `Policy.logprobs` returns it.

Left out, as the paper does not use them: sequence-level ratios, asymmetric clips, means over a constant
length.

Shapes: B rows, T tokens (columns), E episodes, S steps (turns). Masks are bool. A value where the mask is
False never matters, not even a NaN; a NaN anywhere else stays visible in the result. Sums run in fp32 or
wider.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable

import torch
from torch import Tensor

STD_EPS = 1e-6  # added to a standard deviation before dividing by it
MAX_LOG_RATIO = 20.0  # log-ratios are clamped to +-20 before exp, so r <= e^40 and its gradient are finite


def _fp32(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Cast x to fp32, or to double if `like` (default: x) is double.

    bf16 is too coarse for the clip: from c = 64 on, c + 0.2 rounds to c.
    """
    return x.to(torch.promote_types((x if like is None else like).dtype, torch.float32))


def _check(mask: Tensor, *tensors: Tensor) -> None:
    assert mask.dtype is torch.bool, f"the mask must be bool, not {mask.dtype}"
    for x in tensors:
        assert x.is_floating_point(), f"expected a float tensor, not {x.dtype}"
        assert x.shape == mask.shape, f"shape {tuple(x.shape)} with a mask of shape {tuple(mask.shape)}"


# Advantages


def group_advantages(rewards: Tensor, group_ids: Tensor, normalize_std: bool = True) -> Tensor:
    """A_i = (R_i - mean) / (std + 1e-6) over the episodes of one task   (GRPO; std with ddof 1)

    rewards (E,) floats; group_ids (E,) long, groups of any size, in any order. Returns (E,): exactly 0 in a
    group of one and in a group without spread. A reward that is not finite is left out of its group and gets
    advantage 0. With normalize_std=False rewards are only centred.
    """
    assert rewards.dim() == 1 and rewards.is_floating_point(), "rewards must be (E,) floats"
    assert group_ids.shape == rewards.shape and group_ids.dtype is torch.long, "group_ids must be (E,) long"
    members: dict[int, list[int]] = {}  # the places of a group's finite rewards
    for place, (group, reward) in enumerate(zip(group_ids.tolist(), rewards.tolist(), strict=True)):
        if math.isfinite(reward):
            members.setdefault(group, []).append(place)

    advantages = torch.zeros(len(rewards), dtype=torch.double)
    for places in members.values():
        values = rewards[places].tolist()
        mean = statistics.mean(values)  # exact: equal rewards leave 0, and their order changes no bit
        divisor = 1.0
        if normalize_std and len(values) > 1:
            divisor = statistics.stdev(values, mean) + STD_EPS
        advantages[places] = torch.tensor([(value - mean) / divisor for value in values], dtype=torch.double)
    return _fp32(advantages.to(rewards.device), like=rewards)


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """G_t = sum over j >= t of gamma^(j - t) r_j   (GiGPO)

    rewards (S,): the step rewards of one episode. Returns (S,).
    """
    assert rewards.dim() == 1 and rewards.is_floating_point(), "rewards must be (S,) floats of one episode"
    returns, following = [], 0.0
    for reward in reversed(rewards.tolist()):
        following = reward + gamma * following
        returns.append(following)
    return _fp32(torch.tensor(returns[::-1], dtype=torch.double, device=rewards.device), like=rewards)


def anchor_advantages(returns: Tensor, anchors: list[Hashable], normalize_std: bool = True) -> Tensor:
    """A_step = (G - mean) / (std + 1e-6) over the steps with the same anchor   (GiGPO, arXiv 2505.10978)

    returns (S,): the discounted returns of the steps of any number of episodes. anchors: one per step, the
    pair (group, observation), so that two tasks never share an anchor. Returns (S,): 0 for an anchor that
    occurs once.
    """
    assert len(anchors) == len(returns), f"{len(anchors)} anchors for {len(returns)} returns"
    ids: dict[Hashable, int] = {}
    anchor_ids = torch.tensor([ids.setdefault(anchor, len(ids)) for anchor in anchors], dtype=torch.long)
    return group_advantages(returns, anchor_ids.to(returns.device), normalize_std)


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """delta_t = r_t + gamma V_t+1 - V_t,  A_t = delta_t + gamma lam A_t+1   (Schulman et al. 2016)

    rewards, values (T,): one entry per action token of one episode; prompt tokens are skipped. The value
    after the last token is 0, also at the step limit, which counts as failure. Returns the advantages A (T,)
    and the returns A + V (T,).
    """
    assert rewards.dim() == 1 and rewards.is_floating_point(), "rewards must be (T,) floats of one episode"
    assert values.shape == rewards.shape, f"{tuple(values.shape)} values for {tuple(rewards.shape)} rewards"
    advantages, following, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        following = reward + gamma * next_value - value + gamma * lam * following
        advantages.append(following)
        next_value = value
    wide = torch.tensor(advantages[::-1], dtype=torch.double, device=values.device)
    return _fp32(wide, like=values), _fp32(wide + values.double(), like=values)


def whiten(advantages: Tensor, mask: Tensor, statistics_mask: Tensor | None = None) -> Tensor:
    """(A - mean) / (std + 1e-6) over the tokens of the mask, 0 where masked   (PPO; std with ddof 1)

    All arguments have one shape. `statistics_mask` (default: the mask) selects the tokens of mean and std;
    for replayed tokens these are all tokens of the update. With fewer than two such tokens the advantages
    stay as they are. Without spread they are only centred.
    """
    statistics_mask = mask if statistics_mask is None else statistics_mask
    _check(mask, advantages)
    _check(statistics_mask, advantages)
    whitened, kept = advantages.double(), advantages[statistics_mask].double()
    if len(kept) >= 2:
        lowest = kept.min()  # subtracted first, so that equal advantages leave exactly 0
        std = (kept - lowest).std()
        whitened = (whitened - lowest - (kept - lowest).mean()) / torch.where(std > 0, std + STD_EPS, 1.0)
    return _fp32(torch.where(mask, whitened, 0.0), like=advantages)


# Losses: one number per token


def _log_ratio(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / pi_other), masked and clamped before exp is taken, since 0 * inf would be NaN."""
    ratio = _fp32(logprobs) - _fp32(other_logprobs)
    return torch.where(mask, ratio, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_eps: float,
    moving_centre: bool = True,
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, c - eps, c + eps) A) per token   (Eq. 3-4; Queeney et al. 2021)

    r = pi / pi_b is the importance ratio; the policy pi_b sampled the token. The clip interval is centred at
    the constant c = pi_old / pi_b, where pi_old is the trained agent at the start of the update:
        fresh tokens     the agent itself sampled them: pi_b = pi_old, so c = 1 as in PPO
        replayed tokens  B sampled them: pi_b is B's policy, so the centre moves away from 1

    All tensors are (B, T); mask bool. Returns the loss (B, T), 0 where masked, and the mask of clipped tokens
    (B, T) bool. A token is clipped if A > 0 and r > c + eps, or A < 0 and r < c - eps; its gradient is then
    0. The gradient of any other token is -A r grad log pi. Without `moving_centre` the interval is
    [1 - eps, 1 + eps] for every token, a control that is not in the paper.
    """
    _check(mask, logprobs, old_logprobs, behavior_logprobs, advantages)
    c = _log_ratio(old_logprobs, behavior_logprobs, mask).exp().detach()
    r = c * _log_ratio(logprobs, old_logprobs.detach(), mask).exp()  # so pi = pi_old gives r = c exactly
    advantages = torch.where(mask, _fp32(advantages), 0.0)
    centre = c if moving_centre else torch.ones_like(c)
    low, high = centre - clip_eps, centre + clip_eps
    loss = -torch.minimum(r * advantages, r.clamp(low, high) * advantages)
    clipped = torch.where(advantages > 0, r > high, (advantages < 0) & (r < low))
    return loss, clipped


def within_centre(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, max_centre: float) -> Tensor:
    """1 / max_centre <= c <= max_centre per token, c = pi_old / pi_b   (an option, not in the paper)

    All tensors have one shape; mask bool. Returns bool, False where masked. A NaN stays in.
    """
    _check(mask, old_logprobs, behavior_logprobs)
    return mask & ~(_log_ratio(old_logprobs, behavior_logprobs, mask).abs() > math.log(max_centre))


def kl_to_reference(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k3 = exp(d) - 1 - d with d = log(pi_ref / pi)   (Schulman 2020)

    An estimate of KL(pi || pi_ref) that is never negative. All tensors are (B, T); mask bool. Returns (B, T),
    0 where masked. Used as a loss, its expected gradient is that of KL(pi_ref || pi).
    """
    _check(mask, logprobs, ref_logprobs)
    d = _log_ratio(ref_logprobs.detach(), logprobs, mask)
    return d.expm1() - d


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)   (PPO)

    All tensors are (B, T); mask bool. Returns (B, T), 0 where masked.
    """
    _check(mask, values, old_values, returns)
    v, v_old, target = (torch.where(mask, _fp32(x), 0.0) for x in (values, old_values, returns))
    return 0.5 * torch.maximum((v - target) ** 2, (v.clamp(v_old - clip, v_old + clip) - target) ** 2)


def masked_mean(values: Tensor, mask: Tensor, count: int | Tensor) -> Tensor:
    """sum(values where mask) / count, a scalar; 0 if count is 0

    `count`, an int or a 0-d tensor, is the token count of the whole source and optimizer step, not of this
    micro-batch or rank. So the parts add up to one mean, however the rows were split.
    """
    _check(mask, values)
    total = torch.where(mask, _fp32(values), 0.0).sum()
    count = torch.as_tensor(count, dtype=total.dtype, device=total.device)
    assert count.dim() == 0, f"count must be one number, not of shape {tuple(count.shape)}"
    return torch.where(count > 0, total / count.clamp(min=1), 0.0)
