"""Tiny models, agents and episodes of random tokens, for the tests that need a real language model."""

import importlib.util
import random

import pytest
import torch
from device import DEVICE

from batch import pad_rows, rows_of
from buffer import Step, StopReason, Trajectory
from demo.tiny_model import tiny_base
from policy import Policy

torch.set_num_threads(1)  # models this small are slower with more threads
WORDS = (
    "go to desk 1",
    "take mug 1 from bed 1",
    "inventory",
    "look",
    "nothing here open closed hot",
    "|",
    ";",
)
RANKS = (0, 4)  # full weights, LoRA
MISSING = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
needs_models = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def tiny(seed=0, **sizes):
    """Make a base with large weights, so that the differences between its log-probs are large too."""
    sizes = {"d_model": 16, "heads": 2, "intermediate": 32, "seed": seed, "device": DEVICE, **sizes}
    base = tiny_base(WORDS, **sizes)
    with torch.no_grad():
        for p in base.model.parameters():
            if p.ndim == 2:
                p.mul_(2)
    return base


def agent(base, rank=0, **settings):
    return Policy(base, lora_rank=rank, lora_alpha=8, **{"learning_rate": 1e-2, **settings})


def finished(steps):
    return Trajectory("", "", "", steps, 1.0, True, StopReason.FINISHED)


def episode(turns, seed=0, vocab=20):
    """Make an episode of random tokens in which each prompt extends the turn before."""
    rng = random.Random(seed)
    steps, tokens = [], []
    for _ in range(turns):
        prompt = tokens + [rng.randrange(5, vocab) for _ in range(rng.randint(2, 5))]
        action = [rng.randrange(5, vocab) for _ in range(rng.randint(1, 4))]
        steps.append(Step(prompt, action, [0.0] * len(action), "", "", True))
        tokens = prompt + action
    return finished(steps)


def batch_of(*episodes):
    return pad_rows([row for e in episodes for row in rows_of(e)], 0, DEVICE)


BATCH = batch_of(episode(3, seed=1), episode(1, seed=2), episode(2, seed=3))


def train(learner, updates=1):
    for _ in range(updates):
        (-learner.logprobs(BATCH)[0].sum()).backward()
        learner.step(1.0)


def snapshot(learner):
    return {key: value.clone() for key, value in learner.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
