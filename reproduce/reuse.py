"""Results of earlier calls: runs that a NAME.json holds, so that they need not be trained again."""

from __future__ import annotations

import json
from pathlib import Path

from envs import env_class
from flags import Args, UsageError, config_text, resolve
from reproduce.arms import Experiment
from reproduce.runs import Plan, changes_of

Known = dict[tuple[str, str, int, str], dict]  # by start, arm, seed and split: a run as in NAME.json


def read_known(paths: list[Path], plan: Plan, experiments: list[Experiment]) -> Known:
    """Return the runs of the plan that the files hold. Raises UsageError if one has other flags.

    A run that lacks a training curve which an experiment reads is left out, so it is trained.
    """
    training = {key for experiment in experiments for key in experiment.training}
    known: Known = {}
    for path in paths:
        for section in read_sections(path):
            for arm, found in section["arms"].items():
                for seed, described in found["seeds"].items():
                    key = section["start"], arm, int(seed)
                    if key not in plan or training - described["training"].keys():
                        continue
                    args = plan[key].args
                    config = complete(found["config"], args) | {"seed": args.seed}
                    if changes := changes_of(config, args):
                        text = f"holds runs of {arm} with {'; '.join(changes[:3])}; leave it out"
                        raise UsageError(f"--reuse {path}: {text}")
                    known[(*key, section["split"])] = described
    return known


def read_sections(path: Path) -> list[dict]:
    """Return the sections of a NAME.json. Raises UsageError."""
    try:
        sections = json.loads(path.read_text())["sections"]
        for section in sections:
            for arm in section["arms"].values():
                for described in arm["seeds"].values():
                    described["training"], described["commit"]
    except OSError as error:
        raise UsageError(f"--reuse {path}: {error.strerror}; give a NAME.json of reproduce") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        text = "is no NAME.json of reproduce, or of an old version; leave it out"
        raise UsageError(f"--reuse {path}: {text}") from None
    return sections


def complete(config: dict, args: Args) -> dict:
    """Add to a config of an older version the defaults of the flags that it lacks."""
    defaults = resolve(Args(model=args.model, env=args.env), env_class(args.env))
    return json.loads(config_text(defaults)) | config


def is_known(key: tuple[str, str, int], plan: Plan, known: Known) -> bool:
    """Return True if the files hold the run on every split that it is evaluated on."""
    return all((*key, split) in known for split in plan[key].args.eval_splits)
