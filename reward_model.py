"""The dense reward of the paper: the step reward model (RSPO Eq. 5-7; SPA-RL, arXiv 2505.20732).

    r_t  = tanh(MLP(h_t)), in (-1, 1); h_t: the last hidden state at the last token of action t       (Eq. 5)
    R    = sum_t r_t                                                                                  (Eq. 6)
    loss = mean over episodes of (R - outcome)^2                                                      (Eq. 7)

By default the backbone is a copy of the policy's starting model. It reads the policy's own token ids, prompts
and replies as they were sampled. A backbone with its own tokenizer reads `step_text` of each step as the
prompt, and the action as the reply. `StepRewardModel.rows` makes both inputs, for the fit and for scores.

The model is fitted once, on episodes collected beforehand, and then frozen. The paper names neither these
episodes nor the trained layers. Here the backbone is fine-tuned together with the head.
record/reward_fit.py reports the quality of a fit. record/reward_model_files.py saves and loads the model.

A score is read where a row's span ends. Rows are padded on the right and attention is causal, so no token
sees padding and no attention mask is needed.

Left out: normalizing the scores, mixing them with the outcome, and refitting while the policy learns.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from batch import Batch, Row, micro_batches, rows_of
from buffer import Group, Trajectory
from chat import Chat
from model import Base, cast, load_base, recompute_layers, recomputing, rise_and_fall
from record.reward_fit import fit_report, split_by_task
from scale import distributed

BATCH_EPISODES = 32  # episodes of one update of the fit
HELD_OUT = 0.1  # the share of tasks whose episodes are kept for the report
INVALID_REPLY = "invalid reply"  # stands in place of an action in the texts


class DenseReward(Protocol):
    """The interface of a dense reward: `score`. `rspo.train` also calls `learn` of the implicit reward."""

    def score(self, groups: list[Group], noise: float = 0.0, rng: random.Random | None = None) -> None:
        """Set `dense_score` of every step of every usable episode. noise: std of noise drawn from `rng`."""


def step_text(trajectory: Trajectory, index: int, history: int = 2) -> str:
    """Write a step's context: task, last turns, observation. It has no notes and no admissible actions."""
    lines = [f"Task: {trajectory.task}"]
    for step in trajectory.steps[max(0, index - history) : index]:
        lines += [f"Observation: {step.observation}", f"Action: {step.action or INVALID_REPLY}"]
    return "\n".join([*lines, f"Observation: {trajectory.steps[index].observation}"])


class StepRewardModel(nn.Module):
    """A backbone (a Hugging Face model without output layer) and an MLP head in fp32; without dropout."""

    def __init__(
        self,
        backbone: nn.Module,
        chat: Chat,
        own_tokenizer: bool = False,  # `chat` is the backbone's own, not the policy's
        *,
        dtype: torch.dtype = torch.float32,  # of the backbone's weights after the fit
        autocast: bool | None = None,  # matrix products in bf16, also in the fit; None: if dtype is not fp32
        device: str | torch.device = "cpu",
        tokens_per_micro_batch: int = 8192,  # of a forward pass, padding included
        gradient_checkpointing: bool = False,  # recompute activations inside the layers during the fit
        seed: int = 0,  # of the head's initial weights
    ):
        super().__init__()
        width = backbone.config.get_text_config().hidden_size
        self.backbone = backbone
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.head[0].weight, std=width**-0.5, generator=generator)
        nn.init.zeros_(self.head[0].bias)
        nn.init.zeros_(self.head[2].weight)  # all scores start at 0
        nn.init.zeros_(self.head[2].bias)
        self.chat, self.own_tokenizer, self.dtype = chat, own_tokenizer, dtype
        self.autocast = dtype != torch.float32 if autocast is None else autocast
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            recompute_layers(backbone)
        self.report: dict = {}  # the report of the fit
        self.to(device)
        self.requires_grad_(False).eval()

    @classmethod
    def from_base(cls, base: Base, **settings) -> StepRewardModel:
        """Copy the policy's starting model as the backbone, without the weights that agents have trained."""
        source = (base.reference or base.model).get_decoder()
        state = source.state_dict().items()  # LoRA keeps an adapter inside the layer that it adapts
        weights = {name.replace(".base_layer.", "."): w for name, w in state if ".lora_" not in name}
        backbone = new_backbone(source.config)
        backbone.load_state_dict(weights)
        settings.setdefault("device", base.device)
        return cls(backbone, base.chat, **settings)

    @classmethod
    def from_pretrained(cls, name: str, **settings) -> StepRewardModel:
        """Load another model as backbone, from a folder or the hub. It has its own tokenizer and template."""
        base = load_base(name)
        return cls(base.model.get_decoder(), base.chat, own_tokenizer=True, **settings)

    @property
    def device(self) -> torch.device:
        return self.head[0].weight.device

    # --- what the model reads

    def rows(self, trajectory: Trajectory) -> list[Row]:
        """Return an episode as the model reads it: token ids in rows, with a span for each action, in order.

        Raises ValueError if a text is longer than the context of a backbone with its own tokenizer.
        """
        if not self.own_tokenizer:
            return rows_of(trajectory)
        rows = []
        for index, step in enumerate(trajectory.steps):
            prompt = self.chat.first(step_text(trajectory, index))
            reply = self.chat.reply(step.action or INVALID_REPLY)
            rows.append(Row(trajectory, prompt + reply, [(index, len(prompt), len(prompt) + len(reply))]))
        longest = max(len(row.input_ids) for row in rows)
        limit = getattr(self.backbone.config.get_text_config(), "max_position_embeddings", None)
        if limit and longest > limit:
            raise ValueError(
                f"a step of {trajectory.task_id} is {longest} tokens long, and the step reward model reads "
                f"{limit}: give a --reward_model_backbone with a longer context"
            )
        return rows

    def _batches(self, rows: list[Row], tokens: int) -> Iterator[Batch]:
        return micro_batches(rows, tokens, self.chat.pad_id, self.device)

    # --- scores

    def forward(self, batch: Batch) -> Tensor:
        """Compute r_t of the batch's steps (S,), row by row and span by span   (Eq. 5)"""
        rows, columns = [], []  # the last token of each action
        for place, row in enumerate(batch.rows):
            for _, _, end in row.spans:
                rows.append(place)
                columns.append(end - 1)
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast),
            recomputing(self.backbone, self.gradient_checkpointing),
        ):
            hidden = self.backbone(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        return torch.tanh(self.head(hidden[rows, columns].float())[:, 0])

    @torch.no_grad()
    def step_scores(self, trajectories: list[Trajectory]) -> list[list[float]]:
        """Return r_t of each step of each episode. Raises FloatingPointError if a score is not a number.

        Identical rows are scored once. Scored in different batches, they could differ by rounding, and
        dividing by the group's tiny standard deviation would turn that difference into large advantages.
        """
        self.eval()
        episodes = [self.rows(trajectory) for trajectory in trajectories]
        distinct = {_content(row): row for row in itertools.chain(*episodes)}
        scores_of: dict[tuple, list[float]] = {}
        for batch in self._batches(list(distinct.values()), self.tokens_per_micro_batch):
            scores = iter(self(batch).tolist())
            for row in batch.rows:
                scores_of[_content(row)] = [next(scores) for _ in row.spans]
        if not all(math.isfinite(score) for score in itertools.chain(*scores_of.values())):
            message = (
                "a score of the step reward model is not a number: fit it again with a lower learning rate"
            )
            raise FloatingPointError(message)
        return [list(itertools.chain(*(scores_of[_content(row)] for row in rows))) for rows in episodes]

    def score(self, groups: list[Group], noise: float = 0.0, rng: random.Random | None = None) -> None:
        """Set `dense_score` of every step of every usable episode; an older score is replaced.

        noise: std of Gaussian noise on each score, drawn from `rng` in the order of the steps. A noisy score
        may leave (-1, 1). Ranks split the groups, but no group: its identical rows must be scored once.
        """
        if noise and rng is None:
            raise ValueError(f"noise of {noise} needs an rng: give a random.Random")
        usable = [group.usable_episodes() for group in groups]
        costs = [sum(_tokens_of(trajectory) for trajectory in trajectories) for trajectories in usable]
        scores = distributed.map_over_ranks(self._scores_of_groups, usable, costs)
        for trajectories, scores_of_group in zip(usable, scores, strict=True):
            for trajectory, scores_of_episode in zip(trajectories, scores_of_group, strict=True):
                for step, score in zip(trajectory.steps, scores_of_episode, strict=True):
                    step.dense_score = score + (rng.gauss(0.0, noise) if noise else 0.0)

    def _scores_of_groups(self, groups: list[list[Trajectory]]) -> list[list[list[float]]]:
        scores = iter(self.step_scores(list(itertools.chain(*groups))))
        return [list(itertools.islice(scores, len(group))) for group in groups]

    # --- fit

    def fit(
        self,
        trajectories: list[Trajectory],
        *,
        epochs: int = 4,
        learning_rate: float = 1e-3,
        seed: int = 0,
        progress: Callable[[int, int, float], None] = lambda update, updates, loss: None,
    ) -> dict:
        """Fine-tune backbone and head with AdamW, freeze them, and return a report on held-out tasks.

        The learning rate rises over a tenth of the updates, then falls to 0. Weights are fp32 during the fit.
        progress: called with (update, number of updates, loss). Raises ValueError if there are fewer than two
        tasks and FloatingPointError if the fit diverges. Every rank calls this with the same episodes.

        The report (`self.report`) is a `fit_report`. `fit` warns if the model has learned too little.
        """
        rng = random.Random(f"{seed} step reward model")
        training, held_out = split_by_task([t for t in trajectories if t.usable], HELD_OUT, rng)
        episodes = [self.rows(trajectory) for trajectory in training]
        updates = epochs * math.ceil(len(episodes) / BATCH_EPISODES)
        self.requires_grad_(True).eval()
        cast(self, torch.float32)
        optimizer = torch.optim.AdamW(self.parameters(), betas=(0.9, 0.99), weight_decay=0.01, fused=True)
        update = 0
        for _ in range(epochs):
            shuffled = rng.sample(episodes, len(episodes))
            for start in range(0, len(shuffled), BATCH_EPISODES):
                optimizer.param_groups[0]["lr"] = learning_rate * rise_and_fall(update, updates)
                update += 1
                loss = self.backward(shuffled[start : start + BATCH_EPISODES])
                if not torch.isfinite(nn.utils.clip_grad_norm_(self.parameters(), 1.0)):
                    where = f"update {update} of {updates}"
                    remedy = f"lower its learning rate of {learning_rate:g}"
                    raise FloatingPointError(f"the step reward model diverged at {where}: {remedy}")
                optimizer.step()
                optimizer.zero_grad()
                progress(update, updates, loss)
        cast(self.backbone, self.dtype)
        self.requires_grad_(False).eval()
        predicted = [sum(scores) for scores in self.step_scores(held_out)]
        self.report = fit_report(training, held_out, predicted)
        return self.report

    def backward(self, episodes: list[list[Row]]) -> float:
        """Add the gradient of Eq. 7 over these episodes (lists of rows), which ranks share. Return the loss.

        R needs all rows of its episode, so a part holds whole episodes. Parts of up to tokens_per_micro_batch
        tokens are left to autograd; a longer episode is a part of its own and is read twice.
        """
        total, local = 0.0, distributed.local_share([_size([episode]) for episode in episodes])
        for part in _parts([episodes[i] for i in local], self.tokens_per_micro_batch):
            if _size(part) <= self.tokens_per_micro_batch:
                loss = self.squared_error(part) / len(episodes)
                loss.backward()
            else:
                loss = self.two_passes(part, len(episodes))
            total += loss.item()
        distributed.sum_gradients(list(self.parameters()))
        return sum(distributed.gather([total]))

    def squared_error(self, part: list[list[Row]]) -> Tensor:
        """Compute the sum of (R - outcome)^2 over a part, for autograd."""
        # A quarter of the limit: rows of similar length need less padding
        batches = list(self._batches(list(itertools.chain(*part)), self.tokens_per_micro_batch // 4))
        return self._errors(part, batches).square().sum()

    def two_passes(self, part: list[list[Row]], n_episodes: int) -> Tensor:
        """Add the gradient of (R - outcome)^2 / n_episodes for a part of one long episode; return the value.

        The first pass computes R. The second one adds 2 (R - outcome) grad r_t / n_episodes, batch by batch.
        """
        batches = list(self._batches(part[0], self.tokens_per_micro_batch))
        with torch.no_grad():
            error = self._errors(part, batches)
        slope = 2 * error / n_episodes
        for batch in batches:
            (slope * self(batch)).sum().backward()
        return error.square().sum() / n_episodes

    def _errors(self, part: list[list[Row]], batches: list[Batch]) -> Tensor:
        """Compute R - outcome of each episode (E,) from batches of its rows   (Eq. 6)"""
        trajectories = [episode[0].trajectory for episode in part]
        returns = torch.zeros(len(part), device=self.device)
        for batch in batches:
            owners = []  # for each step of the batch, the place of its episode in the part
            for row in batch.rows:
                place = next(i for i, trajectory in enumerate(trajectories) if trajectory is row.trajectory)
                owners += [place] * len(row.spans)
            returns = returns.index_add(0, torch.tensor(owners, device=self.device), self(batch))
        outcomes = [trajectory.outcome for trajectory in trajectories]
        return returns - torch.tensor(outcomes, device=self.device)


# --- pieces -------------------------------------------------------------------------------------------------


def _content(row: Row) -> tuple:
    """Return the tokens of a row and the columns of its scores. Rows with equal content have equal scores."""
    return tuple(row.input_ids), tuple(end for _, _, end in row.spans)


def _tokens_of(trajectory: Trajectory) -> int:
    return sum(len(step.prompt_ids) + len(step.action_ids) for step in trajectory.steps)


def _size(part: list[list[Row]]) -> int:
    return sum(len(row.input_ids) for row in itertools.chain(*part))


def _parts(episodes: list[list[Row]], tokens: int) -> Iterator[list[list[Row]]]:
    """Cut a list of episodes into parts of at most `tokens` tokens; a longer episode is a part of its own."""
    part: list[list[Row]] = []
    for episode in episodes:
        if part and _size([*part, episode]) > tokens:
            yield part
            part = []
        part.append(episode)
    if part:
        yield part


def new_backbone(config) -> nn.Module:
    """Build a backbone with random weights."""
    from transformers import AutoModel

    return AutoModel.from_config(copy.deepcopy(config), dtype=torch.float32)
