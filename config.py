"""The settings of Algorithm 1, with the paper's symbols, their ranges and the presets.

flags.py adds the other flags of a run. The presets and the defaults that depend on the model are written as
command lines.

The docstring below a field is its help text. This file imports no large package, so that
`python train.py --help` answers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

OLD_NAMES = {"total_steps": "total_updates", "tasks_per_step": "tasks_per_update"}  # still accepted
COUNT = (1, 10**6)
SIZE = (1, 10**9)  # of a batch, for example; a large value means all of it
SHARE = (0, 1)
WEIGHT = (0, 1000)  # of a term of the objective or the return
LEARNING_RATE = (1e-10, 1)  # a smaller step is lost in the rounding of fp32 weights

RANGES = {  # (lowest, highest) value of every number, here and in flags.Args
    "total_updates": (1, 999_999),  # the names of checkpoints have six digits
    "k": COUNT,
    "tasks_per_update": COUNT,
    "group_size": COUNT,
    "off_policy_fraction": SHARE,
    "buffer_tasks": COUNT,
    "buffer_keep": COUNT,
    "clip_eps": (1e-6, 10**6),
    "max_centre": (1.001, 10**6),  # at 1, every replayed token would be dropped
    "kl_coef": WEIGHT,
    "entropy_coef": WEIGHT,
    "reward_scale": (0.001, 10**6),
    "invalid_penalty": WEIGHT,
    "reward_noise": (0, 100),
    "seed": (0, 2**63 - 1),
    "gigpo_gamma": SHARE,
    "gigpo_omega": WEIGHT,
    "gamma": SHARE,
    "gae_lambda": SHARE,
    "value_clip": (1e-6, 10**6),
    "spear_weight": WEIGHT,
    "spear_warmup": COUNT,
    "spear_buffer": SIZE,
    "spear_age": COUNT,
    "spear_baseline_groups": COUNT,
    "spear_cov_share": SHARE,
    "spear_cov_low": (-(10**6), 10**6),
    "spear_cov_high": (-(10**6), 10**6),
    "epochs": (1, 1000),
    "minibatch_turns": SIZE,
    "tokens_per_micro_batch": SIZE,
    "max_grad_norm": (1e-4, 10**9),  # AdamW's epsilon hides gradients that are much smaller
    "learning_rate": LEARNING_RATE,
    "critic_learning_rate": LEARNING_RATE,
    "weight_decay": (0, 100),
    "adam_beta1": (0, 0.9999),
    "adam_beta2": (0, 0.9999),
    "tiny_width": (1, 8192),
    "tiny_layers": (1, 64),
    "tiny_heads": (1, 1024),
    "lora_rank": (0, 8192),
    "lora_alpha": (0.001, 10**6),
    "env_workers": (0, 1024),
    "history": (0, 10**6),
    "max_turns": COUNT,
    "max_prompt_tokens": SIZE,
    "max_new_tokens": (2, 10**6),  # an action and the token that ends the reply
    "temperature": (0.001, 1000),
    "parallel_episodes": COUNT,
    "vllm_memory": (0.01, 0.99),
    "eval_games": SIZE,
    "eval_every": COUNT,
    "eval_temperature": (0, 1000),
    "warm_start": (0, 10**6),
    "warm_start_episodes": COUNT,
    "warm_start_games": SIZE,
    "faithful_share": SHARE,
    "expert_share": SHARE,
    "hesitation_share": SHARE,
    "warm_start_turns": SIZE,
    "warm_start_lr": LEARNING_RATE,
    "reward_model_episodes": (2, 10**6),
    "reward_model_epochs": (1, 1000),
    "reward_model_lr": LEARNING_RATE,
    "implicit_beta": (0.0001, 1000),
    "implicit_lr": LEARNING_RATE,
    "gpu_memory_gb": (0.1, 10**6),
    "keep_checkpoints": COUNT,
    "threads": (1, 1024),
    "rank_timeout": (0.05, 7 * 24 * 60),  # minutes; within three seconds, a slow call looks like a hang
}


def check_ranges(settings) -> None:
    """Raise ValueError for the first number of a dataclass that is outside its range."""
    for name, value in vars(settings).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value):
            raise ValueError(f"--{name} {value}: must be a finite number")
        low, high = RANGES[name]
        if not low <= value <= high:
            raise ValueError(f"--{name} {value}: must be between {low} and {high}")


@dataclass(frozen=True)
class Config:
    """The settings of Algorithm 1. The defaults are those of the run on Household."""

    # the method
    method: Literal["rspo", "outcome", "dense", "rspo_h", "rspo_o", "spear"] = "rspo"
    """rspo: the paper's method. outcome, dense: train A only, on that reward. rspo_h: no B; A replays its own
    last groups. rspo_o: B is trained on outcome rewards too. spear: no B; A imitates its own best turns."""
    algo: Literal["grpo", "gigpo", "ppo"] = "grpo"
    """Estimator of the advantages."""
    total_updates: int = 180
    """Updates of A; a multiple of k. Updates of B are not counted."""
    k: int = 3
    """k: updates per phase, first of B, then of A."""
    tasks_per_update: int = 8
    """B (batch size; not agent B): tasks per update, fresh and replayed together."""
    group_size: int = 8
    """N: episodes per task. PPO plays tasks_per_update * group_size tasks once each."""
    off_policy_fraction: float = 0.125
    """alpha: share of an update that is replayed, for example 1/8. alpha * tasks_per_update must be a whole
    number above 0."""
    buffer_tasks: int = 14
    """Tasks (N episodes each) that B plays into the replay buffer in each loop."""
    buffer_source: Literal["collect", "phase1", "history", "both"] | None = None
    """Episodes that fill the buffer. collect: B plays buffer_tasks tasks for it. phase1: the episodes that B
    is trained on, so B plays no others. history: A's own newest groups. both: phase1 and history. Default:
    collect, rspo_h history"""
    buffer_keep: int | None = None
    """Newest tasks (N episodes each) that stay in the buffer from loop to loop. Default: rspo_h buffer_tasks,
    else the buffer is emptied after every loop"""
    replay_strategy: Literal["reward", "variance", "random", "positive"] = "reward"
    """Episodes that the buffer draws first. reward: highest outcome. variance: largest variance of outcomes
    in their group. random: any. positive: only episodes with A_off > 0 and an outcome above the mean of
    their group; fewest draws first, then largest A_off. Not in the paper: positive."""
    replay_unit: Literal["episode", "group"] = "episode"
    """Draw single episodes or whole groups. Groups with equal outcomes are then skipped."""
    clip_eps: float = 0.2
    """epsilon: half width of the clip interval [c - epsilon, c + epsilon]."""
    clip_centre: Literal["moving", "one"] = "moving"
    """Centre of the clip interval of replayed tokens. moving: c = pi_old / pi_B. one: 1 as in PPO, a control
    that is not in the paper."""
    max_centre: float | None = None
    """J_off leaves out replayed tokens whose centre c = pi_old / pi_B is above this or below its inverse.
    Not in the paper. Default: none is left out"""
    kl_coef: float = 0.01
    """beta: weight of the k3 estimate of KL(pi || pi_ref). 0 skips the reference model."""
    entropy_coef: float = 0.001
    """Weight of the entropy bonus."""
    dense_reward: Literal["step_model", "shaped", "implicit", "novelty"] = "step_model"
    """Score of a turn for agents trained on dense rewards. step_model: of the fitted step reward model, as in
    the paper. shaped: the gain of the environment's own progress, an oracle (not alfworld). implicit: the
    log-ratio of a policy, trained on the outcomes of A's episodes, to the starting model. novelty: 1 if the
    turn leads to an observation that is new in the episode, else 0."""
    reward_scale: float = 10.0
    """R = reward_scale * reward - invalid_penalty * (number of invalid replies): the return of an episode."""
    invalid_penalty: float = 0.1
    """Penalty in R for each reply without exactly one well-formed action."""
    reward_noise: float = 0.0
    """sigma: standard deviation of Gaussian noise on each dense score (robustness test)."""
    seed: int = 0
    """Seed of every random draw of the run."""

    # GiGPO and PPO
    gigpo_gamma: float = 0.95
    """gamma of GiGPO, for the discounted returns of steps."""
    gigpo_omega: float = 1.0
    """omega of GiGPO: weight of the step advantages."""
    gigpo_std: bool = True
    """GiGPO: divide episode and step advantages by their standard deviation."""
    gamma: float = 1.0
    """gamma of PPO, per action token."""
    gae_lambda: float = 1.0
    """lambda of PPO's GAE."""
    value_clip: float = 0.5
    """PPO: half width of the interval around the old value that the value loss is clipped to."""

    # SPEAR (baselines/spear.py)
    spear_weight: float = 0.1
    """gamma: weight of the imitation loss after the warm-up. 0.1 suits advantages that are divided by their
    std. SPEAR's own value is 1, for advantages that are only centred."""
    spear_warmup: int = 100
    """Updates of A over which the weight of the imitation loss rises from 0 to gamma, along a cosine."""
    spear_buffer: int = 128
    """Turns with positive advantage that fill the buffer. A full buffer is imitated once and emptied."""
    spear_age: int = 5
    """Turns that were played more updates of A ago leave the buffer."""
    spear_baseline_groups: int = 10240
    """Newest groups whose mean returns give the baseline of imitated turns, their median."""
    spear_cov_share: float = 0.02
    """Share of the imitated tokens whose gradient is dropped. They are drawn from those in the covariance
    band. 0 drops none."""
    spear_cov_low: float = 2.0
    """Lower end of the band of the covariance of log-prob and advantage."""
    spear_cov_high: float = 60.0
    """Upper end of that band."""

    # optimisation (flags.Args continues this section)
    epochs: int = 1
    """Passes over the data of an update."""
    minibatch_turns: int = 128
    """Turns per optimizer step, fresh and replayed together."""
    tokens_per_micro_batch: int = 8192
    """Tokens per forward pass, padding included. Affects memory, not the gradient."""
    max_grad_norm: float = 1.0
    """Largest gradient norm; larger gradients are scaled down."""

    def __post_init__(self):
        check_ranges(self)
        if self.total_updates % self.k:
            below = self.total_updates // self.k * self.k
            near = f"{below} or {below + self.k}" if below else f"{self.k}"
            why = f"must be a multiple of --k {self.k}, for example {near}"
            raise ValueError(f"--total_updates {self.total_updates}: {why}")
        if self.replays and self.tasks_per_update == 1:
            raise ValueError(
                f"--tasks_per_update 1 with --method {self.method}: an update has fresh and replayed tasks; "
                "give 2 or more, or --method outcome"
            )
        off_tasks = self.off_policy_fraction * self.tasks_per_update
        if self.off_policy_fraction == 1 or (self.replays and self.tasks_per_update - off_tasks < 1e-9):
            raise ValueError(
                f"--off_policy_fraction {self.off_policy_fraction}: must lie in [0, 1); give for example 1/8"
            )
        if self.replays and off_tasks < 1e-9:
            raise ValueError(
                f"--off_policy_fraction {self.off_policy_fraction} with --method {self.method}: nothing is "
                "replayed; give for example 1/8, or --method outcome"
            )
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
                "of a group; give 2 or more, or --algo ppo"
            )
        if self.algo == "ppo" and self.replays and self.replay_strategy == "variance":
            raise ValueError(
                "--replay_strategy variance with --algo ppo: groups of one episode have no variance; "
                "give --replay_strategy reward or random"
            )
        if self.algo == "ppo" and self.replays and self.replay_unit == "group":
            raise ValueError("--replay_unit group with --algo ppo: groups have one episode; give episode")
        if self.replays and self.replay_strategy == "positive":
            if self.algo == "ppo":
                raise ValueError(
                    "--replay_strategy positive with --algo ppo: A_off is not known before the draw, as A's "
                    "critic computes it; give --replay_strategy reward or random"
                )
            if self.replay_unit == "group":
                raise ValueError(
                    "--replay_strategy positive with --replay_unit group: the A_off of a group sum to 0; "
                    "give episode"
                )
        self._check_buffer_source()
        if self.method == "spear" and self.algo == "ppo":
            raise ValueError(
                "--algo ppo with --method spear: its baseline is a median of group means, and PPO has no "
                "groups; give grpo or gigpo"
            )
        if self.spear_cov_low >= self.spear_cov_high:
            raise ValueError(
                f"--spear_cov_low {self.spear_cov_low} with --spear_cov_high {self.spear_cov_high}: the band "
                "is empty; give a lower value, or --spear_cov_share 0 to drop no token"
            )

    def _check_buffer_source(self) -> None:
        if self.method == "rspo_h" and self.buffer_source not in (None, "history"):
            raise ValueError(
                f"--buffer_source {self.buffer_source} with --method rspo_h: there is no B; give history, or "
                "--method rspo"
            )
        if self.explores and self.buffer_source == "history":
            raise ValueError(
                f"--buffer_source history with --method {self.method}: no episode of B would be replayed; "
                "give both, or --method rspo_h"
            )
        if self.explores and self.buffer_keep is not None:
            played = self.k * (self.tasks_per_update - self.replayed_tasks)
            filled = self.buffer_tasks if "collect" in self.buffer_sources else played
            if self.buffer_keep < filled:
                raise ValueError(
                    f"--buffer_keep {self.buffer_keep}: B fills the buffer with {filled} tasks in each loop; "
                    f"give {filled} or more"
                )

    @property
    def explores(self) -> bool:
        """Return True if there is an agent B."""
        return self.method in ("rspo", "rspo_o")

    @property
    def replays(self) -> bool:
        """Return True if A's updates draw from a replay buffer."""
        return self.method in ("rspo", "rspo_o", "rspo_h")

    @property
    def explorer_reward(self) -> str:
        """Return the name of B's training reward."""
        return "dense" if self.method == "rspo" else "outcome"

    @property
    def policy_reward(self) -> str:
        """Return the name of A's training reward."""
        return "dense" if self.method == "dense" else "outcome"

    @property
    def uses_dense_reward(self) -> bool:
        """Return True if an agent is trained on dense rewards."""
        return self.method in ("rspo", "dense")

    @property
    def dense_kind(self) -> str | None:
        """Return `dense_reward` if an agent is trained on dense rewards, else None."""
        return self.dense_reward if self.uses_dense_reward else None

    @property
    def episodes_per_task(self) -> int:
        """Return the size of a group: N, or 1 with PPO."""
        return 1 if self.algo == "ppo" else self.group_size

    @property
    def replayed_tasks(self) -> int:
        """Return alpha * B for the methods that replay, else 0."""
        return round(self.off_policy_fraction * self.tasks_per_update) if self.replays else 0

    @property
    def on_policy_tasks(self) -> int:
        """Return the fresh tasks per update: (1 - alpha) * B; with PPO N times as many, played once each."""
        return (self.tasks_per_update - self.replayed_tasks) * self.group_size // self.episodes_per_task

    @property
    def off_policy_episodes(self) -> int:
        """Return the replayed episodes per update, alpha * B * N."""
        return self.replayed_tasks * self.group_size

    @property
    def buffer_sources(self) -> tuple[str, ...]:
        """Return what fills the replay buffer: some of "collect", "phase1" and "history"."""
        if not self.replays:
            return ()
        if self.method == "rspo_h":
            return ("history",)
        if self.buffer_source == "both":
            return ("phase1", "history")
        return (self.buffer_source or "collect",)

    @property
    def buffer_groups(self) -> int:
        """Return the number of groups that B plays into the buffer: buffer_tasks, with PPO N times that."""
        return self.buffer_tasks * self.group_size // self.episodes_per_task

    @property
    def kept_groups(self) -> int:
        """Return the number of newest groups that stay in the buffer. 0: it is emptied after every loop."""
        kept = self.buffer_keep or (self.buffer_tasks if self.method == "rspo_h" else 0)
        return kept * self.group_size // self.episodes_per_task


# --- presets ----------------------------------------------------------------------------------------------

TINY_MODEL = """--style short --lora_rank 0 --dtype float32 --adam_beta2 0.99 --critic_learning_rate 1e-3
    --threads 1 --reward_model_lr 1e-3 --implicit_lr 1e-3"""

LANGUAGE_MODEL = """--style think --lora_rank 64 --dtype bfloat16 --adam_beta2 0.999 --learning_rate 3e-6
    --critic_learning_rate 1e-5 --reward_model_lr 1e-5 --implicit_lr 6e-6 --warm_start 0
    --history 2 --max_prompt_tokens 2048 --max_new_tokens 512"""

TINY = {  # with these the tiny model can act at the start, but has much to learn
    "household": """--tiny_width 64 --tiny_layers 2 --history 1 --max_prompt_tokens 256 --max_new_tokens 16
        --warm_start 450 --warm_start_turns 128 --warm_start_lr 4e-3 --warm_start_episodes 2000
        --faithful_share 0.15 --expert_share 0.95 --hesitation_share 0 --learning_rate 4e-4
        --reward_model_source expert --reward_model_episodes 2000""",
    # ALFWorld's scripted expert almost always wins, but the reward model also needs failures: fit it on the
    # policy's own games.
    "alfworld": """--tiny_width 64 --tiny_layers 2 --history 1 --max_prompt_tokens 256 --max_new_tokens 16
        --warm_start 1500 --warm_start_turns 128 --warm_start_lr 4e-3 --warm_start_episodes 5000
        --faithful_share 1 --expert_share 0.5 --hesitation_share 0.45 --warm_start_games 600
        --learning_rate 2e-4
        --reward_model_source policy --reward_model_episodes 1000""",
    "webshop": """--tiny_width 96 --tiny_layers 3 --history 0 --max_prompt_tokens 320 --max_new_tokens 64
        --warm_start 1000 --warm_start_turns 64 --warm_start_lr 3e-3 --warm_start_episodes 8000
        --faithful_share 1 --expert_share 0.75 --hesitation_share 0.22 --learning_rate 1e-4
        --reward_model_source expert --reward_model_episodes 2000""",
}

PAPER = """--model Qwen/Qwen2.5-1.5B-Instruct --reward_model_backbone meta-llama/Llama-3.2-3B-Instruct
    --lora_rank 64 --lora_alpha 64 --learning_rate 3e-6 --weight_decay 0.01 --critic_learning_rate 1e-5
    --total_updates 150 --k 3 --tasks_per_update 16 --group_size 8 --buffer_tasks 28
    --off_policy_fraction 1/8 --clip_eps 0.2 --kl_coef 0.01 --entropy_coef 0.001 --epochs 1
    --max_grad_norm 1 --reward_scale 10 --invalid_penalty 0.1 --gigpo_gamma 0.95 --gradient_checkpointing
    --context window --history 2 --max_new_tokens 512 --temperature 1 --eval_temperature 0.4
    --eval_every 15"""

# The episodes that B is trained on are replayed, so B plays no others. With the default sizes (k 3, 8 tasks)
# B adds 18 groups in each loop, and the newest 84 stay.
CHEAP_SWAP = """--buffer_source phase1 --buffer_keep 84 --replay_strategy positive
    --off_policy_fraction 1/4"""

PRESETS = {
    "cheap-swap": CHEAP_SWAP,
    "paper-alfworld": f"""{PAPER} --env alfworld --max_turns 50 --max_prompt_tokens 2048
        --minibatch_turns 256 --gigpo_std --eval_splits valid_seen valid_unseen""",
    "paper-webshop": f"""{PAPER} --env webshop --max_turns 15 --max_prompt_tokens 4096
        --minibatch_turns 64 --no_gigpo_std --eval_splits validation test --eval_games 500""",
}
