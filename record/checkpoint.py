"""Checkpoints: all that is needed to continue a run exactly. Being killed at any moment costs at most a loop.

A checkpoint is a folder `update_000012` (A's updates so far): safetensors files of the trainable weights and
their AdamW state, never the frozen base; `state.json` with the counters, the replay buffer and the lengths of
the logs; and `manifest.json` with the sha256 of every other file. It is written under another name, flushed
to the disk, then renamed: what bears the final name is whole. Reading checks every sum first, and no file can
run code (no pickle).

Every random draw of a run is named by the seed and its place in the run, so the only generator to save is the
replay buffer's own.
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

from torch import Tensor

ASIDE = ".unfinished-"  # what is still being written has this before its name


MANIFEST = "manifest.json"


LOCK = ".lock"


@dataclass
class Checkpoint:
    tensors: dict[str, dict[str, Tensor]]  # by file: "policy", "critic", "explorer_critic"
    state: dict  # JSON


def _flush(path: Path) -> None:
    """Have the disk hold this file's content, or this folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace the file whole: a reader finds the old text or the new, never half."""
    aside = path.with_name(ASIDE + path.name)
    aside.write_text(text)
    _flush(aside)
    os.replace(aside, path)
    _flush(path.parent)


def write_folder(path: Path, fill: Callable[[Path], object]) -> None:
    """Have `fill` write into a folder aside, then give it its name; a folder of that name is replaced."""
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
    """Remove what a killed process left unfinished."""
    for leftover in [*folder.glob(ASIDE + "*"), *folder.glob(f"checkpoints/{ASIDE}*")]:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def lock(folder: Path):
    """Keep other processes out of the folder while the returned file is open, however this process ends.

    Raises BlockingIOError if another one is in it.
    """
    file = open(folder / LOCK, "w")  # noqa: SIM115
    try:
        import fcntl
    except ImportError:  # not a Unix: no lock
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    return file


def updates_of(path: Path) -> int:
    """A's updates so far, from a checkpoint's name."""
    return int(path.name.removeprefix("update_"))


def listed(folder: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    named = [
        path for path in folder.glob("checkpoints/update_*") if path.name.removeprefix("update_").isdigit()
    ]
    return sorted(named, key=updates_of)


def write(folder: Path, updates: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Write it as the run's newest and remove all but the newest `keep`. OSError if the disk is full."""
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
            except SafetensorError as error:  # how a full disk looks from here
                raise OSError(errno.ENOSPC, str(error), str(path)) from error
        (aside / "state.json").write_text(json.dumps(checkpoint.state))
        sums = {file.name: _sha256(file) for file in sorted(aside.iterdir())}
        (aside / MANIFEST).write_text(json.dumps({"updates": updates, "sha256": sums}, indent=2))

    write_folder(path, fill)
    for old in listed(folder)[:-keep]:
        remove(old)
    return path


def remove(path: Path) -> None:
    """Take its name away first: what still bears it is whole."""
    aside = path.with_name(f"{ASIDE}old-{path.name}")
    os.rename(path, aside)
    shutil.rmtree(aside)


def _sums(path: Path) -> dict[str, str]:
    sums = dict(json.loads((path / MANIFEST).read_text())["sha256"])
    return {"state.json": sums["state.json"], **sums}


def damage(path: Path) -> str | None:
    """What is wrong with the checkpoint, naming it and the file at fault; None if it is what was written."""
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
    """Raises ValueError, naming the checkpoint and the file at fault, if it is damaged."""
    from safetensors.torch import load_file

    if fault := damage(path):
        raise ValueError(fault)
    files = [path / name for name in _sums(path) if name.endswith(".safetensors")]
    tensors = {file.stem: load_file(file) for file in files}
    return Checkpoint(tensors, json.loads((path / "state.json").read_text()))


def _sha256(file: Path) -> str:
    with open(file, "rb") as handle:
        digest = hashlib.sha256()
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_new_folder(folder: Path) -> None:
    """Raise ValueError unless the folder is absent or empty.

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

    Raises ValueError if there is none of that name, or if it is damaged.
    """
    paths = listed(folder)
    chosen = paths[-1] if paths else None
    if name:
        chosen = next((path for path in paths if path.name == name), None)
        if chosen is None:
            names = ", ".join(path.name for path in paths) or "none"
            raise ValueError(f"has no checkpoint {name}; there are: {names}")
    fault = chosen and damage(chosen)
    if not fault:
        return chosen
    whole = [path.name for path in paths[: paths.index(chosen)] if not damage(path)]
    remedy = "no whole one is left before it: start a new run"
    if whole:
        remedy = f"--resume --resume_from {whole[-1]} continues from the one before it"
    raise ValueError(f"{fault}; {remedy}")
