"""The run folder of a command line: which checkpoint is read, and whether a run can be written there.

`checkpoint_of` is called before torch is imported, so that a folder that cannot be used is refused at once.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from flags import WHEN_EVALUATED, WHEN_RESUMED, Args, config_text
from record import checkpoint
from record.command_line import UsageError, refuse
from record.log import check_log


def checkpoint_of(args: Args) -> Path | None:
    """Return the checkpoint that the run resumes from or evaluates, if any. Raises UsageError."""
    if args.plan:
        return None
    folder, path = Path(args.out or "runs"), None
    try:
        checkpoint.check_folder(folder)
    except ValueError as error:
        raise UsageError(f"--out {folder}: {error}{other_ways_to_evaluate(args)}") from None
    try:
        if args.resume or (args.eval_only and args.out):
            path = checkpoint.choose(folder, args.resume_from)
            state = checkpoint.read_state(path) if path else {}
            check_config(args, state.get("config", {}))
            checkpoint.check_start(folder, state.get("config", {}))
        elif args.out:
            checkpoint.check_new_folder(folder)
        if args.out and not args.eval_only:
            checkpoint.check_contents(folder)
        if args.resume:
            check_log(folder, state)
    except ValueError as error:
        raise UsageError(f"--out {folder}: {error}") from None
    if args.eval_only and args.out and path is None:
        raise UsageError(
            f"--eval_only --out {args.out}: has no checkpoint yet; train it first, with --resume"
        )
    if args.resume and path and args.total_updates < (done := checkpoint.updates_of(path)):
        refuse(args, "total_updates", f"{path.name} has {done} updates; give {done} or more")
    return path


def check_config(args: Args, saved: dict) -> None:
    """Raise ValueError if the run's config.json was changed. saved: the flags in the checkpoint's state."""
    free = WHEN_RESUMED + (f" {WHEN_EVALUATED}" if args.eval_only else "")
    names = {flag.removeprefix("--") for flag in free.split()}
    checkpoint.check_config(Path(args.out, "config.json"), json.loads(config_text(args)), saved, names)


def other_ways_to_evaluate(args: Args) -> str:
    """Return how a run can be evaluated whose folder cannot be written, as the end of a message.

    The policy of a tiny model can only be evaluated with the run's settings.
    """
    if not (args.eval_only and args.out) or args.model == "tiny" or not Path(args.out, "policy").is_dir():
        return ""
    return f", or give --model {Path(args.out, 'policy')} without --out"


def make_run_folder(args: Args) -> Path:
    """Return the run folder, and make it if it is missing. Raises UsageError."""
    if args.out:
        folder = Path(args.out)
    else:
        kind = "eval" if args.eval_only else f"{args.env}-{args.method}-{args.algo}-s{args.seed}"
        stem = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
        names = (Path("runs") / (stem + (f"-{i}" if i else "")) for i in range(1000))
        folder = next(name for name in names if not name.exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be made ({error.strerror}); give another folder") from None
    return folder
