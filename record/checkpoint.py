"""Checkpoints, and safe writing: a run that is killed at any moment loses at most one loop.

A checkpoint is a folder `update_000012` (12 updates of A so far). It holds everything that a run needs to
continue exactly:

    *.safetensors   the trainable weights and their AdamW state; the frozen base is not included
    state.json      the counters, the replay buffer, the lengths of the logs, and the run's identity
                    (record/identity.py)
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
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from config import OLD_NAMES

if TYPE_CHECKING:
    from torch import Tensor  # `choose` runs before torch is imported

ASIDE = ".unfinished-"  # prefix of the names of unfinished files and folders
MANIFEST = "manifest.json"
LOCK = ".lock"
FILES = (LOCK, "run.json", "metrics.jsonl", "transcripts.jsonl", "summary.json", "curves.png", "eval.json")
FOLDERS = ("start", "reward_model", "checkpoints", "policy")
CHANGE_IT = "change its permissions, or work on a copy"


@dataclass
class Checkpoint:
    """The content of a checkpoint."""

    tensors: dict[str, dict[str, Tensor]]  # by file: "policy", "critic", "explorer_critic", "implicit"
    state: dict  # JSON; its "updates" are A's updates so far

    @property
    def of_agents(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of A and of the critics: all but those of the implicit reward."""
        return {name: tensors for name, tensors in self.tensors.items() if name != "implicit"}


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
    """Let `fill` write into an unfinished folder, then rename it to `path`, replacing an older one.

    Raises OSError (ENOSPC) if the disk is full.
    """
    from safetensors import SafetensorError

    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(ASIDE + path.name)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        fill(aside)
    except SafetensorError as error:  # safetensors raises this on a full disk
        raise OSError(errno.ENOSPC, str(error), str(path)) from error
    for file in sorted(aside.rglob("*"), reverse=True):
        _flush(file)
    _flush(aside)
    old = None
    if os.path.lexists(path):  # a link is replaced, and the folder that it names is left as it is
        old = Path(tempfile.mkdtemp(prefix=f"{ASIDE}old-", dir=path.parent))  # a new name: see `discard`
        os.rename(path, old / path.name)
    os.rename(aside, path)
    _flush(path.parent)
    if old:
        discard(old)


def sweep(folder: Path) -> None:
    """Remove the unfinished files and folders that a killed process left."""
    for leftover in [*folder.glob(ASIDE + "*"), *folder.glob(f"checkpoints/{ASIDE}*")]:
        discard(leftover)


def discard(path: Path) -> None:
    """Remove a file or a folder that the run no longer needs. Warn if it cannot be removed."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        warnings.warn(f"{path} cannot be removed ({error.strerror}); it takes up space", stacklevel=2)


def lock(folder: Path):
    """Return an open file that keeps other processes out of the folder until it is closed.

    The system closes the file when the process ends, also after a kill. Raises ValueError if another process
    is in the folder, or if the file cannot be opened.
    """
    try:
        file = open(folder / LOCK, "w")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"{folder / LOCK} cannot be opened ({error.strerror}); remove it") from None
    try:
        import fcntl
    except ImportError:  # not a Unix system: there is no lock
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError("another process works in this folder; wait for it, or stop it") from None
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
    return sorted((path for path in paths if path.name.removeprefix("update_").isdecimal()), key=updates_of)


def write(folder: Path, updates: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Write the run's newest checkpoint and remove all but the newest `keep`.

    Raises OSError (ENOSPC) if the disk is full.
    """
    from safetensors.torch import save_file

    path = folder / "checkpoints" / f"update_{updates:06d}"
    path.parent.mkdir(exist_ok=True)
    needed = sum(t.numel() * t.element_size() for part in checkpoint.tensors.values() for t in part.values())
    if shutil.disk_usage(path.parent).free < 1.1 * needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def fill(aside: Path) -> None:
        for name, tensors in checkpoint.tensors.items():
            plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            save_file(plain, aside / f"{name}.safetensors")
        (aside / "state.json").write_text(json.dumps(checkpoint.state))
        sums = {file.name: _sha256(file) for file in sorted(aside.iterdir())}
        (aside / MANIFEST).write_text(json.dumps({"updates": updates, "sha256": sums}, indent=2))

    write_folder(path, fill)
    for old in listed(folder)[:-keep]:
        remove(old)
    return path


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a folder with its name is always complete.

    Warns if the system refuses, for example because the files belong to another user.
    """
    aside = path.with_name(f"{ASIDE}old-{path.name}")
    try:
        os.rename(path, aside)
    except OSError as error:
        warnings.warn(f"{path} cannot be removed ({error.strerror}); it takes up space", stacklevel=2)
    else:
        discard(aside)


def _sums(path: Path) -> dict[str, str]:
    """Return the sha256 of every file, as the manifest says. Raises ValueError if it cannot be read."""
    try:
        if not (path / MANIFEST).is_file():  # opening a FIFO would wait for ever
            raise FileNotFoundError
        manifest = json.loads((path / MANIFEST).read_text())
        sums, updates = dict(manifest["sha256"]), manifest["updates"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{MANIFEST} is missing or unreadable") from None
    for name in ("state.json", "policy.safetensors"):
        if name not in sums:
            raise ValueError(f"{MANIFEST} does not list {name}")
    if updates != updates_of(path):
        raise ValueError(f"{MANIFEST} is of another checkpoint, after {updates} updates")
    return sums


def damage(path: Path) -> str | None:
    """Name the damaged checkpoint and its first damaged file; return None if no file is damaged."""
    try:
        for name, expected in _sums(path).items():
            if not (path / name).is_file():
                raise ValueError(f"{name} is missing")
            if _sha256(path / name) != expected:
                raise ValueError(f"{name} does not match its checksum")
    except OSError as error:
        return f"checkpoint {path.name} cannot be read ({error})"
    except ValueError as error:
        return f"checkpoint {path.name} is damaged ({error})"
    return None


def read_state(path: Path) -> dict:
    """Return the state of a checkpoint that `choose` has returned, without the tensors."""
    return json.loads((path / "state.json").read_text())


def read(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises ValueError, which names the damaged file, if it is damaged."""
    from safetensors.torch import load_file

    if fault := damage(path):
        raise ValueError(fault)
    files = [path / name for name in _sums(path) if name.endswith(".safetensors")]
    tensors = {file.stem: load_file(file) for file in files}
    return Checkpoint(tensors, read_state(path))


# --- choosing a folder and a checkpoint ---------------------------------------------------------------------


def check_folder(folder: Path) -> None:
    """Raise ValueError unless a file can be written into the folder, which may be missing.

    The check makes and removes a folder, because permission bits do not show a read-only disk or /proc.
    """
    present = folder
    while not present.exists() and present != present.parent:
        present = present.parent
    if not present.is_dir():
        where = "" if present == folder else f"{present} "
        raise ValueError(f"{where}is a file; give a folder")
    try:
        tempfile.TemporaryDirectory(prefix=ASIDE, dir=present).cleanup()
        if not os.access(present, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        remedy = CHANGE_IT if present == folder else "give another folder"
        raise ValueError(f"{present} cannot be written ({error.strerror}); {remedy}") from None


def check_contents(folder: Path) -> None:
    """Raise ValueError if a run cannot write, replace or remove one of its files and folders."""
    files = [folder / name for name in FILES]
    for path in [folder / name for name in FILES + FOLDERS]:
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{path} is a link to nothing; remove it")
    for path in files:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise ValueError(f"{path} is {kind}; remove it")
    for path in [folder / name for name in FOLDERS]:
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; remove it")
    for path in (folder / "checkpoints", folder / "policy", *listed(folder), *files):
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"{path} cannot be written; {CHANGE_IT}")


def check_new_folder(folder: Path) -> None:
    """Raise ValueError unless the folder is missing or empty. `check_folder` has accepted it.

    Files that an earlier start left before it wrote config.json do not count.
    """
    if not folder.exists():
        return
    if (folder / "config.json").exists():
        raise ValueError("already holds a run; add --resume to continue it, or give another folder")
    leftovers = (ASIDE, LOCK, "run.json")
    if any(not path.name.startswith(leftovers) for path in folder.iterdir()):
        raise ValueError("is not empty; give a new folder")


def check_config(path: Path, read: dict, saved: dict, free: set[str]) -> None:
    """Raise ValueError that names the changed flags, if config.json is not what the run was trained with.

    read: the flags as they were read, with a default for each flag that config.json lacks.
    saved: the flags in the checkpoint's state. free: names of the flags whose value may differ.
    """
    present = with_new_names(json.loads(path.read_text()))
    changes = []
    for name, value in with_new_names(saved).items():
        if name in free or (read | present).get(name) == value:
            continue
        found = f"is {json.dumps(present[name])}" if name in present else "is missing"
        changes.append(f"{name} {found} and was {json.dumps(value)}")
    if not changes:
        return
    more = f" (and {len(changes) - 2} more)" if len(changes) > 2 else ""
    raise ValueError(
        f"{path.name} was changed: {', '.join(changes[:2])}{more}; write the old values back (state.json of "
        f"the checkpoint has them), or start another run with --config {path}"
    )


def with_new_names(config: dict) -> dict:
    """Return the flags of a config.json, by their present names."""
    return {OLD_NAMES.get(name, name): value for name, value in config.items()}


def check_start(folder: Path, config: dict) -> None:
    """Raise ValueError if the start/ that a run has made, or its weights, are missing.

    config: the run's flags.
    """
    start = folder / "start"
    if config.get("warm_start") and not any(start.glob("*.safetensors")):
        raise ValueError(f"{start}, the model after the warm start, is missing; copy it again")


def choose(folder: Path, name: str | None = None) -> Path | None:
    """Return the run's checkpoint of that name (default: the newest), or None if the run has none yet.

    Raises ValueError if no checkpoint has that name, if the checkpoint is damaged, or if an older version
    wrote the run.
    """
    paths = listed(folder)
    if not paths and (old := sorted(folder.glob("checkpoints/step_*"))):
        raise ValueError(
            f"its checkpoints ({old[-1].name}) were written by an older version and cannot be read; start a "
            "new run; a new run can take its policy/ with --model and its reward_model/ as --reward_model"
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
    remedy = "no undamaged checkpoint is left before it: start a new run"
    if whole:
        remedy = f"--resume_from {whole[-1]} takes the checkpoint before it"
    raise ValueError(f"{fault}; {remedy}")
