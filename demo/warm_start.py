"""Demonstrations by a scripted player, and supervised learning on them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator

import torch
from torch import nn

from batch import Row, micro_batches, rows_of
from buffer import Trajectory, endings
from chat import parse_action, reply_text
from model import Base, cast, rise_and_fall
from rollout import Episode, World
from sampler import Sample


def demonstrations(
    world: World, episodes: int, expert_share: float, hesitation_share: float, games: int | None = None
) -> list[Trajectory]:
    """Training games of an expert that searches, hesitates and errs, for a warm start.

    Each turn is the searching expert's with probability `expert_share` (it knows nothing hidden), a look
    around with `hesitation_share`, else a random admissible action; a template to be filled in is none.
    Games are drawn independently of the task stream, or from its first `games` where new ones are
    costly; demonstration i is the same however many are asked for.
    """

    @functools.cache
    def sayable(action: str) -> bool:
        return parse_action(world.dialogue.style, reply_text(world.dialogue.style, action))[1]

    def actions(live: list[Episode]) -> Iterator[str | None]:
        chances = [episode.rng.random() for episode in live]
        slips = [list(filter(sayable, episode.view.admissible)) for episode in live]
        turns = list(zip(live, chances, slips, strict=True))
        advice = world.pool.expert(
            episode.slot
            for episode, chance, others in turns
            if chance < expert_share + hesitation_share or not others
        )
        for episode, chance, others in turns:
            advised = advice.get(episode.slot, ("", ""))
            if advised is None:
                yield None
                continue
            expert, look_around = advised
            if chance < expert_share:
                yield expert
            elif chance < expert_share + hesitation_share and look_around in episode.view.admissible:
                yield look_around
            else:
                yield episode.rng.choice(others) if others else expert

    def reply(action: str) -> Sample:
        ids = world.dialogue.chat.reply(reply_text(world.dialogue.style, action))
        return Sample(ids, [0.0] * len(ids), stopped=True)

    def answer(live: list[Episode]) -> list[Sample | None]:
        return [None if action is None else reply(action) for action in actions(live)]

    if not hasattr(world.pool.env, "searching_expert"):
        raise ValueError(f"{world.name} has no expert to show how it is played")
    drawn = world.draw_games("demonstration", episodes, games)
    specs = [("train", game, f"demonstration {i}") for i, game in enumerate(drawn)]
    return world.play(answer, specs)


def warm_start(
    base: Base,
    demonstrations: list[Trajectory],
    *,
    updates: int,
    turns_per_update: int,
    learning_rate: float,
    seed: int = 0,
    tokens_per_micro_batch: int = 4096,
    progress: Callable[[int, float], None] = lambda update, loss: None,
) -> list[float]:
    """Supervised learning of the base itself, full weights, before agents exist: mean cross-entropy of the
    demonstrated action tokens. An update takes rows until they hold `turns_per_update` turns, in an order
    that is shuffled anew when all were seen. The learning rate rises and falls. Returns the losses.

    Raises ValueError if no demonstration is usable, FloatingPointError if the loss diverges.
    """
    assert base.peft is None and base.reference is None, "warm start comes before the agents"
    rows = [row for trajectory in demonstrations if trajectory.usable for row in rows_of(trajectory)]
    if not rows:
        raise ValueError(f"no demonstration can be learned from; they ended so: {endings(demonstrations)}")
    rng, order, dtype, autocast = random.Random(seed), [], base.model.dtype, base.autocast
    base.fp32()
    parameters = list(base.model.requires_grad_(True).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, fused=True)
    losses = []
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = learning_rate * rise_and_fall(update, updates)
        chosen: list[Row] = []
        while sum(len(row.spans) for row in chosen) < turns_per_update:
            order = order or rng.sample(rows, len(rows))
            chosen.append(order.pop())
        count, total = sum(row.action_tokens for row in chosen), 0.0
        for batch in micro_batches(chosen, tokens_per_micro_batch, base.chat.pad_id, base.device):
            loss = -base.score(base.model, batch, temperature=1.0)[0].sum() / count
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            raise FloatingPointError(
                f"the warm start diverged at update {update + 1} of {updates}: lower its learning rate of "
                f"{learning_rate:g}"
            )
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        progress(update, total)
    cast(base.model.requires_grad_(False), dtype)
    base.autocast, base.changed = autocast, True
    return losses
