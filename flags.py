"""The flags of a run: how they are read and completed, and the combinations that are refused.

`prepare(argv)` reads, completes and checks the flags before a model is loaded or a folder is made. A preset
and the config.json of a run are read as if their flags came before those of the command line; the later
flag wins.
config.py holds the flags of Algorithm 1, record/command_line.py the parser, record/checks.py the checks.

torch is imported only if a flag needs it, so that --help and usage errors answer at once.
`python flags.py > docs/FLAGS.md` writes the list of all flags.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from config import LANGUAGE_MODEL, OLD_NAMES, PRESETS, TINY, TINY_MODEL, Config
from dense.shaped import make_with_progress
from envs import Env, env_class, make_env
from record import checks
from record.checks import has_expert, has_other_goals, native_bf16
from record.command_line import CommandLine, UsageError, refuse, text_of


@dataclass(frozen=True)
class Args(Config):
    """All flags of a run. `resolve` replaces a None by a default that fits the model and the environment."""

    # optimisation, continued
    learning_rate: float | None = None
    """Learning rate of AdamW, constant. Default: tiny 4e-4 (alfworld 2e-4, webshop 1e-4), LoRA 3e-6, full
    weights 1e-6"""
    critic_learning_rate: float | None = None
    """Learning rate of PPO's critics. Default: tiny 1e-3, else 1e-5"""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    adam_beta1: float = 0.9
    """beta1 of AdamW."""
    adam_beta2: float | None = None
    """beta2 of AdamW. Default: tiny 0.99, else 0.999"""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    # model
    model: str = "tiny"
    """Starting model: folder or hub id of a causal LM with a chat template. tiny: made by the run."""
    tiny_width: int | None = None
    """Width of the tiny model. Default: 64, webshop 96"""
    tiny_layers: int | None = None
    """Layers of the tiny model. Default: 2, webshop 3"""
    tiny_heads: int = 4
    """Attention heads of the tiny model."""
    lora_rank: int | None = None
    """Rank of the LoRA adapters. 0 trains the full weights. Default: tiny 0, else 64"""
    lora_alpha: float | None = None
    """The adapters are scaled by lora_alpha / lora_rank. Default: lora_rank"""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the starting model's weights. Default: tiny float32, else bfloat16"""
    autocast: bool | None = None
    """Compute matrix products of fp32 weights and adapters in bf16. Losses and softmaxes stay in fp32.
    Default: True if --dtype is bfloat16 and the device computes in bf16 natively"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1. auto: a GPU if there is one. With several ranks, each rank has its own."""

    # environment
    env: str = "household"
    """household, alfworld or webshop."""
    alfworld_data: str | None = None
    """Folder that contains json_2.1.1. Default: $ALFWORLD_DATA, else the folder of alfworld-download"""
    webshop_data: str | None = None
    """Folder of WebShop's files. Default: $WEBSHOP_DATA"""
    webshop_products: Literal["small", "all"] | None = None
    """The set of 1,000 products or the full set. Default: the set that the folder contains"""
    webshop_goals: Literal["synthetic", "human"] = "synthetic"
    """Instructions made from attributes or written by people. Human goals need the full set of products."""
    webshop_reward: Literal["success", "score"] = "success"
    """Outcome reward in training. success: 1 for a full score, else 0. score: the score itself."""
    env_workers: int = 0
    """Worker processes per rank that run the environments. 0: the rank runs them itself."""

    # episodes
    style: Literal["think", "short"] | None = None
    """think: prompts list the admissible actions; a reply reasons before it acts. short: a reply is only an
    action. Default: tiny short, else think"""
    context: Literal["window", "full"] = "window"
    """window: a new prompt per turn, with the last turns as text. full: one chat that grows."""
    history: int | None = None
    """Past turns that a window prompt shows. Default: tiny 1 (webshop 0; its prompts hold notes), else 2"""
    max_turns: int | None = None
    """Turns per episode. Default: household 14, alfworld 50, webshop 15"""
    max_prompt_tokens: int | None = None
    """A longer prompt loses its oldest history. Default: tiny 256 (webshop 320), else 2048; times 4 with
    --context full"""
    max_new_tokens: int | None = None
    """Tokens per reply. Default: tiny 16 (webshop 64), else 512"""
    temperature: float = 1.0
    """Sampling temperature in training. Log-probs are computed at this temperature too."""
    parallel_episodes: int = 128
    """Episodes that each rank plays at the same time. Affects memory."""
    sampler: Literal["kv", "vllm"] = "kv"
    """kv: sample with the trained model. vllm: sample with an engine beside it (LoRA only)."""
    vllm_memory: float = 0.4
    """vllm: share of the GPU's memory for the engine. Training needs room beside it."""

    # evaluation
    eval_splits: tuple[str, ...] | None = None
    """Held-out splits. household: eval. alfworld: valid_seen, valid_unseen. webshop: validation, test.
    Default: the first of these"""
    eval_games: int = 300
    """The first held-out games of each split, each played once. A smaller split is played whole. ALFWorld's
    splits are sorted by type of game, so a part of a split does not represent it."""
    eval_every: int = 15
    """Updates of A between evaluations. An evaluation takes place at the end of a loop."""
    eval_temperature: float = 0.4
    """Sampling temperature of evaluations. 0 is greedy."""

    # warm start
    warm_start: int | None = None
    """Supervised updates on demonstrations. 0: none. Default: tiny 450 (alfworld 1500, webshop 1000; with
    --context full times 8/3), else 0"""
    warm_start_episodes: int | None = None
    """Demonstrations: training games played by an expert that searches. Default: 2000, alfworld 5000, webshop
    8000"""
    warm_start_games: int | None = None
    """Demonstrations, and the policy's games for the reward model, come from this many first games of the
    task stream. Default: all; alfworld 600, because each new game is translated first"""
    faithful_share: float | None = None
    """Share of the demonstrations that pursue the stated task. The others pursue another goal of the same
    game. Default: household 0.15, else 1"""
    expert_share: float | None = None
    """Share of the demonstrated turns in which the expert's action is played. Default: household 0.95,
    alfworld 0.5, webshop 0.75"""
    hesitation_share: float | None = None
    """Share of the turns in which the expert only looks around (webshop: acts hastily). In the other turns
    it errs: any admissible action is played. Default: household 0, alfworld 0.45, webshop 0.22"""
    warm_start_turns: int | None = None
    """Demonstrated turns per supervised update. Default: 128, webshop 64"""
    warm_start_lr: float | None = None
    """Peak learning rate of the warm start. Default: 4e-3, webshop 3e-3"""

    # step reward model
    reward_model: str | None = None
    """Folder of a fitted step reward model. Default: fit one, if the method uses dense rewards"""
    reward_model_backbone: str | None = None
    """Folder or hub id of the model that the step reward model starts from. Default: the starting model"""
    reward_model_source: Literal["expert", "policy"] | None = None
    """Player of the episodes that the step reward model is fitted on. Default: expert, alfworld policy"""
    reward_model_episodes: int | None = None
    """Number of these episodes. A tenth is held out to report the fit. Default: 2000, alfworld 1000"""
    reward_model_epochs: int = 2
    """Passes over the episodes of the fit."""
    reward_model_lr: float | None = None
    """Peak learning rate of the fit. Default: tiny 1e-3, else 1e-5"""

    # implicit reward
    implicit_beta: float = 0.05
    """beta: a turn's score is beta * log(pi_prm / pi_ref) of its reply."""
    implicit_lr: float | None = None
    """Learning rate of pi_prm's AdamW, constant. Default: tiny 1e-3, LoRA 6e-6, full weights 1e-6"""

    # the run
    out: str | None = None
    """Run folder. Default: runs/<env>-<method>-<algo>-s<seed>-<time>"""
    preset: Literal["paper-alfworld", "paper-webshop", "cheap-swap"] | None = None
    """paper-*: the paper's values, or verl-agent's where the paper gives none. cheap-swap: replay the
    episodes that B is trained on. Flags on the command line override the preset. Default: none"""
    config: str | None = None
    """Take the flags of this config.json. Flags on the command line override them. Default: none"""
    resume: bool = False
    """Continue the run in --out from its newest checkpoint. A larger --total_updates makes the run longer."""
    resume_from: str | None = None
    """The checkpoint to continue from (later ones are removed) or to evaluate, for example update_000012.
    Default: the newest"""
    eval_only: bool = False
    """Only evaluate: the policy of the run in --out or, without --out, the --model itself."""
    plan: bool = False
    """Only print the memory that the run takes, by part, and the episodes of a loop. Loads no model."""
    gpu_memory_gb: float | None = None
    """With --plan: refuse a run that needs more GB (10^9 bytes). Default: this machine's GPU, else 80"""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep."""
    threads: int | None = None
    """CPU threads of torch, shared by the ranks of a machine. Another number can round differently. Default:
    tiny 1 (more are slower), else all"""
    ranks: str = "auto"
    """Processes that share the work on this machine. auto: one per GPU; without a GPU, the tiny model gets
    one per core, up to 4, and others get 1. The number changes rounding. Not read under torchrun."""
    rank_timeout: float = 10.0
    """End a run of several ranks after so many minutes in which some rank waits and no rank makes progress.
    Raise it if one call may take longer, for example to write a large checkpoint to a slow disk."""
    tensorboard: bool = False
    """Write <out>/tensorboard too."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project too. Default: none"""

    def __post_init__(self):
        try:
            super().__post_init__()
        except ValueError as error:
            raise UsageError(str(error)) from None
        if (self.expert_share or 0) + (self.hesitation_share or 0) > 1:
            both = f"--expert_share {self.expert_share} with --hesitation_share {self.hesitation_share}"
            raise UsageError(f"{both}: their sum exceeds 1; lower one of them")
        if 0 < self.eval_temperature < 0.001:
            refuse(self, "eval_temperature", "is too small to divide by; give 0 for greedy, or 0.001 or more")

    @property
    def max_tokens(self) -> int:
        """Return the largest number of tokens of a prompt and its reply together."""
        return self.max_prompt_tokens + self.max_new_tokens


SECTIONS = {  # the sections of --help, each by the name of its first flag
    "method": "the method, with the paper's symbols",
    "gigpo_gamma": "GiGPO and PPO",
    "spear_weight": "SPEAR",
    "epochs": "optimisation",
    "model": "model",
    "env": "environment",
    "style": "episodes",
    "eval_splits": "evaluation",
    "warm_start": "warm start, not part of RSPO",
    "reward_model": "step reward model",
    "implicit_beta": "implicit reward",
    "out": "the run",
}

OF_THE_CALL = ["preset", "out", "config", "resume", "resume_from", "eval_only", "plan", "gpu_memory_gb"]
COMMAND_LINE = CommandLine(Args, SECTIONS, OLD_NAMES, unsaved=OF_THE_CALL)

# The flags that may change when a run is resumed or evaluated: its course does not depend on them.
OF_THE_MACHINE = """--threads --ranks --rank_timeout --device --parallel_episodes --env_workers
    --vllm_memory --alfworld_data --webshop_data --webshop_products"""
WHEN_RESUMED = f"""{OF_THE_MACHINE} --total_updates --eval_every --tokens_per_micro_batch
    --gradient_checkpointing --keep_checkpoints --tensorboard --wandb_project"""
WHEN_EVALUATED = f"{OF_THE_MACHINE} --sampler --eval_splits --eval_games --eval_temperature"


# --- reading ------------------------------------------------------------------------------------------------


def prepare(argv: list[str]) -> Args:
    """Return the complete, checked flags of a command line. Raises UsageError.

    Warns on stderr, in one line each, of given flags that are not read and of likely slips.
    """
    args, given = parse(argv), COMMAND_LINE.read(argv)
    try:
        env = environment(args)
        checks.check_folders(args)
        args = resolve(args, env)
        checks.check_spelling(args)
        if not args.plan:
            checks.check(args, env)
    except UsageError as error:
        raise UsageError(checks.with_source(str(error), args, given, flags_before(given))) from None
    for doubt in checks.doubts(args, given):
        print(f"warning: {doubt}", file=sys.stderr)
    return args


def parse(argv: list[str]) -> Args:
    """Return the given flags, after those of the run that is resumed or evaluated, --config or --preset."""
    given = COMMAND_LINE.read(argv)
    checks.check_paths(given)
    first, of_a_run = flags_before(given), is_of_a_run(given)
    args = Args(**{**first, **given})
    if args.preset and (of_a_run or args.config):
        refuse(args, "preset", "excludes --config, --resume and --eval_only with --out; leave one out")
    if args.resume_from and not of_a_run:
        refuse(args, "resume_from", "needs --resume, or --eval_only with --out; add it")
    if args.plan and args.eval_only:
        raise UsageError("--plan with --eval_only: a plan counts the memory of training; leave one out")
    if of_a_run:
        free = (WHEN_RESUMED if args.resume else WHEN_EVALUATED).split()
        for name, value in given.items():
            saved = first.get(name, getattr(Args, name))
            if value != saved and name not in OF_THE_CALL and f"--{name}" not in free:
                new_run = f"start another run with --config {args.out}/config.json"
                refuse(args, name, f"the run in {args.out} has {text_of(saved)}; leave it out, or {new_run}")
    return args


def is_of_a_run(given: dict) -> bool:
    """Return True if the given flags resume or evaluate the run in --out."""
    return bool(given.get("resume") or (given.get("eval_only") and "out" in given))


def flags_before(given: dict) -> dict:
    """Return the flags that are read as if they stood before the given ones. Raises UsageError."""
    if is_of_a_run(given):
        return read_run(given)
    if "config" in given:
        return without_defaults(read_config("config", Path(given["config"])))
    return read(PRESETS[given["preset"]]) if "preset" in given else {}


def read(flags: str) -> dict:
    """Return the values of flags that are written as a command line, by name."""
    return COMMAND_LINE.read(flags.split())


def read_run(given: dict) -> dict:
    """Return the flags of the run in --out, for --resume or --eval_only. Raises UsageError."""
    flag = "--resume" if "resume" in given else "--eval_only"
    if "resume" in given and "eval_only" in given:
        raise UsageError("--eval_only with --resume: one evaluates, the other trains; leave one out")
    if "out" not in given:
        raise UsageError("--resume: needs the folder of a run; give it with --out")
    if "config" in given:
        config = text_of(given["config"])
        raise UsageError(f"--config {config} with {flag}: the run has its own config; leave it out")
    folder = Path(given["out"])
    if (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        return read_config("out", folder / "config.json")
    remedy = f"check its name, or start a run without {flag}"
    if run := checks.run_around(folder):
        remedy = f"give {run}"
    elif "model" in given:
        remedy = "leave it out, and the result is written to a new folder"
    why = f"the folder contains no run (no config.json); {remedy}"
    raise UsageError(f"--out {text_of(given['out'])}: {why}")


def read_config(flag: str, path: Path) -> dict:
    """Return the flags of a config.json, by name. Raises UsageError that names the file and the key."""
    if (path / "config.json").is_file():
        raise UsageError(f"--{flag} {path}: is a folder; give {path / 'config.json'}")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(f"--{flag} {path}: is not a regular file; give the config.json of a run")
    try:
        values = COMMAND_LINE.read_file(path)
        if {"expert_share", "hesitation_share"} <= values.keys():
            values.setdefault("faithful_share", 1.0)  # as every run did before this flag existed
        env_class(Args(**values).env)
    except UsageError as error:
        raise UsageError(f"--{flag} {path}: {error}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--{flag} {path}: is no config.json of a run ({why}); give another") from None
    return values


def config_text(args: Args) -> str:
    """Return config.json: the value of every flag."""
    values = {name: value for name, value in vars(args).items() if name not in OF_THE_CALL}
    return json.dumps(values, indent=2) + "\n"


# --- defaults -----------------------------------------------------------------------------------------------


def resolve(args: Args, env: Env | type[Env]) -> Args:
    """Replace every None by a default that fits the model and the environment."""
    defaults = read(TINY_MODEL) | read(TINY.get(args.env, TINY["household"]))
    if args.model != "tiny":
        defaults |= read(LANGUAGE_MODEL) | {"threads": os.cpu_count() or 1}
    given = {name: value for name, value in vars(args).items() if value is not None}
    rank, dtype = (defaults | given)["lora_rank"], (defaults | given)["dtype"]
    if args.model != "tiny" and rank == 0:
        defaults |= {"learning_rate": 1e-6, "implicit_lr": 1e-6}
    if args.context == "full":
        defaults["max_prompt_tokens"] *= 4
        defaults["warm_start"] = defaults["warm_start"] * 8 // 3
    if not has_expert(env):
        defaults["reward_model_source"] = "policy"
    if not has_other_goals(env):
        defaults["faithful_share"] = 1.0
    if "autocast" not in given:
        defaults["autocast"] = dtype == "bfloat16" and (args.plan or native_bf16(args.device))
    defaults["lora_alpha"] = float(rank or 64)
    defaults["max_turns"] = env.step_limit
    defaults["eval_splits"] = env.eval_splits[:1]
    return Args(**{**defaults, **given})


def without_defaults(values: dict) -> dict:
    """Leave out the values that `resolve` chose, so that another --model or --env gets its own defaults."""
    open_names = [field.name for field in dataclasses.fields(Args) if field.default is None]
    blank = Args(**{name: value for name, value in values.items() if name not in open_names})
    chosen = resolve(blank, env_class(blank.env))  # the class, since the data may be elsewhere
    return {
        name: value
        for name, value in values.items()
        if name not in open_names or value != getattr(chosen, name)
    }


# --- the environment ----------------------------------------------------------------------------------------


def env_maker(args: Args) -> Callable[[], Env]:
    """Return a function that builds one environment of the run, in this process or in a worker."""
    options = {}
    if args.env == "alfworld":
        options = {"data": args.alfworld_data}
    if args.env == "webshop":
        options = {name: getattr(args, f"webshop_{name}") for name in ("data", "goals", "reward", "products")}
    maker = functools.partial(make_env, args.env, **options)
    if args.dense_kind == "shaped" and not args.eval_only:
        return functools.partial(make_with_progress, maker)
    return maker


def environment(args: Args) -> Env | type[Env]:
    """Return an environment to query for its constants; its class, if a plan needs no data.

    Raises UsageError if data or packages are missing.
    """
    try:
        if args.plan and args.model != "tiny":
            return env_class(args.env)
        return env_maker(args)()
    except ImportError as error:
        refuse(args, "env", str(error))
    except (OSError, ValueError) as error:  # OSError: a file that cannot be read
        if getattr(args, f"{args.env}_data", None):
            refuse(args, f"{args.env}_data", str(error))
        refuse(args, "env", str(error))


if __name__ == "__main__":
    print(COMMAND_LINE.page(), end="")
