"""The curves on the page of a run."""

from __future__ import annotations

from record.charts import Chart, Curve
from record.run_logs import Run, points

OVER_A, OVER_BOTH = "updates of A", "updates (of A; of B)"
MEAN_CENTRE = "mean |log c|, c = \u03c0_old/\u03c0_B"
PAIRS = {"a": "A", "b": "B", "replayed": "A, replayed", "buffer": "B, for the buffer"}  # colour: label


def charts_of(run: Run) -> list[Chart]:
    """Return the curves of a run."""
    training = "Held-out success counts the panel, the other curves count training games."
    charts = [
        Chart("Success over updates", OVER_BOTH, success_curves(run, "update"), training, "share"),
        Chart(
            "Success over environment episodes",
            "training episodes of A and B",
            success_curves(run, "environment_episodes"),
            "Panels do not count as episodes.",
            "share",
        ),
        Chart("Dense reward of an episode", OVER_BOTH, agents_curves(run, "dense_reward")),
        Chart("KL to the start, per token", OVER_BOTH, agents_curves(run, "kl_on", "kl_off")),
        Chart("Entropy per token", OVER_BOTH, agents_curves(run, "entropy_on", "entropy_off")),
        Chart("Clipped tokens", OVER_BOTH, agents_curves(run, "clip_fraction_on", "clip_fraction_off")),
        Chart(
            "Distance of the centre from 1",
            OVER_A,
            [curve(run, "policy", "centre_log_mean_abs", "replayed", MEAN_CENTRE)],
        ),
        Chart(
            "Replayed tokens with a centre far from 1",
            OVER_A,
            [
                curve(run, "policy", "centre_above_2", "replayed", "c > 2"),
                curve(run, "policy", "centre_below_half", "replayed", "c < 1/2", dashed=True),
            ],
        ),
        Chart(
            "Groups without spread",
            OVER_BOTH,
            [*agents_curves(run, "zero_spread_groups"), curve(run, "buffer", "zero_spread_groups", "buffer")],
            "Such a group gives no gradient.",
            "share",
        ),
        Chart(
            "Replayed episodes per update",
            OVER_A,
            [
                curve(run, "policy", "replayed_episodes", "replayed", "episodes"),
                curve(run, "policy", "replay_age_mean", "ink", "mean age, in updates of A", dashed=True),
            ],
        ),
        Chart("Turns per episode", OVER_BOTH, agents_curves(run, "turns_per_episode")),
        Chart("Invalid replies", OVER_BOTH, agents_curves(run, "invalid_actions")),
    ]
    return charts


def axis_of(agent: str, x: str) -> str:
    """Return the log key of the x axis: over updates, B is drawn over its own."""
    return "explorer_update" if agent == "explorer" and x == "update" else x


def curve(
    run: Run, agent: str, key: str, colour: str, label: str = "", x: str = "update", dashed: bool = False
) -> Curve:
    values = points(run.of(agent), axis_of(agent, x), key)
    return Curve(label or PAIRS[colour], colour, *values, kind="noisy", dashed=dashed)


def agents_curves(run: Run, key: str, replayed: str = "") -> list[Curve]:
    """Return the curves of A and B, and of A's replayed tokens."""
    curves = [curve(run, "policy", key, "a"), curve(run, "explorer", key, "b")]
    if replayed:
        curves.append(curve(run, "policy", replayed, "replayed"))
    return curves


def success_curves(run: Run, x: str) -> list[Curve]:
    """Return the success on the panels, and in training of A, B and B's episodes for the buffer."""
    curves = []
    for place, (split, panels) in enumerate(run.panels().items()):
        values = points(panels, x, "success")
        curves.append(Curve(f"A, held-out {split}", "ink", *values, kind="marks", dashed=place > 0))
    for agent, colour in (("policy", "a"), ("explorer", "b"), ("buffer", "buffer")):
        found = curve(run, agent, "success", colour, x=x)
        found.label += ", training" if agent != "buffer" else ""
        curves.append(found)
    return curves
