"""Dense rewards: the step reward model (RSPO Eq. 5-7; SPA-RL, arXiv 2505.20732), and the seam for others.

    r_t  = tanh(MLP(h_t)), in (-1, 1); h_t: the last hidden layer at the last token of action t       (Eq. 5)
    R    = sum_t r_t                                                                                  (Eq. 6)
    loss = mean over episodes of (R - outcome)^2                                                      (Eq. 7)

It is fitted once, on episodes collected beforehand, and then frozen. Fine-tuning the backbone together with
the head is our choice, as are the episodes: the paper names neither. The model sees the policy's own token
ids, as they were sampled, never tokenised again; a backbone with another tokenizer sees `step_text` of each
step, encoded by one function for fitting and scoring alike.

Scores are read at columns that the rows' own bookkeeping names, never at "the last token that is not
padding". Rows are padded on the right and attention is causal, so no token sees padding and no mask is
needed.

Left out: normalising the scores, mixing them with the outcome, and refitting while the policy learns.

Shapes: S steps, E episodes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from batch import Batch, Row, micro_batches, rows_of
from buffer import Group, Trajectory
from chat import Chat
from model import Base, cast, load_base, recompute_layers, recomputing, rise_and_fall
from scale import distributed

CHANCE_AUC = 0.6  # a fit with less has learned too little


class DenseReward(Protocol):
    """All that `rspo.train` asks of a dense reward. Another one is a class with this method."""

    def score(self, groups: list[Group], noise: float = 0.0, rng: random.Random | None = None) -> None:
        """Set `dense_score` of every step of every usable episode; noise: std of what is added from rng."""


def step_text(trajectory: Trajectory, index: int, history: int = 2) -> str:
    """The context of a step as text, for a backbone that has a tokenizer of its own.

    It holds what a `Step` records, the task, the last turns and the observation, and so neither the
    environment's notes nor the admissible actions.
    """
    lines = [f"Task: {trajectory.task}"]
    for step in trajectory.steps[max(0, index - history) : index]:
        lines += [f"Observation: {step.observation}", f"Action: {action_text(step.action)}"]
    return "\n".join([*lines, f"Observation: {trajectory.steps[index].observation}"])


def action_text(action: str) -> str:
    return action or "invalid reply"


class StepRewardModel(nn.Module):
    """A backbone, an MLP head in fp32, and the chat format it reads. In eval mode always: no dropout."""

    def __init__(
        self,
        backbone: nn.Module,
        chat: Chat,
        own_tokenizer: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        autocast: bool | None = None,
        device: str | torch.device = "cpu",
        tokens_per_micro_batch: int = 8192,
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ):
        """backbone: an HF model without its output layer. own_tokenizer: it reads `step_text`, with `chat`;
        else `chat` is the policy's. dtype: of its weights once it is fitted. autocast: matrix
        products in bf16, in the fit too; None: with a dtype other than fp32. tokens_per_micro_batch: padded
        tokens of a forward pass. gradient_checkpointing: the fit recomputes what is inside layers."""
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
        self.report: dict = {}  # of the fit
        self.to(device)
        self._freeze()

    @classmethod
    def from_base(cls, base: Base, **settings) -> StepRewardModel:
        """On a copy of the policy's starting model, whatever was trained since; it reads the policy's ids."""
        source = (base.reference or base.model).get_decoder()
        backbone = _new_backbone(source.config)
        # A LoRA adapter, which lives inside the layers it adapts, stays behind
        weights = {name.replace(".base_layer.", "."): w for name, w in source.state_dict().items()}
        backbone.load_state_dict({name: w for name, w in weights.items() if ".lora_" not in name})
        return cls(backbone, base.chat, **{"device": base.device, **settings})

    @classmethod
    def from_pretrained(cls, name: str, **settings) -> StepRewardModel:
        """On another model, a folder or hub id, which reads text with its own tokenizer and template."""
        base = load_base(name)
        return cls(base.model.get_decoder(), base.chat, own_tokenizer=True, **settings)

    # --- scores

    def rows(self, trajectory: Trajectory) -> list[Row]:
        """What the model reads of an episode: the stored token ids, or the text of each step, encoded."""
        if not self.own_tokenizer:
            return rows_of(trajectory)
        rows = []
        for index, step in enumerate(trajectory.steps):
            prompt = self.chat.first(step_text(trajectory, index))
            reply = self.chat.reply(action_text(step.action))
            rows.append(Row(trajectory, prompt + reply, [(index, len(prompt), len(prompt) + len(reply))]))
        longest = max(len(row.input_ids) for row in rows)
        limit = getattr(self.backbone.config.get_text_config(), "max_position_embeddings", None) or math.inf
        if longest > limit:
            raise ValueError(
                f"a step of {trajectory.task_id} is {longest} tokens long, and the step reward model reads "
                f"{limit}: give a --reward_model_backbone with a longer context"
            )
        return rows

    def forward(self, batch: Batch) -> Tensor:
        """r_t of the batch's steps (S,), row by row and span by span   (Eq. 5)"""
        last_tokens = [(b, end - 1) for b, row in enumerate(batch.rows) for _, _, end in row.spans]
        rows, columns = torch.tensor(last_tokens, device=self.device).unbind(1)
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast),
            recomputing(self.backbone, self.gradient_checkpointing),
        ):
            hidden = self.backbone(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        return torch.tanh(self.head(hidden[rows, columns].float())[:, 0])

    @torch.no_grad()
    def step_scores(self, trajectories: list[Trajectory]) -> list[list[float]]:
        """r_t of each step of each episode. A score that is not a number raises FloatingPointError.

        Equal rows are read once, so equal episodes have equal sums. Read apart, their sums would differ by
        rounding, and dividing by the standard deviation of their group would make advantages of that.
        """
        self.eval()
        scores = [[math.nan] * len(trajectory.steps) for trajectory in trajectories]
        rows = [(row, mine) for t, mine in zip(trajectories, scores, strict=True) for row in self.rows(t)]
        distinct = {_content(row): row for row, _ in rows}
        known: dict[tuple, list[float]] = {}
        for batch in self._batches(list(distinct.values()), self.tokens_per_micro_batch):
            values = iter(self(batch).tolist())
            known |= {_content(row): [next(values) for _ in row.spans] for row in batch.rows}
        for row, mine in rows:
            for (index, _, _), score in zip(row.spans, known[_content(row)], strict=True):
                mine[index] = score
        if not all(math.isfinite(score) for mine in scores for score in mine):
            raise FloatingPointError(
                "a score of the step reward model is not a number: its weights are no good; fit it again "
                "with a lower learning rate"
            )
        return scores

    def score(self, groups: list[Group], noise: float = 0.0, rng: random.Random | None = None) -> None:
        """Set `dense_score` of every step of every usable episode, over an older one.

        noise: std of the Gaussian noise on each score, drawn from `rng` in the order of the steps; a noisy
        score may leave (-1, 1). Episodes that are not usable are left as they are. Of several ranks each
        scores some groups, whole ones: equal rows are read once.
        """
        if noise and rng is None:
            raise ValueError(f"noise of std {noise} is drawn from rng: give a random.Random")
        members = [[member for member in group.trajectories if member.usable] for group in groups]
        tokens = [sum(len(s.prompt_ids + s.action_ids) for t in group for s in t.steps) for group in members]
        scored = distributed.map_over_ranks(self._group_scores, members, tokens)
        trajectories = [trajectory for group in members for trajectory in group]
        every = [scores for group in scored for scores in group]
        for trajectory, scores in zip(trajectories, every, strict=True):
            for step, score in zip(trajectory.steps, scores, strict=True):
                step.dense_score = score + (rng.gauss(0.0, noise) if noise else 0.0)

    def _group_scores(self, groups: list[list[Trajectory]]) -> list[list[list[float]]]:
        scores = iter(self.step_scores([trajectory for group in groups for trajectory in group]))
        return [[next(scores) for _ in group] for group in groups]

    # --- fit

    def fit(
        self,
        trajectories: list[Trajectory],
        *,
        epochs: int = 4,
        learning_rate: float = 1e-3,
        batch_episodes: int = 32,
        held_out: float = 0.1,
        seed: int = 0,
        progress: Callable[[int, int, float], None] = lambda update, updates, loss: None,
    ) -> dict:
        """Fine-tune backbone and head, freeze them, and report how they do on episodes of other tasks.

        held_out: the share of tasks (at most half) kept for the report. AdamW; the learning rate rises over
        the first tenth of the updates, then falls to 0. The weights are kept in fp32 until the end, and
        computed with in `dtype`.

        The report (`self.report`): `quality` on the held-out episodes; mse_of_mean, the MSE there of always
        predicting the training episodes' mean; episodes, successes, held_out_episodes, held_out_successes;
        learned, False if the model is not clearly better than chance, which a warning then says. Raises
        ValueError if there are no two tasks, FloatingPointError if the fit diverges.
        """
        rng = random.Random(f"{seed} step reward model")
        training, held = split_by_task([t for t in trajectories if t.usable], held_out, rng)
        episodes = [self.rows(trajectory) for trajectory in training]
        updates = epochs * math.ceil(len(episodes) / batch_episodes)

        self.eval()
        self.requires_grad_(True)
        cast(self, torch.float32)
        optimizer = torch.optim.AdamW(self.parameters(), betas=(0.9, 0.99), weight_decay=0.01, fused=True)
        order: list[list[Row]] = []
        for update in range(updates):
            if not order:
                order = rng.sample(episodes, len(episodes))
            minibatch, order = order[:batch_episodes], order[batch_episodes:]
            optimizer.param_groups[0]["lr"] = learning_rate * rise_and_fall(update, updates)
            loss = self.backward(minibatch)
            if not torch.isfinite(nn.utils.clip_grad_norm_(self.parameters(), 1.0)):
                raise FloatingPointError(
                    f"the step reward model diverged at update {update + 1} of {updates}: lower its learning "
                    f"rate of {learning_rate:g}"
                )
            optimizer.step()
            optimizer.zero_grad()
            progress(update + 1, updates, loss)
        cast(self.backbone, self.dtype)
        self._freeze()

        mean = sum(trajectory.outcome for trajectory in training) / len(training)
        self.report = {
            **quality([sum(scores) for scores in self.step_scores(held)], held),
            "mse_of_mean": sum((mean - trajectory.outcome) ** 2 for trajectory in held) / len(held),
            "episodes": len(training),
            "successes": sum(trajectory.success for trajectory in training),
            "held_out_episodes": len(held),
            "held_out_successes": sum(trajectory.success for trajectory in held),
        }
        mse, auc, mse_of_mean = (self.report[name] for name in ("mse", "auc", "mse_of_mean"))
        self.report["learned"] = mse < mse_of_mean and (auc is None or auc >= CHANCE_AUC)
        if not self.report["learned"]:
            warnings.warn(
                f"the step reward model has learned too little: on {len(held)} held-out episodes its AUC is "
                f"{'not known' if auc is None else f'{auc:.2f}'} (chance 0.5), its MSE {mse:.4f} (always "
                f"predicting the mean: {mse_of_mean:.4f}). It saw {self.report['successes']} successes in "
                f"{len(training)} episodes: raise --reward_model_episodes, or let others play them "
                "(--reward_model_source)",
                stacklevel=2,
            )
        return self.report

    def backward(self, episodes: list[list[Row]]) -> float:
        """Add the gradient of mean (R - outcome)^2 over these episodes, given as rows; returns it   (Eq. 6-7)

        R needs all rows of its episode. Episodes that fit in one micro-batch together leave this to autograd;
        one that does not is read twice, first for R, then for the gradient, 2 (R - outcome) grad r_t, row by
        row.
        """
        total = 0.0
        for part in _parts(episodes, self.tokens_per_micro_batch):
            rows = [row for episode in part for row in episode]
            place = {id(row): i for i, episode in enumerate(part) for row in episode}
            outcomes = torch.tensor([episode[0].trajectory.outcome for episode in part], device=self.device)
            fits = sum(len(row.input_ids) for row in rows) <= self.tokens_per_micro_batch
            # What fits as a whole is cut finer: rows of like length need less padding
            batches = list(self._batches(rows, self.tokens_per_micro_batch // (4 if fits else 1)))
            owners = [
                torch.tensor([place[id(row)] for row in batch.rows for _ in row.spans], device=self.device)
                for batch in batches
            ]
            sums = torch.zeros(len(part), device=self.device)
            with torch.set_grad_enabled(fits):
                for batch, owner in zip(batches, owners, strict=True):
                    sums = sums.index_add(0, owner, self(batch))
            loss = (sums - outcomes).square().sum() / len(episodes)
            total += loss.item()
            if fits:
                loss.backward()
                continue
            slopes = 2 * (sums - outcomes) / len(episodes)
            for batch, owner in zip(batches, owners, strict=True):
                (slopes[owner] * self(batch)).sum().backward()
        return total

    def _batches(self, rows: list[Row], tokens: int) -> Iterator[Batch]:
        return micro_batches(rows, tokens, self.chat.pad_id, self.device)

    def _freeze(self) -> None:
        self.requires_grad_(False)
        self.eval()

    @property
    def device(self) -> torch.device:
        return self.head[0].weight.device

    # --- files

    def save(self, folder: str | Path) -> None:
        """Weights, the backbone's config, the fit's report and, unless it is the policy's, the tokenizer."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: w.detach().cpu().contiguous() for name, w in self.state_dict().items()}
        save_file(weights, folder / "model.safetensors")
        self.backbone.config.save_pretrained(folder)
        if self.own_tokenizer:
            self.chat.tokenizer.save_pretrained(folder / "tokenizer")
        about = {
            "own_tokenizer": self.own_tokenizer,
            "vocabulary": _vocabulary(self.chat),
            "report": self.report,
        }
        (folder / "reward_model.json").write_text(json.dumps(about, indent=2))

    @classmethod
    def load(cls, folder: str | Path, chat: Chat, **settings) -> StepRewardModel:
        """A saved model; chat: of the policy it shall score. Settings as for the constructor.

        Raises ValueError if there is none, if it is damaged, or if it was made for another vocabulary.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoTokenizer

        folder = Path(folder)
        for name in ("reward_model.json", "config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise ValueError(f"{folder} holds no step reward model: it has no {name}")
        try:
            about = json.loads((folder / "reward_model.json").read_text())
            if about["own_tokenizer"]:
                chat = Chat(AutoTokenizer.from_pretrained(folder / "tokenizer"))
            if about["vocabulary"] != _vocabulary(chat):
                raise ValueError(
                    f"the step reward model in {folder} was made for another vocabulary: the policy's token "
                    "ids would mean other words to it; fit a new one, or give one made for this model"
                )
            model = cls(
                _new_backbone(AutoConfig.from_pretrained(folder)), chat, about["own_tokenizer"], **settings
            )
            model.load_state_dict(load_file(folder / "model.safetensors"))
            model.report = about["report"]
        except (OSError, KeyError, json.JSONDecodeError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"the step reward model in {folder} is damaged: {error}") from error
        cast(model.backbone, model.dtype)
        return model


# --- how good a fit is --------------------------------------------------------------------------------------


def split_by_task(
    trajectories: list[Trajectory], held_out: float, rng: random.Random
) -> tuple[list[Trajectory], list[Trajectory]]:
    """(training, held-out) episodes. No task is in both; tasks with a success in them are split like the
    others."""
    tasks: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        tasks.setdefault(trajectory.task_id, []).append(trajectory)
    if len(tasks) < 2:
        raise ValueError(
            f"the step reward model needs episodes of two tasks, to hold one out: {len(trajectories)} usable "
            f"episodes have {len(tasks)}; raise --reward_model_episodes"
        )
    members = rng.sample(list(tasks.values()), len(tasks))
    members.sort(key=lambda episodes: any(episode.success for episode in episodes))
    every = min(len(members), max(2, round(1 / held_out)))
    held = {id(episode) for episodes in members[every // 2 :: every] for episode in episodes}
    return [t for t in trajectories if id(t) not in held], [t for t in trajectories if id(t) in held]


def quality(predicted: list[float], trajectories: list[Trajectory]) -> dict[str, float | None]:
    """Of R against what happened: mse, correlation (Pearson) with the outcome, auc (ranking success over
    failure).

    None where it does not exist: the correlation with what never varies, the AUC without both kinds of
    episodes.
    """
    r = torch.tensor(predicted, dtype=torch.float64)
    outcomes = torch.tensor([trajectory.outcome for trajectory in trajectories], dtype=torch.float64)
    x, y = r - r.mean(), outcomes - outcomes.mean()
    norms = float(x.norm() * y.norm())
    return {
        "mse": float((r - outcomes).square().mean()),
        "correlation": float(x @ y) / norms if norms > 0 else None,
        "auc": area_under_roc(predicted, [trajectory.success for trajectory in trajectories]),
    }


def area_under_roc(scores: list[float], positive: list[bool]) -> float | None:
    """The share of (positive, negative) pairs with the positive scored higher, ties as half; None without any
    pair."""
    n_positive, n_negative = sum(positive), len(positive) - sum(positive)
    if not n_positive or not n_negative:
        return None
    tied: dict[float, list[bool]] = {}
    for score, is_positive in zip(scores, positive, strict=True):
        tied.setdefault(score, []).append(is_positive)
    below, won = 0, 0.0
    for score in sorted(tied):
        positives, negatives = sum(tied[score]), len(tied[score]) - sum(tied[score])
        won += positives * (below + negatives / 2)
        below += negatives
    return won / (n_positive * n_negative)


# --- pieces -------------------------------------------------------------------------------------------------


def _content(row: Row) -> tuple:
    """What the model reads of a row, and where its scores are."""
    return tuple(row.input_ids), tuple(end for _, _, end in row.spans)


def _parts(episodes: list[list[Row]], tokens: int) -> Iterator[list[list[Row]]]:
    """Whole episodes in lots of at most that many tokens; a longer episode goes alone."""
    part, size = [], 0
    for episode in episodes:
        length = sum(len(row.input_ids) for row in episode)
        if part and size + length > tokens:
            yield part
            part, size = [], 0
        part.append(episode)
        size += length
    if part:
        yield part


def _new_backbone(config) -> nn.Module:
    from transformers import AutoModel

    return AutoModel.from_config(copy.deepcopy(config), dtype=torch.float32)


def _vocabulary(chat: Chat) -> str:
    """A fingerprint of which token has which id."""
    return hashlib.sha256(json.dumps(sorted(chat.tokenizer.get_vocab().items())).encode()).hexdigest()
