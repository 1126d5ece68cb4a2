"""Reports of a run: the table of its panels, its episodes as text, and its curves.

`python -m record.report RUN` prints the tables and the newest episodes of a run and draws its curves again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from buffer import Trajectory
from record.log import read_lines
from record.metrics import result_of_type, start_and_end, types_of

# --- the table of panels ------------------------------------------------------------------------------------

COSTS = {"updates": "update", "episodes": "environment_episodes", "seconds": "seconds_elapsed"}


def panel_table(panels: dict[str, dict]) -> str:
    """Return success in percent as a table: a line per panel, a column per task type with games, and "all".

    A column "score" is added if a mean outcome differs from its success. Two panels get a line of changes.
    Panels that are lines of the log also get columns of what it cost to get there. A number of games that
    differs between the panels, because games crashed, is shown as "5/4".
    """
    results = list(panels.values())
    first, types, games = results[0], [], ["games"]
    for task_type in types_of(results):
        counts = [result_of_type(panel, task_type)["games"] for panel in results]
        if any(counts):
            types.append(task_type)
            games.append("/".join(str(count) for count in dict.fromkeys(counts)))
    games.append(str(first["games"]))
    header = ["", *types, "all"]
    shares = {}
    for name, panel in panels.items():
        shares[name] = [result_of_type(panel, task_type)["success"] for task_type in types]
        shares[name].append(panel["success"])
    if any(panel["outcome"] != panel["success"] for panel in panels.values()):
        header.append("score")
        games.append("")
        for name, panel in panels.items():
            shares[name].append(panel["outcome"])
    lines = [header, games] + [[name, *(f"{100 * share:.1f}" for share in shares[name])] for name in shares]
    if len(panels) == 2:
        start, end = shares.values()
        lines.append(["change", *(f"{100 * (b - a):+.1f}" for a, b in zip(start, end, strict=True))])
    for column, key in COSTS.items():
        if key in first:
            header.append(column)
            for line in lines[1:]:
                panel = panels.get(line[0], {})
                line.append(f"{round(panel[key]):,}" if key in panel else "")
    return align(lines)


def solved_text(panel: dict) -> str:
    """Return how many games of a panel are solved, in words, with the 95 % interval."""
    low, high = panel["success_interval"]
    counts = f"{panel['successes']} of {panel['games']} games"
    return f"solved: {counts}, {panel['success']:.1%} (95 % interval {low:.1%} to {high:.1%})"


def align(lines: list[list[str]]) -> str:
    """Join the cells of a table: the first column is flush left, the others flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    texts = []
    for name, *cells in lines:
        cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        texts.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(texts)


# --- episodes -----------------------------------------------------------------------------------------------


def transcript(trajectory: Trajectory, decode: Callable[[list[int]], str], **about) -> dict:
    """Return an episode as a line of transcripts.jsonl. `decode` turns reply tokens into text."""
    steps = [
        {
            "observation": step.observation,
            "reply": decode(step.action_ids),
            "action": step.action,
            "valid": step.valid,
            "dense_score": step.dense_score,
        }
        for step in trajectory.steps
    ]
    return {
        **about,
        "task_id": trajectory.task_id,
        "task_type": trajectory.task_type,
        "task": trajectory.task,
        "outcome": trajectory.outcome,
        "success": trajectory.success,
        "stop_reason": trajectory.stop_reason.value,
        "steps": steps,
    }


def one_of_each(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Return the first solved and the first unsolved episode, if there are any."""
    first = {}
    for trajectory in trajectories:
        first.setdefault(trajectory.success, trajectory)
    return list(first.values())


def transcript_text(episode: dict) -> str:
    """Return a line of transcripts.jsonl as text: observations, "> " actions, and their dense scores."""
    result = "solved" if episode["success"] else f"not solved ({episode['stop_reason']})"
    lines = [f"{episode['task']}  [{episode['task_type']}, {episode['task_id']}]: {result}"]
    for step in episode["steps"]:
        score = "" if step["dense_score"] is None else f"   [score {step['dense_score']:+.2f}]"
        action = step["action"] if step["valid"] else f"(invalid reply) {step['reply']!r}"
        lines += [f"  {step['observation']}", f"  > {action}{score}"]
    return "\n".join(lines)


# --- curves -------------------------------------------------------------------------------------------------

AGENTS = {"policy": ("A", "tab:blue"), "explorer": ("B", "tab:orange")}  # legend and colour

PANELS = {  # y axis: log key of both agents, and of A's replayed tokens if they are drawn too
    "dense reward of an episode": ("dense_reward", None),
    "KL to the start": ("kl_on", "kl_off"),
    "entropy per token": ("entropy_on", None),
    "clipped tokens": ("clip_fraction_on", "clip_fraction_off"),
}


def title_of(config: dict) -> str:
    return "{method} + {algo} on {env}, seed {seed}".format(**config)


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


# --- command line -------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    """Print the tables and the newest episodes of a run, and draw its curves."""
    lines = read_lines(folder / "metrics.jsonl")
    for split, (start, end) in start_and_end(lines).items():
        print(f"success in % on {split}\n{panel_table({'start': start, 'end': end})}\n")
    config = json.loads((folder / "config.json").read_text())
    draw_curves(lines, folder / "curves.png", title_of(config))
    print(f"\n{folder / 'curves.png'} drawn. The newest episodes of the panel:\n")
    episodes = [line for line in read_lines(folder / "transcripts.jsonl") if line["agent"] == "evaluation"]
    for episode in episodes[-2:]:
        print(transcript_text(episode) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: give a run folder: python -m record.report runs/household-rspo-grpo-s0")
    try:
        main(Path(sys.argv[1]))
    except (FileNotFoundError, NotADirectoryError) as error:
        sys.exit(
            f"error: {sys.argv[1]} is not a run folder: {error.filename} is missing; give the --out of a run"
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
