"""The environments that an agent acts in.

`Env` is the interface, and its docstrings hold for all environments. `View` is what an environment shows at
each turn. `Household`, `AlfWorld` and `WebShop` connect the engines in games/ to this interface; `make_env`
makes one by its name. chat.py turns views into prompts.

The `observation` of a view is the raw text of the environment. It is GiGPO's anchor: states with equal
observations count as one state. Step counts, notes and other parts of a prompt therefore never go into it.
Text from an environment is data: a tag inside an observation has no meaning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from games import alfworld_engine, household, webshop, webshop_player
from games.alfworld_files import alfworld_splits, alfworld_vocabulary
from games.alfworld_player import Notebook, Walkthrough, Wanderer

SEARCH = "search[<your query>]"  # an action to fill in; the wording is verl-agent's

# Words and signs without information in the texts of Household and AlfWorld. No action contains one.
SILENT_WORDS = ("a", "an", "the", "you", "see", "and", "is", "are", "it", "of", "middle", "room", "looking")
SILENT_WORDS += ("quickly", "around", "arrive", "at", "on", "in", ",", ".")


@dataclass(frozen=True)
class View:
    """One turn of an environment, as the agent sees it."""

    task: str
    task_type: str  # the column of the result tables
    observation: str  # raw text: the anchor
    admissible: tuple[str, ...]
    notes: str = ""  # a summary of the episode so far, for the short style; never part of the anchor
    done: bool = False  # the episode has ended, with or without success
    outcome: float = 0.0  # in [0, 1]
    success: bool = False  # the environment's verdict
    brief: str = ""  # a shorter observation for the short style; "" if the observation is short already
    progress: float | None = None  # `Env.progress` of this state, if recorded (dense/shaped.py); in no prompt


@dataclass(frozen=True)
class Corpus:
    """Texts of an environment with an open vocabulary. The tiny model's tokenizer is trained on them."""

    texts: tuple[str, ...]
    names: tuple[str, ...]  # each becomes one token
    size: int  # the number of all other tokens


class EnvironmentCrashed(RuntimeError):
    """Raised by an environment whose engine broke. The episode is counted, but not trained on."""


class Env(Protocol):
    """An environment that plays one episode at a time.

    Two environments share no state. The caller applies the step limit. `step` accepts any text. `reset` and
    `step` raise no other exception than EnvironmentCrashed.
    """

    name: str
    task_types: tuple[str, ...]
    step_limit: int  # the default number of turns per episode
    eval_splits: tuple[str, ...]  # the held-out splits, the default one first; "train" is the other split
    vocabulary: tuple[str, ...] | Corpus | None  # all words of the environment; None if they are unknown
    silent_words: tuple[str, ...]  # words that the tiny model does not read; optional, none by default
    look_around: str  # an action of little use in the current state, for demonstrations that hesitate
    fingerprint: str  # identifies the games: a run can only be resumed on the same games

    def size(self, split: str) -> int:
        """Return the number of games in "train" or in one of `eval_splits`."""

    def reset(self, split: str, index: int) -> View:
        """Start a game. Equal (split, index) mean the same game in every process."""

    def step(self, action: str) -> View:
        """Take an action. An action that is not admissible gets an answer and changes no state."""

    def searching_expert(self) -> str:
        """Return a good action for the current state, for demonstrations. This method is optional."""

    def wandering_expert(self, seed: str) -> str:
        """Return a good action for another goal than the task, for demonstrations. This method is optional.

        The seed draws the goal. Once it is reached, the action looks around or pursues another goal.
        """

    def progress(self) -> float:
        """Return how much of the task is done, in [0, 1], from hidden state too. This method is optional."""


def one_line(text: str) -> str:
    """Replace each run of whitespace by one blank, and strip the ends."""
    return " ".join(text.split())


class Household:
    """The embedded environment, games/household.py: pure Python, microseconds per step."""

    name = "household"
    task_types = household.TASK_TYPES
    step_limit = household.STEP_LIMIT
    eval_splits = ("eval",)
    vocabulary = household.VOCABULARY
    silent_words = SILENT_WORDS
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
        """Return the best action, with full knowledge of the game."""
        return self._room.advice(self._room.contents)

    def searching_expert(self) -> str:
        """Return a good action, with knowledge only of the places searched so far."""
        return self._room.advice(self._room.searched)

    def wandering_expert(self, seed: str) -> str:
        """Return a good action for the drawn goal (`household.draw_goal`). Look around once it is reached."""
        room = self._room.pursuing(household.draw_goal(self._room.game, seed))
        return self.look_around if room.won else room.advice(room.searched)

    def progress(self) -> float:
        """Return the share of the task's subgoals that are reached (`household.Room.progress`)."""
        return self._room.progress()

    def _show(self, observation: str) -> View:
        room = self._room
        return View(
            task=room.game.sentence,
            task_type=room.game.task_type,
            observation=observation,
            admissible=room.admissible,
            notes=room.notes(),
            done=room.won,
            outcome=float(room.won),
            success=room.won,
        )


class AlfWorld:
    """ALFWorld's text games, from the files that `alfworld-download` fetches.

    A game's index is its place in the sorted list of the split's files. Success is the engine's `won`.
    """

    name = "alfworld"
    columns = {  # task type in a game's path -> column of the paper's Table 1
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
    silent_words = SILENT_WORDS
    look_around = "look"

    def __init__(self, data: str | None = None):
        """data: the folder that contains json_2.1.1; None: $ALFWORLD_DATA, or alfworld-download's default.

        Raises ValueError if games are missing and ImportError if ALFWorld is not installed.
        """
        alfworld_engine.check_installed()
        self.games = dict(alfworld_splits(data))
        self._game = None

    @property
    def fingerprint(self) -> str:
        """A digest of the names and sizes of all game files."""
        games = [path for games in self.games.values() for path in games]
        return _digest(f"{'/'.join(path.parts[-4:])} {path.stat().st_size}" for path in games)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every word of the training games."""
        return alfworld_vocabulary(self.games["train"])

    def size(self, split: str) -> int:
        return len(self.games[split])

    def reset(self, split: str, index: int) -> View:
        path = self.games[split][index]
        if self._game:
            self._game.close()
        with _crash_if_damaged(path):
            self._game = alfworld_engine.Game(path)
            state = self._game.reset()
        # The text is a banner, the observation and the task, with an empty line between them
        opening, _, task = state.text.strip().rpartition("\n\nYour task is to: ")
        observation = opening.rpartition("\n\n")[2]
        self._task = task.removesuffix(".")
        self._notes = Notebook(self._task, state.admissible)
        rng = random.Random(f"detours {path.parent.name}")
        self._walkthrough = Walkthrough(self._game.walkthrough, self._notes.places, rng)
        self._wanderer = None  # made by the first call of `wandering_expert`
        return self._show(observation, state)

    def step(self, action: str) -> View:
        with _crash_if_damaged(self._game.path):
            state = self._game.step(action)
        self._walkthrough.heard(action, state.text)
        return self._show(state.text, state)

    def searching_expert(self) -> str:
        """Return the next action of the stored solution, with detours and repairs (`Walkthrough`).

        Raises EnvironmentCrashed if the game's file has no solution.
        """
        if not self._walkthrough.plan:
            raise EnvironmentCrashed(f"{self._game.path}: the game has no walkthrough to demonstrate")
        return self._walkthrough.next(self._notes, self._admissible)

    def wandering_expert(self, seed: str) -> str:
        """Return the next action of a player with goals of its own (`Wanderer`)."""
        self._wanderer = self._wanderer or Wanderer(self._notes.places, seed)
        return self._wanderer.next(self._notes, self._admissible)

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
def _crash_if_damaged(path: Path) -> Iterator[None]:
    """Raise the errors of a damaged game file as EnvironmentCrashed, with the file's path."""
    try:
        yield
    except (ValueError, OSError, RecursionError) as error:  # RecursionError: a grammar that contains itself
        raise EnvironmentCrashed(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error


class WebShop:
    """WebShop's goals in the official order and splits: 6,910 synthetic goals for the small product set.

    The outcome in the held-out splits is the score. In training it depends on `reward`: with "score" it is
    the score, and with "success" it is 1 for a full score, else 0, as in the paper's code base. A training
    goal with the words of a held-out goal is never played in training (`webshop_substitutes`).
    """

    name = "webshop"
    task_types = ("fashion", "beauty", "garden", "electronics", "grocery")  # categories of the product sought
    step_limit = 15
    eval_splits = ("validation", "test")
    ranges = {"test": slice(0, 500), "validation": slice(500, 1500), "train": slice(1500, None)}

    def __init__(
        self,
        data: str | None = None,
        goals: str = "synthetic",
        reward: str = "success",
        products: str | None = None,
    ):
        """data: the folder of the files; None: $WEBSHOP_DATA. goals: "synthetic" or "human".

        reward: "success" or "score". products: "small" or "all"; None: the product set in the folder. Raises
        ValueError if a file is missing, or if there are both product sets and `products` is None.
        """
        self.shop = load_shop(data, goals, products)
        self.substitutes = webshop_substitutes(self.shop)
        self.reward = reward

    @property
    def fingerprint(self) -> str:
        """A digest of the held-out goals. It depends on all goals, as they are shuffled together."""
        held_out = self.shop.goals[: self.ranges["train"].start]
        return _digest([repr(self.shop), *(f"{goal.asin} {goal.instruction_text}" for goal in held_out)])

    @property
    def vocabulary(self) -> Corpus:
        """Training texts for the tiny model's tokenizer."""
        return webshop_corpus(self.shop)

    def size(self, split: str) -> int:
        return len(range(len(self.shop.goals))[self.ranges[split]])

    def reset(self, split: str, index: int) -> View:
        self._split = split
        goal = self.ranges[split].start + index
        self._session = self.shop.session(self.substitutes.get(goal, goal))
        self._category = self.shop.products[self._session.goal.asin].category
        return self._show(self._session.reset())

    def step(self, action: str) -> View:
        """Take an action.

        Names of buttons can contain runs of blanks, which an action cannot. `click[8 oz | 1 l]` therefore
        also clicks a button "8 oz  |  1 l".
        """
        clicks = [f"click[{name}]" for name in self._session.page.clickables]
        exact = {one_line(click): click for click in clicks}
        return self._show(self._session.step(exact.get(action, action)))

    def searching_expert(self) -> str:
        """Return the action of the scripted customer."""
        return webshop_player.advice(self._session.page)

    def wandering_expert(self, seed: str) -> str:
        """Return the action of the scripted customer who has read another training goal."""
        goal = random.Random(seed).choice(self.shop.goals[self.ranges["train"]])
        return webshop_player.advice(replace(self._session.page, instruction=goal.instruction_text))

    def progress(self) -> float:
        """Return the score of a purchase; before it, half of what the open product would score, else 0."""
        return self._session.progress()

    @property
    def look_around(self) -> str:
        """A hasty action, for example buying before all options are chosen."""
        return webshop_player.haste(self._session.page)

    def _show(self, turn: webshop.Turn) -> View:
        """Show the part of a page after the instruction. The last page is hidden: it contains the reward."""
        page = turn.page
        success = turn.reward == 1.0
        outcome = float(success) if self._split == "train" and self.reward == "success" else turn.reward
        observation, brief, admissible = "", "", []
        if not turn.done:
            observation = page.text.partition(f"{page.instruction.strip()} [SEP] ")[2]
            brief = webshop_player.brief(page)
            if page.kind == "index":
                admissible.append(SEARCH)
            admissible += [one_line(f"click[{name}]") for name in page.clickables if name != "search"]
        return View(
            task=page.instruction,
            task_type=self._category,
            observation=observation,
            admissible=tuple(admissible),
            notes="; ".join(f"{name} {value}" for name, value in page.options.items()),
            done=turn.done,
            outcome=outcome,
            success=success,
            brief=brief,
        )


@functools.lru_cache
def load_shop(data: str | None, goals: str, products: str | None) -> webshop.WebShop:
    """Load a shop, once per process. Raises ValueError if a file is missing or there are too few goals."""
    data = data or os.environ.get("WEBSHOP_DATA")
    if not data:
        files = ", ".join((*webshop.SETS["small"], webshop.COLORS))
        raise ValueError(
            f"WebShop's files are missing: give the folder of {files} with --webshop_data, or in "
            f"$WEBSHOP_DATA; they come from {webshop.SOURCE}"
        )
    try:
        shop = webshop.WebShop(data, goals=goals, product_set=products)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from error
    first = WebShop.ranges["train"].start
    if len(shop.goals) <= first:
        raise ValueError(
            f"{data} has {len(shop.goals)} {goals} goals; training begins at {first}, after the held-out "
            "goals: give the full product set, or the other kind of goals"
        )
    return shop


@functools.lru_cache
def webshop_substitutes(shop: webshop.WebShop) -> dict[int, int]:
    """Map each training goal with the words of a held-out goal to the goal that training plays in its place.

    That is the next training goal with words of its own, so every other goal keeps its index. Warns with the
    number of such goals. Raises ValueError if no training goal has words of its own.
    """
    first = WebShop.ranges["train"].start
    held_out = {goal.instruction_text for goal in shop.goals[:first]}
    training = range(first, len(shop.goals))
    repeated = {i for i in training if shop.goals[i].instruction_text in held_out}
    if len(repeated) == len(training):
        raise ValueError("every WebShop training goal equals a held-out goal: give the full product set")
    substitutes = {}
    for goal in sorted(repeated):
        place = goal
        while place in repeated:
            place = place + 1 if place < training[-1] else first
        substitutes[goal] = place
    if substitutes:
        warnings.warn(
            f"{len(substitutes)} of {len(training):,} WebShop training goals equal a held-out goal word for "
            "word; they are left out of training, and the next goals are played in their place",
            stacklevel=2,
        )
    return substitutes


@functools.lru_cache
def webshop_corpus(shop: webshop.WebShop) -> Corpus:
    """Collect training goals, titles, options and actions as texts, and ASINs as names."""
    first, products = WebShop.ranges["train"].start, list(shop.products.values())[:5000]
    goals = {goal.instruction_text for goal in shop.goals[first : first + 20_000]}
    options = set()
    for product in products:
        for name, values in product.options.items():
            options.update(f"{name}: {value}" for value in values)
    buttons = ["back to search", "next >", "< prev", "description", "features", "reviews", "buy now"]
    actions = ["search[]", "page 1; item; search bar; ..."] + [f"click[{name}]" for name in buttons]
    texts = sorted(goals) + [product.title for product in products] + sorted(options) + actions * 100
    return Corpus(tuple(texts), tuple(product.asin.lower() for product in products), size=4096)


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def env_class(name: str) -> type[Env]:
    """Return the class of an environment. Facts that need no data, such as step_limit, are read from it."""
    classes = {"household": Household, "alfworld": AlfWorld, "webshop": WebShop}
    if name not in classes:
        raise ValueError(f"environment {name!r} is unknown: this version has {', '.join(classes)}")
    return classes[name]


def make_env(name: str, **options) -> Env:
    """Make an environment by name. The options are the arguments of its class."""
    return env_class(name)(**options)
