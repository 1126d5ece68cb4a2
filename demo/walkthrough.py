"""Write docs/WALKTHROUGH.md: one loop of Algorithm 1 on the toy, number by number.

`python -m demo.walkthrough` writes the page. `play_loop` runs rspo.train and watches it through the log, the
policy and the replay buffer, so the page always shows the algorithm as it is. The text is
demo/walkthrough.md: `{name}` becomes a value of `values_of`, and [[rspo.update]] a link to the file of that
function. Sentences that say what happened are written for seed 0; tests/demo/test_walkthrough.py checks them.
Links name no lines, as lines change with every edit.

Left out: GiGPO and PPO; more than one update per phase; the KL term and the entropy bonus, whose weights are
0 in CONFIG, so that all numbers follow from Eq. 1-4.

Shapes: B rows, T tokens (columns).
"""

from __future__ import annotations

import inspect
import math
import pkgutil
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import losses
import rspo
from batch import Batch
from buffer import Group, ReplayBuffer, Trajectory
from config import Config
from demo import toy

ROOT = Path(__file__).parent.parent
TEXT = ROOT / "demo" / "walkthrough.md"
PAGE = ROOT / "docs" / "WALKTHROUGH.md"
LEARNING_RATE = 0.15
LEAD = -0.7  # the logit of "left" starts 0.7 below that of "right"
WEAK_LEAD = 0.5  # a weaker start, with which B wins no game
UPDATES = [1, 2, 5, 10]  # of A, the columns of the comparison at the end
CONFIG = Config(
    total_updates=1,
    k=1,
    tasks_per_update=3,
    group_size=4,
    off_policy_fraction=1 / 3,
    buffer_tasks=8,
    epochs=3,
    kl_coef=0.0,
    entropy_coef=0.0,
)


# Watch one loop


def p_right(policy: toy.ToyPolicy) -> float:
    """Return the policy's probability of "right" at a door."""
    return torch.softmax(policy.logits.detach()[toy.AGENT], dim=-1)[toy.RIGHT].item()


class LossPass:
    """The rows of one source in one optimizer step, with log pi, loss and clipped tokens, all (B, T)."""

    def __init__(self, batch: Batch, logprobs: torch.Tensor):
        self.batch, self.logprobs = batch, logprobs
        old = batch.column("old_logprobs")
        fresh = batch.rows[0].behavior_logprobs is None  # then pi_b = pi_old
        behavior = old if fresh else batch.column("behavior_logprobs")
        advantages, mask, eps = batch.column("advantages"), batch.action_mask, CONFIG.clip_eps
        self.loss, self.clipped = losses.clipped_surrogate(logprobs, old, behavior, advantages, mask, eps)
        self.tokens = int(mask.sum())
        self.objective = 0.0 - self.loss.sum().item() / self.tokens  # J; 0.0 - 0.0 has no minus sign
        self.clipped_tokens = f"{int(self.clipped.sum())} of {self.tokens}"


@dataclass
class OptimizerStep:
    """One optimizer step: its passes (fresh rows, then replayed rows), and p(right) before and after it."""

    passes: list[LossPass]
    gradient: float  # of the loss, at the logit of "right"
    before: float
    after: float

    def total(self) -> float:
        """Return J_total   (Eq. 3)"""
        on, off = self.passes
        alpha = CONFIG.off_policy_fraction
        return (1 - alpha) * on.objective + alpha * off.objective


class WatchedPolicy(toy.ToyPolicy):
    """A toy policy that records every optimizer step. Its copy, agent B, does too."""

    def __init__(self, name: str = "policy", learning_rate: float = LEARNING_RATE, lead: float = LEAD):
        super().__init__(name, learning_rate, lead)
        self.scored: list[tuple[Batch, torch.Tensor]] = []  # the batches of this step, with log pi
        self.steps: list[OptimizerStep] = []

    def logprobs(self, batch, with_entropy=False):
        logprobs, entropy = super().logprobs(batch, with_entropy)
        if with_entropy:  # only the loss needs the entropy
            self.scored.append((batch, logprobs.detach()))
        return logprobs, entropy

    def step(self, max_grad_norm):
        gradient, before = self.logits.grad[toy.AGENT, toy.RIGHT].item(), p_right(self)
        norm = super().step(max_grad_norm)
        passes = [LossPass(batch, logprobs) for batch, logprobs in self.scored]
        self.steps.append(OptimizerStep(passes, gradient, before, p_right(self)))
        self.scored = []
        return norm


class WatchedBuffer(ReplayBuffer):
    """A replay buffer that records the last draw."""

    def sample(self, n):
        self.drawn = super().sample(n)
        return self.drawn


@dataclass
class Loop:
    """One loop of Algorithm 1 as it was watched."""

    policy: WatchedPolicy  # A, after the loop
    explorer: WatchedPolicy  # B
    replay: WatchedBuffer
    groups: dict[str, list[Group]]  # by the log's names: "explorer", "buffer", "policy"
    metrics: dict[str, dict]


def play_loop(lead: float = LEAD) -> Loop:
    """Run one loop of Algorithm 1 and record it. `lead` sets the start of A (see demo.toy.ToyPolicy)."""
    policy, replay = WatchedPolicy(lead=lead), WatchedBuffer(seed=CONFIG.seed)
    world = toy.toy_world(CONFIG.group_size, seed=CONFIG.seed)
    groups, metrics = {}, {}

    def log(agent, played, described, updates):
        groups[agent], metrics[agent] = played, described

    rspo.train(policy, world, toy.CountingScorer(), CONFIG, log, replay=replay)
    return Loop(policy, policy.explorer, replay, groups, metrics)


def episodes_of(groups: list[Group]) -> list[Trajectory]:
    """Return the episodes of all groups."""
    return [episode for group in groups for episode in group.trajectories]


def play_on(method: str) -> tuple[list[float], int]:
    """Run a method for more updates. Return A's chance to win after each update, and the episodes played."""
    policy, world = toy.ToyPolicy("policy", LEARNING_RATE, LEAD), toy.toy_world(CONFIG.group_size)
    config = replace(CONFIG, method=method, total_updates=UPDATES[-1])
    chances = []

    def end_loop(updates, replay):  # a loop has one update
        chances.append(p_right(policy) ** 3)

    rspo.train(policy, world, toy.CountingScorer(), config, end_loop=end_loop)
    return chances, world.episodes


# Write the page


def number(x: float) -> str:
    """Write a number with three decimals; -0.000 becomes 0.000."""
    return f"{x:.3f}".replace("-0.000", "0.000")


def rows(lines: list[list]) -> str:
    """Return the lines of a Markdown table. Floats get three decimals."""
    texts = []
    for line in lines:
        cells = [number(cell) if isinstance(cell, float) else str(cell) for cell in line]
        texts.append(f"| {' | '.join(cells)} |")
    return "\n".join(texts)


def path_of(episode: Trajectory) -> str:
    """Return the actions as letters, for example "R R L"."""
    return " ".join(step.action[0].upper() for step in episode.steps)


def group_rows(groups: list[Group]) -> str:
    """Return a line per group: its number, and its episodes' paths, dense sums, outcomes and advantages."""
    lines = []
    for place, group in enumerate(groups, start=1):
        paths = [path_of(episode) for episode in group.trajectories]
        dense = [str(path.count("L")) for path in paths]  # B's buffer and A's episodes are never scored
        outcomes = [f"{episode.outcome:.0f}" for episode in group.trajectories]
        advantages = [number(episode.steps[0].advantage) for episode in group.trajectories]
        lines.append([place, ", ".join(paths), " ".join(dense), " ".join(outcomes), ", ".join(advantages)])
    return rows(lines)


def dense_values(loop: Loop) -> dict:
    """Return the values of section 1: B's episodes and B's update."""
    episodes = []
    for place, group in enumerate(loop.groups["explorer"], start=1):
        for episode in group.trajectories:
            dense = episode.reward("dense")
            scaled, advantage = CONFIG.reward_scale * dense, episode.steps[0].advantage
            episodes.append([place, path_of(episode), f"{dense:.0f}", f"{scaled:.0f}", advantage])
    steps = []
    for place, step in enumerate(loop.explorer.steps, start=1):
        (fresh,) = step.passes
        clipped = fresh.clipped_tokens
        steps.append([place, fresh.objective, clipped, step.gradient, step.before, step.after])
    return {"dense_groups": rows(episodes), "dense_steps": rows(steps)}


def buffer_values(loop: Loop) -> dict:
    """Return the values of sections 2 and 3: the swapped episodes and the draw."""
    groups = loop.groups["buffer"]
    draws = []
    for place, episode in enumerate(loop.replay.drawn, start=1):
        (group,) = [i for i, group in enumerate(groups, start=1) if episode in group.trajectories]
        draws.append([place, group, path_of(episode), f"{episode.outcome:.0f}", episode.steps[0].advantage])
    stored = loop.replay.drawn[0].steps[0].behavior_logprobs
    return {
        "buffer_episodes": len(episodes_of(groups)),
        "buffer_groups": group_rows(groups),
        "winners": sum(episode.success for episode in episodes_of(groups)),
        "stored": " and ".join(number(logprob) for logprob in stored),
        "draws": rows(draws),
    }


def learning_values(loop: Loop) -> dict:
    """Return the values of section 4: A's update on both sources."""
    groups, first = loop.groups["policy"], loop.policy.steps[0]
    steps = []
    for place, step in enumerate(loop.policy.steps, start=1):
        objectives = [passed.objective for passed in step.passes] + [step.total()]
        clipped = step.passes[1].clipped_tokens
        steps.append([place, *objectives, clipped, step.gradient, step.before, step.after])
    return {
        "fresh_groups": group_rows(groups),
        "rights": sum(path_of(episode).count("R") for episode in episodes_of(groups)),
        "expected_rights": 24 * first.before,
        "all_fail": (1 - first.before**3) ** 8,
        "on": first.passes[0],
        "off": first.passes[1],
        "j_total": first.total(),
        "learning_steps": rows(steps),
    }


def token_values(loop: Loop) -> dict:
    """Return the values of the one replayed token that section 4 follows through A's update."""
    lines = []
    for place, step in enumerate(loop.policy.steps, start=1):
        _, off = step.passes
        drawn = [i for i, row in enumerate(off.batch.rows) if row.trajectory is loop.replay.drawn[0]]
        at = (drawn[0], off.batch.rows[drawn[0]].spans[0][1])  # row and column of a "right"
        old = off.batch.column("old_logprobs")[at].item()
        behavior = off.batch.column("behavior_logprobs")[at].item()
        r = math.exp(off.logprobs[at].item() - behavior)
        gradient = "0: clipped" if off.clipped[at] else "flows"
        gradient_at_1 = "0: clipped" if r > 1 + CONFIG.clip_eps else "flows"  # A_off is positive
        lines.append([place, r, off.loss[at].item(), gradient, gradient_at_1])
    c = math.exp(old - behavior)
    return {
        "advantage": loop.replay.drawn[0].steps[0].advantage,
        "log_b": behavior,
        "log_old": old,
        "c": c,
        "low": c - CONFIG.clip_eps,
        "high": c + CONFIG.clip_eps,
        "token_steps": rows(lines),
    }


def values_of(loop: Loop) -> dict:
    """Return the value of every name in the text."""
    weak = play_loop(WEAK_LEAD)
    p = {
        "start": loop.policy.steps[0].before,
        "end": p_right(loop.policy),
        "explorer": p_right(loop.explorer),
        "weak": weak.policy.steps[0].before,
    }
    names = {"rspo": "RSPO", "outcome": "outcomes only (GRPO)", "dense": "dense rewards only"}
    runs = {method: play_on(method) for method in names}
    lines = []
    for method, (chances, episodes) in runs.items():
        name = names[method]
        lines.append([name, *[chances[update - 1] for update in UPDATES], episodes])
    prompt = loop.replay.drawn[0].steps[0].prompt_ids
    return {
        "config": CONFIG,
        "learning_rate": LEARNING_RATE,
        "prompt": toy.ToyChat().decode(prompt),
        "p": p,
        "win": {name: value**3 for name, value in p.items()},
        "weak_winners": sum(episode.success for episode in episodes_of(weak.groups["buffer"])),
        "buffer_size": len(loop.replay),
        "runs": runs,
        "comparison": rows(lines),
        **dense_values(loop),
        **buffer_values(loop),
        **learning_values(loop),
        **token_values(loop),
    }


def link(match: re.Match) -> str:
    """Turn [[module.name]] into a link to the file that defines it. Fails if there is no such name."""
    defined = inspect.unwrap(pkgutil.resolve_name(match[1]))
    file = Path(inspect.getsourcefile(defined)).relative_to(ROOT).as_posix()
    return f"[`{match[1]}`](../{file})"


def make_page(values: dict) -> str:
    """Return the page: the text with its links and values."""
    text = re.sub(r"\[\[(.+?)\]\]", link, TEXT.read_text(encoding="utf-8"))
    return text.format(**values)


if __name__ == "__main__":
    PAGE.write_text(make_page(values_of(play_loop())), encoding="utf-8")
    print(f"written to {PAGE}")
