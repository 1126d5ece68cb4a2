"""A run's log: metrics.jsonl, transcripts.jsonl and other listeners."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


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


def tensorboard_listener(folder: Path, past: list[dict]):
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


def wandb_listener(project: str, folder: Path, config: dict):
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
