"""The settings of Algorithm 1, with the paper's symbols. A run's other flags are in flags.py.

Nothing heavy is imported here, so that `python train.py --help` answers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


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
