"""Sampling replies with vLLM."""

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


@dataclass
class Synced:
    """The adapter that the engine has of an agent."""

    policy: object
    version: int  # of the policy when it was saved
    request: object  # vLLM's LoRARequest: its name, number and the folder it was read from


class VLLMSampler:
    """Decodes with vLLM, for LoRA alone. The first call starts the engine, from where the base was loaded.

    An agent's adapter is handed over whenever it has changed, every time with a new name and number and in
    its own folder, since vLLM goes by these: under an old one it would go on with old weights, or with an
    old prefix cache. A request that names an adapter which the engine lacks would block it for good, so an
    adapter is added before the one it replaces is removed.

    A row draws from a seed of its own generator's, so that rows differ and none depends on its neighbours but
    by rounding.
    """

    def __init__(self, max_length: int, memory: float):
        """max_length: of prompt and reply together. memory: the engine's share of a GPU's."""
        self.max_length, self.memory = max_length, memory
        self._llm = None
        self._synced: dict[str, Synced] = {}  # by the agent's name
        self._numbers = itertools.count(1)

    def reset(self) -> None:
        if self._llm is not None and self._llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM keeps its prefix cache: requests are still running")

    def close(self) -> None:
        if self._llm is not None:
            self._llm = stop_vllm(self._llm)
            self._synced.clear()

    def sample(self, policy, prompts, episodes, rngs, temperature, max_tokens) -> list[Sample]:
        """Temperature 0 takes the likeliest token; its log-probs are then those at temperature 1. `episodes`
        are of no use: vLLM finds out by itself what prompts have in common."""
        policy.activate()  # refuses an agent that was discarded
        # One that is too long would fail all others with it, or have its reply cut short
        check_lengths(prompts, max_tokens, self.max_length, "vLLM was started for")
        adapter = self._sync(policy)
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [sampling_params(policy, rng, temperature, max_tokens) for rng in rngs],
            lora_request=adapter,  # always: base rows beside those of an adapter may silently get the adapter
            use_tqdm=False,
        )
        return [self._sample(output.outputs[0], policy.chat.stop_ids) for output in outputs]

    def _sample(self, reply, stop_ids: list[int]) -> Sample:
        ids = list(reply.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(ids, reply.logprobs, strict=True)]
        if any(map(math.isnan, logprobs)):
            raise FloatingPointError("the policy's logits are not numbers: lower its learning rate")
        if not ids or reply.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM gave a reply of {len(ids)} tokens up: {reply.finish_reason}")
        return Sample(ids, logprobs, stopped=ids[-1] in stop_ids)

    def _sync(self, policy):
        """Have the engine hold the policy's adapter as it is now."""
        old = self._synced.get(policy.name)
        if old and old.policy is policy and old.version == policy.version:
            return old.request
        if self._llm is None:
            self._llm = start_vllm(policy, self.max_length, self.memory)
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        name = f"{policy.name}@{policy.version}-{number}"
        # The engine reads the folder now and never again, so nothing of a run that is killed stays behind
        with tempfile.TemporaryDirectory(prefix="rspo-adapter-") as folder:
            policy.save_adapter(Path(folder) / name)
            request = LoRARequest(name, number, str(Path(folder) / name))
            if not self._llm.llm_engine.add_lora(request):
                raise RuntimeError(f"vLLM does not take the adapter {name}")
        self._synced[policy.name] = Synced(policy, policy.version, request)
        if old:
            self._llm.llm_engine.remove_lora(old.request.lora_int_id)
        self.reset()  # no prefix was computed with the new adapter: a belt to the braces of its name
        return request


def sampling_params(policy, rng: random.Random, temperature: float, max_tokens: int):
    """The model's own distribution at this temperature, every setting given: none is left to a checkpoint."""
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": temperature, "max_tokens": max_tokens, "seed": rng.getrandbits(63), "n": 1},
        **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0},
        **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        stop_token_ids=policy.chat.stop_ids,
        logprobs=0,  # the sampled token's alone
        detokenize=False,
    )


class EngineError(Exception):
    """vLLM does not start with this model, or not on this machine."""


MAX_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def start_vllm(policy, max_length: int, memory: float):
    """An engine in this process, with the base that the policy's adapters are trained on."""
    base = policy.base
    if base.peft is None:
        raise ValueError("vLLM samples LoRA adapters alone: full weights would go stale in it")
    if base.changed:
        raise ValueError("vLLM loads the starting model from a folder: save it first")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns of the tokenizer that it is not given
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    settings = {"gpu_memory_utilization": memory}
    if policy.device.type == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer's threads are its own
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Its blocks of 128 tokens would hold no short prompt, so that no prefix would ever be shared
        settings = {"enforce_eager": True, "block_size": 32}
    if distributed.world_size() > 1:  # an engine per rank, that finds the ranks' connections there already
        settings["distributed_executor_backend"] = "external_launcher"
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # of what torch deprecates
    from vllm import LLM, SamplingParams

    rank = base.peft.peft_config[policy.name].r
    try:
        llm = LLM(
            model=base.model.name_or_path,
            skip_tokenizer_init=True,  # token ids in, token ids out
            use_tqdm_on_load=False,
            dtype=str(base.model.dtype).removeprefix("torch."),
            max_model_len=max_length,
            generation_config="vllm",  # nothing of the checkpoint's
            logprobs_mode="processed_logprobs",  # at the temperature; the raw ones are not
            enable_prefix_caching=True,
            enable_lora=True,
            max_loras=2,
            max_cpu_loras=3,  # of A, of B, and a new one beside them
            max_lora_rank=min(size for size in MAX_LORA_RANKS if size >= rank),
            **settings,
        )
        # Some models are taken and then cannot be run, on a CPU those with heads of 16: one token tells
        once = SamplingParams(max_tokens=1, detokenize=False)
        llm.generate([{"prompt_token_ids": [0]}], once, lora_request=None, use_tqdm=False)
    except (ValueError, RuntimeError) as error:
        why = textwrap.shorten(str(error), 400, placeholder=" ...")
        raise EngineError(f"vLLM does not start with {base.model.name_or_path}: {why}") from error
    torch.set_num_threads = set_threads  # on a CPU it puts a function there that does nothing
    torch.set_num_threads(threads)
    return llm


def stop_vllm(llm) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    if distributed.world_size() == 1:  # else it would take the ranks' connections down
        cleanup_dist_env_and_memory()
