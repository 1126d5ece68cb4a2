"""Setting the dense scores of whole groups, with noise: what all dense rewards in this folder share."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from buffer import Group, Trajectory


def set_scores(
    groups: list[Group],
    scores_of: Callable[[Trajectory], list[float]],
    noise: float = 0.0,
    rng: random.Random | None = None,
) -> None:
    """Set `dense_score` of every step of every usable episode; an older score is replaced.

    scores_of: returns one score for each step of an episode. noise: std of Gaussian noise on each score,
    drawn from `rng` in the order of the steps, as by the step reward model. Raises ValueError for noise
    without an rng, and FloatingPointError if a score is not a finite number.
    """
    if noise and rng is None:
        raise ValueError(f"noise of {noise} needs an rng: give a random.Random")
    for group in groups:
        for episode in group.usable_episodes():
            scores = scores_of(episode)
            if not all(math.isfinite(score) for score in scores):
                raise FloatingPointError(f"a dense score of task {episode.task_id} is not a finite number")
            for step, score in zip(episode.steps, scores, strict=True):
                step.dense_score = score + (rng.gauss(0.0, noise) if noise else 0.0)
