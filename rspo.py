"""RSPO: Reward-Swap Policy Optimization (arXiv 2607.04713), Algorithm 1.

`Config` holds the algorithm's settings. `set_advantages` and `set_token_advantages` turn rewards into
advantages (GRPO, GiGPO; PPO). `update` is one update of an agent on J_total. `swap_rewards` is the reward
swap. `train` is Algorithm 1 with its ablations and baselines.

This file needs neither a language model nor an environment, only records and tensors: an agent is anything
with `logprobs`, `step` and `fork`, a world anything with `collect` (demo/toy.py has the smallest of both).

Left out: mixing both rewards in one loss, as the paper shows that dense rewards mislead A; schedules of
alpha, k and the learning rate; early stopping of an update by its KL.

Shapes: B rows, T tokens (columns), G groups, N episodes per group, S steps of an episode.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

import distributed
import losses
from batch import Batch, Row, gather_columns, micro_batches, put, rows_of, split_rows, take
from buffer import Group, ReplayBuffer, Trajectory, endings
from distributed import Totals


def check_ranges(settings, names: str, low=-math.inf, high=math.inf, above=-math.inf) -> None:
    """Raise ValueError for the first named setting that is not a number in the range. None is skipped."""
    for name in names.split():
        value = getattr(settings, name)
        if value is not None and not (low <= value <= high and value > above):
            limits = f"above {above}" if above > -math.inf else f"at least {low}"
            limits = limits if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{name} {value}: must be {limits}")


@dataclass(frozen=True)
class Config:
    """The settings of Algorithm 1. The defaults are those of the run on Household."""

    method: Literal["rspo", "outcome", "dense", "rspo_h", "rspo_o"] = "rspo"
    """rspo: the paper's method. outcome, dense: train A only, on that reward. rspo_h: no B; A replays its own
    last groups. rspo_o: B trains on outcome rewards too."""
    algo: Literal["grpo", "gigpo", "ppo"] = "grpo"
    """Estimator of the advantages."""
    total_updates: int = 45  # Updates of A; a multiple of k. Updates of B are not counted.
    k: int = 3  # k: updates per phase, first of B, then of A.
    tasks_per_update: int = 8  # B (batch size): tasks per update, fresh and replayed together.
    group_size: int = 8  # N: episodes per task. PPO plays tasks_per_update * group_size tasks once each.
    off_policy_fraction: float = 0.125
    """alpha: share of an update that is replayed. alpha * tasks_per_update must be a whole number."""
    buffer_tasks: int = 14  # Tasks (N episodes each) that agent B plays into the replay buffer in each loop.
    replay_strategy: Literal["reward", "variance", "random"] = "reward"
    """Episodes that the buffer draws first: highest outcome, largest variance in their group, or any."""
    replay_unit: Literal["episode", "group"] = "episode"
    """Draw single episodes, or whole groups (groups with equal outcomes are then skipped)."""
    clip_eps: float = 0.2  # epsilon: half width of the clip interval [c - epsilon, c + epsilon].
    kl_coef: float = 0.01  # beta: weight of the k3 estimate of KL(pi || pi_ref). 0 skips the reference model.
    entropy_coef: float = 0.001  # Weight of the entropy bonus.
    reward_scale: float = 10.0
    """Return R = reward_scale * reward - invalid_penalty * (number of invalid replies)."""
    invalid_penalty: float = 0.1  # Penalty in R for each reply without exactly one well-formed action.
    reward_noise: float = 0.0  # sigma: std of Gaussian noise on each dense score (robustness test).
    gigpo_gamma: float = 0.95  # GiGPO's gamma, for the discounted returns of steps.
    gigpo_omega: float = 1.0  # GiGPO's omega: weight of the step advantages.
    gigpo_std: bool = True  # GiGPO: divide by the standard deviation, at both levels.
    gamma: float = 1.0  # PPO's gamma, per action token.
    gae_lambda: float = 1.0  # PPO's lambda.
    value_clip: float = 0.5
    """PPO: half width of the interval around the old value that the value loss is clipped to."""
    epochs: int = 1  # Passes over the data of an update.
    minibatch_turns: int = 128  # Turns per optimizer step, fresh and replayed together.
    tokens_per_micro_batch: int = 8192
    """Tokens per forward pass, padding included. Affects memory, not the gradient."""
    max_grad_norm: float = 1.0  # Largest gradient norm; larger gradients are scaled down.
    seed: int = 0  # Seed of every random draw of the run.

    def __post_init__(self):
        above_0 = "total_updates k tasks_per_update group_size buffer_tasks clip_eps reward_scale value_clip"
        check_ranges(self, f"{above_0} epochs minibatch_turns tokens_per_micro_batch max_grad_norm", above=0)
        check_ranges(self, "kl_coef entropy_coef invalid_penalty reward_noise gigpo_omega", low=0)
        check_ranges(self, "gigpo_gamma gamma gae_lambda", low=0, high=1)
        if self.total_updates % self.k:
            below = self.total_updates // self.k * self.k
            near = f"{below} or {below + self.k}" if below else f"{self.k}"
            why = f"must be a multiple of --k {self.k}, for example {near}"
            raise ValueError(f"--total_updates {self.total_updates}: {why}")
        if not 0 <= self.off_policy_fraction < 1:
            raise ValueError(f"--off_policy_fraction {self.off_policy_fraction}: must lie in [0, 1)")
        off_tasks = self.off_policy_fraction * self.tasks_per_update
        if self.replays and abs(off_tasks - round(off_tasks)) > 1e-9:
            near = min(max(1, round(off_tasks)), self.tasks_per_update - 1) / self.tasks_per_update
            raise ValueError(
                f"--off_policy_fraction {self.off_policy_fraction} of --tasks_per_update "
                f"{self.tasks_per_update} is {off_tasks:g} tasks: it must be whole, for example with "
                f"--off_policy_fraction {near:g}"
            )
        if self.algo != "ppo" and self.group_size < 2:
            raise ValueError(
                f"--group_size {self.group_size} with --algo {self.algo}: advantages compare the episodes "
                "of a group, so give 2 or more (or --algo ppo)"
            )
        if self.algo == "ppo" and self.replays and self.replay_strategy == "variance":
            raise ValueError(
                "--replay_strategy variance with --algo ppo: groups of one episode have no variance; "
                "give --replay_strategy reward or random"
            )
        if self.algo == "ppo" and self.replays and self.replay_unit == "group":
            raise ValueError("--replay_unit group with --algo ppo: groups have one episode; give episode")

    @property
    def explores(self) -> bool:  # there is an agent B
        return self.method in ("rspo", "rspo_o")

    @property
    def replays(self) -> bool:  # A's updates draw from a replay buffer
        return self.method in ("rspo", "rspo_o", "rspo_h")

    @property
    def explorer_reward(self) -> str:  # that B is trained on
        return "dense" if self.method == "rspo" else "outcome"

    @property
    def policy_reward(self) -> str:  # that A is trained on
        return "dense" if self.method == "dense" else "outcome"

    @property
    def uses_dense_reward(self) -> bool:
        return self.method in ("rspo", "dense")

    @property
    def episodes_per_task(self) -> int:
        return 1 if self.algo == "ppo" else self.group_size

    @property
    def replayed_tasks(self) -> int:
        """alpha * B for the methods that replay, else 0."""
        return round(self.off_policy_fraction * self.tasks_per_update) if self.replays else 0

    @property
    def on_policy_tasks(self) -> int:
        """(1 - alpha) * B fresh tasks per update. PPO plays as many episodes, each of another task."""
        return (self.tasks_per_update - self.replayed_tasks) * self.group_size // self.episodes_per_task

    @property
    def off_policy_episodes(self) -> int:
        """alpha * B * N replayed episodes per update."""
        return self.replayed_tasks * self.group_size

    @property
    def buffer_groups(self) -> int:
        """Groups that fill the replay buffer. PPO plays as many episodes, each of another task."""
        return self.buffer_tasks * self.group_size // self.episodes_per_task


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
    episodes = [(g, episode) for g, group in enumerate(groups) for episode in group.usable(reward)]
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
    on its last action token. Fresh tokens are whitened by their own statistics, replayed tokens by those of
    all tokens: while no fresh episode succeeds, fresh returns have almost no spread, and dividing by it would
    make the advantage of a replayed success huge.
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


@torch.no_grad()
def score_rows(agent, rows: list[Row], config: Config) -> None:
    """Set the rows' old_logprobs (pi_old), ref_logprobs (if beta > 0) and old_values (PPO).

    Each rank scores its share of the rows and gathers the others.
    """
    local = local_rows(rows)
    for batch in batches_of(agent, [rows[i] for i in local], config):
        batch.store("old_logprobs", agent.logprobs(batch)[0])
        if config.kl_coef:
            batch.store("ref_logprobs", agent.reference_logprobs(batch))
        if config.algo == "ppo":
            batch.store("old_values", agent.critic.values(batch))
    gather_columns(rows, local, ["old_logprobs", "ref_logprobs", "old_values"])


@torch.no_grad()
def swap_rewards(agent, groups: list[Group], config: Config) -> None:
    """The reward swap: prepare episodes that B collected for replay with their outcome.

    B was trained on dense rewards. From here on its episodes are read by their outcome only: this sets A_off,
    computed from outcomes inside each whole group, and log pi_B of every action token, the denominator of the
    importance ratio. PPO computes A_off when an episode is drawn, with the critic that A has then.
    """
    rows = [row for group in groups for episode in group.usable("outcome") for row in rows_of(episode)]
    local = local_rows(rows)
    for batch in batches_of(agent, [rows[i] for i in local], config):
        batch.store("behavior_logprobs", agent.logprobs(batch)[0])
    gather_columns(rows, local, ["behavior_logprobs"])
    for row in rows:
        for index, start, end in row.spans:
            row.trajectory.steps[index].behavior_logprobs = row.behavior_logprobs[start:end].tolist()
    if config.algo != "ppo":
        set_advantages(groups, "outcome", config)


def local_rows(rows: list[Row]) -> list[int]:
    """Return the places of this rank's share of the rows, balanced by tokens."""
    return distributed.local_share([len(row.input_ids) for row in rows])


def batches_of(agent, rows: list[Row], config: Config):
    """Yield the rows as micro-batches on the agent's device."""
    return micro_batches(rows, config.tokens_per_micro_batch, agent.chat.pad_id, agent.device)


def sampler_gap(rows: list[Row]) -> dict[str, float]:
    """Compare the sampler's log-probs of fresh action tokens with the trainer's, which the loss reads.

    Returns the mean and the largest absolute difference. More than rounding is a fault: an engine with stale
    weights, another temperature or other tokens.
    """
    sampled = torch.cat([row.column_of("sampler_logprobs")[row.action_mask] for row in rows])
    gap = (take(rows, "old_logprobs") - sampled).abs().double()
    return {"sampler_gap_mean": gap.mean().item(), "sampler_gap_max": gap.max().item()}


def policy_loss(agent, batch: Batch, source: str, config: Config, totals: Totals) -> torch.Tensor:
    """-min(r A, clip(r, c - eps, c + eps) A) + beta KL - entropy bonus, per token (B, T), 0 where masked."""
    logprobs, entropy = agent.logprobs(batch, with_entropy=True)
    mask, count = batch.action_mask, batch.action_mask.sum()
    old, behavior = batch.column("old_logprobs"), batch.column("behavior_logprobs")
    advantages = batch.column("advantages")
    loss, clipped = losses.clipped_surrogate(logprobs, old, behavior, advantages, mask, config.clip_eps)
    totals.add(f"policy_loss_{source}", loss.detach().sum(), count)
    totals.add(f"clip_fraction_{source}", clipped.sum(), count)
    if source == "off":
        totals.add("centre_log_mean_abs", (old - behavior).abs().sum(), count)
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

    rows: this rank's rows of one source, "on" or "off"; count: action tokens of that source on all ranks.
    Fresh rows also train PPO's critic, replayed rows do not.
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


class NothingToTrainOn(RuntimeError):
    """No episode of an update is usable: all crashed, or none has a reply."""

    def __init__(self, groups: list[Group]):
        ends = endings([episode for group in groups for episode in group.trajectories])
        super().__init__(
            f"no episode of this update can be trained on; the episodes ended with: {ends} (crashed: see the "
            "environment's warning; token limit: the first prompt is longer than --max_prompt_tokens)"
        )


def update(
    agent, on: list[Group], off: list[Trajectory], reward: str, config: Config, rng: random.Random
) -> dict:
    """Update an agent once on J_total = (1 - alpha) J_on + alpha J_off   (Eq. 3)

    on: groups that the agent has just collected, trained on `reward` ("outcome" or "dense"). off: replayed
    episodes, always trained on their outcome; without any, alpha is 0 for this update. J_on and J_off are
    each a mean over their own action tokens: an optimizer step has two token counts, each over all
    micro-batches and ranks. rng shuffles the rows into minibatches. Returns the update's metrics
    (docs/METRICS.md). Raises NothingToTrainOn if no fresh episode is usable.
    """
    started = time.perf_counter()
    if config.algo != "ppo":
        set_advantages(on, reward, config)
    on_episodes = [rows_of(episode) for group in on for episode in group.usable(reward)]
    off_episodes = [rows_of(episode) for episode in off]  # with log pi_B and A_off of `swap_rewards`
    on_rows = [row for rows in on_episodes for row in rows]
    off_rows = [row for rows in off_episodes for row in rows]
    if not on_rows:
        raise NothingToTrainOn(on)

    score_rows(agent, on_rows + off_rows, config)
    for row in on_rows:
        row.behavior_logprobs = row.old_logprobs  # pi_b = pi_old: the clip's centre c is 1
    if config.algo == "ppo":
        set_token_advantages(on_episodes, off_episodes, reward, config)

    alpha = config.off_policy_fraction if off_rows else 0.0
    turns = sum(len(row.spans) for row in on_rows + off_rows)
    parts = max(1, round(turns / config.minibatch_turns))
    parts = min(parts, len(on_rows), len(off_rows) or parts)  # each minibatch has rows of both sources
    totals = Totals()
    for _ in range(config.epochs):
        on_parts, off_parts = split_rows(on_rows, parts, rng), split_rows(off_rows, parts, rng)
        for part in range(parts):
            drawn = [("on", row) for row in on_parts[part]] + [("off", row) for row in off_parts[part]]
            local = [drawn[i] for i in local_rows([row for _, row in drawn])]
            for source, weight in [("on", 1 - alpha), ("off", alpha)]:
                count = sum(row.action_tokens for kind, row in drawn if kind == source)  # over all ranks
                rows = [row for kind, row in local if kind == source]
                add_gradient(agent, rows, source, weight, count, config, totals)
            optimizer_step(agent, config, totals)
    return {
        **totals.means(),
        **sampler_gap(on_rows),
        "replayed_episodes": len(off),
        "alpha": alpha,
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
    """Algorithm 1: train `policy` (agent A) until it has had `total_updates` updates.

    world.collect(agent, tasks) plays and returns groups of episodes. dense_reward.score(groups, noise, rng)
    sets the dense scores of their steps. After every collection that was used, log("policy", "explorer" or
    "buffer", groups, metrics, A's updates so far) is called; after every loop, end_loop(A's updates so far,
    replay). `start` (A's updates so far) and `replay` resume a run.
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

    for done in range(start, config.total_updates, config.k):
        if config.explores:
            # Phase 1: B, a copy of A, learns from dense rewards, so that it explores where A would not
            explorer = policy.fork("explorer")
            for number in range(done, done + config.k):
                groups = collect(explorer, config.explorer_reward, number)
                metrics = learn(explorer, groups, [], config.explorer_reward, number)
                log("explorer", groups, metrics, done)
            groups = world.collect(explorer, config.buffer_groups)
            swap_rewards(explorer, groups, config)
            replay.add(groups)
            log("buffer", groups, {"buffer_episodes": len(replay)}, done)
            explorer.discard()

        # Phase 2: A learns from outcomes, on its own episodes and on B's best
        for number in range(done, done + config.k):
            groups = collect(policy, config.policy_reward, number)
            if config.method == "rspo_h":
                swap_rewards(policy, groups, config)  # A's episodes count by outcome already: adds log-probs
            replayed = replay.sample(config.off_policy_episodes)
            metrics = learn(policy, groups, replayed, config.policy_reward, number)
            log("policy", groups, metrics, number + 1)
            if config.method == "rspo_h":  # no B: the buffer keeps A's newest groups over loops
                replay.add(groups)
                replay.keep_newest(config.buffer_groups)
        if config.explores:
            replay.clear()
        end_loop(done + config.k, replay)
