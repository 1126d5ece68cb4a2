"""The smallest world for rspo.train: three doors, a bigram policy, a dense reward that misleads.

`rspo.train` needs an agent with `logprobs`, `step` and `fork`, a world with `collect`, and a dense reward
with `score`. Here each of them takes a few lines, so one loop of Algorithm 1 runs in milliseconds.
demo/walkthrough.py shows such a loop number by number. The tests drive the algorithm with this toy.

Shapes: B rows, T tokens (columns), V words of the vocabulary.
"""

from __future__ import annotations

import copy
import os
import random

import torch
from torch import Tensor, nn

from batch import Batch
from buffer import Group
from chat import Dialogue
from envs import View
from rollout import World
from sampler import Sample

DEVICE = os.environ.get("RSPO_TEST_DEVICE", "cpu")
MARKS = ["<pad>", "<end>", "<user>", "<agent>"]
WORDS = [*MARKS, "left", "right", "door", "0", "1", "2", "|", "walk", "no", "action", "look", "<"]
PAD, END, USER, AGENT, LEFT, RIGHT = range(6)  # ids of the first words


class ToyChat:
    """A tokenizer of whole words, with chat turns `<user> ... <agent> ... <end>`. Stands in for chat.Chat."""

    pad_id, opened = PAD, ""

    def encode(self, text: str) -> list[int]:
        """Return the ids of the words; semicolons are dropped."""
        return [WORDS.index(word) for word in text.replace(";", "").split()]

    def decode(self, ids: list[int]) -> str:
        """Return the words of the ids, without <end>."""
        return " ".join(WORDS[i] for i in ids if i != END)

    def first(self, user: str, system: str | None = None) -> list[int]:
        """Return the prompt of a chat that starts with this user message. A system message is ignored."""
        return [USER, *self.encode(user), AGENT]

    def extend(self, action_ids: list[int], user: str) -> list[int]:
        """Return the tokens between a reply and the next one. A truncated reply gets its <end> first."""
        end = [] if action_ids[-1] == END else [END]
        return [*end, USER, *self.encode(user), AGENT]

    def reply(self, text: str) -> list[int]:
        """Return the ids of a whole reply."""
        return [*self.encode(text), END]


class ToyEnv:
    """Three doors. "right" three times wins; every other path of three actions fails.

    The task type is the parity of the game's index. It changes nothing else.
    """

    name, task_types, step_limit, vocabulary = "toy", ("Left", "Right"), 3, tuple(WORDS)
    look_around, fingerprint = "look", "ten games"

    def size(self, split: str) -> int:
        return {"train": 10, "eval": 4}[split]

    def reset(self, split: str, index: int) -> View:
        self.path: list[str] = []
        self.kind = self.task_types[index % 2]
        return self._view()

    def step(self, action: str) -> View:
        self.path.append(action)
        return self._view()

    def searching_expert(self) -> str:
        return "right"

    expert = searching_expert

    def _view(self) -> View:
        won = self.path == ["right"] * 3
        return View(
            task="walk",
            task_type=self.kind,
            observation=f"door {len(self.path) % 3}",
            admissible=("left", "right"),
            done=len(self.path) == 3,
            outcome=float(won),
            success=won,
        )


class ToyPolicy:
    """A bigram policy: a table (V, V) of the next word's logits, which depend only on the last word.

    It cannot tell the doors apart, as every prompt ends with <agent>. So it has one probability of "right",
    at all doors. `lead` is the first logit of "left"; the logit of "right" starts at 0. With 0.5, "right" has
    probability 0.378, and "right" three times has 0.054. It has the methods of policy.Policy that
    `rspo.train` calls.
    """

    device, temperature, chat = DEVICE, 1.0, ToyChat()

    def __init__(self, name: str = "policy", learning_rate: float = 0.5, lead: float = 0.5):
        self.name, self.version, self.alive, self.learning_rate = name, 0, True, learning_rate
        logits = torch.full((len(WORDS), len(WORDS)), -30.0, device=DEVICE)
        logits[AGENT, LEFT], logits[AGENT, RIGHT] = lead, 0.0
        logits[[LEFT, RIGHT], END] = 0.0  # an action is one word, then the reply ends
        self.logits, self.reference = nn.Parameter(logits), logits.clone()
        self.parameters = [self.logits]
        self.optimizer = torch.optim.Adam(self.parameters, lr=learning_rate)
        self.critic = ToyCritic()
        self.explorer: ToyPolicy | None = None

    def logprobs(self, batch: Batch, with_entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the action tokens and the entropies at their places, both (B, T)."""
        assert self.alive, "a discarded explorer was used"
        return self._score(self.logits, batch)

    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Return the log-probs of the action tokens under the starting policy (B, T)."""
        return self._score(self.reference, batch)[0]

    def _score(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        table = torch.log_softmax(logits[batch.input_ids[:, :-1]] / self.temperature, dim=-1)
        picked = table.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
        entropy = -(table.exp() * table).sum(-1)
        pad = torch.nn.functional.pad  # the first column has no word before it
        picked = torch.where(batch.action_mask, pad(picked, (1, 0)), 0.0)
        return picked, torch.where(batch.action_mask, pad(entropy, (1, 0)), 0.0)

    def step(self, max_grad_norm: float) -> float:
        """Clip the gradient, take one optimizer step and return the gradient's norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_([self.logits], max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return float(norm)

    def fork(self, name: str) -> ToyPolicy:
        """Return agent B, a copy of this policy and its optimizer. B keeps its critic from loop to loop."""
        critic = self.explorer.critic if self.explorer else ToyCritic()
        self.explorer = type(self)(name, self.learning_rate)
        self.explorer.critic = critic
        self.explorer.logits.data.copy_(self.logits.data)
        self.explorer.reference = self.reference
        self.explorer.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return self.explorer

    def discard(self) -> None:
        """End an agent B. Later calls of `logprobs` fail."""
        self.alive = False


class ToyCritic:
    """PPO's critic: one value per last word, a table (V,)."""

    def __init__(self):
        self.table = nn.Parameter(torch.zeros(len(WORDS), device=DEVICE))
        self.parameters = [self.table]
        self.optimizer = torch.optim.Adam(self.parameters, lr=0.5)

    def values(self, batch: Batch) -> Tensor:
        """Return the value before each action token (B, T), 0 elsewhere."""
        before = torch.nn.functional.pad(self.table[batch.input_ids[:, :-1]], (1, 0))
        return torch.where(batch.action_mask, before, 0.0)

    def step(self, max_grad_norm: float) -> float:
        """Clip the gradient, take one optimizer step and return the gradient's norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_([self.table], max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)


class ToySampler:
    """Draws replies from a ToyPolicy. `calls` records (agent, version, temperature, prompts) of each call."""

    def __init__(self):
        self.calls: list[tuple[str, int, float, int]] = []

    def reset(self) -> None:
        """Do nothing: there is no cache."""

    close = reset

    def sample(self, policy, prompts, episodes, rngs, temperature, max_tokens) -> list[Sample]:
        """Draw one reply to each prompt, each with its own generator. See sampler.Sampler."""
        self.calls.append((policy.name, policy.version, temperature, len(prompts)))
        table = torch.log_softmax(policy.logits.detach() / temperature, dim=-1)
        logprobs, weights = table.tolist(), table.exp().tolist()
        replies = []
        for prompt, rng in zip(prompts, rngs, strict=True):
            replies.append(self._reply(logprobs, weights, prompt[-1], rng, max_tokens))
        return replies

    def _reply(self, logprobs, weights, last: int, rng: random.Random, max_tokens: int) -> Sample:
        sample = Sample([], [], False)
        while len(sample.token_ids) < max_tokens and not sample.stopped:
            (token,) = rng.choices(range(len(WORDS)), weights[last])
            sample.token_ids.append(token)
            sample.logprobs.append(logprobs[last][token])
            sample.stopped, last = token == END, token
        return sample


class CountingScorer:
    """A dense reward that misleads: 1 for each "left", 0 for each "right". Stands in for the reward model.

    score: replaces that rule by another function of a step. `scored` counts the episodes that were scored.
    """

    def __init__(self, score=lambda step: float(step.action == "left")):
        self.scored, self.score_of = 0, score

    def score(self, groups: list[Group], noise: float = 0.0, rng: random.Random | None = None) -> None:
        """Set the dense score of every step. The noise is ignored."""
        for group in groups:
            for trajectory in group.trajectories:
                self.scored += 1
                for step in trajectory.steps:
                    step.dense_score = self.score_of(step)


def toy_world(
    group_size: int = 4,
    context: str = "window",
    make_env=ToyEnv,
    seed: int = 0,
    max_prompt_tokens: int = 60,
    parallel: int = 128,
) -> World:
    """Build a `rollout.World` of the toy. Replies have at most 3 tokens."""
    dialogue = Dialogue(ToyChat(), "short", context, 2, max_prompt_tokens, 3)
    return World(make_env, ToySampler(), dialogue, group_size=group_size, seed=seed, parallel=parallel)
