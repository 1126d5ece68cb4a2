"""What a run tells: its log, the table of the evaluation panel, episodes as text, the curves.

metrics.jsonl holds a line per event, told apart by "agent": "policy" (an update of A), "explorer" (an update
of B), "buffer" (what B collected for replay), "evaluation" (the held-out panel). "update" counts updates of A
only, B's own are "explorer_update". "environment_episodes" and "environment_turns" count what was played in
training so far, by B too, but not for the panel. Times are the keys that begin with "seconds".

`python report.py RUN` prints a run's table and draws its curves again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from buffer import Trajectory
from record.log import read_lines
from record.metrics import start_and_end

COSTS = {"updates": "update", "episodes": "environment_episodes", "seconds": "seconds_elapsed"}


def panel_table(panels: dict[str, dict]) -> str:
    """Success in percent: a line per panel, a column per task type that has games and one for all; the mean
    outcome (the score) where it is another number; what it cost, if the panels are lines of the log."""
    first = next(iter(panels.values()))
    types = [task_type for task_type, result in first["by_type"].items() if result["games"]]
    games = [str(first["by_type"][task_type]["games"]) for task_type in types] + [str(first["games"])]
    shares = {
        name: [result["by_type"][task_type]["success"] for task_type in types] + [result["success"]]
        for name, result in panels.items()
    }
    lines = [["", *types, "all"], ["games", *games]]
    if any(result["outcome"] != result["success"] for result in panels.values()):
        lines[0].append("score")
        lines[1].append("")
        shares = {name: [*row, panels[name]["outcome"]] for name, row in shares.items()}
    lines += [[name, *(f"{100 * share:.1f}" for share in row)] for name, row in shares.items()]
    if len(shares) == 2:
        start, end = shares.values()
        lines.append(["change", *(f"{100 * (b - a):+.1f}" for a, b in zip(start, end, strict=True))])
    costs = {column: key for column, key in COSTS.items() if key in first}
    lines[0] += costs
    for line in lines[1:]:
        known = panels.get(line[0], {})
        line += [f"{round(known[key]):,}" if key in known else "" for key in costs.values()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(row)
        ).rstrip()
        for row in (zip(line, widths, strict=True) for line in lines)
    )


def transcript(trajectory: Trajectory, decode, **about) -> dict:
    """A line of transcripts.jsonl. `decode` makes text of reply tokens; `about` says whose it is."""
    return {
        **about,
        "task_id": trajectory.task_id,
        "task_type": trajectory.task_type,
        "task": trajectory.task,
        "outcome": trajectory.outcome,
        "success": trajectory.success,
        "stop_reason": trajectory.stop_reason.value,
        "steps": [
            {
                "observation": step.observation,
                "reply": decode(step.action_ids),
                "action": step.action,
                "valid": step.valid,
                "dense_score": step.dense_score,
            }
            for step in trajectory.steps
        ],
    }


def telling(trajectories: list[Trajectory]) -> list[Trajectory]:
    """One solved and one unsolved episode, as far as there are any: the first of each."""
    picked = {}
    for trajectory in trajectories:
        picked.setdefault(trajectory.success, trajectory)
    return list(picked.values())


def transcript_text(record: dict) -> str:
    """An episode to read: what was seen, `> ` what was done, the step reward model's score."""
    result = "solved" if record["success"] else f"not solved ({record['stop_reason']})"
    lines = [f"{record['task']}  [{record['task_type']}, {record['task_id']}]: {result}"]
    for step in record["steps"]:
        score = "" if step["dense_score"] is None else f"   [score {step['dense_score']:+.2f}]"
        action = step["action"] if step["valid"] else f"(invalid reply) {step['reply']!r}"
        lines += [f"  {step['observation']}", f"  > {action}{score}"]
    return "\n".join(lines)


def title_of(config: dict) -> str:
    return "{method} + {algo} on {env}, seed {seed}".format(**config)


def draw_curves(lines: list[dict], path: Path, title: str = "") -> None:
    """Success over both costs, updates and environment episodes; dense reward, KL, entropy, clip fraction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def points(agent: str, x: str, y: str) -> tuple[list, list]:
        x = "explorer_update" if (agent, x) == ("explorer", "update") else x
        agent, _, split = agent.partition(" ")
        lines_of = [line for line in lines if line["agent"] == agent and split in ("", line.get("split"))]
        with_both = [line for line in lines_of if x in line and y in line]
        return [line[x] for line in with_both], [line[y] for line in with_both]

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
    style = {"policy": {"color": "tab:blue", "lw": 1}, "explorer": {"color": "tab:orange", "lw": 1}}
    names = {"policy": "A", "explorer": "B"}
    success = axes[0, :2]
    for ax, x, label in zip(
        success,
        ("update", "environment_episodes"),
        ("updates (of A; of B)", "environment episodes"),
        strict=True,
    ):
        for agent in ("explorer", "policy"):
            ax.plot(
                *points(agent, x, "success"),
                **style[agent],
                alpha=0.6,
                label=f"{names[agent]}, training games",
            )
        for split, marker in zip(start_and_end(lines), "os^v", strict=False):
            ax.plot(
                *points(f"evaluation {split}", x, "success"),
                f"{marker}-",
                color="black",
                label=f"A, held-out ({split})",
            )
        ax.set(xlabel=label, ylabel="success", ylim=(0, 1))
    success[0].legend(loc="upper left", fontsize=8)
    rest = [
        (
            axes[0, 2],
            "dense reward of an episode",
            [("policy", "dense_reward"), ("explorer", "dense_reward")],
        ),
        (axes[1, 0], "KL to the start", [("policy", "kl_on"), ("explorer", "kl_on"), ("policy", "kl_off")]),
        (axes[1, 1], "entropy per token", [("policy", "entropy_on"), ("explorer", "entropy_on")]),
        (
            axes[1, 2],
            "clipped tokens",
            [
                ("policy", "clip_fraction_on"),
                ("explorer", "clip_fraction_on"),
                ("policy", "clip_fraction_off"),
            ],
        ),
    ]
    for ax, label, curves in rest:
        for agent, key in curves:
            xs, ys = points(agent, "update", key)
            replayed = key.endswith("_off")
            what = {"lw": 1, "color": "tab:green"} if replayed else style[agent]
            if xs:
                ax.plot(xs, ys, **what, label=f"{names[agent]}, replayed" if replayed else names[agent])
        ax.set(xlabel="updates (of A; of B)", ylabel=label)
        if ax.lines:
            ax.legend(fontsize=8)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(folder: Path) -> None:
    lines = read_lines(folder / "metrics.jsonl")
    for split, (start, end) in start_and_end(lines).items():
        print(f"success in % on {split}\n{panel_table({'start': start, 'end': end})}\n")
    config = json.loads((folder / "config.json").read_text())
    draw_curves(lines, folder / "curves.png", title_of(config))
    print(f"\n{folder / 'curves.png'} drawn. The newest episodes of the panel:\n")
    records = [r for r in read_lines(folder / "transcripts.jsonl") if r["agent"] == "evaluation"]
    for record in records[-2:]:
        print(transcript_text(record) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: give the folder of a run, for example python report.py runs/household-rspo-grpo-s0")
    try:
        main(Path(sys.argv[1]))
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        sys.exit(f"error: {sys.argv[1]} is no folder of a run: {error}")
