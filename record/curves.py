"""The curves of a run as an image, curves.png."""

from __future__ import annotations

from pathlib import Path

from record.metrics import start_and_end

AGENTS = {"policy": ("A", "tab:blue"), "explorer": ("B", "tab:orange")}  # legend and colour

PANELS = {  # y axis: log key of both agents, and of A's replayed tokens if they are drawn too
    "dense reward of an episode": ("dense_reward", None),
    "KL to the start": ("kl_on", "kl_off"),
    "entropy per token": ("entropy_on", None),
    "clipped tokens": ("clip_fraction_on", "clip_fraction_off"),
}


def points(lines: list[dict], x: str, y: str, **wanted: str) -> tuple[list, list]:
    """Return the values of x and y in the lines that have both and the wanted values (agent=..., split=...).

    If x is "update", agent B's values are drawn over the updates of B.
    """
    if x == "update" and wanted["agent"] == "explorer":
        x = "explorer_update"
    lines = [line for line in lines if wanted.items() <= line.items() and x in line and y in line]
    return [line[x] for line in lines], [line[y] for line in lines]


def draw_success(ax, lines: list[dict], x: str) -> None:
    """Draw the success of both agents in training, and of A on the held-out panels."""
    for agent in ("explorer", "policy"):
        name, color = AGENTS[agent]
        values = points(lines, x, "success", agent=agent)
        ax.plot(*values, color=color, lw=1, alpha=0.6, label=f"{name}, training games")
    for split, marker in zip(start_and_end(lines), "os^v", strict=False):
        values = points(lines, x, "success", agent="evaluation", split=split)
        ax.plot(*values, f"{marker}-", color="black", label=f"A, held-out ({split})")
    ax.set(ylabel="success", ylim=(0, 1))


def draw_metric(ax, lines: list[dict], key: str, replayed: str | None) -> None:
    """Draw a metric of both agents over updates, and of A's replayed tokens."""
    curves = [(agent, key, name, color) for agent, (name, color) in AGENTS.items()]
    if replayed:
        curves.append(("policy", replayed, "A, replayed", "tab:green"))
    for agent, y, name, color in curves:
        updates, values = points(lines, "update", y, agent=agent)
        if values:
            ax.plot(updates, values, color=color, lw=1, label=name)
    if ax.lines:
        ax.legend(fontsize=8)


def draw_curves(lines: list[dict], path: Path, title: str = "") -> None:
    """Draw six panels: success over updates and over environment episodes, and PANELS over updates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
    over_updates, over_episodes, *others = axes.flat
    draw_success(over_updates, lines, "update")
    draw_success(over_episodes, lines, "environment_episodes")
    over_updates.legend(loc="upper left", fontsize=8)
    for ax, (label, keys) in zip(others, PANELS.items(), strict=True):
        draw_metric(ax, lines, *keys)
        ax.set(ylabel=label)
    for ax in axes.flat:
        ax.set(xlabel="updates (of A; of B)")
        ax.grid(alpha=0.3)
    over_episodes.set(xlabel="environment episodes")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
