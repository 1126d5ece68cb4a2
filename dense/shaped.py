"""Shaped reward: a dense reward from the environment's own progress, an oracle for upper bounds.

    r_t = Phi(after turn t) - Phi(before turn t), in [-1, 1]; Phi: `Env.progress`, in [0, 1]

So R = sum_t r_t is Phi at the end less Phi at the start. Phi may read hidden state. It reaches no prompt: a
view carries it from the environment, also out of a worker process, and `rollout.Episode` records its gain on
the step. Views carry it only if the environment is wrapped in `WithProgress`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from buffer import Group, Trajectory
from dense.scores import set_scores
from envs import Env, View


class WithProgress:
    """An environment whose views also carry its progress. All else is the environment's own."""

    def __init__(self, env: Env):
        self.env = env

    def __getattr__(self, name: str):
        return getattr(self.env, name)

    def reset(self, split: str, index: int) -> View:
        return self._add_progress(self.env.reset(split, index))

    def step(self, action: str) -> View:
        return self._add_progress(self.env.step(action))

    def _add_progress(self, view: View) -> View:
        return dataclasses.replace(view, progress=self.env.progress())


def make_with_progress(make_env: Callable[[], Env]) -> WithProgress:
    """Make an environment with `make_env`, and wrap it."""
    return WithProgress(make_env())


def gains(trajectory: Trajectory) -> list[float]:
    """Return the gain of progress of each step. Raises ValueError if a step has none recorded."""
    recorded = [step.progress_gain for step in trajectory.steps]
    if None in recorded:
        where = f"step {recorded.index(None)} of task {trajectory.task_id}"
        raise ValueError(f"{where} has no gain of progress: wrap the environment in WithProgress")
    return recorded


class ShapedReward:
    """Scores the turns of an episode by their gain of progress. Without noise a score is in [-1, 1]."""

    def score(self, groups: list[Group], noise: float = 0.0, rng: random.Random | None = None) -> None:
        """Set `dense_score` of every step of every usable episode. noise: see `set_scores`."""
        set_scores(groups, gains, noise, rng)
