"""`python gpu_check.py`: whether this project works on the GPU here, and how well; in at most 8 minutes.

`tests`: the unit tests, with their models on the GPU. `loop`: one loop of RSPO on Household through train.py,
with a Qwen2.5-1.5B of random weights made here (bf16, LoRA of rank 64, autocast, gradient checkpointing);
it prints tokens per second, FLOP utilisation, and the peak of memory beside what --plan says. A part that
fails, or runs out of its time, leaves the other alone; the exit status is then 1. `--dry_run` goes the same
way on the CPU with a tiny model, and measures no memory.

FLOPs: 2 per token and parameter of a matrix product in a forward pass; in a backward pass 2 for the gradient
of its input and, where the parameter is trained, 2 for its own (Kaplan et al. 2020, arXiv 2001.08361, section
2.1). So training takes 6 N a token with full weights, 4 N for a frozen base under an adapter. The output
layer counts for action tokens alone; attention's own products, under 5 % at these lengths, do not count. MFU
is this over time and peak; HFU also counts what gradient checkpointing computes again (Chowdhery et al. 2022,
arXiv 2204.02311, appendix B).

The random model's replies are noise: each token ends one with a chance of 1 in 100, and none holds an action.
Rates leave out a phase's first call; memory is the largest of all calls.
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
from demo.tiny_model import tiny_tokenizer
from envs import make_env
from reward_model import StepRewardModel
from sampler import KVSampler
from scale import plan
from scale.plan import GB

TESTED = ("losses", "buffer", "policy", "sampler", "rspo", "reward_model", "plan")
SHAPES = {"cuda": plan.KNOWN["Qwen/Qwen2.5-1.5B-Instruct"], "cpu": plan.qwen(64, 224, 2, 4, 2, vocab=512)}
LOOP = {  # flags of the loop: every batch and cache about as full as the plan supposes
    **{"env": "household", "total_updates": 1, "k": 1, "max_turns": 3, "eval_games": 64, "buffer_tasks": 8},
    **{"parallel_episodes": 64, "max_prompt_tokens": 192, "max_new_tokens": 128, "learning_rate": 1e-5},
    **{"tokens_per_micro_batch": 16384, "reward_model_episodes": 72, "lora_rank": 64, "dtype": "bfloat16"},
    **{"autocast": True, "reward_noise": 0.1},  # noise: or all of B's advantages were 0
}
DRY = {  # what is smaller in a dry run
    **{"max_turns": 2, "tasks_per_update": 2, "group_size": 4, "off_policy_fraction": 0.5, "buffer_tasks": 2},
    **{"parallel_episodes": 8, "max_new_tokens": 16, "tokens_per_micro_batch": 2048, "eval_games": 4},
    **{"reward_model_episodes": 24, "lora_rank": 8, "threads": 1},
}
PEAKS = {  # dense bf16 TFLOP/s by part of the device's name, the first that fits; NVIDIA's data sheets
    **{"B200": 2250, "H200": 989, "GH200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312},
    **{"L40S": 362, "L40": 181, "L4": 121, "A40": 150, "A10G": 70, "A10": 125, "A6000": 155, "4090": 165},
}
MEMORY_MISS = 0.15  # of the plan
LOG_PROB_GAP = 0.05  # mean of |sampler's - trainer's|, in bf16


class Failed(Exception):
    """What a part was to show does not hold."""


# --- FLOPs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a call had to do."""

    tokens: dict[str, int]  # by kind
    flops: float  # of the model
    again: float = 0.0  # computed a second time, to save memory


@dataclass(frozen=True)
class Costs:
    """FLOPs of one token: of the base's layers, of an adapter, of the output layer."""

    base: int
    adapter: int
    output: int

    @classmethod
    def of(cls, shape: plan.Shape, rank: int) -> Costs:
        layers = shape.layers * sum(i * o for i, o in shape.linears)
        return cls(2 * layers, 2 * shape.adapter(rank), 2 * shape.vocab * shape.width)

    def rollout(self, prompts: int, sampled: int) -> Work:
        flops = (self.base + self.adapter) * (prompts + sampled) + self.output * sampled
        return Work({"prompt": prompts, "sampled": sampled}, flops)

    def log_probs(self, tokens: int, actions: int) -> Work:
        return Work({"scored": tokens}, (self.base + self.adapter) * tokens + self.output * actions)

    def step_scores(self, tokens: int) -> Work:
        return Work({"scored": tokens}, self.base * tokens)

    def fit(self, tokens: int) -> Work:
        """All weights are trained, there is neither adapter nor output layer."""
        return Work({"trained": tokens}, 3 * self.base * tokens, self.base * tokens)

    def update(self, tokens: int, actions: int) -> Work:
        """Old and reference log-probs, then forward and backward. Frozen parameters pass gradients on."""
        scores = self.log_probs(tokens, actions).flops
        reference = scores - self.adapter * tokens
        backward = (self.base + 2 * self.adapter) * tokens + self.output * actions
        return Work({"trained": tokens}, 2 * scores + reference + backward, scores)


def peak_flops(device: str) -> float | None:
    """FLOP/s by the GPU's name, None if it is not known; those of a CPU are measured, in fp32."""
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
    seconds: float
    work: Work
    allocated: int  # peak bytes of tensors while it ran
    reserved: int  # and of what PyTorch held for them


class Meter:
    """Measures calls by phase, from outside."""

    def __init__(self, device: str):
        self.gpu, self.calls = device != "cpu", defaultdict(list)

    def around(self, owner, name: str, phase: str, work: Callable[..., Work]):
        """A context in which calls of owner.name are measured; work(result, *arguments): what one did."""
        call = getattr(owner, name)

        @functools.wraps(call)
        def measured(*given, **named):
            if self.gpu:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            started, sizes = time.perf_counter(), (0, 0)
            result = call(*given, **named)
            if self.gpu:
                torch.cuda.synchronize()
                sizes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            seconds = time.perf_counter() - started
            self.calls[phase].append(Call(seconds, work(result, *given, **named), *sizes))
            return result

        return mock.patch.object(owner, name, measured)

    def speeds(self, peak: float | None) -> str:
        lines = [f"{'phase':<18}{'calls':>6}{'seconds':>9}{'MFU':>9}{'HFU':>9}  tokens per second"]
        for phase, calls in self.calls.items():
            warm = calls[1:] or calls
            seconds = sum(call.seconds for call in warm)
            model = sum(call.work.flops for call in warm)
            whole = model + sum(call.work.again for call in warm)
            shares = [f"{flops / seconds / peak:.1%}" if peak else "unknown" for flops in (model, whole)]
            counts = {kind: sum(call.work.tokens[kind] for call in warm) for kind in warm[0].work.tokens}
            rates = ", ".join(f"{count / seconds:,.0f} {kind}" for kind, count in counts.items())
            total = sum(call.seconds for call in calls)
            lines.append(f"{phase:<18}{len(calls):>6}{total:>9.2f}{shares[0]:>9}{shares[1]:>9}  {rates}")
        return "\n".join(lines)

    def memory(self, planned: dict[str, float]) -> tuple[str, list[str]]:
        """Planned bytes beside measured ones, without the GPU's libraries; what misses the plan, in words."""
        lines, missed = [f"{'memory in GB':<18}{'plan':>8}{'tensors':>9}{'of plan':>9}{'reserved':>10}"], []
        for phase, calls in self.calls.items():
            allocated, reserved = (max(sizes) for sizes in list(zip(*calls, strict=True))[2:])
            plan_gb, share = "-", "-"
            if size := planned.get(phase):
                plan_gb, share = f"{size / GB:.2f}", f"{allocated / size:.1%}"
                if abs(allocated / size - 1) > MEMORY_MISS:
                    missed.append(f"{phase} takes {allocated / GB:.2f} GB, {share} of the plan's {plan_gb}")
            lines.append(f"{phase:<18}{plan_gb:>8}{allocated / GB:>9.2f}{share:>9}{reserved / GB:>10.2f}")
        return "\n".join(lines), missed


# --- the parts ----------------------------------------------------------------------------------------------


def run_tests(device: str, peak: float | None) -> None:
    root, env = Path(__file__).parent, {**os.environ, "RSPO_TEST_DEVICE": device}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--durations=5"]
    command += [f"tests/test_{name}.py" for name in TESTED]
    status = subprocess.run(command, cwd=root, env=env).returncode
    if status:
        raise Failed(f"pytest has ended with status {status}")


def run_loop(device: str, peak: float | None) -> None:
    """Train for one loop under a meter, print its tables, and check what it left behind."""
    shape, meter, gaps = SHAPES[device], Meter(device), []
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        make_model(f"{folder}/model", shape, device)
        chosen = {**LOOP, **(DRY if device == "cpu" else {}), "device": device}
        chosen |= {"model": f"{folder}/model", "out": f"{folder}/run"}
        argv = [*(f"--{name}={value}" for name, value in chosen.items()), "--gradient_checkpointing"]
        args, _ = flags.prepare(argv)
        with contextlib.ExitStack() as stack:
            for point in watched(Costs.of(shape, args.lora_rank), args.reward_model_epochs, gaps):
                stack.enter_context(meter.around(*point))
            train.main(argv)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]

    print(f"\n{shape.parameters:,} parameters; peak {f'{peak / 1e12:.4g} TFLOP/s' if peak else 'unknown'}")
    print(meter.speeds(peak), end="\n\n")
    moments = plan.moments(args, shape, shape, context=0)
    table, wrong = meter.memory({moment: plan.total(parts) for moment, parts in moments.items()})
    if meter.gpu:
        free, total = torch.cuda.mem_get_info()
        libraries = (total - free - torch.cuda.memory_reserved()) / GB
        print(f"{table}\nthe GPU's libraries: {libraries:.2f} GB, planned {plan.CONTEXT / GB:.2f}")
    else:
        wrong = []
    gap = sum(gaps) / len(gaps)
    print(f"log-probs of sampler and trainer are {gap:.5f} apart in the mean, at most {LOG_PROB_GAP}")
    if not gap <= LOG_PROB_GAP:
        wrong.append(f"log-probs of sampler and trainer are {gap:.5f} apart")
    agents = [line["agent"] for line in lines]
    if agents != ["evaluation", "explorer", "buffer", "policy", "evaluation"]:
        wrong.append(f"the log holds {agents}")
    values = [value for line in lines for value in line.items() if isinstance(value[1], float)]
    wrong += [f"{name} is {value}" for name, value in values if not math.isfinite(value)]
    if wrong:
        raise Failed("; ".join(wrong))


def make_model(folder: str, shape: plan.Shape, device: str) -> None:
    """Save a Qwen2 of random weights, drawn on the device. Ids beyond the tokenizer's decode to nothing."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    tokenizer = tiny_tokenizer(make_env("household").vocabulary)
    sizes = {"vocab_size": shape.vocab, "hidden_size": shape.width, "intermediate_size": shape.mlp}
    sizes |= {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads}
    sizes |= {"num_key_value_heads": shape.kv_heads, "tie_word_embeddings": shape.tied}
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = Qwen2Config(**sizes, bos_token_id=None, eos_token_id=end, pad_token_id=pad)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = [end, *range(shape.vocab - shape.vocab // 100, shape.vocab)]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def watched(costs: Costs, epochs: int, gaps: list[float]) -> Iterator[tuple]:
    """What the meter is put around: (owner, name, phase, work). Fills `gaps` with those of log-probs."""

    def members(groups) -> list:
        return [member for group in groups for member in group.trajectories]

    def lengths(episodes) -> tuple[int, int]:
        """Their tokens, as rows for the loss, and those of actions."""
        rows = [row for episode in episodes for row in rows_of(episode)]
        return sum(len(row.input_ids) for row in rows), sum(row.action_tokens for row in rows)

    def fitted(report, model, episodes, **_) -> Work:
        share = report["episodes"] / (report["episodes"] + report["held_out_episodes"])
        return costs.fit(round(lengths(episodes)[0] * share * epochs))

    def sampled(samples, sampler, policy, prompts, *_, **__) -> Work:
        return costs.rollout(sum(map(len, prompts)), sum(len(sample.token_ids) for sample in samples))

    def rewarded(_, model, groups, **__) -> Work:
        return costs.step_scores(lengths(members(groups))[0])

    def scored(groups, *_) -> Work:
        for step in (step for member in members(groups) for step in member.steps):
            both = zip(step.sampler_logprobs, step.behavior_logprobs, strict=True)
            gaps.extend(abs(a - b) for a, b in both)
        return costs.log_probs(*lengths(members(groups)))

    def updated(_, agent, on, off, *__) -> Work:
        return costs.update(*lengths(members(on) + off))

    yield StepRewardModel, "fit", "reward model fit", fitted
    yield KVSampler, "sample", "rollout", sampled
    yield StepRewardModel, "score", "step rewards", rewarded
    yield rspo, "with_behavior_logprobs", "log-probs", scored
    yield rspo, "update", "update", updated


def attempt(part: Callable, seconds: int, *given) -> str | None:
    """Call a part, for so long at most; the reason if it fails."""

    def late(*_):
        raise Failed(f"it takes more than its {seconds} s")

    print(f"\n=== {part.__name__}: at most {seconds} s", flush=True)
    started, reason = time.perf_counter(), None
    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        part(*given)
    except (Exception, SystemExit) as error:  # whatever it is, the other part is tried too
        reason = f"{part.__name__}: {type(error).__name__}: {' '.join(str(error).split())}"
        if not isinstance(error, Failed | SystemExit):
            traceback.print_exc()
    finally:
        signal.alarm(0)
    print(f"=== {reason or f'{part.__name__}: passed'} ({time.perf_counter() - started:.0f} s)", flush=True)
    return reason


PARTS = {"tests": (run_tests, 200), "loop": (run_loop, 240)}  # and the seconds that each may take on a GPU


def main(argv: list[str] | None = None) -> int:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--dry_run", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--only", choices=list(PARTS), help="one part alone")
    parser.add_argument("--peak_tflops", type=float, help="dense bf16 TFLOP/s of a GPU that is not listed")
    args = parser.parse_args(argv)
    if args.peak_tflops is not None and args.peak_tflops <= 0:
        parser.error(f"--peak_tflops {args.peak_tflops:g}: must be above 0")
    device = "cpu" if args.dry_run else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("error: torch finds no GPU here; --dry_run goes the same way on the CPU", file=sys.stderr)
        return 2
    print(f"torch {torch.__version__} on {'the CPU' if args.dry_run else torch.cuda.get_device_name()}")
    peak = args.peak_tflops * 1e12 if args.peak_tflops else peak_flops(device)
    patience = 5 if args.dry_run else 1  # a CPU may be busy with other things
    parts = [part for name, part in PARTS.items() if args.only in (None, name)]
    reasons = [
        reason for part, seconds in parts if (reason := attempt(part, patience * seconds, device, peak))
    ]
    print("\n".join(["", *reasons]) if reasons else "\nall is well")
    return int(bool(reasons))


if __name__ == "__main__":
    sys.exit(main())
