"""A world of torch alone to drive the loop with: a three-step environment, a bigram policy, its sampler."""

from __future__ import annotations

import copy
import random

import torch
from device import DEVICE
from torch import nn

from chat import Dialogue
from envs import View
from rollout import World
from sampler import Sample

WORDS = [
    "<pad>",
    "<end>",
    "<user>",
    "<agent>",
    "left",
    "right",
    "door",
    "0",
    "1",
    "2",
    "|",
    "walk",
    "no",
    "action",
    "look",
    "<",
]


class ToyChat:
    pad_id = 0

    def encode(self, text):
        return [WORDS.index(word) for word in text.replace(";", "").split()]

    def decode(self, ids):
        return " ".join(WORDS[i] for i in ids if i != 1)

    def first(self, user, system=None):
        return [2, *self.encode(user), 3]

    def extend(self, action_ids, user):
        return [*([] if action_ids[-1] == 1 else [1]), 2, *self.encode(user), 3]

    def reply(self, text):
        return [*self.encode(text), 1]


class ToyEnv:
    """Three doors; "right" three times wins. A game's parity is its task type, and changes nothing."""

    name, task_types, step_limit, vocabulary = "toy", ("Left", "Right"), 3, tuple(WORDS)
    look_around, fingerprint = "look", "ten games"

    def size(self, split):
        return {"train": 10, "eval": 4}[split]

    def reset(self, split, index):
        self.path, self.kind = [], self.task_types[index % 2]
        return self._view()

    def step(self, action):
        self.path.append(action)
        return self._view()

    def searching_expert(self):
        return "right"

    expert = searching_expert

    def _view(self):
        won = self.path == ["right"] * 3
        done = len(self.path) == 3
        return View(
            "walk", self.kind, f"door {len(self.path) % 3}", ("left", "right"), "", done, float(won), won
        )


class ToyPolicy:
    """Next-token logits given the last token alone. Same methods as policy.Policy."""

    device, temperature, chat = DEVICE, 1.0, ToyChat()

    def __init__(self, name="policy", learning_rate=0.5):
        self.name, self.version, self.alive, self.learning_rate = name, 0, True, learning_rate
        logits = torch.full((len(WORDS), len(WORDS)), -30.0, device=DEVICE)
        logits[3, 4], logits[3, 5] = 0.5, 0.0  # after <agent>: left or right
        logits[[4, 5], 1] = 0.0  # then <end>
        self.logits, self.reference = nn.Parameter(logits), logits.clone()
        self.parameters = [self.logits]
        self.optimizer = torch.optim.Adam(self.parameters, lr=learning_rate)
        self.critic = ToyCritic()
        self.explorer = None

    def logprobs(self, batch, with_entropy=False):
        assert self.alive, "a discarded explorer was used"
        return self._score(self.logits, batch)

    def reference_logprobs(self, batch):
        return self._score(self.reference, batch)[0]

    def _score(self, logits, batch):
        table = torch.log_softmax(logits[batch.input_ids[:, :-1]] / self.temperature, dim=-1)
        picked = table.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
        entropy = -(table.exp() * table).sum(-1)
        pad = torch.nn.functional.pad
        return tuple(torch.where(batch.action_mask, pad(x, (1, 0)), 0.0) for x in (picked, entropy))

    def step(self, max_grad_norm):
        norm = torch.nn.utils.clip_grad_norm_([self.logits], max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return float(norm)

    def fork(self, name):
        critic = self.explorer.critic if self.explorer else ToyCritic()
        self.explorer = ToyPolicy(name, self.learning_rate)
        self.explorer.critic = critic
        self.explorer.logits.data.copy_(self.logits.data)
        self.explorer.reference = self.reference
        self.explorer.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return self.explorer

    def discard(self):
        self.alive = False


class ToyCritic:
    def __init__(self):
        self.table = nn.Parameter(torch.zeros(len(WORDS), device=DEVICE))
        self.parameters = [self.table]
        self.optimizer = torch.optim.Adam(self.parameters, lr=0.5)

    def values(self, batch):
        before = torch.nn.functional.pad(self.table[batch.input_ids[:, :-1]], (1, 0))
        return torch.where(batch.action_mask, before, 0.0)

    def step(self, max_grad_norm):
        norm = torch.nn.utils.clip_grad_norm_([self.table], max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)


class ToySampler:
    """Samples from ToyPolicy; keeps what it was asked."""

    def __init__(self):
        self.calls = []

    def reset(self):
        pass

    close = reset

    def sample(self, policy, prompts, episodes, rngs, temperature, max_tokens):
        self.calls.append((policy.name, policy.version, temperature, len(prompts)))
        table = torch.log_softmax(policy.logits.detach() / temperature, dim=-1)
        logprobs, weights = table.tolist(), table.exp().tolist()
        rows = zip(prompts, rngs, strict=True)
        return [self._row(logprobs, weights, prompt[-1], rng, max_tokens) for prompt, rng in rows]

    def _row(self, logprobs, weights, last, rng: random.Random, max_tokens):
        sample = Sample([], [], False)
        while len(sample.token_ids) < max_tokens and not sample.stopped:
            (token,) = rng.choices(range(len(WORDS)), weights[last])
            sample.token_ids.append(token)
            sample.logprobs.append(logprobs[last][token])
            sample.stopped, last = token == 1, token
        return sample


class CountingScorer:
    """A dense reward that likes to walk left: 1 for each left, 0 for each right."""

    def __init__(self, score=lambda step: float(step.action == "left")):
        self.scored, self.of = 0, score

    def score(self, groups, noise=0.0, rng=None):
        for group in groups:
            for trajectory in group.trajectories:
                self.scored += 1
                for step in trajectory.steps:
                    step.dense_score = self.of(step)


def toy_world(group_size=4, context="window", make_env=ToyEnv, seed=0, max_prompt_tokens=60, parallel=128):
    dialogue = Dialogue(ToyChat(), "short", context, 2, max_prompt_tokens, 3)
    return World(make_env, ToySampler(), dialogue, group_size=group_size, seed=seed, parallel=parallel)
