"""`python bench.py core`: playing and learning beside what others do for the same tokens.

Rollouts beside transformers' generate, an update on one row per episode beside one row per turn, a whole GRPO
step beside TRL's GRPOTrainer, log-probs at a large vocabulary beside the plain formula, two adapters, and how
the time of an update grows. Every model is random and in fp32, every ratio the median of repeats in which the
two sides take turns. What an environment does in between is not measured here.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import rspo
from bench.goals import Goal, apart, conclude, cpu_seconds
from bench.trl import even_tokens
from buffer import Group, Step, StopReason, Trajectory
from demo.tiny_model import tiny_base
from model import chunk_of, token_logprobs
from policy import Policy
from sampler import KVSampler

SYSTEM, OBSERVATION, ACTION = 60, 150, 15  # tokens of an ALFWorld episode's parts, the latter two each turn
WORDS = tuple("".join(letters) for letters in itertools.product("bcdfghjklm", "aeiouy", "npqrstvwxz"))


def random_policy(layers: int = 4, width: int = 256, **settings) -> Policy:
    """600 words and five control tokens."""
    sizes = {"layers": layers, "d_model": width, "intermediate": 4 * width, "max_length": 8192}
    return Policy(tiny_base(WORDS, **sizes), learning_rate=1e-6, **settings)


def compared(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """CPU-seconds of each side, taken in turn."""
    seconds = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            seconds[name].append(cpu_seconds(call))
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def show(title: str, seconds: dict[str, list[float]]) -> None:
    parts = (f"{name} {' '.join(f'{value:.2f}' for value in values)}" for name, values in seconds.items())
    print(f"  {title}: {'; '.join(parts)}", flush=True)


# --- playing ------------------------------------------------------------------------------------------------

Texts = list[list[list[int]]]  # token ids of each episode's turns


def random_texts(policy: Policy, episodes: int, turns: int, observation: int = OBSERVATION) -> Texts:
    """What an agent reads: the system prompt with the first observation, then the others."""
    rng, size = random.Random(0), policy.base.config.vocab_size
    lengths = [SYSTEM + observation, *[observation] * (turns - 1)]
    return [[[rng.randrange(5, size) for _ in range(n)] for n in lengths] for _ in range(episodes)]


def prompt_of(texts: list[list[int]], replies: list[list[int]], window: int | None) -> list[int]:
    """The next turn's prompt: the whole history; or the system prompt and the last `window` turns. The latter
    tells the turn's number, as verl-agent's does, so no prompt extends another."""
    turn = len(replies)
    first = 0 if window is None else max(0, turn - window)
    past = itertools.chain(*(texts[t] + replies[t] for t in range(first, turn)))
    prompt = [*(texts[0][:SYSTEM] if first else []), *past, *texts[turn]]
    return prompt if window is None else [5 + turn, *prompt[1:]]


def play(texts: Texts, reply: Callable[[list[list[int]]], Texts], window: int | None = None) -> Texts:
    """All episodes at once; `reply` answers the prompts of a turn."""
    replies = [[] for _ in texts]
    for _ in texts[0]:
        prompts = [prompt_of(read, said, window) for read, said in zip(texts, replies, strict=True)]
        for said, new in zip(replies, reply(prompts), strict=True):
            said.append(new)
    return replies


def ours(policy: Policy, texts: Texts) -> Texts:
    """Greedy replies by KVSampler, the whole history in its cache. No token ends a reply."""
    sampler, rngs = KVSampler(), [random.Random(0)] * len(texts)
    stop_ids, policy.chat.stop_ids = policy.chat.stop_ids, []

    def reply(prompts: list[list[int]]) -> list[list[int]]:
        samples = sampler.sample(policy, prompts, list(range(len(prompts))), rngs, 0.0, ACTION)
        return [sample.token_ids for sample in samples]

    replies = play(texts, reply)
    policy.chat.stop_ids = stop_ids
    return replies


def generated(policy: Policy, texts: Texts, window: int | None = None) -> Texts:
    """The same by transformers' generate, which reads each prompt anew."""
    from transformers import GenerationConfig

    greedy = GenerationConfig(max_new_tokens=ACTION, do_sample=False, pad_token_id=0, eos_token_id=None)

    @torch.no_grad()
    def reply(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = policy.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        return out[:, ids.shape[1] :].tolist()

    return play(texts, reply, window)


def bench_rollout(policy: Policy, repeats: int) -> list[Goal]:
    texts, replies = random_texts(policy, 8, 10), {}

    def side(name: str, roll: Callable[[], Texts]) -> Callable[[], None]:
        return lambda: replies.update({name: roll()})

    ours(policy, [read[:2] for read in texts])
    generated(policy, [read[:2] for read in texts])
    sides = {
        "ours": side("ours", lambda: ours(policy, texts)),
        "generate, whole history": side("generate", lambda: generated(policy, texts)),
        "generate, the last 2 turns": side("window", lambda: generated(policy, texts, 2)),
    }
    seconds = compared(sides, repeats)
    show("rollout of 8 episodes of 10 turns", seconds)
    fast, whole, window = seconds.values()
    same = sum(a == b for a, b in zip(replies["ours"], replies["generate"], strict=True))
    return [
        Goal("rollout: generate with the whole history / ours", ratio(whole, fast), "x", 4, True),
        Goal("episodes of 8 with the same greedy tokens in both", same, "", 8, True),
        Goal("rollout: generate with the last 2 turns / ours", ratio(window, fast), "x", 2, True),
    ]


# --- learning -----------------------------------------------------------------------------------------------


def played(policy: Policy, texts: Texts, window: int | None = None) -> list[Group]:
    """A group as a rollout leaves it, its replies random, every other episode a success."""
    rng, size, episodes = random.Random(1), policy.base.config.vocab_size, []
    for i, read in enumerate(texts):
        replies, steps = [], []
        for turn in range(len(read)):
            prompt = prompt_of(read, replies, window)
            replies.append([rng.randrange(5, size) for _ in range(ACTION)])
            steps.append(Step(prompt, replies[-1], [0.0] * ACTION, f"{turn}", "act", True))
        won = bool(i % 2)
        episodes.append(Trajectory("task", "", "", steps, float(won), won, StopReason.FINISHED))
    return [Group("task", episodes)]


def update(policy: Policy, groups: list[Group], optimizer_steps: int = 1) -> dict:
    """GRPO on outcomes, without the reference model: old log-probs, advantages, gradients, AdamW."""
    turns = sum(len(episode.steps) for group in groups for episode in group.trajectories)
    config = rspo.Config(method="outcome", kl_coef=0.0, minibatch_turns=turns // optimizer_steps)
    return rspo.update(policy, groups, [], "outcome", config, random.Random(0))


def bench_update(policy: Policy, repeats: int) -> list[Goal]:
    """Attention over whole episodes takes a share that shrinks with the width, so also at that of a 0.5B
    model."""
    goals, wide = [], random_policy(1, 896)
    for agent, what, episodes in ((policy, "4 layers of 256", 8), (wide, "1 layer of 896", 2)):
        texts = random_texts(agent, episodes, 10)
        whole, windows = played(agent, texts), played(agent, texts, 2)
        update(agent, played(agent, random_texts(agent, 2, 2)))
        sides = {
            "a row an episode": functools.partial(update, agent, whole),
            "a row a turn": functools.partial(update, agent, windows),
        }
        seconds = compared(sides, repeats)
        show(f"update on {episodes} episodes of 10 turns, {what}", seconds)
        fast, slow = seconds.values()
        goals.append(
            Goal(f"update, {what}: a row a turn / a row an episode", ratio(slow, fast), "x", 2.5, True)
        )
    return goals


def bench_growth(policy: Policy, repeats: int) -> list[Goal]:
    """Four times the episodes, turns or tokens of a turn: how a token's time in an update grows. 1 is linear,
    4 quadratic, as attention alone is."""
    goals, usual = [], {"episodes": 2, "turns": 10, "tokens": OBSERVATION}
    sizes_of = {"episodes": (2, 4, 8), "turns": (5, 10, 20), "tokens": (75, 150, 300)}
    for what, sizes in sizes_of.items():
        groups = [played(policy, random_texts(policy, *(usual | {what: size}).values())) for size in sizes]
        sides = {
            f"{size}": functools.partial(update, policy, g) for size, g in zip(sizes, groups, strict=True)
        }
        seconds = compared(sides, repeats)
        small, _, large = seconds.values()
        tokens = [
            sum(len(e.steps[-1].prompt_ids) + ACTION for group in g for e in group.trajectories)
            for g in groups
        ]
        show(f"update as {what} grow, {tokens} tokens in all", seconds)
        name = f"update: time a token after 4 times the {what} / before"
        growth = ratio(large, small) * tokens[0] / tokens[-1]
        goals.append(Goal(name, growth, "x", 1.2 if what == "episodes" else 2, False))
    return goals


# --- a whole GRPO step beside TRL's -------------------------------------------------------------------------


def grpo_step(policy: Policy, sampler, prompts: list[str], settings: dict, rng: random.Random) -> dict:
    """Texts in: tokens, replies, their rewards, and an update on them."""
    size, groups = settings["group_size"], []
    ids = [policy.chat.encode(prompt) for prompt in prompts for _ in range(size)]
    rngs = [random.Random(rng.random()) for _ in ids]
    samples = sampler.sample(policy, ids, list(range(len(ids))), rngs, 1.0, settings["new_tokens"])
    rewards = even_tokens([sample.token_ids for sample in samples])
    for start in range(0, len(ids), size):
        episodes = []
        for i in range(start, start + size):
            action = policy.chat.decode(samples[i].token_ids)
            step = Step(ids[i], samples[i].token_ids, samples[i].logprobs, "", action, True)
            episodes.append(Trajectory("", "", "", [step], rewards[i], False, StopReason.FINISHED))
        groups.append(Group(str(start), episodes))
    return update(policy, groups, settings["optimizer_steps"])


class Trl:
    """TRL's trainer in a process of another Python: `seconds()` lets it take one step."""

    def __init__(self, python: str, folder: str, settings: dict):
        command = [python, str(Path(__file__).with_name("bench_trl.py")), folder, json.dumps(settings)]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen(command, text=True, **streams)

    def seconds(self) -> float:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                return json.loads(line)["seconds"]
        self.process.wait()
        self.errors.seek(0)
        raise RuntimeError(f"TRL's process ended: {self.errors.read()[-500:]}")

    def close(self) -> None:
        self.process.stdin.close()  # it stops when no line comes
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def no_trl(python: str | None) -> str:
    """Why TRL cannot be measured; "" if it can."""
    if python is None:
        return "give --trl PYTHON, of an environment made by requirements/trl.txt"
    try:
        result = subprocess.run([python, "-c", "import torch, trl"], capture_output=True, text=True)
    except OSError as error:
        return f"--trl {python}: {error.strerror}"
    return f"--trl {python}: {result.stderr.strip().splitlines()[-1]}" if result.returncode else ""


def bench_step(python: str, repeats: int) -> list[Goal]:
    """8 prompts of 64 tokens, 8 replies of 32 to each: as one optimizer step, and as two on 32 replies each.

    With one, TRL takes the log-probs of the update itself for the old ones; with two it has to compute them.
    """
    goals, rng = [], random.Random(0)
    prompts = [" ".join(rng.choice(WORDS) for _ in range(64)) for _ in range(8)]
    for layers, width in ((3, 128), (4, 256)):
        policy, sampler = random_policy(layers, width), KVSampler()
        assert {len(policy.chat.encode(prompt)) for prompt in prompts} == {64}
        with tempfile.TemporaryDirectory() as folder:
            policy.base.save(folder)
            for steps in (1, 2):
                settings = {"rows": 64, "group_size": 8, "new_tokens": 32, "optimizer_steps": steps}
                trl = Trl(python, folder, {**settings, "prompts": prompts})
                step = functools.partial(grpo_step, policy, sampler, prompts, settings, rng)
                trl.seconds()
                step()
                mine, theirs = [], []
                for _ in range(repeats):
                    mine.append(cpu_seconds(step))
                    theirs.append(trl.seconds())
                trl.close()
                what = f"GRPO step, {layers} layers of {width}, {steps} optimizer step{'s' * (steps > 1)}"
                show(what, {"ours": mine, "TRL": theirs})
                goals.append(Goal(f"{what}: TRL / ours", ratio(theirs, mine), "x", 2, True))
    return goals


# --- log-probs at a large vocabulary ------------------------------------------------------------------------


def kilobytes(name: str) -> int:
    """VmRSS: this process's memory; VmHWM: its peak."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def logprob_cost(plain: bool, tokens: int, width: int, vocabulary: int) -> tuple[float, float, list, list]:
    """CPU-seconds forward and backward, GB beyond what was there, the log-probs, row sums of the gradient."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight, hidden = torch.randn(vocabulary, width), torch.randn(tokens, width) / width**0.5
    hidden.requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    chunk = tokens if plain else chunk_of(vocabulary)
    values = []

    def run() -> None:
        logits_of = functools.partial(torch.nn.functional.linear, weight=weight)
        (logprobs,) = token_logprobs(logits_of, hidden, targets, 1.0, chunk)
        logprobs.sum().backward()
        values.extend((logprobs.tolist(), hidden.grad.sum(1).tolist()))

    before = kilobytes("VmRSS")
    seconds = cpu_seconds(run)
    return seconds, (kilobytes("VmHWM") - before) * 1024 / 1e9, *values


def bench_logprobs(
    repeats: int, tokens: int = 2048, width: int = 896, vocabulary: int = 151_936
) -> list[Goal]:
    """The output layer of Qwen2.5-0.5B, frozen as it is under LoRA. Each run has a process of its own."""
    seconds, memory = {"ours": [], "plain": []}, {}
    values = {}
    for _ in range(repeats):
        for name in seconds:
            cost = apart(logprob_cost, name == "plain", tokens, width, vocabulary)
            seconds[name].append(cost[0])
            memory[name], values[name] = cost[1], torch.tensor(cost[2:])
    show(f"log-probs of {tokens:,} tokens, forward and backward", seconds)
    print(f"  extra memory: ours {memory['ours']:.2f} GB, plain {memory['plain']:.2f} GB")
    apart_by = (values["ours"] - values["plain"]).abs().amax(1).tolist()
    print(f"  largest difference: log-probs {apart_by[0]:.1e}, their gradient {apart_by[1]:.1e}")
    print(f"  time, ours / plain: {ratio(seconds['ours'], seconds['plain']):.2f} x", flush=True)
    return [
        Goal(f"log-probs at {vocabulary:,} words: extra memory", memory["ours"], "GB", 0.3, False),
        Goal("log-probs: largest difference to plain", max(apart_by), "", 1e-4, False),
    ]


# --- two adapters on one base -------------------------------------------------------------------------------


def bench_adapters(repeats: int = 30) -> None:
    policy = random_policy(lora_rank=16)
    update(policy, played(policy, random_texts(policy, 2, 2)))  # so that there is an AdamW state
    explorer = policy.fork("explorer")
    sides = {
        "switch": lambda: (policy.activate(), explorer.activate()),
        "copy": lambda: explorer.copy_from(policy),
        "state": lambda: policy.load_state_dict(policy.state_dict()),
    }
    milliseconds = {name: 1000 * statistics.median(times) for name, times in compared(sides, repeats).items()}
    print(
        f"  two adapters of rank 16: a switch {milliseconds['switch'] / 2:.2f} ms, copying A and its AdamW "
        f"state into B {milliseconds['copy']:.2f} ms, through a state dict {milliseconds['state']:.2f} ms",
        flush=True,
    )


# --- all of it ----------------------------------------------------------------------------------------------


def bench_core(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    reason = no_trl(args.trl)  # said now too, since all of it takes a quarter of an hour
    if reason:
        print(f"GRPO step beside TRL's: skipped, {reason}")
    print("CPU-seconds of one thread, fp32:", flush=True)
    policy, repeats = random_policy(), args.repeats
    goals = [*bench_rollout(policy, repeats), *bench_update(policy, repeats), *bench_growth(policy, repeats)]
    if not reason:
        goals += bench_step(args.trl, repeats)
    goals += bench_logprobs(repeats)
    bench_adapters()
    return conclude(goals, {"GRPO step: TRL / ours": reason} if reason else {})
