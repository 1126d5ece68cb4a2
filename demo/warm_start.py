"""Warm start: demonstrations by a noisy scripted player, and supervised learning on them. Not part of RSPO.

A tiny model with random weights cannot act: no episode would succeed, so RL would have nothing to learn from.
`demonstrations` plays episodes with a `NoisyPlayer`. `warm_start` trains the base on their replies before any
agent exists, so the reference is the warm-started model.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable

import torch
from torch import nn

from batch import Row, micro_batches, rows_of
from buffer import Trajectory, endings
from chat import parse_action, reply_text
from model import Base, cast, rise_and_fall
from rollout import Episode, World
from sampler import Sample
from scale import distributed


@functools.lru_cache(maxsize=2**16)
def _is_typable(style: str, action: str) -> bool:
    """Check that a reply can take the action; a template such as "search[<your query>]" must be filled in."""
    return parse_action(style, reply_text(style, action))[1]


class NoisyPlayer:
    """A player that follows the searching expert in some turns, and hesitates or errs in the others.

    Each episode is faithful with probability `faithful_share`: the expert then pursues the stated task. In
    the other episodes the expert pursues another goal of the same game, and looks around once it has reached
    that goal. A model that imitates this player learns to act, but not to follow the task.

    Each turn draws u in [0, 1):
        u < expert_share                       the searching expert's action, which uses no hidden fact
        u < expert_share + hesitation_share    the action that looks around, if it is admissible
        otherwise                              a random action that is admissible and can be typed
    """

    def __init__(
        self, world: World, expert_share: float, hesitation_share: float, faithful_share: float = 1.0
    ):
        self.world, self.dialogue = world, world.dialogue
        self.expert_share, self.hesitation_share = expert_share, hesitation_share
        self.faithful_share = faithful_share
        self.goals: dict[int, str] = {}  # by episode: the seed of its goal, "" for the stated task

    def goal(self, episode: Episode) -> str:
        """Return the seed of the episode's goal, drawn at its first turn; "" for the stated task."""
        if self.faithful_share == 1:
            return ""
        if episode.number not in self.goals:
            is_faithful = episode.rng.random() < self.faithful_share
            self.goals[episode.number] = "" if is_faithful else f"goal {episode.rng.random()}"
        return self.goals[episode.number]

    def answer(self, episodes: list[Episode]) -> list[Sample | None]:
        """Reply in every episode. None: the environment crashed when its expert was queried."""
        goals = {episode.slot: goal for episode in episodes if (goal := self.goal(episode))}
        draws = [episode.rng.random() for episode in episodes]
        typable = []
        for episode in episodes:
            typable.append([a for a in episode.view.admissible if _is_typable(self.dialogue.style, a)])
        asking = []  # only slots whose turn may need advice
        for i, episode in enumerate(episodes):
            if draws[i] < self.expert_share + self.hesitation_share or not typable[i]:
                asking.append(episode.slot)
        advice = self.world.pool.expert(asking, goals)
        replies = []
        for i, episode in enumerate(episodes):
            advised = advice.get(episode.slot, ("", ""))
            if advised is None:
                replies.append(None)
            else:
                action = self.choose(episode, draws[i], typable[i], *advised)
                replies.append(self.reply(action))
        return replies

    def choose(self, episode: Episode, draw: float, typable: list[str], expert: str, look_around: str) -> str:
        """Return the action of a turn."""
        if draw < self.expert_share:
            return expert
        hesitates = draw < self.expert_share + self.hesitation_share
        if hesitates and look_around in episode.view.admissible:
            return look_around
        return episode.rng.choice(typable) if typable else expert

    def reply(self, action: str) -> Sample:
        """Encode the reply that takes this action."""
        ids = self.dialogue.reply(action)
        return Sample(ids, [0.0] * len(ids), stopped=True)


def demonstrations(
    world: World,
    episodes: int,
    expert_share: float,
    hesitation_share: float,
    faithful_share: float = 1.0,
    games: int | None = None,
) -> list[Trajectory]:
    """Play training games with a `NoisyPlayer`. Raises ValueError if the environment lacks the expert.

    Games are drawn independently of the task stream. `games` limits them to the first games of that stream,
    for environments where a new game is expensive. Demonstration i does not depend on the number of episodes.
    """
    if not hasattr(world.pool.env, "searching_expert"):
        raise ValueError(f"{world.name} has no searching expert to play demonstrations")
    if faithful_share < 1 and not hasattr(world.pool.env, "wandering_expert"):
        raise ValueError(f"{world.name} has no expert that plays for another goal than the task")
    drawn = world.draw_games("demonstration", episodes, games)
    specs = [("train", game, f"demonstration {i}") for i, game in enumerate(drawn)]
    player = NoisyPlayer(world, expert_share, hesitation_share, faithful_share)
    return world.play(player.answer, specs)


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
    """Train the full weights of the base on the demonstrated replies. Returns the loss of every update.

    The loss is the mean cross-entropy of the replies' tokens. An update takes rows until they have at least
    `turns_per_update` turns. The order of the rows is random. A new order is drawn after each pass.
    The learning rate rises to `learning_rate` and falls (`rise_and_fall`). Every rank calls this with equal
    arguments and computes the gradient of its share of the rows.

    Raises ValueError if no demonstration is usable, FloatingPointError if the loss diverges.
    """
    assert base.peft is None and base.reference is None, "the warm start must come before the agents"
    rows = [row for trajectory in demonstrations if trajectory.usable for row in rows_of(trajectory)]
    if not rows:
        raise ValueError(
            f"no demonstration can be learned from; the episodes ended with: {endings(demonstrations)}"
        )
    dtype, autocast = base.model.dtype, base.autocast
    base.fp32()
    parameters = list(base.model.requires_grad_(True).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, fused=True)
    rng, unseen, losses = random.Random(seed), [], []
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = learning_rate * rise_and_fall(update, updates)
        chosen: list[Row] = []
        turns = 0
        while turns < turns_per_update:
            if not unseen:
                unseen = rng.sample(rows, len(rows))
            chosen.append(unseen.pop())
            turns += len(chosen[-1].spans)
        count, total = sum(row.action_tokens for row in chosen), 0.0
        local = [chosen[i] for i in distributed.local_share([len(row.input_ids) for row in chosen])]
        for batch in micro_batches(local, tokens_per_micro_batch, base.chat.pad_id, base.device):
            loss = -base.score(base.model, batch, temperature=1.0)[0].sum() / count
            loss.backward()
            total += loss.item()
        total = sum(distributed.gather([total]))
        if not math.isfinite(total):
            raise FloatingPointError(
                f"the warm start diverged at update {update + 1} of {updates}: lower its learning rate of "
                f"{learning_rate:g}"
            )
        distributed.sum_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        progress(update, total)
    cast(base.model.requires_grad_(False), dtype)
    base.autocast, base.changed = autocast, True
    return losses
