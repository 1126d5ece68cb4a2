"""RSPO: Reward-Swap Policy Optimization (arXiv 2607.04713), Algorithm 1.

`set_advantages` (GRPO, GiGPO) and `set_token_advantages` (PPO) turn rewards into advantages. `swap_rewards`
is the reward swap. `update` is one update of an agent on J_total. `train` is Algorithm 1 with its ablations,
baselines and the cheap swap, which is not in the paper. The settings are in config.py.

This file needs neither a language model nor an environment, only records and tensors. An agent is any object
with `logprobs`, `step` and `fork`; a world is any object with `collect`. demo/toy.py has a small one of each.

Left out: mixing both rewards in one loss, as the paper shows that dense rewards mislead A; schedules of
alpha, k and the learning rate; early stopping of an update by its KL.

Shapes: B rows, T tokens (columns), G groups, N episodes per group, S steps of an episode.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import torch

import losses
from batch import Batch, Row, gather_columns, micro_batches, put, rows_of, split_rows, take
from buffer import Group, ReplayBuffer, Trajectory, endings
from config import Config
from scale import distributed
from scale.distributed import Totals


def step_returns(trajectory: Trajectory, reward: str, config: Config) -> list[float]:
    """Return reward_scale * reward of each step, less invalid_penalty if its reply was invalid (S,)."""
    returns = []
    for step, step_reward in zip(trajectory.steps, trajectory.step_rewards(reward), strict=True):
        penalty = 0.0 if step.valid else config.invalid_penalty
        returns.append(config.reward_scale * step_reward - penalty)
    return returns


def set_advantages(groups: list[Group], reward: str, config: Config) -> None:
    """Set every step's advantage inside whole groups   (Eq. 1-2; GiGPO: Feng et al. 2025, Eq. 5-8)

    GRPO gives all steps of an episode one value, from the returns of its group's N episodes. GiGPO adds
    omega times a step advantage: the step's discounted return compared with the steps of the same group that
    had the same observation. `reward` is "outcome" or "dense".
    """
    episodes = [(g, episode) for g, group in enumerate(groups) for episode in group.usable_episodes(reward)]
    if not episodes:
        return
    normalize_std = config.algo != "gigpo" or config.gigpo_std
    rewards = [step_returns(episode, reward, config) for _, episode in episodes]
    returns = torch.tensor([sum(r) for r in rewards])
    group_ids = torch.tensor([g for g, _ in episodes])
    episode_advantages = losses.group_advantages(returns, group_ids, normalize_std)
    for (_, episode), advantage in zip(episodes, episode_advantages.tolist(), strict=True):
        for step in episode.steps:
            step.advantage = advantage
    if config.algo == "gigpo":
        steps = [(g, step) for g, episode in episodes for step in episode.steps]
        returns = torch.cat([losses.discounted_returns(torch.tensor(r), config.gigpo_gamma) for r in rewards])
        anchors = [(g, step.observation) for g, step in steps]
        step_advantages = losses.anchor_advantages(returns, anchors, normalize_std)
        for (_, step), advantage in zip(steps, step_advantages.tolist(), strict=True):
            step.advantage += config.gigpo_omega * advantage


def set_token_advantages(on: list[list[Row]], off: list[list[Row]], reward: str, config: Config) -> None:
    """Set every row's advantages and returns by GAE over the action tokens of its episode   (PPO)

    on, off: the rows of each episode, with old_values from the agent's current critic. A step's reward is put
    on its last action token. Fresh tokens are whitened with the mean and std of the fresh tokens, replayed
    tokens with the mean and std of all tokens. While no fresh episode succeeds, fresh returns have almost no
    spread; dividing by their std would make the advantage of a replayed success huge.
    """
    for episodes, name in [(on, reward), (off, "outcome")]:
        for rows in episodes:
            steps = rows[0].trajectory.steps
            token_rewards = []
            for step, earned in zip(steps, step_returns(rows[0].trajectory, name, config), strict=True):
                token_rewards += [0.0] * (len(step.action_ids) - 1) + [earned]
            token_rewards, values = torch.tensor(token_rewards), take(rows, "old_values")
            advantages, returns = losses.gae(token_rewards, values, config.gamma, config.gae_lambda)
            put(rows, "advantages", advantages)
            put(rows, "returns", returns)
    on_rows = [row for rows in on for row in rows]
    rows = on_rows + [row for rows in off for row in rows]
    advantages = take(rows, "advantages")
    fresh = torch.arange(len(advantages)) < sum(row.action_tokens for row in on_rows)
    every = torch.ones_like(fresh)
    whitened = losses.whiten(advantages, fresh)
    whitened = whitened + losses.whiten(advantages, ~fresh, statistics_mask=every)
    put(rows, "advantages", whitened)


def local_rows(rows: list[Row]) -> list[int]:
    """Return the places of this rank's share of the rows, balanced by tokens."""
    return distributed.local_share([len(row.input_ids) for row in rows])


def batches_of(agent, rows: list[Row], config: Config) -> Iterator[Batch]:
    """Yield the rows as micro-batches on the agent's device."""
    return micro_batches(rows, config.tokens_per_micro_batch, agent.chat.pad_id, agent.device)


@torch.no_grad()
def score_rows(agent, rows: list[Row], column: str, config: Config) -> None:
    """Set a column of the rows. Each rank scores its share of the rows and gathers the rest.

    column: "ref_logprobs" (of the starting model), "old_values" (of PPO's critic), "old_logprobs" (pi_old)
    or "behavior_logprobs" (pi_b). The last two come from the agent's present weights. Columns come from
    different weights, so each has a pass of its own, and LoRA adapters are switched once per pass.
    """
    local = local_rows(rows)
    for batch in batches_of(agent, [rows[i] for i in local], config):
        if column == "ref_logprobs":
            values = agent.reference_logprobs(batch)
        elif column == "old_values":
            values = agent.critic.values(batch)
        else:
            values = agent.logprobs(batch)[0]
        batch.store(column, values)
    gather_columns(rows, local, [column])


def score_minibatches(agent, minibatches: list[tuple[list[Row], list[Row]]], config: Config) -> None:
    """Set the columns that the losses read, for the minibatches (fresh rows, replayed rows) of one epoch.

    The rows of the first minibatch get pi_old in `policy_loss`, since no weight has moved before it. With
    `max_centre`, its replayed rows get pi_old here, because pi_old decides which tokens are counted.
    """
    rows = [row for minibatch in minibatches for part in minibatch for row in part]
    if config.kl_coef:
        score_rows(agent, rows, "ref_logprobs", config)
    if config.algo == "ppo":
        score_rows(agent, rows, "old_values", config)
    fresh, replayed = minibatches[0]
    first = len(fresh) if config.max_centre is not None else len(fresh) + len(replayed)
    waiting = [row for row in rows[first:] if row.old_logprobs is None]
    score_rows(agent, waiting, "old_logprobs", config)


def set_behavior_logprobs(agent, groups: list[Group], config: Config) -> None:
    """Set log pi_b of every action token, the denominator of its importance ratio when it is replayed.

    agent: the agent that played the groups, with the weights that it had then. So call this before the
    agent's next update. log pi_b comes from the trainer's forward pass, not from the sampler.
    """
    rows = [
        row for group in groups for episode in group.usable_episodes("outcome") for row in rows_of(episode)
    ]
    score_rows(agent, rows, "behavior_logprobs", config)
    for row in rows:
        for index, start, end in row.spans:
            row.trajectory.steps[index].behavior_logprobs = row.behavior_logprobs[start:end].tolist()


def swap_rewards(groups: list[Group], config: Config) -> None:
    """Swap the reward: from now on the episodes count by their outcome, in the buffer and in A's updates.

    Sets A_off on every step, computed from outcomes inside each whole group. A_off replaces the advantages of
    an update on dense rewards, so call this after that update. With PPO, A_off is computed only when an
    episode is drawn, with the critic that A has then.
    """
    if config.algo != "ppo":
        set_advantages(groups, "outcome", config)


def policy_loss(agent, batch: Batch, source: str, config: Config, totals: Totals) -> torch.Tensor:
    """Return -min(r A, clip(r, c - eps, c + eps) A) + beta KL - entropy bonus (B, T), 0 where masked.

    Rows without pi_old belong to the first optimizer step. No weight has moved since pi_old, so the agent's
    log-probs are stored as those of pi_old.
    """
    logprobs, entropy = agent.logprobs(batch, with_entropy=True)
    if batch.rows[0].old_logprobs is None:
        batch.store("old_logprobs", logprobs)
    mask, count = batch.action_mask, batch.action_mask.sum()
    old, advantages = batch.column("old_logprobs"), batch.column("advantages")
    behavior = old if source == "on" else batch.column("behavior_logprobs")  # fresh: pi_b = pi_old, so c = 1
    columns, moves = (logprobs, old, behavior, advantages, mask), config.clip_centre == "moving"
    loss, clipped = losses.clipped_surrogate(*columns, config.clip_eps, moves)
    totals.add(f"policy_loss_{source}", loss.detach().sum(), count)
    totals.add(f"clip_fraction_{source}", clipped.sum(), count)
    if source == "off":
        totals.add("centre_log_mean_abs", (old - behavior).abs().sum(), count)
        batch.store("new_logprobs", logprobs.masked_fill(~mask, torch.nan))  # those that `max_centre` drops
    if config.kl_coef:
        kl = losses.kl_to_reference(logprobs, batch.column("ref_logprobs"), mask)
        totals.add(f"kl_{source}", kl.detach().sum(), count)
        loss = loss + config.kl_coef * kl
    totals.add(f"entropy_{source}", entropy.detach().sum(), count)
    return loss - config.entropy_coef * entropy


def critic_loss(agent, batch: Batch, config: Config, totals: Totals) -> torch.Tensor:
    """Clipped value loss per token (B, T), 0 where masked   (PPO)"""
    mask, old_values, returns = batch.action_mask, batch.column("old_values"), batch.column("returns")
    loss = losses.value_loss(agent.critic.values(batch), old_values, returns, mask, config.value_clip)
    totals.add("value_loss", loss.detach().sum(), mask.sum())
    return loss


def add_gradient(
    agent, rows: list[Row], source: str, weight: float, count: int, config: Config, totals: Totals
) -> None:
    """Add the gradient of weight * (sum of the policy loss / count), micro-batch by micro-batch.

    rows: this rank's rows of one source, "on" or "off". count: loss tokens of that source in this optimizer
    step, on all ranks. Fresh rows also train PPO's critic, replayed rows do not.
    """
    for batch in batches_of(agent, rows, config):
        token_losses = policy_loss(agent, batch, source, config, totals)
        loss = weight * losses.masked_mean(token_losses, batch.action_mask, count)
        if config.algo == "ppo" and source == "on":
            token_losses = critic_loss(agent, batch, config, totals)
            loss = loss + losses.masked_mean(token_losses, batch.action_mask, count)
        loss.backward()


def optimizer_step(agent, config: Config, totals: Totals) -> None:
    """Sum the gradients over ranks, clip them and step the agent's optimizer, then its critic's (PPO)."""
    distributed.sum_gradients(agent.parameters)
    totals.add("grad_norm", agent.step(config.max_grad_norm), 1)
    if config.algo == "ppo":
        distributed.sum_gradients(agent.critic.parameters)
        totals.add("critic_grad_norm", agent.critic.step(config.max_grad_norm), 1)


def sampler_gap(rows: list[Row]) -> dict[str, float]:
    """Compare the sampler's log-probs of fresh action tokens with the trainer's, which the loss reads.

    Returns the mean and the largest absolute difference. More than rounding is a fault: stale weights, say.
    """
    gap = (take(rows, "old_logprobs") - take(rows, "sampler_logprobs")).abs().double()
    return {"sampler_gap_mean": gap.mean().item(), "sampler_gap_max": gap.max().item()}


def centre_metrics(rows: list[Row]) -> dict[str, float]:
    """Describe c = pi_old / pi_B of the replayed action tokens: the largest, and the shares far from 1."""
    if not rows:
        return {}
    log_c = (take(rows, "old_logprobs") - take(rows, "behavior_logprobs")).double()
    c = log_c.clamp(-losses.MAX_LOG_RATIO, losses.MAX_LOG_RATIO).exp()
    metrics = {
        "centre_max": c.max().item(),
        "centre_above_2": (c > 2).double().mean().item(),
        "centre_below_half": (c < 0.5).double().mean().item(),
    }
    if rows[0].loss_mask is not None:
        metrics["centre_dropped"] = 1 - sum(row.loss_tokens for row in rows) / len(c)
    return metrics


def set_ratios(rows: list[Row]) -> None:
    """Set log c and log r of every replayed step, as means over its tokens. No loss reads them."""
    spans = [(row, *span) for row in rows for span in row.spans]
    found = torch.zeros(len(spans), 2)  # (sum of log r, number of ranks that trained on the row)
    for i, (row, _, start, end) in enumerate(spans):
        if row.new_logprobs is not None:
            found[i] = torch.tensor([(row.new_logprobs - row.behavior_logprobs)[start:end].nanmean(), 1.0])
    distributed.sum_tensor(found)
    for (row, index, start, end), (total, ranks) in zip(spans, found.tolist(), strict=True):
        step = row.trajectory.steps[index]
        step.log_centre = (row.old_logprobs - row.behavior_logprobs)[start:end].mean().item()
        step.log_ratio = total / ranks if ranks and total == total else None  # NaN: no token is counted


class NothingToTrainOn(RuntimeError):
    """No episode of an update is usable: all crashed, or none has a reply."""

    def __init__(self, groups: list[Group]):
        ends = endings([episode for group in groups for episode in group.trajectories])
        super().__init__(
            f"no episode of this update can be trained on; the episodes ended with: {ends} (crashed: see the "
            "environment's warning; token limit: the first prompt is longer than --max_prompt_tokens)"
        )


def update(
    agent,
    on: list[Group],
    off: list[Trajectory],
    reward: str,
    config: Config,
    rng: random.Random,
    weights: tuple[float, float] | None = None,
) -> dict:
    """Update an agent once on J_total = (1 - alpha) J_on + alpha J_off   (Eq. 3)

    on      groups that the agent has just collected; they count by `reward`, "outcome" or "dense"
    off     replayed episodes; they always count by their outcome. If there are none, alpha is 0.
    rng     shuffles the rows into minibatches
    weights of J_on and J_off, in place of 1 - alpha and alpha

    J_on and J_off are each a mean over their own action tokens. So an optimizer step divides by two token
    counts, each taken over all micro-batches and ranks. With `max_centre`, J_off and its count leave out
    replayed tokens with a centre c above it or below its inverse. Returns the update's metrics
    (docs/METRICS.md). Raises NothingToTrainOn if no fresh episode is usable.
    """
    started = time.perf_counter()
    if config.algo != "ppo":
        set_advantages(on, reward, config)
    on_episodes = [rows_of(episode) for group in on for episode in group.usable_episodes(reward)]
    off_episodes = [rows_of(episode) for episode in off]  # they have log pi_b and A_off
    on_rows = [row for rows in on_episodes for row in rows]
    off_rows = [row for rows in off_episodes for row in rows]
    if not on_rows:
        raise NothingToTrainOn(on)

    for row in on_rows:
        row.sampler_logprobs = row.column_of("sampler_logprobs")  # raises before a weight moves
        row.old_logprobs = row.behavior_logprobs  # pi_b = pi_old; not None if the row will be replayed

    alpha = config.off_policy_fraction if off_rows else 0.0
    on_weight, off_weight = weights or (1 - alpha, alpha)
    turns = sum(len(row.spans) for row in on_rows + off_rows)
    parts = max(1, round(turns / config.minibatch_turns))
    parts = min(parts, len(on_rows), len(off_rows) or parts)  # each minibatch has rows of both sources
    minibatches = []  # (fresh rows, replayed rows) of each optimizer step
    for _ in range(config.epochs):
        minibatches += zip(split_rows(on_rows, parts, rng), split_rows(off_rows, parts, rng), strict=True)

    score_minibatches(agent, minibatches[:parts], config)
    if config.max_centre is not None:
        for row in off_rows:
            centre = (row.old_logprobs, row.behavior_logprobs, row.action_mask)
            row.loss_mask = losses.within_centre(*centre, config.max_centre)
    if config.algo == "ppo":
        set_token_advantages(on_episodes, off_episodes, reward, config)

    totals = Totals()
    for step, (on_part, off_part) in enumerate(minibatches):
        drawn = [("on", row) for row in on_part] + [("off", row) for row in off_part]
        rows = [row for _, row in drawn]
        places = local_rows(rows)
        for source, weight in [("on", on_weight), ("off", off_weight)]:
            count = sum(row.loss_tokens for kind, row in drawn if kind == source)  # over all ranks
            local = [row for kind, row in (drawn[i] for i in places) if kind == source and row.loss_tokens]
            add_gradient(agent, local, source, weight, count, config, totals)
        optimizer_step(agent, config, totals)
        if step == 0:
            gather_columns(rows, places, ["old_logprobs"])
    set_ratios(off_rows)
    return {
        **totals.means(),
        **sampler_gap(on_rows),
        **centre_metrics(off_rows),
        "replayed_episodes": len(off),
        "alpha": off_weight,
        "optimizer_steps": parts * config.epochs,
        "seconds_update": time.perf_counter() - started,
    }


def train(
    policy,
    world,
    dense_reward,
    config: Config,
    log: Callable[[str, list[Group], dict, int], None] = lambda agent, groups, metrics, updates: None,
    end_loop: Callable[[int, ReplayBuffer], None] = lambda updates, replay: None,
    start: int = 0,
    replay: ReplayBuffer | None = None,
) -> None:
    """Train `policy`, agent A, by Algorithm 1 until it has had `total_updates` updates.

    policy         agent A; policy.fork(name) returns a copy, agent B
    world          world.collect(agent, tasks) plays tasks and returns groups of episodes
    dense_reward   dense_reward.score(groups, noise, rng) sets the dense score of every step;
                   dense_reward.learn(groups) trains the implicit reward after each update of A
    log            called with ("explorer", "buffer" or "policy", groups, metrics, A's updates so far)
                   after every update and after B has played tasks for the buffer
    end_loop       called with (A's updates so far, replay buffer) after every loop
    start, replay  A's updates so far and the replay buffer of a run that is resumed
    """
    if replay is None:
        replay = ReplayBuffer(config.replay_strategy, config.replay_unit, seed=config.seed)

    def collect(agent, reward: str, number: int) -> list[Group]:
        """Play fresh episodes; score their steps if the agent is trained on dense rewards."""
        groups = world.collect(agent, config.on_policy_tasks)
        if reward == "dense":
            rng = random.Random(f"{config.seed} reward noise {agent.name} {number}")
            dense_reward.score(groups, noise=config.reward_noise, rng=rng)
        return groups

    def learn(agent, groups: list[Group], replayed: list[Trajectory], reward: str, number: int) -> dict:
        rng = random.Random(f"{config.seed} minibatches {agent.name} {number}")
        return update(agent, groups, replayed, reward, config, rng)

    def fill_buffer(groups: list[Group], updates: int) -> None:
        """Swap the reward of groups and add them. They have log pi_b. A had `updates` updates before them."""
        swap_rewards(groups, config)
        replay.add(groups, updates)
        if config.kept_groups:
            replay.keep_newest(config.kept_groups)

    sources = config.buffer_sources
    for done in range(start, config.total_updates, config.k):
        if config.explores:
            # Phase 1: B, a copy of A, learns from dense rewards, so that it explores where A would not
            explorer = policy.fork("explorer")
            for number in range(done, done + config.k):
                groups = collect(explorer, config.explorer_reward, number)
                if "phase1" in sources:
                    set_behavior_logprobs(explorer, groups, config)
                metrics = learn(explorer, groups, [], config.explorer_reward, number)
                log("explorer", groups, metrics, done)
                if "phase1" in sources:  # the cheap swap: the episodes that B is trained on are replayed
                    fill_buffer(groups, done)
            if "collect" in sources:
                groups = world.collect(explorer, config.buffer_groups)
                set_behavior_logprobs(explorer, groups, config)
                fill_buffer(groups, done)
                log("buffer", groups, {"buffer_episodes": len(replay)}, done)
            explorer.discard()

        # Phase 2: A learns from outcomes, on its own episodes and on B's best
        for number in range(done, done + config.k):
            groups = collect(policy, config.policy_reward, number)
            if "history" in sources:
                set_behavior_logprobs(policy, groups, config)
            replayed = replay.sample(config.off_policy_episodes)
            metrics = learn(policy, groups, replayed, config.policy_reward, number)
            metrics |= replay.draw_metrics(replayed, number)
            if config.dense_kind == "implicit":
                metrics |= dense_reward.learn(groups)
            log("policy", groups, metrics, number + 1)
            if "history" in sources:  # RSPO_H: A replays its own earlier groups
                fill_buffer(groups, number)
        if not config.kept_groups:
            replay.clear()
        end_loop(done + config.k, replay)
