"""Sampling replies with vLLM: `--sampler vllm`, for LoRA adapters.

vLLM loads its own copy of the base from the folder or hub id that the trainer loaded. Before an agent samples
with new weights, `VLLMSampler` loads the agent's adapter into the engine. Log-probs are at the sampling
temperature and equal the trainer's up to rounding, as with `KVSampler`.

Left out: full weights, which would have to be copied at every update; tensor parallelism (each rank runs its
own engine); generating while the trainer updates. Critics and the reference model never sample.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import tempfile
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from sampler import Sample, check_lengths
from scale import distributed

MAX_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM accepts for max_lora_rank


class EngineError(Exception):
    """vLLM cannot start with this model or on this machine."""


@dataclass
class Synced:
    """An agent's adapter as it was loaded into the engine."""

    policy: object
    version: int  # the policy's, when the adapter was saved
    request: object  # vLLM's LoRARequest: the adapter's name, number and folder


class VLLMSampler:
    """Decodes LoRA policies with vLLM. The first call of `sample` starts the engine.

    When a policy has changed, its adapter is loaded with a new name, a new number and a new folder. vLLM
    identifies adapters and cached prefixes by these, so with an old name it would use old weights. The new
    adapter is loaded before the old one is removed, because a request for a missing adapter would block the
    engine forever.

    vLLM draws a row's tokens from a seed, and each seed comes from the row's generator. So equal prompts get
    different replies, and the other rows change a reply only by rounding.
    """

    def __init__(self, max_length: int, memory: float):
        """max_length: tokens of a prompt and its reply. memory: the engine's share of the GPU memory."""
        self.max_length, self.memory = max_length, memory
        self._llm = None
        self._synced: dict[str, Synced] = {}  # by the agent's name
        self._numbers = itertools.count(1)

    def reset(self) -> None:
        """Clear the prefix cache. Raises RuntimeError if the engine refuses."""
        if self._llm is not None and self._llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM keeps its prefix cache: requests are still running")

    def close(self) -> None:
        """Stop the engine and free its memory."""
        if self._llm is not None:
            self._llm = stop_vllm(self._llm)
            self._synced.clear()

    def sample(self, policy, prompts, episodes, rngs, temperature, max_tokens) -> list[Sample]:
        """See `Sampler.sample`. `episodes` is not used, because vLLM finds common prefixes itself.

        Raises EngineError if the engine cannot start, ValueError for a policy with full weights.
        """
        policy.activate()  # raises for a discarded agent
        # vLLM would fail the whole call for one prompt that is too long, or shorten its reply
        check_lengths(prompts, max_tokens, self.max_length, "vLLM was started for")
        adapter = self._sync(policy)
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [sampling_params(policy, rng, temperature, max_tokens) for rng in rngs],
            lora_request=adapter,  # for all rows: base rows next to adapter rows may silently use the adapter
            use_tqdm=False,
        )
        return [sample_of(output.outputs[0], policy.chat.stop_ids) for output in outputs]

    def _sync(self, policy):
        """Load the policy's adapter unless the engine has it. Returns its LoRARequest."""
        old = self._synced.get(policy.name)
        if old and old.policy is policy and old.version == policy.version:
            return old.request
        if self._llm is None:
            self._llm = start_vllm(policy, self.max_length, self.memory)
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        name = f"{policy.name}@{policy.version}-{number}"
        # The engine reads the folder only in add_lora, so the folder can be removed afterwards
        with tempfile.TemporaryDirectory(prefix="rspo-adapter-") as folder:
            policy.save_adapter(Path(folder) / name)
            request = LoRARequest(name, number, str(Path(folder) / name))
            if not self._llm.llm_engine.add_lora(request):
                raise RuntimeError(f"vLLM does not accept the adapter {name}")
        self._synced[policy.name] = Synced(policy, policy.version, request)
        if old:
            self._llm.llm_engine.remove_lora(old.request.lora_int_id)
        self.reset()  # to be safe: the new name already prevents the reuse of old prefixes
        return request


def sample_of(reply, stop_ids: list[int]) -> Sample:
    """Convert vLLM's reply. Raises FloatingPointError for a NaN log-prob, RuntimeError for a broken reply."""
    ids = list(reply.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(ids, reply.logprobs, strict=True)]
    if any(math.isnan(logprob) for logprob in logprobs):
        raise FloatingPointError("the policy's logits are not numbers: lower its learning rate")
    if not ids or reply.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a reply after {len(ids)} tokens: {reply.finish_reason}")
    return Sample(ids, logprobs, stopped=ids[-1] in stop_ids)


def sampling_params(policy, rng: random.Random, temperature: float, max_tokens: int):
    """Return vLLM's SamplingParams for the whole distribution at this temperature.

    Every setting is explicit, so that no default of the checkpoint applies.
    """
    from vllm import SamplingParams

    return SamplingParams(
        n=1,
        seed=rng.getrandbits(63),
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_tokens=0,
        max_tokens=max_tokens,
        stop_token_ids=policy.chat.stop_ids,
        logprobs=0,  # only the log-prob of the sampled token
        detokenize=False,
    )


def start_vllm(policy, max_length: int, memory: float):
    """Start an engine in this process, with the base of the policy's adapter. Returns vLLM's LLM.

    Raises ValueError if vLLM cannot load the base of this policy, EngineError if the engine does not run.
    """
    base = policy.base
    if base.peft is None:
        raise ValueError("vLLM samples only LoRA adapters: its copy of full weights would be out of date")
    if base.changed:
        raise ValueError("vLLM loads the starting model from a folder: save it first")
    set_environment(policy.device.type)
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # torch's deprecations
    from vllm import LLM, SamplingParams

    try:
        llm = LLM(**engine_settings(policy, max_length, memory))
        # vLLM accepts some models that it cannot run, such as heads of 16 on a CPU: sample one token
        once = SamplingParams(max_tokens=1, detokenize=False)
        llm.generate([{"prompt_token_ids": [0]}], once, lora_request=None, use_tqdm=False)
    except (ValueError, RuntimeError) as error:
        why = textwrap.shorten(str(error), 400, placeholder=" ...")
        raise EngineError(f"vLLM does not start with {base.model.name_or_path}: {why}") from error
    torch.set_num_threads = set_threads  # on a CPU vLLM replaces it by a function that does nothing
    torch.set_num_threads(threads)
    return llm


def set_environment(device_type: str) -> None:
    """Set the environment variables that vLLM reads on import, unless the user has set them."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it would warn that it has no tokenizer
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device_type == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # keep the trainer's threads
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def engine_settings(policy, max_length: int, memory: float) -> dict:
    """Return the arguments of vLLM's LLM."""
    model = policy.base.model
    rank = policy.base.peft.peft_config[policy.name].r
    settings = {
        "model": model.name_or_path,
        "skip_tokenizer_init": True,  # prompts and replies are token ids
        "use_tqdm_on_load": False,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": max_length,
        "generation_config": "vllm",  # ignore the checkpoint's generation_config
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "enable_prefix_caching": True,
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 3,  # A's, B's, and a new one before the old one is removed
        "max_lora_rank": min(size for size in MAX_LORA_RANKS if size >= rank),
    }
    if policy.device.type == "cpu":
        settings["enforce_eager"] = True
        settings["block_size"] = 32  # vLLM shares whole blocks; 128 tokens, its default, exceed most prompts
    else:
        settings["gpu_memory_utilization"] = memory
    if distributed.world_size() > 1:  # each rank runs its own engine, over the existing connections
        settings["distributed_executor_backend"] = "external_launcher"
    return settings


def stop_vllm(llm) -> None:
    """Stop an engine that `start_vllm` started."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    if distributed.world_size() == 1:  # with more ranks this would close the connections between them
        cleanup_dist_env_and_memory()
