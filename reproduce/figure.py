"""The figure of an experiment: success over both axes, the training curves, and when the swap pays."""

from __future__ import annotations

from pathlib import Path

from record.metrics import mean
from reproduce.tables import AXES, points_of

LABELS = {
    "success": "success in training",
    "dense_reward": "dense reward of an episode",
    "repeated_states_per_episode": "repeated states per episode",
    "zero_spread_groups": "share of groups without spread",
}


def draw(report: dict, path: Path) -> None:
    """Draw a row of axes for each start and split. A band reaches from the lowest seed to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sections = [section for section in report["sections"] if finished_arms(section)]
    if not sections:
        return
    training = list(finished_arms(sections[0])[0]["seeds"].values())[0]["training"]
    columns = len(AXES) + len(training)
    rows = len(sections) + ("leads" in report)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.5 * columns + 2, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for ax in axes[: len(sections)].flat:
        ax.set_prop_cycle(
            color=pyplot.colormaps["tab20" if len(finished_arms(sections[0])) > 10 else "tab10"].colors
        )
    for section, row in zip(sections, axes, strict=False):
        for ax, axis in zip(row, AXES, strict=False):
            draw_success(ax, section, axis)
        for ax, key in zip(row[len(AXES) :], training, strict=True):
            draw_training(ax, section, key)
        row[0].set_title(f"start: {section['start']}, games of {section['split']}", fontsize=9)
    lines, titles = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, titles, loc="outside right upper", fontsize=8)
    if "leads" in report:
        draw_leads(axes[-1][0], report["leads"])
        for ax in axes[-1][1:]:
            ax.set_axis_off()
    seeds = ", ".join(map(str, report["seeds"]))
    figure.suptitle(f"{report['name']}: {report['question']} Seeds {seeds}.", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def finished_arms(section: dict) -> list[dict]:
    return [arm for arm in section["arms"].values() if arm["seeds"]]


def draw_success(ax, section: dict, axis: str) -> None:
    """Draw the success of every arm on the panels over updates or episodes."""
    for arm in finished_arms(section):
        draw_band(ax, [points_of(seed, axis) for seed in arm["seeds"].values()], arm["title"], marker=".")
    ax.set(xlabel="updates of A" if axis == "updates" else "environment episodes", ylabel="success in %")
    ax.grid(alpha=0.3)


def draw_training(ax, section: dict, key: str) -> None:
    """Draw a key of A's training log over updates, averaged over windows of a tenth of the run."""
    for arm in finished_arms(section):
        curves = []
        for seed in arm["seeds"].values():
            log = seed["training"][key]
            size = max(1, len(log) // 10)
            parts = [log[i : i + size] for i in range(0, len(log), size)]
            curves.append([(part[-1][0], mean([line[2] for line in part])) for part in parts])
        draw_band(ax, curves, arm["title"])
    ax.set(xlabel="updates of A", ylabel=LABELS[key])
    ax.grid(alpha=0.3)


def draw_band(ax, curves: list[list[tuple[float, float]]], label: str, marker: str = "") -> None:
    """Draw the mean of curves with the same x, and a band from the lowest curve to the highest."""
    x = [point[0] for point in curves[0]]
    columns = list(zip(*([point[1] for point in points] for points in curves), strict=True))
    (line,) = ax.plot(x, [mean(list(column)) for column in columns], marker=marker, lw=1.2, label=label)
    low, high = [min(column) for column in columns], [max(column) for column in columns]
    ax.fill_between(x, low, high, color=line.get_color(), alpha=0.1, lw=0)


def draw_leads(ax, rows: list[dict]) -> None:
    """Draw the lead of each swap over the share of groups without spread, one point per start and seed."""
    for claim in dict.fromkeys(row["claim"] for row in rows):
        points = [point for row in rows if row["claim"] == claim for point in row["points"]]
        ax.plot([x for x, _ in points], [y for _, y in points], "o", ms=4, label=claim)
    ax.axhline(0, color="black", lw=0.8)
    ax.set(xlabel="groups without spread, first updates, %", ylabel="lead in area, points")
    ax.legend(fontsize=6)
    ax.grid(alpha=0.3)
