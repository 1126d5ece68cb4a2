"""Novelty: a dense reward that counts first visits of an observation, inside one episode.

    r_t = 1 if the observation after turn t did not occur before in this episode, else 0

The observation after turn t is the one that turn t + 1 shows. Texts must be equal, as for GiGPO's anchor. The
last turn of an episode has score 0, since no turn shows what it led to. So R = sum_t r_t is the number of
different observations less 1, and long episodes can have a larger R than short ones.

Left out: counts over several episodes or updates, texts that are only similar, and a bonus that decays.
"""

from __future__ import annotations

import random

from buffer import Group, Trajectory
from dense.scores import set_scores


def first_visits(trajectory: Trajectory) -> list[float]:
    """Return the score of each step: 1.0 if it led to an observation that is new in the episode, else 0.0."""
    scores, seen = [], set()
    following = [step.observation for step in trajectory.steps[1:]]
    for step, reached in zip(trajectory.steps, following, strict=False):
        seen.add(step.observation)
        scores.append(float(reached not in seen))
    return [*scores, 0.0]


class NoveltyReward:
    """Scores the turns of an episode by `first_visits`. Without noise a score is 0 or 1."""

    def score(self, groups: list[Group], noise: float = 0.0, rng: random.Random | None = None) -> None:
        """Set `dense_score` of every step of every usable episode. noise: see `set_scores`."""
        set_scores(groups, first_visits, noise, rng)
