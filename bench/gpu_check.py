"""Check that this project works on a machine with a GPU, and its speed: `python -m bench.gpu_check`.

The check takes at most 8 minutes and has two parts. If one part fails or exceeds its time, the other still
runs, and the exit status is 1. `--dry_run` runs the same code on the CPU with a tiny model, but it measures
no memory.
    tests    the unit tests, with their models on the GPU
    loop     one loop of RSPO on Household through train.py. The model has the shape of Qwen2.5-1.5B and
             random weights (bf16, LoRA of rank 64, autocast, gradient checkpointing). This part prints tokens
             per second, FLOP utilisation, and the peak of memory beside the estimate of --plan

FLOPs: a matrix product takes 2 per token and parameter in a forward pass. A backward pass takes 2 for the
gradient of the input and, if the parameter is trained, 2 for the parameter's gradient (Kaplan et al. 2020,
arXiv 2001.08361, section 2.1). So training takes 6 N per token for full weights, and 4 N for a frozen base
under an adapter. The output layer counts only for action tokens. Attention's own products are below 5 % at
these lengths and do not count. MFU is these FLOPs by time and peak. HFU also counts the FLOPs that gradient
checkpointing repeats (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

The random model's replies are noise: each token ends a reply with a chance of 1 %, and no reply holds an
action. Rates leave out the first call of each phase. Memory is the largest of all calls.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

import flags
import rspo
import train
from batch import rows_of
from buffer import Group, Trajectory
from demo.tiny_model import tiny_tokenizer
from envs import make_env
from reward_model import StepRewardModel
from sampler import KVSampler
from scale import plan
from scale.plan import GB

ROOT = Path(flags.__file__).parent  # the project's folder
TESTED = [  # test files that use the device
    "tests/test_losses.py",
    "tests/test_buffer.py",
    "tests/test_batch.py",
    "tests/test_chat.py",
    "tests/test_model.py",
    "tests/test_policy.py",
    "tests/test_sampler.py",
    "tests/test_rspo.py",
    "tests/test_reward_model.py",
    "tests/scale/test_plan.py",
]
SHAPES = {"cuda": plan.KNOWN["Qwen/Qwen2.5-1.5B-Instruct"], "cpu": plan.qwen(64, 224, 2, 4, 2, vocab=512)}

# Flags of the loop. Batches and caches are about as full as the plan assumes. Without the noise, all outcomes
# of the random model would be equal and all of B's advantages 0
LOOP = """
    --env household --total_updates 1 --k 1 --max_turns 3 --eval_games 64 --buffer_tasks 8
    --parallel_episodes 64 --max_prompt_tokens 192 --max_new_tokens 128 --tokens_per_micro_batch 16384
    --learning_rate 1e-5 --lora_rank 64 --dtype bfloat16 --autocast True --gradient_checkpointing
    --reward_model_episodes 72 --reward_noise 0.1
"""
DRY = """
    --max_turns 2 --tasks_per_update 2 --group_size 4 --off_policy_fraction 0.5 --buffer_tasks 2
    --eval_games 4 --parallel_episodes 8 --max_new_tokens 16 --tokens_per_micro_batch 2048
    --reward_model_episodes 24 --lora_rank 8 --threads 1
"""  # smaller values for the dry run; they override those of LOOP

# Dense bf16 TFLOP/s from NVIDIA's data sheets. The first name that is part of the device's name decides
PEAKS = {
    "B200": 2250,
    "H200": 989,
    "GH200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A40": 150,
    "A10G": 70,
    "A10": 125,
    "A6000": 155,
    "4090": 165,
}
MEMORY_MISS = 0.15  # largest relative difference between measured memory and the plan
LOG_PROB_GAP = 0.05  # largest mean of |sampler's log-prob - trainer's log-prob|, in bf16


class Failed(Exception):
    """A part of the check has failed."""


# --- FLOPs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The work of one call."""

    tokens: dict[str, int]  # by kind
    flops: float  # without repeated FLOPs
    repeated: float = 0.0  # FLOPs that gradient checkpointing computes a second time


@dataclass(frozen=True)
class Costs:
    """FLOPs of one token's forward pass through the base's layers, an adapter and the output layer."""

    base: int
    adapter: int
    output: int

    @classmethod
    def of(cls, shape: plan.Shape, rank: int) -> Costs:
        """Return the costs of a model with an adapter of this rank."""
        layers = shape.layers * sum(i * o for i, o in shape.linears)
        return cls(2 * layers, 2 * shape.adapter(rank), 2 * shape.vocab * shape.width)

    def rollout(self, prompts: int, sampled: int) -> Work:
        """Return the work for these numbers of prompt tokens and sampled tokens."""
        flops = (self.base + self.adapter) * (prompts + sampled) + self.output * sampled
        return Work({"prompt": prompts, "sampled": sampled}, flops)

    def log_probs(self, tokens: int, actions: int) -> Work:
        """Return the work of a forward pass over rows with these numbers of tokens and action tokens."""
        return Work({"scored": tokens}, (self.base + self.adapter) * tokens + self.output * actions)

    def step_scores(self, tokens: int) -> Work:
        """Return the work of the reward model, which has neither an adapter nor an output layer."""
        return Work({"scored": tokens}, self.base * tokens)

    def fit(self, tokens: int) -> Work:
        """Return the work of the reward model's fit, which trains all weights."""
        return Work({"trained": tokens}, 3 * self.base * tokens, self.base * tokens)

    def update(self, tokens: int, actions: int) -> Work:
        """Return the work of an update: old and reference log-probs, then a forward and a backward pass.

        A backward pass goes through frozen parameters, but computes no gradient for them.
        """
        scores = self.log_probs(tokens, actions).flops
        reference = scores - self.adapter * tokens
        backward = (self.base + 2 * self.adapter) * tokens + self.output * actions
        return Work({"trained": tokens}, 2 * scores + reference + backward, scores)


def peak_flops(device: str) -> float | None:
    """Return the device's peak FLOP/s.

    A GPU's peak is looked up by name; it is None if the name is unknown. A CPU's peak is measured in fp32.
    """
    if device == "cpu":
        a, b = torch.rand(2, 1024, 1024)
        a @ b
        started = time.perf_counter()
        for _ in range(10):
            a @ b
        return 10 * 2 * 1024**3 / (time.perf_counter() - started)
    name = torch.cuda.get_device_name()
    return next((peak * 1e12 for part, peak in PEAKS.items() if part in name), None)


# --- measuring ----------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """The measurements of one call."""

    seconds: float
    work: Work
    allocated: int  # peak bytes of tensors during the call
    reserved: int  # peak bytes that PyTorch reserved for them


class Meter:
    """Measure calls by phase, without changes to the code that is measured."""

    def __init__(self, device: str):
        self.gpu, self.calls = device != "cpu", defaultdict(list)

    def around(self, owner, name: str, phase: str, work: Callable[..., Work]):
        """Return a context in which calls of owner.name are measured.

        work: called with the result and the arguments of a call; returns the call's work.
        """
        call = getattr(owner, name)

        @functools.wraps(call)
        def measured(*arguments, **named):
            if self.gpu:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            started, allocated, reserved = time.perf_counter(), 0, 0
            result = call(*arguments, **named)
            if self.gpu:
                torch.cuda.synchronize()
                allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            seconds = time.perf_counter() - started
            done = work(result, *arguments, **named)
            self.calls[phase].append(Call(seconds, done, allocated, reserved))
            return result

        return mock.patch.object(owner, name, measured)

    def speeds(self, peak: float | None) -> str:
        """Return a table with a line for each phase. peak: the device's FLOP/s, None if unknown."""
        lines = [f"{'phase':<18}{'calls':>6}{'seconds':>9}{'MFU':>9}{'HFU':>9}  tokens per second"]
        for phase, calls in self.calls.items():
            warm = calls[1:] or calls
            seconds = sum(call.seconds for call in warm)
            model = sum(call.work.flops for call in warm)
            whole = model + sum(call.work.repeated for call in warm)
            shares = [f"{flops / seconds / peak:.1%}" if peak else "unknown" for flops in (model, whole)]
            counts = {kind: sum(call.work.tokens[kind] for call in warm) for kind in warm[0].work.tokens}
            rates = ", ".join(f"{count / seconds:,.0f} {kind}" for kind, count in counts.items())
            total = sum(call.seconds for call in calls)
            lines.append(f"{phase:<18}{len(calls):>6}{total:>9.2f}{shares[0]:>9}{shares[1]:>9}  {rates}")
        return "\n".join(lines)

    def memory(self, planned: dict[str, float]) -> tuple[str, list[str]]:
        """Return a table of planned and measured memory, and a sentence for each phase that misses the plan.

        planned: bytes by phase, without the GPU's libraries.
        """
        lines, missed = [f"{'memory in GB':<18}{'plan':>8}{'tensors':>9}{'of plan':>9}{'reserved':>10}"], []
        for phase, calls in self.calls.items():
            allocated = max(call.allocated for call in calls)
            reserved = max(call.reserved for call in calls)
            plan_gb, share = "-", "-"
            if phase in planned:
                size = planned[phase]
                plan_gb, share = f"{size / GB:.2f}", f"{allocated / size:.1%}"
                if abs(allocated / size - 1) > MEMORY_MISS:
                    missed.append(f"{phase} takes {allocated / GB:.2f} GB, {share} of the plan's {plan_gb}")
            lines.append(f"{phase:<18}{plan_gb:>8}{allocated / GB:>9.2f}{share:>9}{reserved / GB:>10.2f}")
        return "\n".join(lines), missed


# --- the parts ----------------------------------------------------------------------------------------------


def run_tests(device: str, peak: float | None) -> None:
    """Run the unit tests of TESTED on the device. Raises Failed if a test fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--durations=5", *TESTED]
    status = subprocess.run(command, cwd=ROOT, env=os.environ | {"RSPO_TEST_DEVICE": device}).returncode
    if status:
        raise Failed(f"pytest ended with exit status {status}")


def run_loop(device: str, peak: float | None) -> None:
    """Train for one loop, print speeds and memory, and check the results. Raises Failed with the faults."""
    shape, meter, gaps = SHAPES[device], Meter(device), []
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        make_model(f"{folder}/model", shape, device)
        argv = (LOOP + (DRY if device == "cpu" else "")).split()
        argv += ["--device", device, "--model", f"{folder}/model", "--out", f"{folder}/run"]
        args = flags.prepare(argv)
        with contextlib.ExitStack() as stack:
            for call in calls_to_measure(Costs.of(shape, args.lora_rank), args.reward_model_epochs, gaps):
                stack.enter_context(meter.around(*call))
            train.main(argv)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]

    peak_text = f"{peak / 1e12:.4g} TFLOP/s" if peak else "unknown"
    print(f"\n{shape.parameters:,} parameters; peak {peak_text}")
    print(meter.speeds(peak), end="\n\n")
    faults = check_memory(meter, plan.moments(args, shape, shape, context=0)) if meter.gpu else []
    gap = sum(gaps) / len(gaps)
    print(f"mean difference of sampler's and trainer's log-probs: {gap:.5f}, at most {LOG_PROB_GAP}")
    faults += check_log(lines, gap)
    if faults:
        raise Failed("; ".join(faults))


def check_memory(meter: Meter, moments: plan.Moments) -> list[str]:
    """Print measured memory beside the plan; return the faults."""
    table, faults = meter.memory({moment: plan.total(parts) for moment, parts in moments.items()})
    free, total = torch.cuda.mem_get_info()
    libraries = (total - free - torch.cuda.memory_reserved()) / GB
    print(f"{table}\nthe GPU's libraries: {libraries:.2f} GB, planned {plan.CONTEXT / GB:.2f}")
    return faults


def check_log(lines: list[dict], gap: float) -> list[str]:
    """Return the faults of a run: its log lines, and the mean difference of log-probs."""
    faults = []
    if not gap <= LOG_PROB_GAP:  # also true for NaN
        faults.append(f"the mean difference of sampler's and trainer's log-probs is {gap:.5f}")
    agents = [line["agent"] for line in lines]
    if agents != ["evaluation", "explorer", "buffer", "policy", "evaluation"]:
        faults.append(f"the log holds lines of {agents}")
    for line in lines:
        for name, value in line.items():
            if isinstance(value, float) and not math.isfinite(value):
                faults.append(f"{name} of {line['agent']} is {value}")
    return faults


def make_model(folder: str, shape: plan.Shape, device: str) -> None:
    """Save a Qwen2 of random weights, drawn on the device. Ids beyond the tokenizer's decode to nothing."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    env = make_env("household")
    tokenizer = tiny_tokenizer(env.vocabulary, env.silent_words)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    one_percent = range(shape.vocab - shape.vocab // 100, shape.vocab)
    model.generation_config.eos_token_id = [end, *one_percent]  # these ids end a reply
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def members_of(groups: list[Group]) -> list[Trajectory]:
    """Return the episodes of all groups."""
    return [member for group in groups for member in group.trajectories]


def lengths_of(episodes: list[Trajectory]) -> tuple[int, int]:
    """Return the numbers of tokens and of action tokens in the episodes' rows."""
    tokens, actions = 0, 0
    for episode in episodes:
        for row in rows_of(episode):
            tokens += len(row.input_ids)
            actions += row.action_tokens
    return tokens, actions


def calls_to_measure(costs: Costs, epochs: int, gaps: list[float]) -> Iterator[tuple]:
    """Yield (owner, name, phase, work) for `Meter.around`.

    epochs: of the reward model's fit. gaps: receives |sampler's - trainer's log-prob| of each action token.
    """

    def fit(report, model, episodes, **_) -> Work:
        share = report["episodes"] / (report["episodes"] + report["held_out_episodes"])
        return costs.fit(round(lengths_of(episodes)[0] * share * epochs))

    def sample(samples, sampler, policy, prompts, *_, **__) -> Work:
        return costs.rollout(sum(map(len, prompts)), sum(len(sample.token_ids) for sample in samples))

    def score_steps(_, model, groups, **__) -> Work:
        return costs.step_scores(lengths_of(members_of(groups))[0])

    def store(_, agent, groups, *__) -> Work:
        episodes = [episode for group in groups for episode in group.usable_episodes("outcome")]
        for episode in episodes:
            for step in episode.steps:
                for a, b in zip(step.sampler_logprobs, step.behavior_logprobs, strict=True):
                    gaps.append(abs(a - b))
        return costs.log_probs(*lengths_of(episodes))

    def update(_, agent, on, off, *__) -> Work:
        return costs.update(*lengths_of(members_of(on) + off))

    yield StepRewardModel, "fit", "reward model fit", fit
    yield KVSampler, "sample", "rollout", sample
    yield StepRewardModel, "score", "step rewards", score_steps
    yield rspo, "set_behavior_logprobs", "log-probs", store
    yield rspo, "update", "update", update


def attempt(part: Callable, seconds: int, *arguments) -> str | None:
    """Run a part for at most `seconds`; return the reason if it fails, otherwise None."""

    def stop(*_):
        raise Failed(f"takes more than {seconds} s")

    print(f"\n=== {part.__name__}: at most {seconds} s", flush=True)
    started, reason = time.perf_counter(), None
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        part(*arguments)
    except (Exception, SystemExit) as error:  # after any failure, the other part still runs
        reason = f"{part.__name__}: {type(error).__name__}: {' '.join(str(error).split())}"
        if not isinstance(error, Failed | SystemExit):
            traceback.print_exc()
    finally:
        signal.alarm(0)
    print(f"=== {reason or f'{part.__name__}: passed'} ({time.perf_counter() - started:.0f} s)", flush=True)
    return reason


PARTS = {"tests": (run_tests, 200), "loop": (run_loop, 240)}  # with the seconds that each may take on a GPU


def main(argv: list[str] | None = None) -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dry_run", action="store_true", help="use a tiny model on the CPU")
    parser.add_argument("--only", choices=list(PARTS), help="run only this part")
    parser.add_argument(
        "--peak_tflops", type=float, help="dense bf16 TFLOP/s of a GPU that PEAKS does not list"
    )
    args = parser.parse_args(argv)
    if args.peak_tflops is not None and args.peak_tflops <= 0:
        parser.error(f"--peak_tflops {args.peak_tflops:g}: must be above 0")
    device = "cpu" if args.dry_run else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("error: torch finds no GPU; --dry_run runs the same code on the CPU", file=sys.stderr)
        return 2
    print(f"torch {torch.__version__} on {'the CPU' if args.dry_run else torch.cuda.get_device_name()}")
    peak = args.peak_tflops * 1e12 if args.peak_tflops else peak_flops(device)
    patience = 5 if args.dry_run else 1  # a CPU may be shared
    reasons = []
    for name, (part, seconds) in PARTS.items():
        if args.only in (None, name):
            reasons.append(attempt(part, patience * seconds, device, peak))
    failures = [reason for reason in reasons if reason]
    print("\n".join(["", *failures]) if failures else "\nall parts passed")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
