"""What an agent acts in and how it is asked: `View`, `Env`, the prompts, the parser, the three environments.

An environment hands out a `View` at each turn. Its `observation` is the raw text, GiGPO's anchor: states with
equal text are one state, so prompts, step counts and notes never go into it. Text from an environment or a
model is data: a tag inside an observation means nothing here.

Two prompt styles: "think" for real language models (verl-agent's conventions: reasoning in <think></think>,
one action in <action></action>, the admissible actions listed) and "short" for the tiny model (the reply is
the action; notes say what happened so far, and long pages are cut). Two contexts: window (a fresh message
each turn, the last turns in it as text) and full (a chat that only grows).

`Household`, `AlfWorld` and `WebShop` show their engines through a `View`; `make_env` makes them by name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from games import alfworld_engine, household, webshop, webshop_player
from games.alfworld_files import alfworld_games, alfworld_vocabulary
from games.alfworld_player import Notebook, Walkthrough


@dataclass(frozen=True)
class View:
    """What one turn shows. `success` is the environment's verdict, not `done`; `outcome` is in [0, 1]."""

    task: str
    task_type: str  # a column of the result tables
    observation: str  # raw text: the anchor
    admissible: tuple[str, ...]
    notes: str = ""  # what was seen and done so far, for the short style; never part of the anchor
    done: bool = False
    outcome: float = 0.0
    success: bool = False
    brief: str = ""  # the observation in fewer words, for the short style; "" where there is no need


@dataclass(frozen=True)
class Corpus:
    """What an environment of open vocabulary says: what the tiny model's tokenizer is trained on."""

    texts: tuple[str, ...]
    names: tuple[str, ...]  # one token each
    size: int  # number of the other tokens


class EnvironmentCrashed(RuntimeError):
    """Raised by an adapter whose engine broke: the episode is then kept out of training and counted."""


class Env(Protocol):
    """One episode at a time; two environments share nothing. The step limit is the caller's to apply.

    `reset` and `step` may raise EnvironmentCrashed, and nothing else for any text they are given.
    """

    name: str
    task_types: tuple[str, ...]
    step_limit: int  # default turns per episode
    eval_splits: tuple[str, ...]  # its held-out splits, the usual one first; the other is "train"
    vocabulary: tuple[str, ...] | Corpus | None  # every word it says or accepts; None where that is unknown
    look_around: str  # at this state, the action of one who hesitates or is hasty: of no use
    fingerprint: str  # of its games: a run goes on with the same alone

    def size(self, split: str) -> int:
        """The number of games in "train" or one of `eval_splits`."""

    def reset(self, split: str, index: int) -> View:
        """Begin that game; the same (split, index) is the same game in every process."""

    def step(self, action: str) -> View:
        """Act. What is not admissible is answered by the environment and changes nothing."""

    def searching_expert(self) -> str:
        """A good action from the present state, for demonstrations. An environment may be without it."""


SEARCH = "search[<your query>]"  # a template: verl-agent's


def _one_line(text: str) -> str:
    return " ".join(text.split())


class Household:
    """The embedded environment: household.py, seen through a `View`. Pure Python, microseconds a step."""

    name = "household"
    task_types = household.TASK_TYPES
    step_limit = household.STEP_LIMIT
    eval_splits = ("eval",)
    vocabulary = household.VOCABULARY
    look_around = "look"
    fingerprint = str(household.SIZES)

    def size(self, split: str) -> int:
        return household.SIZES[split]

    def reset(self, split: str, index: int) -> View:
        self._room = household.Room(*household.make_game(split, index))
        return self._show(self._room.opening)

    def step(self, action: str) -> View:
        return self._show(self._room.act(action))

    def expert(self) -> str:
        return self._room.advice(self._room.contents)

    def searching_expert(self) -> str:
        return self._room.advice(self._room.searched)

    def _show(self, observation: str) -> View:
        room = self._room
        won = room.won
        return View(
            task=room.game.sentence,
            task_type=room.game.task_type,
            observation=observation,
            admissible=room.admissible,
            notes=room.notes(),
            done=won,
            outcome=float(won),
            success=won,
        )


class AlfWorld:
    """ALFWorld's text games, from the files that `alfworld-download` fetches.

    A game's number is its place in the sorted list of the split's files. Success is the engine's `won`.
    """

    name = "alfworld"
    columns = {  # of the paper's Table 1, by what a game's path says
        "pick_and_place": "Pick",
        "look_at_obj_in_light": "Look",
        "pick_clean_then_place_in_recep": "Clean",
        "pick_heat_then_place_in_recep": "Heat",
        "pick_cool_then_place_in_recep": "Cool",
        "pick_two_obj_and_place": "Pick2",
    }
    task_types = tuple(columns.values())
    step_limit = 50
    eval_splits = ("valid_seen", "valid_unseen")
    look_around = "look"

    def __init__(self, data: str | None = None):
        """`data`: the folder that holds json_2.1.1; None: $ALFWORLD_DATA, or where alfworld-download puts it.
        ValueError where there is none, ImportError where ALFWorld is not installed: they say what to do."""
        alfworld_engine.check_installed()
        self.games = {split: alfworld_games(data, split) for split in ("train", *self.eval_splits)}
        self._game = None

    @property
    def fingerprint(self) -> str:
        """Of the files' names and sizes."""
        games = [path for games in self.games.values() for path in games]
        return _digest(f"{'/'.join(path.parts[-4:])} {path.stat().st_size}" for path in games)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return alfworld_vocabulary(self.games["train"])

    def size(self, split: str) -> int:
        return len(self.games[split])

    def reset(self, split: str, index: int) -> View:
        path = self.games[split][index]
        if self._game:
            self._game.close()
        with _damage_is_a_crash(path):
            self._game = alfworld_engine.Game(path)
            state = self._game.reset()
        opening, _, task = state.text.strip().rpartition("\n\nYour task is to: ")
        observation, self._task = opening.rpartition("\n\n")[2], task.removesuffix(".")
        self._notes = Notebook(self._task, state.admissible)
        self._walkthrough = Walkthrough(
            self._game.walkthrough, self._notes.places, random.Random(f"detours {path.parent.name}")
        )
        return self._show(observation, state)

    def step(self, action: str) -> View:
        with _damage_is_a_crash(self._game.path):
            state = self._game.step(action)
        self._walkthrough.heard(action, state.text)
        return self._show(state.text, state)

    def searching_expert(self) -> str:
        if not self._walkthrough.plan:
            raise EnvironmentCrashed(f"{self._game.path}: the game has no walkthrough to be shown")
        return self._walkthrough.next(self._notes, self._admissible)

    def _show(self, observation: str, state: alfworld_engine.State) -> View:
        self._notes.read(observation, state.admissible)
        self._admissible = [command for command in state.admissible if command != "help"]
        return View(
            task=self._task,
            task_type=self.columns[self._game.task_type],
            observation=observation,
            admissible=tuple(self._admissible),
            notes=self._notes.text(),
            done=state.done,
            outcome=float(state.won),
            success=state.won,
        )


@contextlib.contextmanager
def _damage_is_a_crash(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, RecursionError) as error:  # the last: its grammar goes round in circles
        raise EnvironmentCrashed(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error


class WebShop:
    """WebShop's goals (6,910 synthetic ones over the 1,000 products), in the official split and order.

    A panel's outcome is the score; in training it is what `reward` says: 1 for a full score and else 0
    ("success", as in the paper's code base), or the score.
    """

    name = "webshop"
    task_types = ("fashion", "beauty", "garden", "electronics", "grocery")  # of the product sought
    step_limit = 15
    ranges = {"test": (0, 500), "validation": (500, 1500), "train": (1500, None)}  # of the goals
    eval_splits = ("validation", "test")

    def __init__(
        self,
        data: str | None = None,
        goals: str = "synthetic",
        reward: str = "success",
        products: str | None = None,
    ):
        """`data`: the folder of the files; None: $WEBSHOP_DATA. `products`: "small" or "all"; None: what is
        there. Raises ValueError if something is missing, or both are there and neither is named."""
        self.shop, self.reward = webshop_of(data, goals, products), reward

    @property
    def fingerprint(self) -> str:
        """Of the held-out goals: their order is drawn from all."""
        held_out = (self.shop.goals[i] for i in range(min(1500, len(self.shop.goals))))
        return _digest([repr(self.shop), *(f"{goal.asin} {goal.instruction_text}" for goal in held_out)])

    @property
    def vocabulary(self) -> Corpus:
        return webshop_corpus(self.shop)

    def size(self, split: str) -> int:
        return len(range(len(self.shop.goals))[slice(*self.ranges[split])])

    def reset(self, split: str, index: int) -> View:
        self._split = split
        self._session = self.shop.session(self.ranges[split][0] + index)
        self._sought = self.shop.products[self._session.goal.asin].category
        return self._show(self._session.reset())

    def step(self, action: str) -> View:
        """A name with a run of blanks in it is clicked with one blank: replies come with such alone."""
        named = {_one_line(f"click[{name}]"): f"click[{name}]" for name in self._session.page.clickables}
        return self._show(self._session.step(named.get(action, action)))

    def searching_expert(self) -> str:
        return webshop_player.advice(self._session.page)

    @property
    def look_around(self) -> str:
        return webshop_player.haste(self._session.page)

    def _show(self, turn: webshop.Turn) -> View:
        """What is shown is the page after the instruction; the last page, which tells the reward, is not."""
        success = turn.reward == 1.0
        page, actions = turn.page, turn.available_actions
        commands = [_one_line(f"click[{name}]") for name in actions["clickables"] if name != "search"]
        if actions["has_search_bar"]:
            commands.insert(0, SEARCH)
        return View(
            task=page.instruction,
            task_type=self._sought,
            observation="" if turn.done else turn.text.partition(f"{page.instruction.strip()} [SEP] ")[2],
            admissible=() if turn.done else tuple(commands),
            notes="; ".join(f"{name} {value}" for name, value in page.options.items()),
            done=turn.done,
            outcome=float(success) if self._split == "train" and self.reward == "success" else turn.reward,
            success=success,
            brief="" if turn.done else webshop_player.brief(page),
        )


@functools.lru_cache
def webshop_of(data: str | None, goals: str, products: str | None) -> webshop.WebShop:
    """The shop, loaded once a process. Raises ValueError if something is missing."""
    data = data or os.environ.get("WEBSHOP_DATA")
    if not data:
        files = ", ".join((*webshop.SETS["small"], webshop.COLORS))
        raise ValueError(
            f"where are WebShop's files? give the folder of {files} with --webshop_data, or in "
            f"$WEBSHOP_DATA; they come from {webshop.SOURCE}"
        )
    try:
        shop = webshop.WebShop(data, goals=goals, product_set=products)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from error
    first = WebShop.ranges["train"][0]
    if len(shop.goals) <= first:
        raise ValueError(
            f"{data} has {len(shop.goals)} {goals} goals; training begins at {first}, after those of test "
            "and validation: give the full product set, or the other kind of goals"
        )
    return shop


@functools.lru_cache
def webshop_corpus(shop: webshop.WebShop) -> Corpus:
    """For the tiny model's tokenizer: training goals, titles, options, actions; ASINs are names."""
    first, products = WebShop.ranges["train"][0], list(shop.products.values())[:5000]
    goals = {goal.instruction_text for goal in shop.goals[first : first + 20_000]}
    groups = [group for product in products for group in product.options.items()]
    options = {f"{name}: {value}" for name, values in groups for value in values}
    buttons = ["back to search", "next >", "< prev", "description", "features", "reviews", "buy now"]
    actions = ["search[]", "page 1; item; search bar; ..."] + [f"click[{name}]" for name in buttons]
    texts = sorted(goals) + [product.title for product in products] + sorted(options) + actions * 100
    return Corpus(tuple(texts), tuple(product.asin.lower() for product in products), size=4096)


def make_env(name: str, **options) -> Env:
    """The environment of that name; the options are those of its class."""
    return env_class(name)(**options)


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def env_class(name: str) -> type[Env]:
    """What does not depend on its data can be asked of the class."""
    classes = {"household": Household, "alfworld": AlfWorld, "webshop": WebShop}
    if name not in classes:
        raise ValueError(f"environment {name!r} is unknown: this version knows {', '.join(classes)}")
    return classes[name]
