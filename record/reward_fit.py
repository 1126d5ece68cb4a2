"""The quality of a fit of the step reward model: the choice of held-out tasks, and the report on them."""

from __future__ import annotations

import random
import warnings
from bisect import bisect_left, bisect_right

import torch

from buffer import Trajectory

CHANCE_AUC = 0.6  # a fit with a lower AUC has learned too little


def split_by_task(trajectories: list[Trajectory], held_out: float, rng: random.Random) -> tuple[list, list]:
    """Split episodes into (training, held-out). No task is in both.

    Solved and unsolved tasks are held out in the same proportion. Raises ValueError for fewer than two tasks.
    """
    solved: dict[str, bool] = {}  # by task: True if one of its episodes is a success
    for trajectory in trajectories:
        solved[trajectory.task_id] = solved.get(trajectory.task_id, False) or trajectory.success
    if len(solved) < 2:
        raise ValueError(
            f"the step reward model needs episodes of two tasks, to hold one out: {len(trajectories)} usable "
            f"episodes have {len(solved)}; raise --reward_model_episodes"
        )
    tasks = rng.sample(list(solved), len(solved))
    tasks.sort(key=lambda task: solved[task])
    every = min(len(tasks), max(2, round(1 / held_out)))
    held_tasks = set(tasks[every // 2 :: every])
    training = [trajectory for trajectory in trajectories if trajectory.task_id not in held_tasks]
    return training, [trajectory for trajectory in trajectories if trajectory.task_id in held_tasks]


def quality(predicted: list[float], trajectories: list[Trajectory]) -> dict[str, float | None]:
    """Compare predicted R with outcomes: mse, Pearson correlation, auc of success; None if undefined."""
    r = torch.tensor(predicted, dtype=torch.float64)
    outcomes = torch.tensor([trajectory.outcome for trajectory in trajectories], dtype=torch.float64)
    x, y = r - r.mean(), outcomes - outcomes.mean()
    norms = float(x.norm() * y.norm())
    return {
        "mse": float((r - outcomes).square().mean()),
        "correlation": float(x @ y) / norms if norms > 0 else None,
        "auc": area_under_roc(predicted, [trajectory.success for trajectory in trajectories]),
    }


def area_under_roc(scores: list[float], positive: list[bool]) -> float | None:
    """Return the share of pairs whose positive has the higher score; ties count half. None without pairs."""
    positives = [score for score, is_positive in zip(scores, positive, strict=True) if is_positive]
    negatives = sorted(score for score, is_positive in zip(scores, positive, strict=True) if not is_positive)
    if not positives or not negatives:
        return None
    wins = sum(bisect_left(negatives, score) + bisect_right(negatives, score) for score in positives) / 2
    return wins / (len(positives) * len(negatives))


def fit_report(training: list[Trajectory], held_out: list[Trajectory], predicted: list[float]) -> dict:
    """Return the report of a fit, and warn if the model has learned too little.

    predicted: R of the held-out episodes. The report holds `quality` on them; mse_of_mean, their MSE if the
    mean outcome of the training episodes is predicted; counts of episodes and successes; and learned, True if
    the model is clearly better than chance.
    """
    mean = sum(trajectory.outcome for trajectory in training) / len(training)
    report = {
        **quality(predicted, held_out),
        "mse_of_mean": sum((mean - trajectory.outcome) ** 2 for trajectory in held_out) / len(held_out),
        "episodes": len(training),
        "successes": sum(trajectory.success for trajectory in training),
        "held_out_episodes": len(held_out),
        "held_out_successes": sum(trajectory.success for trajectory in held_out),
    }
    faults = faults_of_fit(report)
    report["learned"] = not faults
    if faults:
        remedy = "raise --reward_model_episodes, or change --reward_model_source"
        if report["auc"] is not None and report["auc"] >= CHANCE_AUC:  # the order is right, the scale is not
            remedy = "raise --reward_model_epochs"
        warnings.warn(
            f"the step reward model has learned too little: on {len(held_out)} held-out episodes "
            f"{' and '.join(faults)}. It saw {report['successes']} successes in {len(training)} episodes: "
            f"{remedy}",
            stacklevel=3,
        )
    return report


def faults_of_fit(report: dict) -> list[str]:
    """Return the tests that a fit has failed, in words. An undefined AUC fails no test."""
    auc, mse, mse_of_mean = report["auc"], report["mse"], report["mse_of_mean"]
    faults = []
    if auc is not None and auc < CHANCE_AUC:
        faults.append(f"its AUC of success is {auc:.2f}, below {CHANCE_AUC} (chance: 0.5)")
    if not mse < mse_of_mean:
        known = "" if auc is not None else ", and its AUC is not known, as all outcomes are equal"
        faults.append(f"its MSE of {mse:.3g} is not below the {mse_of_mean:.3g} of the mean{known}")
    return faults
