"""RSPO: Reward-Swap Policy Optimization (arXiv 2607.04713), Algorithm 1.

`Config` holds the algorithm's knobs, `advantages` and `token_advantages` turn rewards into advantages
(GRPO, GiGPO; PPO), `update` is one update of an agent on J_total, `train` is Algorithm 1 with its
ablations and baselines. Losses are in losses.py, the buffer in buffer.py, everything about flags, files
and logs in train.py.

Shapes: B rows, T tokens, G groups, N episodes per group, S steps of an episode.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

import distributed
from buffer import Batch, Group, ReplayBuffer, Row, StopReason, Trajectory, endings, micro_batches, rows_of
from losses import (
    anchor_advantages,
    clipped,
    clipped_surrogate,
    discounted_returns,
    gae,
    group_advantages,
    kl_to_reference,
    masked_mean,
    value_loss,
    whiten,
)


@dataclass(frozen=True)
class Config:
    """The knobs of Algorithm 1. Defaults are those of the embedded household run."""

    method: Literal["rspo", "outcome", "dense", "rspo_h", "rspo_o"] = "rspo"
    """rspo: the paper's method; outcome, dense: A alone on that reward; rspo_h: no B, A replays its own last
    groups; rspo_o: B trains on outcome rewards too."""
    algo: Literal["grpo", "gigpo", "ppo"] = "grpo"
    """The estimator of advantages that RSPO wraps."""
    seed: int = 0
    """Seed of every random draw of the run."""
    total_steps: int = 45
    """Updates of A; B's updates are not counted. A multiple of k."""
    k: int = 3
    """k: updates per phase, of B and then of A."""
    tasks_per_step: int = 8
    """B: tasks per update, fresh and replayed together (the paper's batch size, not agent B)."""
    group_size: int = 8
    """N: episodes per task. PPO plays tasks_per_step * group_size tasks once each."""
    off_policy_fraction: float = 0.125
    """alpha: share of an update that is replayed; alpha * tasks_per_step must be whole."""
    buffer_tasks: int = 14
    """Tasks (N episodes each) that B plays into the replay buffer in each loop."""
    replay_strategy: Literal["reward", "variance", "random"] = "reward"
    """What is drawn from the buffer first."""
    replay_unit: Literal["episode", "group"] = "episode"
    """Draw single episodes, or whole groups (those without spread are then skipped)."""
    clip_eps: float = 0.2
    """epsilon: half width of the clip interval [c - epsilon, c + epsilon]."""
    kl_coef: float = 0.01
    """beta: weight of the k3 estimate of KL(pi || pi_ref); 0 skips the reference model."""
    entropy_coef: float = 0.001
    """Weight of the entropy bonus."""
    reward_scale: float = 10.0
    """Factor on an episode's reward: R = reward_scale * reward - invalid_penalty * (invalid turns)."""
    invalid_penalty: float = 0.1
    """Taken off the return for each reply without one well-formed action."""
    reward_noise: float = 0.0
    """sigma: Gaussian noise on each dense step score (robustness test)."""
    gigpo_gamma: float = 0.95
    """gamma of GiGPO's step returns; plays no part in GRPO."""
    gigpo_omega: float = 1.0
    """omega: weight of GiGPO's step advantages."""
    gigpo_std: bool = True
    """GiGPO divides by the standard deviation, at both levels."""
    gamma: float = 1.0
    """gamma of PPO's GAE, per action token."""
    gae_lambda: float = 1.0
    """lambda of PPO's GAE."""
    value_clip: float = 0.5
    """PPO: the value may move this far from its old value before its loss is clipped."""
    epochs: int = 1
    """Passes over the data of an update."""
    minibatch_turns: int = 128
    """Turns per optimizer step, on-policy and replayed together."""
    tokens_per_micro_batch: int = 8192
    """Padded tokens per forward pass; a matter of memory, never of the gradient."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""

    def __post_init__(self):
        positive = "k total_steps tasks_per_step group_size buffer_tasks clip_eps epochs minibatch_turns"
        for name in (positive + " tokens_per_micro_batch max_grad_norm reward_scale value_clip").split():
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name} {getattr(self, name)}: must be above 0")
        for name in ["kl_coef", "entropy_coef", "invalid_penalty", "reward_noise", "gigpo_omega"]:
            if not getattr(self, name) >= 0:
                raise ValueError(f"--{name} {getattr(self, name)}: must not be negative")
        for name in ["gigpo_gamma", "gamma", "gae_lambda"]:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must lie between 0 and 1")
        if self.total_steps % self.k:
            below = self.total_steps // self.k * self.k
            near = f"{below} or {below + self.k}" if below else f"{self.k}"
            raise ValueError(
                f"--total_steps {self.total_steps}: must be a multiple of --k {self.k}, for example {near}"
            )
        if not 0 <= self.off_policy_fraction < 1:
            raise ValueError(f"--off_policy_fraction {self.off_policy_fraction}: must lie in [0, 1)")
        off_tasks = self.off_policy_fraction * self.tasks_per_step
        if self.replays and abs(off_tasks - round(off_tasks)) > 1e-9:
            near = min(max(1, round(off_tasks)), self.tasks_per_step - 1) / self.tasks_per_step
            raise ValueError(
                f"--off_policy_fraction {self.off_policy_fraction} of --tasks_per_step {self.tasks_per_step} "
                f"is {off_tasks:g} tasks: it must be whole, for example with --off_policy_fraction {near:g}"
            )
        if self.algo != "ppo" and self.group_size < 2:
            raise ValueError(
                f"--group_size {self.group_size} with --algo {self.algo}: advantages compare the episodes "
                "of a group, so it takes 2 or more (or --algo ppo)"
            )
        if self.algo == "ppo" and self.replays and self.replay_strategy == "variance":
            raise ValueError(
                "--replay_strategy variance with --algo ppo: groups of one episode have no variance; "
                "use --replay_strategy reward or random"
            )
        if self.algo == "ppo" and self.replays and self.replay_unit == "group":
            raise ValueError(
                "--replay_unit group with --algo ppo: its groups are single episodes; use episode"
            )

    @property
    def explores(self) -> bool:
        """There is an agent B."""
        return self.method in ("rspo", "rspo_o")

    @property
    def replays(self) -> bool:
        return self.method in ("rspo", "rspo_o", "rspo_h")

    @property
    def explorer_reward(self) -> str:
        return "dense" if self.method == "rspo" else "outcome"

    @property
    def policy_reward(self) -> str:
        return "dense" if self.method == "dense" else "outcome"

    @property
    def uses_dense_reward(self) -> bool:
        return self.method in ("rspo", "dense")

    @property
    def episodes_per_task(self) -> int:
        return 1 if self.algo == "ppo" else self.group_size

    @property
    def on_policy_tasks(self) -> int:
        """(1 - alpha) * B tasks for the methods that replay, else B; PPO: as many episodes, each its own
        task."""
        tasks = self.tasks_per_step
        if self.replays:
            tasks -= round(self.off_policy_fraction * self.tasks_per_step)
        return tasks * self.group_size // self.episodes_per_task

    @property
    def off_policy_episodes(self) -> int:
        """alpha * B * N"""
        return round(self.off_policy_fraction * self.tasks_per_step) * self.group_size if self.replays else 0

    @property
    def buffer_groups(self) -> int:
        return self.buffer_tasks * self.group_size // self.episodes_per_task


# --- from rewards to advantages ------------------------------------------------------------------------


def usable(groups: Iterable[Group], which: str) -> list[Trajectory]:
    """The episodes that count: those that crashed, or whose reward is not finite, have left their group."""
    members = [member for group in groups for member in group.trajectories if member.usable]
    return [member for member in members if math.isfinite(member.reward(which))]


def step_returns(trajectory: Trajectory, which: str, config: Config) -> list[float]:
    """What each step earns: reward_scale * its reward, less the penalty if its reply was invalid (S,)."""
    return [
        config.reward_scale * reward - config.invalid_penalty * (not step.valid)
        for step, reward in zip(trajectory.steps, trajectory.step_rewards(which), strict=True)
    ]


def advantages(groups: list[Group], which: str, config: Config) -> None:
    """Set every step's advantage, inside whole groups (Eq. 1-2; GiGPO: Feng et al. 2025, Eq. 5-8).

    GRPO: one value per episode, from the statistics of its group's N episodes. GiGPO adds, weighted by
    omega, how the step's discounted return compares with those of the steps of the same group that saw
    the same observation.
    """
    members = {id(member): g for g, group in enumerate(groups) for member in group.trajectories}
    episodes = usable(groups, which)
    if not episodes:
        return
    group_ids = torch.tensor([members[id(episode)] for episode in episodes])
    rewards = [step_returns(episode, which, config) for episode in episodes]
    normalize_std = config.algo != "gigpo" or config.gigpo_std
    episode_advantages = group_advantages(torch.tensor([sum(r) for r in rewards]), group_ids, normalize_std)
    for episode, advantage in zip(episodes, episode_advantages.tolist(), strict=True):
        for step in episode.steps:
            step.advantage = advantage
    if config.algo == "gigpo":
        steps = [step for episode in episodes for step in episode.steps]
        returns = torch.cat([discounted_returns(torch.tensor(r), config.gigpo_gamma) for r in rewards])
        anchors = [(members[id(episode)], step.observation) for episode in episodes for step in episode.steps]
        step_advantages = anchor_advantages(returns, anchors, normalize_std)
        for step, advantage in zip(steps, step_advantages.tolist(), strict=True):
            step.advantage += config.gigpo_omega * advantage


def token_advantages(on: list[list[Row]], off: list[list[Row]], which: str, config: Config) -> None:
    """PPO: set every row's advantages and returns, by GAE over its episode's action tokens alone.

    on, off: each episode's rows, with old_values from the agent's current critic. A step's reward sits on its
    last action token; the step limit counts as failure, so nothing is bootstrapped. On-policy tokens are
    whitened by their own statistics, replayed ones by those of the whole batch: while nothing fresh succeeds,
    on-policy returns have next to no spread, and divided by it a replayed success would be huge.
    """
    for episodes, reward in ((on, which), (off, "outcome")):
        for rows in episodes:
            episode = rows[0].trajectory
            rewards = [torch.zeros(len(step.action_ids)) for step in episode.steps]
            for tokens, earned in zip(rewards, step_returns(episode, reward, config), strict=True):
                tokens[-1] = earned
            masks = [row.action_mask for row in rows]
            values = torch.cat([row.old_values[mask] for row, mask in zip(rows, masks, strict=True)])
            columns = gae(torch.cat(rewards), values, config.gamma, config.gae_lambda)
            for name, column in zip(("advantages", "returns"), columns, strict=True):
                parts = column.split([int(mask.sum()) for mask in masks])
                for row, mask, part in zip(rows, masks, parts, strict=True):
                    setattr(row, name, torch.zeros(len(mask)).masked_scatter(mask, part))
    rows = [row for episode in on + off for row in episode]
    mask = torch.cat([row.action_mask for row in rows])
    on_policy = torch.arange(len(mask)) < sum(len(row.input_ids) for episode in on for row in episode)
    values = torch.cat([row.advantages for row in rows])
    values = whiten(values, mask & on_policy) + whiten(values, mask & ~on_policy, statistics_mask=mask)
    for row, part in zip(rows, values.split([len(row.input_ids) for row in rows]), strict=True):
        row.advantages = part


# --- one update ----------------------------------------------------------------------------------------


def with_behavior_logprobs(agent, groups: list[Group], config: Config) -> list[Group]:
    """Store what replay needs: log pi_B of every action token, and A_off of outcomes inside each whole group.

    PPO's advantages are computed when an episode is drawn, with the critic that A has by then.
    """
    rows = [row for episode in usable(groups, "outcome") for row in rows_of(episode)]
    score_rows(agent, rows, config, behavior_logprobs=True)
    for row in rows:
        for index, start, end in row.spans:
            row.trajectory.steps[index].behavior_logprobs = row.behavior_logprobs[start:end].tolist()
    if config.algo != "ppo":
        advantages(groups, "outcome", config)
    return groups


class NothingToTrainOn(RuntimeError):
    """No episode of an update counts: all crashed, or none got as far as a reply."""

    def __init__(self, groups: list[Group]):
        ends = endings([member for group in groups for member in group.trajectories])
        super().__init__(
            f"no episode of this update can be trained on; they ended so: {ends} (crashed: the environment "
            "broke, see its warning; token limit: the first prompt is longer than --max_prompt_tokens)"
        )


@torch.no_grad()
def score_rows(agent, rows: list[Row], config: Config, behavior_logprobs: bool = False) -> None:
    """Fill the rows' old_logprobs (or behavior_logprobs), and with the former ref_logprobs and old_values.

    Every rank scores its share of the rows and is told the rest.
    """
    mine = distributed.mine([len(row.input_ids) for row in rows])
    scored = [rows[i] for i in mine]
    for batch in micro_batches(scored, config.tokens_per_micro_batch, agent.chat.pad_id, agent.device):
        logprobs, _ = agent.logprobs(batch)
        if behavior_logprobs:
            batch.store("behavior_logprobs", logprobs)
            continue
        batch.store("old_logprobs", logprobs)
        if config.kl_coef:
            batch.store("ref_logprobs", agent.reference_logprobs(batch))
        if config.algo == "ppo":
            batch.store("old_values", agent.critic.values(batch))
    share_columns(rows, mine)


def share_columns(rows: list[Row], mine: list[int]) -> None:
    """Tell all ranks the columns of action tokens that each has filled in for the rows in places `mine`."""
    if distributed.world_size() == 1:
        return
    told = []
    for i in mine:
        for name in ("old_logprobs", "behavior_logprobs", "ref_logprobs", "old_values"):
            column = getattr(rows[i], name)
            if column is not None:
                told.append((i, name, column[rows[i].action_mask].tolist()))
    for i, name, values in distributed.gather(told):
        column = torch.zeros(len(rows[i].input_ids))
        setattr(rows[i], name, column.masked_scatter(rows[i].action_mask, torch.tensor(values)))


def split_rows(rows: list[Row], parts: int, rng: random.Random) -> list[list[Row]]:
    """Shuffle the rows and cut them into runs of about equally many turns, none empty if rows suffice."""
    rows = rng.sample(rows, len(rows))
    ends = list(itertools.accumulate(len(row.spans) for row in rows))
    middles = [end - len(row.spans) / 2 for end, row in zip(ends, rows, strict=True)]
    cuts = [0]
    for part in range(1, parts):
        cut = bisect.bisect(middles, ends[-1] * part / parts) if rows else 0
        if len(rows) >= parts:
            cut = min(max(cut, cuts[-1] + 1), len(rows) - (parts - part))
        cuts.append(cut)
    return [rows[start:end] for start, end in zip(cuts, [*cuts[1:], len(rows)], strict=True)]


def rows_here(rows: list[Row]) -> set[int]:
    """The ids of those rows that this rank trains on: its share, balanced by tokens."""
    return {id(rows[i]) for i in distributed.mine([len(row.input_ids) for row in rows])}


def sampler_gap(rows: list[Row]) -> dict[str, float]:
    """|sampler log-prob - trainer log-prob| over the action tokens of fresh rows: rounding, or it is a fault:
    an engine with stale weights, another temperature, other tokens. The loss reads the trainer's alone."""
    columns = [row.spread([step.sampler_logprobs for step in row.trajectory.steps]) for row in rows]
    gaps = [
        (row.old_logprobs - column)[row.action_mask].abs() for row, column in zip(rows, columns, strict=True)
    ]
    gap = torch.cat(gaps).double()
    return {"sampler_gap_mean": gap.mean().item(), "sampler_gap_max": gap.max().item()}


class Totals:
    """Whole-batch means: sums and counts gathered over micro-batches, divided once at the end."""

    def __init__(self):
        self.sums, self.counts = {}, {}

    def add(self, name: str, total: float | torch.Tensor, count: int | torch.Tensor) -> None:
        """Tensors stay on their device: reading one for every micro-batch would make a GPU wait."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0) + count

    def means(self) -> dict[str, float]:
        """Of all ranks together."""
        mine = [(name, float(total), int(self.counts[name])) for name, total in self.sums.items()]
        sums, counts = defaultdict(float), defaultdict(int)
        for name, total, count in distributed.gather(mine):
            sums[name] += total
            counts[name] += count
        return {name: total / counts[name] for name, total in sums.items()}


def policy_loss(agent, batch: Batch, source: str, config: Config, totals: Totals) -> torch.Tensor:
    """Per token: -min(r A, clip(r, c - eps, c + eps) A) + beta KL - entropy bonus (B, T), 0 where masked."""
    logprobs, entropy = agent.logprobs(batch, with_entropy=True)
    mask = batch.action_mask
    old, behavior = batch.column("old_logprobs"), batch.column("behavior_logprobs")
    surrogate = (logprobs, old, behavior, batch.column("advantages"), mask, config.clip_eps)
    loss = clipped_surrogate(*surrogate)
    count = mask.sum()
    totals.add(f"policy_loss_{source}", loss.detach().sum(), count)
    totals.add(f"clip_fraction_{source}", clipped(*surrogate).sum(), count)
    if source == "off":
        totals.add("centre_log_mean_abs", (old - behavior).abs().sum(), count)
    if config.kl_coef:
        kl = kl_to_reference(logprobs, batch.column("ref_logprobs"), mask)
        totals.add(f"kl_{source}", kl.detach().sum(), count)
        loss = loss + config.kl_coef * kl
    totals.add(f"entropy_{source}", entropy.detach().sum(), count)
    return loss - config.entropy_coef * entropy


def critic_loss(agent, batch: Batch, config: Config, totals: Totals) -> torch.Tensor:
    """The clipped value loss of on-policy tokens (B, T); replayed episodes do not train the critic."""
    mask, returns = batch.action_mask, batch.column("returns")
    values, old_values = agent.critic.values(batch), batch.column("old_values")
    loss = value_loss(values, old_values, returns, mask, config.value_clip)
    totals.add("value_loss", loss.detach().sum(), mask.sum())
    return loss


def update(
    agent, on: list[Group], off: list[Trajectory], which: str, config: Config, rng: random.Random
) -> dict:
    """One update of an agent on J_total = (1 - alpha) J_on + alpha J_off   (Eq. 3)

    on: groups the agent has just played; `which` of their rewards is read. off: replayed episodes, always
    read for their outcome; without any, alpha is 0 for this update. Each source's loss is a mean over its
    own action tokens: two token counts per optimizer step, taken over all of its micro-batches, on whichever
    rank. Returns the update's metrics.
    """
    started = time.perf_counter()
    on_episodes = [rows_of(episode) for episode in usable(on, which)]
    off_episodes = [rows_of(episode) for episode in off]
    on_rows = [row for rows in on_episodes for row in rows]
    off_rows = [row for rows in off_episodes for row in rows]
    if not on_rows:
        raise NothingToTrainOn(on)

    score_rows(agent, on_rows + off_rows, config)
    for row in on_rows:
        row.behavior_logprobs = row.old_logprobs  # pi_b = pi_old: the centre c is 1
    for row in off_rows:
        row.behavior_logprobs = row.spread([step.behavior_logprobs for step in row.trajectory.steps])
    if config.algo == "ppo":
        token_advantages(on_episodes, off_episodes, which, config)
    else:
        advantages(on, which, config)
        for row in on_rows + off_rows:
            row.advantages = row.spread([step.advantage for step in row.trajectory.steps])

    alpha = config.off_policy_fraction if off_rows else 0.0
    turns = sum(len(row.spans) for row in on_rows + off_rows)
    parts = max(1, round(turns / config.minibatch_turns))
    parts = min(parts, len(on_rows), len(off_rows) or parts)  # every minibatch holds something of each source
    totals = Totals()
    for _ in range(config.epochs):
        minibatches = zip(split_rows(on_rows, parts, rng), split_rows(off_rows, parts, rng), strict=True)
        for on_part, off_part in minibatches:
            here = rows_here(on_part + off_part)
            for source, rows, weight in (("on", on_part, 1 - alpha), ("off", off_part, alpha)):
                count = sum(row.action_tokens for row in rows)  # of all ranks' rows
                mine = [row for row in rows if id(row) in here]
                for batch in micro_batches(
                    mine, config.tokens_per_micro_batch, agent.chat.pad_id, agent.device
                ):
                    mask = batch.action_mask
                    loss = weight * masked_mean(
                        policy_loss(agent, batch, source, config, totals), mask, count
                    )
                    if config.algo == "ppo" and source == "on":
                        loss = loss + masked_mean(critic_loss(agent, batch, config, totals), mask, count)
                    loss.backward()
            distributed.sum_gradients(agent.parameters)
            totals.add("grad_norm", agent.step(config.max_grad_norm), 1)
            if config.algo == "ppo":
                distributed.sum_gradients(agent.critic.parameters)
                totals.add("critic_grad_norm", agent.critic.step(config.max_grad_norm), 1)
    return {
        **totals.means(),
        **sampler_gap(on_rows),
        "replayed_episodes": len(off),
        "alpha": alpha,
        "optimizer_steps": parts * config.epochs,
        "seconds_update": time.perf_counter() - started,
    }


# --- Algorithm 1 ---------------------------------------------------------------------------------------


def train(
    policy,
    world,
    dense_reward,
    config: Config,
    log: Callable[[str, dict, int], None] = lambda agent, metrics, step: None,
    end_loop: Callable[[int, ReplayBuffer], None] = lambda step, replay: None,
    start: int = 0,
    replay: ReplayBuffer | None = None,
) -> None:
    """Algorithm 1: train `policy` (agent A) until it has had `total_steps` updates.

    world.collect(agent, tasks) -> groups of episodes; dense_reward.score(groups, noise, rng) sets their
    dense scores. log(agent's name, metrics, A's updates so far) is called after every update,
    end_loop(A's updates, replay) after every loop of k; `start` and `replay` continue a run from there.
    """
    if replay is None:
        replay = ReplayBuffer(config.replay_strategy, config.replay_unit, seed=config.seed)

    def score(groups: list[Group], name: str) -> None:
        dense_reward.score(
            groups, noise=config.reward_noise, rng=random.Random(f"{config.seed} reward noise {name}")
        )

    def shuffle(name: str) -> random.Random:
        return random.Random(f"{config.seed} minibatches {name}")

    for step in range(start, config.total_steps, config.k):
        if config.explores:
            # Phase 1: B, a copy of A, learns from dense rewards and goes where A would not
            explorer = policy.fork("explorer")
            for i in range(config.k):
                groups = world.collect(explorer, config.on_policy_tasks)
                if config.explorer_reward == "dense":
                    score(groups, f"explorer {step + i}")
                metrics = update(
                    explorer, groups, [], config.explorer_reward, config, shuffle(f"explorer {step + i}")
                )
                log("explorer", {**episode_metrics(groups, config.explorer_reward), **metrics}, step)
            # The reward swap: what B collects now is stored with, and replayed for, the environment's outcome
            groups = with_behavior_logprobs(explorer, world.collect(explorer, config.buffer_groups), config)
            replay.add(groups)
            log("buffer", {**episode_metrics(groups, "outcome"), "buffer_episodes": len(replay)}, step)
            explorer.discard()

        # Phase 2: A learns from outcomes, its own and B's best
        for i in range(config.k):
            groups = world.collect(policy, config.on_policy_tasks)
            if config.policy_reward == "dense":
                score(groups, f"policy {step + i}")
            if config.method == "rspo_h":
                groups = with_behavior_logprobs(policy, groups, config)
            replayed = replay.sample(config.off_policy_episodes)
            metrics = update(
                policy, groups, replayed, config.policy_reward, config, shuffle(f"policy {step + i}")
            )
            log("policy", {**episode_metrics(groups, config.policy_reward), **metrics}, step + i + 1)
            if config.method == "rspo_h":  # no B: A's own last groups, oldest out first, never cleared
                replay.add(groups)
                replay.keep_newest(config.buffer_groups)
        if config.explores:
            replay.clear()
        end_loop(step + config.k, replay)


def episode_metrics(groups: list[Group], which: str) -> dict[str, float]:
    """What the episodes of one update say, crashed ones counted and otherwise left out: docs/METRICS.md."""
    members = [member for group in groups for member in group.trajectories]
    episodes = [member for member in members if member.usable]
    rewards = [[member.reward(which) for member in group.trajectories if member.usable] for group in groups]
    rewards = [group for group in rewards if group]
    turns = sum(len(episode.steps) for episode in episodes)
    metrics = {
        "success": mean([episode.success for episode in episodes]),
        "outcome": mean([episode.outcome for episode in episodes]),
        "turns_per_episode": mean([len(episode.steps) for episode in episodes]),
        "invalid_actions": sum(episode.invalid_actions for episode in episodes) / max(turns, 1),
        "truncated_replies": sum(step.truncated for episode in episodes for step in episode.steps)
        / max(turns, 1),
        "repeated_states": sum(episode.repeated_states for episode in episodes),
        "zero_spread_groups": mean([max(group) == min(group) for group in rewards]),
        "step_limit_episodes": sum(episode.stop_reason is StopReason.STEP_LIMIT for episode in episodes),
        "token_limit_episodes": sum(member.stop_reason is StopReason.TOKEN_LIMIT for member in members),
        "crashed_episodes": sum(member.stop_reason is StopReason.CRASHED for member in members),
        "left_out_episodes": len(members) - len(usable(groups, which)),
        "sampled_episodes": len(members),
        "sampled_turns": sum(len(member.steps) for member in members),
    }
    if which == "dense":
        metrics["dense_reward"] = mean([reward for group in rewards for reward in group])
    return metrics


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
