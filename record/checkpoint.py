"""Checkpoints, and safe writing: a run that is killed at any moment loses at most one loop.

A checkpoint is a folder `update_000012` (12 updates of A so far). It holds everything that a run needs to
continue exactly:

    *.safetensors   the trainable weights and their AdamW state; the frozen base is not included
    state.json      the counters, the replay buffer and the lengths of the logs
    manifest.json   the sha256 of every other file

It is written under another name, flushed to the disk and then renamed, so a folder with the final name is
complete. Reading first checks every sum. No file can run code (no pickle).

The only random generator to save is the replay buffer's: all other draws are seeded by the run's seed and
their place in the run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # `choose` runs before torch is imported

ASIDE = ".unfinished-"  # prefix of the names of unfinished files and folders
MANIFEST = "manifest.json"
LOCK = ".lock"


@dataclass
class Checkpoint:
    """What a checkpoint holds."""

    tensors: dict[str, dict[str, Tensor]]  # by file: "policy", "critic", "explorer_critic"
    state: dict  # JSON; its "updates" are A's updates so far


# --- safe writing -------------------------------------------------------------------------------------------


def _flush(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: a reader finds the old text or the new one, never a part."""
    aside = path.with_name(ASIDE + path.name)
    aside.write_text(text)
    _flush(aside)
    os.replace(aside, path)
    _flush(path.parent)


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write into an unfinished folder, then rename it to `path`, replacing an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside, old = path.with_name(ASIDE + path.name), path.with_name(f"{ASIDE}old-{path.name}")
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir()
    fill(aside)
    for file in sorted(aside.rglob("*"), reverse=True):
        _flush(file)
    _flush(aside)
    if path.exists():
        os.rename(path, old)
    os.rename(aside, path)
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove the unfinished files and folders that a killed process left."""
    for leftover in [*folder.glob(ASIDE + "*"), *folder.glob(f"checkpoints/{ASIDE}*")]:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def lock(folder: Path):
    """Return an open file that keeps other processes out of the folder until it is closed.

    The system closes it however this process ends. Raises ValueError if another process is in the folder.
    """
    file = open(folder / LOCK, "w")  # noqa: SIM115
    try:
        import fcntl
    except ImportError:  # not a Unix system: there is no lock
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError("another process works in it; wait for it, or stop it") from None
    return file


# --- checkpoints --------------------------------------------------------------------------------------------


def _sha256(file: Path) -> str:
    with open(file, "rb") as handle:
        digest = hashlib.sha256()
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def updates_of(path: Path) -> int:
    """Return A's updates so far, read from a checkpoint's name."""
    return int(path.name.removeprefix("update_"))


def listed(folder: Path) -> list[Path]:
    """Return the run's checkpoints, oldest first."""
    paths = folder.glob("checkpoints/update_*")
    return sorted((path for path in paths if path.name.removeprefix("update_").isdigit()), key=updates_of)


def write(folder: Path, updates: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Write the run's newest checkpoint and remove all but the newest `keep`.

    Raises OSError (ENOSPC) if the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = folder / "checkpoints" / f"update_{updates:06d}"
    path.parent.mkdir(exist_ok=True)
    needed = sum(t.numel() * t.element_size() for part in checkpoint.tensors.values() for t in part.values())
    if shutil.disk_usage(path.parent).free < 1.1 * needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def fill(aside: Path) -> None:
        for name, tensors in checkpoint.tensors.items():
            plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            try:
                save_file(plain, aside / f"{name}.safetensors")
            except SafetensorError as error:  # a full disk raises this
                raise OSError(errno.ENOSPC, str(error), str(path)) from error
        (aside / "state.json").write_text(json.dumps(checkpoint.state))
        sums = {file.name: _sha256(file) for file in sorted(aside.iterdir())}
        (aside / MANIFEST).write_text(json.dumps({"updates": updates, "sha256": sums}, indent=2))

    write_folder(path, fill)
    for old in listed(folder)[:-keep]:
        remove(old)
    return path


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a folder with its name is always complete."""
    aside = path.with_name(f"{ASIDE}old-{path.name}")
    os.rename(path, aside)
    shutil.rmtree(aside)


def _sums(path: Path) -> dict[str, str]:
    """Return the sha256 of every file, as the manifest says."""
    sums = dict(json.loads((path / MANIFEST).read_text())["sha256"])
    return {"state.json": sums["state.json"], **sums}


def damage(path: Path) -> str | None:
    """Name the damaged checkpoint and its first damaged file; return None if all is as it was written."""
    try:
        sums = _sums(path)
    except (OSError, ValueError, KeyError, TypeError):
        return f"checkpoint {path.name} is damaged ({MANIFEST} is missing or unreadable)"
    for name, expected in sums.items():
        if not (path / name).is_file():
            return f"checkpoint {path.name} is damaged ({name} is missing)"
        if _sha256(path / name) != expected:
            return f"checkpoint {path.name} is damaged ({name} does not match its checksum)"
    return None


def read(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises ValueError, which names the damaged file, if it is damaged."""
    from safetensors.torch import load_file

    if fault := damage(path):
        raise ValueError(fault)
    files = [path / name for name in _sums(path) if name.endswith(".safetensors")]
    tensors = {file.stem: load_file(file) for file in files}
    return Checkpoint(tensors, json.loads((path / "state.json").read_text()))


# --- choosing a folder and a checkpoint ---------------------------------------------------------------------


def check_new_folder(folder: Path) -> None:
    """Raise ValueError unless the folder is missing or empty.

    Files that an earlier start left before it wrote config.json do not count.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError("is a file; give a folder")
    if (folder / "config.json").exists():
        raise ValueError("already holds a run; add --resume to continue it, or give another folder")
    leftovers = (ASIDE, LOCK, "run.json")
    if any(not path.name.startswith(leftovers) for path in folder.iterdir()):
        raise ValueError("is not empty; give a new folder")


def choose(folder: Path, name: str | None = None) -> Path | None:
    """Return the run's checkpoint of that name (default: the newest), or None if the run has none yet.

    Raises ValueError if there is none of that name, if it is damaged, or if an older version wrote the run.
    """
    paths = listed(folder)
    if not paths and (old := sorted(folder.glob("checkpoints/step_*"))):
        raise ValueError(
            f"its checkpoints ({old[-1].name}) were written by an older version and cannot be read; start a "
            "new run; its policy/ can be given as --model and its reward_model/ as --reward_model"
        )
    chosen = paths[-1] if paths else None
    if name:
        chosen = next((path for path in paths if path.name == name), None)
        if chosen is None:
            names = ", ".join(path.name for path in paths) or "none"
            raise ValueError(f"has no checkpoint {name}; there are: {names}")
    fault = damage(chosen) if chosen else None
    if not fault:
        return chosen
    whole = [path.name for path in paths[: paths.index(chosen)] if not damage(path)]
    remedy = "no whole one is left before it: start a new run"
    if whole:
        remedy = f"--resume --resume_from {whole[-1]} continues from the one before it"
    raise ValueError(f"{fault}; {remedy}")
