"""The arithmetic of RSPO: advantages, the clipped surrogate with a movable centre, KL, value loss (Eq. 1-4).

Pure functions of tensors and floats in the order in which an update uses them: no model, no config, torch
alone. Not here: the entropy bonus, which needs the whole vocabulary (`Policy.logprobs` returns it), and the
two sums (1 - alpha) J_on + alpha J_off and A_episode + omega A_step, which `rspo.py` spells out. Ratios are
taken per token; sequence-level ratios, asymmetric clips and means over a constant length are left out, as the
paper uses none.

Shapes: B rows, T tokens (columns), E episodes, S steps (turns). Masks are bool. What stands where a mask is
False never matters, not even a NaN; a NaN anywhere else stays visible in the result. Sums run in fp32 or
wider.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

STD_EPS = 1e-6  # added to a standard deviation before dividing by it
MAX_LOG_RATIO = 20.0  # a log-ratio is cut here before exp, so r = c u <= e^40 and its gradient stay finite


def _fp32(x: Tensor, like: Tensor | None = None) -> Tensor:
    """x in fp32, or in double where `like` (x itself) is. In bf16, c + 0.2 would be c from c = 64 on."""
    return x.to(torch.promote_types((x if like is None else like).dtype, torch.float32))


def _check(mask: Tensor, *tensors: Tensor) -> None:
    assert mask.dtype is torch.bool, f"a mask is bool, this one is {mask.dtype}"
    for x in tensors:
        assert x.is_floating_point(), f"a float tensor is wanted, not {x.dtype}"
        assert x.shape == mask.shape, f"shape {tuple(x.shape)} beside a mask of shape {tuple(mask.shape)}"


# Advantages


def group_advantages(rewards: Tensor, group_ids: Tensor, normalize_std: bool = True) -> Tensor:
    """A_i = (R_i - mean) / (std + 1e-6) over the episodes of one task   (GRPO; std with ddof 1)

    rewards (E,), group_ids (E,) long: groups of any size, rows in any order. Returns (E,): exactly 0 in a
    group of one or without spread. A reward that is not finite leaves its group and gets 0.
    normalize_std=False only centres.
    """
    assert rewards.dim() == 1 and rewards.is_floating_point(), "rewards are (E,) floats"
    assert group_ids.shape == rewards.shape and group_ids.dtype is torch.long, "group_ids are (E,) long"
    order = rewards.argsort()  # groups are summed from the lowest reward up: shuffled rows give the same bits
    reward = rewards[order].double()
    ids, group = group_ids[order].unique(return_inverse=True)
    finite = reward.isfinite()

    def group_sum(x: Tensor) -> Tensor:
        return x.new_zeros(len(ids)).index_add(0, group, x)[group]

    lowest = torch.full_like(ids, torch.inf, dtype=torch.double)
    lowest = lowest.scatter_reduce(0, group, torch.where(finite, reward, torch.inf), "amin")[group]
    above = torch.where(finite, reward - lowest, 0.0)  # without spread exactly 0, and so is all that follows
    count = group_sum(finite.double())
    advantages = torch.where(finite, above - group_sum(above) / count, 0.0)
    if normalize_std:
        variance = group_sum(advantages**2) / (count - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + STD_EPS)
    return _fp32(torch.empty_like(advantages).index_copy(0, order, advantages), like=rewards)


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """G_t = sum over j >= t of gamma^(j - t) r_j   (GiGPO). rewards (S,) of one episode. Returns (S,)."""
    assert rewards.dim() == 1 and rewards.is_floating_point(), "rewards are (S,) floats of one episode"
    returns, following = [], 0.0
    for reward in reversed(rewards.tolist()):
        following = reward + gamma * following
        returns.append(following)
    return _fp32(torch.tensor(returns[::-1], dtype=torch.double, device=rewards.device), like=rewards)


def anchor_advantages(returns: Tensor, anchors: list[Hashable], normalize_std: bool = True) -> Tensor:
    """A_step = (G - mean) / (std + 1e-6) over the steps that share an anchor   (GiGPO, arXiv 2505.10978)

    returns (S,): the steps of any number of episodes. An anchor is (group id, observation), so that tasks
    never mix. Returns (S,): 0 for an anchor that occurs once.
    """
    assert len(anchors) == len(returns), f"{len(anchors)} anchors for {len(returns)} returns"
    ids: dict[Hashable, int] = {}
    anchor_ids = torch.tensor([ids.setdefault(anchor, len(ids)) for anchor in anchors], dtype=torch.long)
    return group_advantages(returns, anchor_ids.to(returns.device), normalize_std)


def gae(
    rewards: Tensor, values: Tensor, gamma: float, lam: float, bootstrap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """delta_t = r_t + gamma V_t+1 - V_t,  A_t = delta_t + gamma lam A_t+1   (Schulman et al. 2016)

    rewards, values (T,): the action tokens of one episode, and nothing between them. `bootstrap` is the value
    after the last: 0 at an end, and at the step limit too, which counts as failure. Returns A (T,) and
    returns A + V (T,).
    """
    assert rewards.dim() == 1 and rewards.is_floating_point(), "rewards are (T,) floats of one episode"
    assert values.shape == rewards.shape, f"{tuple(values.shape)} values for {tuple(rewards.shape)} rewards"
    advantages, following, next_value = [], 0.0, float(bootstrap)
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        following = reward + gamma * next_value - value + gamma * lam * following
        advantages.append(following)
        next_value = value
    wide = torch.tensor(advantages[::-1], dtype=torch.double, device=values.device)
    return _fp32(wide, like=values), _fp32(wide + values.double(), like=values)


def whiten(advantages: Tensor, mask: Tensor, statistics_mask: Tensor | None = None) -> Tensor:
    """(A - mean) / (std + 1e-6) over all tokens of the mask, 0 where masked   (PPO; std with ddof 1)

    All of one shape. `statistics_mask` says which entries give mean and std where that is not the mask:
    replayed tokens are put on the scale of the whole batch. Fewer than two such entries leave the advantages
    as they are; entries without spread only centre them.
    """
    statistics_mask = mask if statistics_mask is None else statistics_mask
    _check(mask, advantages)
    _check(statistics_mask, advantages)
    whitened, kept = advantages.double(), advantages[statistics_mask].double()
    if len(kept) >= 2:
        lowest = kept.min()  # subtracted first: without spread, exactly 0 is left and no rounding error
        std = (kept - lowest).std()
        whitened = (whitened - lowest - (kept - lowest).mean()) / torch.where(std > 0, std + STD_EPS, 1.0)
    return _fp32(torch.where(mask, whitened, 0.0), like=advantages)


# Losses, one number for each token


def _log_ratio(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / pi_other), masked and cut before its exp is taken: 0 * inf would be NaN. A NaN stays one."""
    ratio = _fp32(logprobs) - _fp32(other_logprobs)
    return torch.where(mask, ratio, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratios(
    logprobs: Tensor, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """r = pi/pi_b and the constant c = pi_old/pi_b; as r is c pi/pi_old, pi = pi_old gives exactly r = c."""
    c = _log_ratio(old_logprobs, behavior_logprobs, mask).exp().detach()
    u = _log_ratio(logprobs, old_logprobs.detach(), mask).exp()
    return c * u, c


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_eps: float,
) -> Tensor:
    """Per-token loss -min(r A, clip(r, c - eps, c + eps) A)   (Eq. 3-4; Queeney et al. 2021)

    r = pi/pi_b, c = pi_old/pi_b; pi_b is the policy that sampled the token: B for replayed ones; for fresh
    ones pi_old, so c = 1: PPO. All (B, T); mask bool. Returns (B,
    T), 0 where masked. Its gradient is 0 where A > 0 and r > c + eps, or A < 0 and r < c - eps, and -A r
    elsewhere.
    """
    _check(mask, logprobs, old_logprobs, behavior_logprobs, advantages)
    r, c = _ratios(logprobs, old_logprobs, behavior_logprobs, mask)
    advantages = torch.where(mask, _fp32(advantages), 0.0)
    return -torch.minimum(r * advantages, r.clamp(c - clip_eps, c + clip_eps) * advantages)


def clipped(
    logprobs: Tensor,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_eps: float,
) -> Tensor:
    """Tokens to which the clip of `clipped_surrogate` leaves no gradient, (B, T) bool. Arguments as there."""
    _check(mask, logprobs, old_logprobs, behavior_logprobs, advantages)
    r, c = _ratios(logprobs.detach(), old_logprobs, behavior_logprobs, mask)
    return mask & torch.where(advantages > 0, r > c + clip_eps, (advantages < 0) & (r < c - clip_eps))


def kl_to_reference(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """k3 = exp(d) - 1 - d, d = log(pi_ref / pi): never negative, mean KL(pi || pi_ref)   (Schulman 2020)

    All (B, T); mask bool. Returns (B, T), 0 where masked. Used as a loss, its expected gradient is that of
    KL(pi_ref || pi).
    """
    _check(mask, logprobs, ref_logprobs)
    d = _log_ratio(ref_logprobs.detach(), logprobs, mask)
    return d.expm1() - d


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)   (PPO)

    All (B, T); mask bool. Returns (B, T), 0 where masked.
    """
    _check(mask, values, old_values, returns)
    v, v_old, target = (torch.where(mask, _fp32(x), 0.0) for x in (values, old_values, returns))
    return 0.5 * torch.maximum((v - target) ** 2, (v.clamp(v_old - clip, v_old + clip) - target) ** 2)


def masked_mean(values: Tensor, mask: Tensor, count: int | Tensor) -> Tensor:
    """sum(values where mask) / count, a scalar; 0 if count is 0

    `count`, an int or a 0-d tensor, is the number of tokens of the whole source and optimizer step, not of
    this micro-batch or rank: so the parts add up to one mean, however the rows were split.
    """
    _check(mask, values)
    total = torch.where(mask, _fp32(values), 0.0).sum()
    count = torch.as_tensor(count, dtype=total.dtype, device=total.device)
    assert count.dim() == 0, f"count is one number, not of shape {tuple(count.shape)}"
    return torch.where(count > 0, total / count.clamp(min=1), 0.0)
