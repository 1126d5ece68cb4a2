"""Measure rollouts and updates beside other programs on the same tokens: `python -m bench core`.

    rollout        KVSampler beside transformers' generate
    update         one row per episode (full context) beside one row per turn (window context)
    GRPO step      rollout and update beside TRL's GRPOTrainer
    log-probs      chunks beside the plain formula, at a large vocabulary
    adapters       switching and copying two LoRA adapters
    growth         the time of an update as episodes, turns or tokens grow

Models are random and in fp32. One GRPO step is also measured under bf16 autocast. Each ratio is the median
over repeats, in which the two sides take turns. The time of the environments is not included.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import rspo
from bench.goals import Goal, PeakMemory, apart, conclude, cpu_seconds
from bench.trl import even_tokens
from buffer import Group, Step, StopReason, Trajectory
from demo.tiny_model import tiny_base
from model import chunk_of, token_logprobs
from policy import Policy
from sampler import KVSampler

ROOT = Path(rspo.__file__).parent  # the project's folder
SYSTEM = 60  # tokens of the system prompt, as in an ALFWorld episode
OBSERVATION = 150  # tokens of a turn's observation
ACTION = 15  # tokens of a turn's reply
WORDS = tuple("".join(letters) for letters in itertools.product("bcdfghjklm", "aeiouy", "npqrstvwxz"))


def random_policy(layers: int = 4, width: int = 256, autocast: bool = False, **settings) -> Policy:
    """Return a policy of random weights. Its vocabulary has 600 words and five control tokens."""
    sizes = {"layers": layers, "d_model": width, "intermediate": 4 * width, "max_length": 8192}
    base = tiny_base(WORDS, **sizes, autocast=autocast)
    return Policy(base, learning_rate=1e-6, **settings)


def compare(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the CPU-seconds of each repeat by side. The sides take turns."""
    seconds = {name: [] for name in sides}
    for _ in range(repeats):
        for name, call in sides.items():
            seconds[name].append(cpu_seconds(call))
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    """Return the median over repeats of slow / fast."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def print_seconds(title: str, seconds: dict[str, list[float]]) -> None:
    """Print the seconds of all repeats in one line."""
    parts = (f"{name} {' '.join(f'{value:.2f}' for value in values)}" for name, values in seconds.items())
    print(f"  {title}: {'; '.join(parts)}", flush=True)


# --- rollouts -----------------------------------------------------------------------------------------------

Texts = list[list[list[int]]]  # token ids by episode and turn


def random_texts(policy: Policy, episodes: int, turns: int, observation: int = OBSERVATION) -> Texts:
    """Return random observations. All episodes begin with the same prompt, as those of a group do."""
    rng, size = random.Random(0), policy.base.config.vocab_size

    def text(length: int) -> list[int]:
        return [rng.randrange(5, size) for _ in range(length)]

    first = text(SYSTEM + observation)
    return [[first] + [text(observation) for _ in range(turns - 1)] for _ in range(episodes)]


def prompt_of(texts: list[list[int]], replies: list[list[int]], window: int | None) -> list[int]:
    """Return the prompt of an episode's next turn.

    window: None for the whole history. Otherwise the system prompt and the last `window` turns are shown, and
        the first token is the turn's number, which verl-agent's prompts contain: no prompt extends another.
    """
    turn = len(replies)
    first = 0 if window is None else max(0, turn - window)
    prompt = texts[0][:SYSTEM] if first else []
    for t in range(first, turn):
        prompt = prompt + texts[t] + replies[t]
    prompt = prompt + texts[turn]
    return prompt if window is None else [5 + turn] + prompt[1:]


def play(
    texts: Texts, reply: Callable[[list[list[int]]], list[list[int]]], window: int | None = None
) -> Texts:
    """Play all episodes together and return their replies. `reply` answers the prompts of one turn."""
    replies = [[] for _ in texts]
    for _ in texts[0]:
        prompts = [prompt_of(texts[i], replies[i], window) for i in range(len(texts))]
        for i, new in enumerate(reply(prompts)):
            replies[i].append(new)
    return replies


def play_with_sampler(policy: Policy, texts: Texts) -> Texts:
    """Return the greedy replies of KVSampler, which caches the whole history. No token ends a reply."""
    sampler, rngs = KVSampler(), [random.Random(0)] * len(texts)
    stop_ids, policy.chat.stop_ids = policy.chat.stop_ids, []

    def reply(prompts: list[list[int]]) -> list[list[int]]:
        samples = sampler.sample(policy, prompts, list(range(len(prompts))), rngs, 0.0, ACTION)
        return [sample.token_ids for sample in samples]

    replies = play(texts, reply)
    policy.chat.stop_ids = stop_ids
    return replies


def play_with_generate(policy: Policy, texts: Texts, window: int | None = None) -> Texts:
    """Return the greedy replies of transformers' generate, which reads each prompt from its beginning."""
    from transformers import GenerationConfig

    greedy = GenerationConfig(max_new_tokens=ACTION, do_sample=False, pad_token_id=0, eos_token_id=None)

    @torch.no_grad()
    def reply(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = policy.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        return out[:, ids.shape[1] :].tolist()

    return play(texts, reply, window)


def bench_rollout(policy: Policy, repeats: int) -> list[Goal]:
    """Compare KVSampler with generate on 8 episodes of 10 turns."""
    texts, replies = random_texts(policy, 8, 10), {}

    def keep(name: str, play_all: Callable[[], Texts]) -> Callable[[], None]:
        """Return a call that plays and keeps the replies under this name."""
        return lambda: replies.update({name: play_all()})

    sides = {
        "ours": keep("ours", lambda: play_with_sampler(policy, texts)),
        "generate, whole history": keep("generate", lambda: play_with_generate(policy, texts)),
        "generate, the last 2 turns": keep("window", lambda: play_with_generate(policy, texts, 2)),
    }
    short = [episode[:2] for episode in texts]  # a first call of each side, which is not timed
    play_with_sampler(policy, short)
    play_with_generate(policy, short)
    seconds = compare(sides, repeats)
    print_seconds("rollout of 8 episodes of 10 turns", seconds)
    ours, whole, window = seconds.values()
    same = sum(a == b for a, b in zip(replies["ours"], replies["generate"], strict=True))
    return [
        Goal("rollout: generate with the whole history / ours", ratio(whole, ours), "x", at_least=4),
        Goal("episodes of 8 with the same greedy tokens in both", same, "", at_least=8),
        Goal("rollout: generate with the last 2 turns / ours", ratio(window, ours), "x", at_least=2),
    ]


# --- updates ------------------------------------------------------------------------------------------------


def random_group(policy: Policy, texts: Texts, window: int | None = None) -> list[Group]:
    """Return a group like a rollout's, with random replies. Every second episode is a success."""
    rng, size, episodes = random.Random(1), policy.base.config.vocab_size, []
    for i, observations in enumerate(texts):
        replies, steps = [], []
        for turn in range(len(observations)):
            prompt = prompt_of(observations, replies, window)
            replies.append([rng.randrange(5, size) for _ in range(ACTION)])
            steps.append(Step(prompt, replies[-1], [0.0] * ACTION, f"{turn}", "act", True))
        won = bool(i % 2)
        episodes.append(Trajectory("task", "", "", steps, float(won), won, StopReason.FINISHED))
    return [Group("task", episodes)]


def grpo_update(policy: Policy, groups: list[Group], optimizer_steps: int = 1) -> dict:
    """Run one GRPO update on outcomes: old log-probs, advantages, gradients, AdamW; no reference model."""
    turns = sum(len(episode.steps) for group in groups for episode in group.trajectories)
    config = rspo.Config(method="outcome", kl_coef=0.0, minibatch_turns=turns // optimizer_steps)
    return rspo.update(policy, groups, [], "outcome", config, random.Random(0))


def bench_update(policy: Policy, repeats: int) -> list[Goal]:
    """Compare an update on one row per episode with an update on one row per turn.

    The wider the model, the smaller the share of attention over whole episodes. The second model has the
    width of a 0.5B model.
    """
    goals = []
    cases = [(policy, "4 layers of 256", 8), (random_policy(1, 896), "1 layer of 896", 2)]
    for agent, model, episodes in cases:
        texts = random_texts(agent, episodes, 10)
        whole, windows = random_group(agent, texts), random_group(agent, texts, 2)
        grpo_update(agent, random_group(agent, random_texts(agent, 2, 2)))  # a first call, which is not timed
        sides = {
            "a row an episode": functools.partial(grpo_update, agent, whole),
            "a row a turn": functools.partial(grpo_update, agent, windows),
        }
        seconds = compare(sides, repeats)
        print_seconds(f"update on {episodes} episodes of 10 turns, {model}", seconds)
        per_episode, per_turn = seconds.values()
        name = f"update, {model}: a row a turn / a row an episode"
        goals.append(Goal(name, ratio(per_turn, per_episode), "x", at_least=2.5))
    return goals


def bench_growth(policy: Policy, repeats: int) -> list[Goal]:
    """Measure how the update's time per token grows with episodes, turns or tokens of a turn, times four.

    A ratio of 1 is linear growth of the whole time. 4 is quadratic growth, which attention has.
    """
    goals = []
    cases = {
        "episodes": [(2, 10, 150), (4, 10, 150), (8, 10, 150)],  # episodes, turns, tokens of an observation
        "turns": [(2, 5, 150), (2, 10, 150), (2, 20, 150)],
        "tokens": [(2, 10, 75), (2, 10, 150), (2, 10, 300)],
    }
    for what, sizes in cases.items():
        sides, tokens = {}, []
        for episodes, turns, observation in sizes:
            (group,) = random_group(policy, random_texts(policy, episodes, turns, observation))
            name = f"{episodes} x {turns} x {observation}"
            sides[name] = functools.partial(grpo_update, policy, [group])
            tokens.append(sum(len(e.steps[-1].prompt_ids) + ACTION for e in group.trajectories))
        seconds = compare(sides, repeats)
        print_seconds(f"update as {what} grow, {tokens} tokens in all", seconds)
        small, _, large = seconds.values()
        growth = ratio(large, small) * tokens[0] / tokens[-1]
        name = f"update: time a token after 4 times the {what} / before"
        goals.append(Goal(name, growth, "x", at_most=1.2 if what == "episodes" else 2))
    return goals


# --- a GRPO step beside TRL's -------------------------------------------------------------------------------


def random_prompts() -> list[str]:
    """Return 8 prompts of 64 tokens."""
    rng = random.Random(0)
    return [" ".join(rng.choice(WORDS) for _ in range(64)) for _ in range(8)]


def grpo_step(policy: Policy, sampler, prompts: list[str], settings: dict, rng: random.Random) -> dict:
    """Run one GRPO step: tokenize the prompts, sample a group of replies to each, reward them, update."""
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
    return grpo_update(policy, groups, settings["optimizer_steps"])


def step_memory(layers: int, width: int, settings: dict) -> float:
    """Return the GB by which the peak of two GRPO steps exceeds the memory before them, in this process."""
    torch.set_num_threads(1)
    policy, rng = random_policy(layers, width, settings["autocast"]), random.Random(0)
    memory, sampler = PeakMemory(), KVSampler()
    for _ in range(2):
        grpo_step(policy, sampler, settings["prompts"], settings, rng)
    return memory.gigabytes()


class Trl:
    """TRL's trainer in a process of another Python. Each call of `step()` makes it take one step."""

    def __init__(self, python: str, folder: str, settings: dict):
        command = [python, "-m", even_tokens.__module__, folder, json.dumps(settings)]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )

    def step(self) -> tuple[float, float]:
        """Return the CPU-seconds of one step and the extra GB at the peak so far.

        Raises RuntimeError if the process has ended.
        """
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                return tuple(json.loads(line).values())
        self.process.wait()
        self.errors.seek(0)
        raise RuntimeError(f"TRL's process ended: {self.errors.read()[-500:]}")

    def close(self) -> None:
        """End the process, which stops when its stdin ends."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def missing_trl(python: str | None) -> str:
    """Return the reason why TRL cannot be measured, or "" if it can."""
    if python is None:
        return "no --trl; give the Python of an environment with requirements/trl.txt"
    try:
        result = subprocess.run([python, "-c", "import torch, trl"], capture_output=True, text=True)
    except OSError as error:
        return f"--trl {python}: {error.strerror}"
    return f"--trl {python}: {result.stderr.strip().splitlines()[-1]}" if result.returncode else ""


def bench_step(python: str, repeats: int) -> list[Goal]:
    """Compare a GRPO step with TRL's: 8 prompts of 64 tokens, 8 replies of 32 tokens to each.

    A step has one optimizer step on all replies, or two on 32 replies each. With one step, both sides use the
    update's own log-probs as the old ones. With two steps TRL computes all old ones separately, and ours
    computes those of the second step. A process of its own measures the memory of our step.
    """
    goals = []
    for layers, width, steps, autocast in (
        (3, 128, 1, False),
        (3, 128, 2, False),
        (4, 256, 1, False),
        (4, 256, 2, False),
        (4, 256, 1, True),
    ):
        settings = {"rows": 64, "group_size": 8, "new_tokens": 32, "optimizer_steps": steps}
        settings |= {"autocast": autocast, "prompts": random_prompts()}
        seconds, gigabytes = step_beside_trl(python, layers, width, settings, repeats)
        title = f"GRPO step, {layers} layers of {width}, {steps} optimizer step{'s' * (steps > 1)}"
        title += ", bf16 autocast" * autocast
        print_seconds(title, seconds)
        print(
            f"  its extra memory: ours {gigabytes['ours']:.2f} GB, TRL {gigabytes['TRL']:.2f} GB", flush=True
        )
        least = 1.2 if steps == 1 else 1.5
        faster = ratio(seconds["TRL"], seconds["ours"])
        if autocast:
            print(f"  TRL / ours: {faster:.2f} x", flush=True)
        else:
            goals.append(Goal(f"{title}: TRL / ours", faster, "x", at_least=least))
    return goals


def step_beside_trl(
    python: str, layers: int, width: int, settings: dict, repeats: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Take GRPO steps in turns with TRL. Returns the CPU-seconds and the extra GB at the peak, by side."""
    policy, sampler, rng = random_policy(layers, width, settings["autocast"]), KVSampler(), random.Random(0)
    assert {len(policy.chat.encode(prompt)) for prompt in settings["prompts"]} == {64}
    step = functools.partial(grpo_step, policy, sampler, settings["prompts"], settings, rng)
    seconds, gigabytes = {"ours": [], "TRL": []}, {"ours": apart(step_memory, layers, width, settings)}
    with tempfile.TemporaryDirectory() as folder:
        policy.base.save(folder)
        trl = Trl(python, folder, settings)
        trl.step()
        step()
        for _ in range(repeats):
            seconds["ours"].append(cpu_seconds(step))
            theirs, gigabytes["TRL"] = trl.step()
            seconds["TRL"].append(theirs)
        trl.close()
    return seconds, gigabytes


# --- log-probs at a large vocabulary ------------------------------------------------------------------------


def logprob_cost(plain: bool, tokens: int, width: int, vocabulary: int) -> tuple[float, float, list, list]:
    """Measure log-probs, forward and backward, in this process.

    plain: in one piece; otherwise in chunks. Returns CPU-seconds, the GB by which the peak exceeds the memory
    before the call, the log-probs, and the row sums of the gradient.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight, hidden = torch.randn(vocabulary, width), torch.randn(tokens, width) / width**0.5
    hidden.requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    chunk = tokens if plain else chunk_of(vocabulary)
    logits_of = functools.partial(torch.nn.functional.linear, weight=weight)
    memory, start = PeakMemory(), time.process_time()
    (logprobs,) = token_logprobs(logits_of, hidden, targets, 1.0, chunk)
    logprobs.sum().backward()
    seconds = time.process_time() - start
    return seconds, memory.gigabytes(), logprobs.tolist(), hidden.grad.sum(1).tolist()


def bench_logprobs(
    repeats: int, tokens: int = 2048, width: int = 896, vocabulary: int = 151_936
) -> list[Goal]:
    """Compare log-probs in chunks with the plain formula. Each run has its own process.

    The output layer has the size of Qwen2.5-0.5B's, and is frozen as under LoRA.
    """
    seconds, memory, values = {"ours": [], "plain": []}, {}, {}
    for _ in range(repeats):
        for name in seconds:
            cost = apart(logprob_cost, name == "plain", tokens, width, vocabulary)
            seconds[name].append(cost[0])
            memory[name], values[name] = cost[1], torch.tensor(cost[2:])
    print_seconds(f"log-probs of {tokens:,} tokens, forward and backward", seconds)
    print(f"  extra memory: ours {memory['ours']:.2f} GB, plain {memory['plain']:.2f} GB")
    differences = (values["ours"] - values["plain"]).abs().amax(1).tolist()
    print(f"  largest difference: log-probs {differences[0]:.1e}, their gradient {differences[1]:.1e}")
    print(f"  time, ours / plain: {ratio(seconds['ours'], seconds['plain']):.2f} x", flush=True)
    return [
        Goal(f"log-probs at {vocabulary:,} words: extra memory", memory["ours"], "GB", at_most=0.3),
        Goal("log-probs: largest difference to plain", max(differences), "", at_most=1e-4),
    ]


# --- two adapters on one base -------------------------------------------------------------------------------


def bench_adapters(repeats: int = 30) -> None:
    """Print the time to switch between two adapters, and the time to copy one into the other."""
    policy = random_policy(lora_rank=16)
    grpo_update(policy, random_group(policy, random_texts(policy, 2, 2)))  # AdamW has moments after an update
    explorer = policy.fork("explorer")
    sides = {
        "switch": lambda: (policy.activate(), explorer.activate()),
        "copy": lambda: explorer.copy_from(policy),
        "state": lambda: policy.load_state_dict(policy.state_dict()),
    }
    milliseconds = {name: 1000 * statistics.median(times) for name, times in compare(sides, repeats).items()}
    print(
        f"  two adapters of rank 16: a switch {milliseconds['switch'] / 2:.2f} ms, copying A and its AdamW "
        f"state into B {milliseconds['copy']:.2f} ms, through a state dict {milliseconds['state']:.2f} ms",
        flush=True,
    )


# --- all benchmarks -----------------------------------------------------------------------------------------


def bench_core(args: argparse.Namespace) -> int:
    """Run all benchmarks of this file and print the table; return the exit status."""
    torch.set_num_threads(1)
    reason = missing_trl(args.trl)
    if reason:  # printed before the other benchmarks, which take a quarter of an hour
        print(f"GRPO step beside TRL's: skipped, {reason}")
    print("CPU-seconds of one thread, fp32:", flush=True)
    policy = random_policy()
    goals = bench_rollout(policy, args.repeats)
    goals += bench_update(policy, args.repeats)
    goals += bench_growth(policy, args.repeats)
    if not reason:
        goals += bench_step(args.trl, args.repeats)
    goals += bench_logprobs(args.repeats)
    bench_adapters()
    return conclude(goals, {"GRPO step: TRL / ours": reason} if reason else {})
