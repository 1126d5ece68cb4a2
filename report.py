"""What a run tells: its log, the table of the evaluation panel, episodes as text, the curves.

metrics.jsonl holds a line per event, told apart by "agent": "policy" (an update of A), "explorer" (an update
of B), "buffer" (what B collected for replay), "evaluation" (the held-out panel). "update" counts updates of A
only, B's own are "explorer_update". "environment_episodes" and "environment_turns" count what was played in
training so far, by B too, but not for the panel. Times are the keys that begin with "seconds".

`python report.py RUN` prints a run's table and draws its curves again.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from buffer import StopReason, Trajectory


def panel(trajectories: list[Trajectory], task_types: tuple[str, ...]) -> dict:
    """Success in 0-1, of all games and per task type. A crashed game is not solved, and counted too."""
    by_type = {}
    for task_type in task_types:
        games = [trajectory for trajectory in trajectories if trajectory.task_type == task_type]
        by_type[task_type] = {"games": len(games), "success": _mean([game.success for game in games])}
    return {
        "games": len(trajectories),
        "success": _mean([game.success for game in trajectories]),
        "outcome": _mean([game.outcome for game in trajectories]),
        "turns_per_episode": _mean([len(game.steps) for game in trajectories]),
        "crashed_episodes": sum(game.stop_reason is StopReason.CRASHED for game in trajectories),
        "by_type": by_type,
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def start_and_end(lines: list[dict]) -> dict[str, tuple[dict, dict]]:
    """For each split the first and the last line of its panel."""
    first, last = {}, {}
    for line in lines:
        if line["agent"] == "evaluation":
            first.setdefault(line["split"], line)
            last[line["split"]] = line
    return {split: (first[split], last[split]) for split in first}


def progress(start: dict, end: dict) -> dict:
    """A split's part of summary.json."""
    ends = {"start": start, "end": end}
    return {
        "games": end["games"],
        **{
            f"{key}_{when}": line[key]
            for key in ("success", "outcome", "crashed_episodes")
            for when, line in ends.items()
        },
        "by_type": {
            kind: {"games": result["games"]}
            | {when: line["by_type"][kind]["success"] for when, line in ends.items()}
            for kind, result in start["by_type"].items()
        },
    }


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


# --- episodes -----------------------------------------------------------------------------------------------


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


# --- the log ------------------------------------------------------------------------------------------------


class Log:
    """metrics.jsonl and transcripts.jsonl of a run folder, and whoever else wants to hear of them.

    The files only grow. `sizes` flushes them to the disk and says how long they are; a Log made with these
    sizes first cuts off what came later: the lines of a loop that was not finished. `lines` is all that was
    written so far.
    """

    FILES = ("metrics.jsonl", "transcripts.jsonl")

    def __init__(self, folder: Path, sizes: dict[str, int] | None = None):
        self.folder, self.listeners = folder, []
        for name in self.FILES:
            (folder / name).touch()
            length, there = (sizes or {}).get(name, 0), (folder / name).stat().st_size
            if there < length:
                raise ValueError(f"{folder / name} has {there} bytes where the checkpoint saw {length}")
            os.truncate(folder / name, length)
        self.lines = read_lines(folder / "metrics.jsonl")
        self._files = {name: open(folder / name, "a") for name in self.FILES}  # noqa: SIM115

    def write(self, line: dict) -> None:
        """One event, for metrics.jsonl and all listeners."""
        self.lines.append(line)
        self._append("metrics.jsonl", line)
        for listener in self.listeners:
            listener(line)

    def write_transcript(self, record: dict) -> None:
        self._append("transcripts.jsonl", record)

    def _append(self, name: str, record: dict) -> None:
        self._files[name].write(json.dumps(record) + "\n")
        self._files[name].flush()

    def sizes(self) -> dict[str, int]:
        for file in self._files.values():
            os.fsync(file.fileno())
        return {name: (self.folder / name).stat().st_size for name in self.FILES}

    def of(self, agent: str) -> list[dict]:
        return [line for line in self.lines if line["agent"] == agent]

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def read_lines(path: Path) -> list[dict]:
    """The records of a log. A last line without its end, of a run that was killed or goes on, is none."""
    *lines, _ = path.read_text().split("\n")
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _numbers(line: dict) -> dict[str, float]:
    """The numbers of a line as agent/name, those of the task types as agent/success/type; a panel's after its
    split."""
    about = "/".join(filter(None, (line["agent"], line.get("split"))))
    named = {f"{about}/{key}": value for key, value in line.items() if isinstance(value, (int, float))}
    by_type = line.get("by_type", {})
    return named | {f"{about}/success/{kind}": result["success"] for kind, result in by_type.items()}


def tensorboard(folder: Path, past: list[dict]):
    """A listener that writes <folder>/tensorboard, over each agent's updates; the past is written anew."""
    import shutil

    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    writer = SummaryWriter(folder / "tensorboard")

    def listen(line: dict) -> None:
        for name, value in _numbers(line).items():
            writer.add_scalar(
                name, value, line["explorer_update" if line["agent"] == "explorer" else "update"]
            )
        writer.flush()

    for line in past:
        listen(line)
    return listen


def wandb(project: str, folder: Path, config: dict):
    """A listener that logs to Weights & Biases; every metric is drawn over the updates of its own agent."""
    import wandb

    run = wandb.init(
        project=project, name=folder.name, id=folder.name, dir=folder, resume="allow", config=config
    )
    for agent, axis in (("policy", "update"), ("explorer", "explorer_update")):
        run.define_metric(f"{agent}/*", step_metric=f"{agent}/{axis}")
    run.define_metric("buffer/*", step_metric="buffer/update")
    for split in config["eval_splits"]:
        run.define_metric(f"evaluation/{split}/*", step_metric=f"evaluation/{split}/update")
    return lambda line: run.log(_numbers(line))


# --- the circumstances --------------------------------------------------------------------------------------


def how_and_where(argv: list[str], threads: int) -> dict:
    """For run.json: the command, when, with which versions of what, on which machine."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "peft", "numpy", "tokenizers", "safetensors"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "argv": argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions,
        "commit": commit(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, {threads} torch threads, {gpu}",
    }


def commit() -> str | None:
    """Of this code, if it lies in a git repository; with a + if files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except OSError:  # no git here
        return None
    return head.stdout.strip() + "+" * bool(changed.stdout) if head.returncode == 0 else None


# --- curves -------------------------------------------------------------------------------------------------


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
