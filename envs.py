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
import json
import os
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import alfworld_engine
import household
import webshop
import webshop_player
from alfworld_player import Notebook, Walkthrough


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


# Prompts. `turn` counts the actions already taken. `history` is the last (observation, action) pairs, oldest
# first, cut by the caller, who cuts more if a prompt is too long; task, observation, admissible actions stay.

HOME = "a household that is described to you in text"
SCENES = {"household": HOME, "alfworld": HOME, "webshop": "an online shop that is described to you in text"}


def reply_text(style: str, action: str) -> str:
    """What a demonstration replies to take this action; `parse_action` gives the action back."""
    if style == "short":
        return action
    return f"<think>I take the next step towards the goal.</think><action>{action}</action>"


FORMAT = (
    "Think step by step about where you are and what is still to be done, inside <think></think>. "
    "Then choose one admissible action and give it inside <action></action>, once, after your reasoning. "
    "That is:\n<think>your reasoning</think><action>your action</action>"
)
SEARCH = "search[<your query>]"  # a template: verl-agent's


def _admissible(view: View) -> str:
    hint = " In place of <your query> write what you search for." if SEARCH in view.admissible else ""
    return "Admissible actions: " + ", ".join(f"'{action}'" for action in view.admissible) + "." + hint


def system_message(style: str, env_name: str) -> str | None:
    """What opens a full context; None where the style has none."""
    if style == "short":
        return None
    scene = SCENES.get(env_name, f"{env_name}, a world that is described to you in text")
    return f"You act in {scene}, one action at a time, until the task is done. {FORMAT}"


def window_message(style: str, view: View, history: list[tuple[str, str]], turn: int) -> str:
    """The one user message of a turn in the window context."""
    if style == "short":
        last = "; ".join(action for _, action in history)
        return " | ".join([view.task, view.notes, last, view.brief or view.observation])
    parts = [f"You act in a world that is described to you in text. Your task is to: {view.task}"]
    if history:
        pairs = [f"[Observation: {observation}]\n[Action: {action}]" for observation, action in history]
        steps = "1 step" if turn == 1 else f"{turn} steps"
        parts.append(f"You have taken {steps} so far. The last {len(history)}:\n" + "\n".join(pairs))
    parts.append(f"You are at step {turn + 1}. You observe: {view.observation}\n{_admissible(view)}")
    parts.append(FORMAT)
    return "\n\n".join(parts)


def first_message(style: str, view: View) -> str:
    """The first user message of a full context."""
    if style == "short":
        return " | ".join([view.task, view.notes, view.brief or view.observation])
    return f"Your task is to: {view.task}\n\nYou observe: {view.observation}\n{_admissible(view)}"


def next_message(style: str, view: View, turn: int) -> str:
    """Every later user message of a full context: what is new, and nothing that the chat already holds."""
    if style == "short":
        return f"{view.notes} | {view.brief or view.observation}"
    return f"You are at step {turn + 1}. You observe: {view.observation}\n{_admissible(view)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def parse_action(style: str, reply: str) -> tuple[str, bool]:
    """(action, valid): the action lower-cased, its whitespace normalised; ("", False) for all else.

    "think": exactly one closed <action></action> block with text in it, after the reasoning. Missing,
    unclosed, empty or several blocks are invalid, and so is one that is quoted inside the reasoning. "short":
    the whole reply. No action holds the beginning of a tag or of a template, a "<" before a letter or
    most signs; "click[< prev]" and "search[laptop <$500]" are actions. The reasoning may be in any language,
    and the action need not be admissible: that is the environment's to answer.
    """
    text = reply.lower()
    if style != "short":
        if text.count("<action>") != 1 or text.count("</action>") != 1:
            return "", False
        before, _, text = text.partition("<action>")
        text, closed, after = text.partition("</action>")
        still_thinking = before.rfind("<think>") > before.rfind("</think>") or "think>" in after
        if not closed or still_thinking:
            return "", False
    action = _one_line(text)
    if not action or re.search(r"<[^\s\d$€£=.+-]", action):
        return "", False
    return action, True


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


ALFWORLD_WORDS = (
    "nothing happens inventory look examine open close closed take move clean heat cool use slice sliced "
    "from to with using pick up turn on off facing next carrying not anything this there's special about "
    "normal hot cold don't any switch search seen holding no action | ; : , ."
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


@functools.lru_cache
def alfworld_games(data: str | None, split: str) -> tuple[Path, ...]:
    """The split's game files, sorted: those the official loader plays. A warning names those that are damaged
    and left out, as far as their beginnings and ends tell. ValueError if there are none, or none is whole."""
    folder = Path(data or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser()
    folder = folder if folder.name == "json_2.1.1" else folder / "json_2.1.1"
    games = sorted((folder / split).glob("*/*/game.tw-pddl"))
    left_out = ("movable", "Sliced")  # kinds of task that the text games do not support
    games = [path for path in games if not any(word in path.parent.parent.name for word in left_out)]
    if not games:
        raise ValueError(
            f"no ALFWorld games in {folder / split}; fetch them with `alfworld-download` (of the package "
            "alfworld, see requirements/alfworld.txt) and give the folder that holds json_2.1.1 with "
            "--alfworld_data, or in $ALFWORLD_DATA"
        )
    solvable = {path: _solvable(path) for path in games}
    _tell_damaged([path for path in games if solvable[path] is None], games, "they are left out")
    return tuple(path for path in games if solvable[path])


def _solvable(path: Path) -> bool | None:
    """What the file says of itself, in its last lines; None where it is no whole game file."""
    try:
        with open(path, "rb") as file:
            first = file.read(1)
            file.seek(max(0, path.stat().st_size - 4096))
            last = file.read().rstrip()
    except OSError:
        return None
    return b'"solvable": false' not in last if first == b"{" and last.endswith(b"}") else None


def _tell_damaged(damaged: list[Path], games: Sequence[Path], so: str) -> None:
    """One warning for all; ValueError if these are all the games."""
    if damaged:
        names = ", ".join(map(str, damaged[:3])) + (", ..." if len(damaged) > 3 else "")
        told = f"{len(damaged)} of {len(games)} ALFWorld game files cannot be read: {names}"
        remedy = "`alfworld-download -f` unpacks them again"
        if len(damaged) == len(games):
            raise ValueError(f"{told}; {remedy}")
        warnings.warn(f"{told}; {so}; {remedy}", stacklevel=3)


@functools.lru_cache
def alfworld_vocabulary(games: tuple[Path, ...]) -> tuple[str, ...]:
    """Every word that these games and the prompts about them say; "mug 1" is one, as are all that occur.

    A warning names the files that are damaged; ValueError if all are.
    """
    words, most, damaged = dict.fromkeys(ALFWORLD_WORDS.split()), {}, []
    for path in games:
        try:
            game = json.loads(path.read_text())
            listed = game["pddl_problem"].partition("(:objects")[2].partition("(:init")[0]
            task = re.search(r"Your task is to: ([^\"]*)", game["grammar"])[1]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            damaged.append(path)
            continue
        # Mug_bar__plus_01_..._bar_... is a thing, Sink_bar__..._bar_SinkBasin one that belongs to another
        names = re.findall(r"([A-Za-z]+)_bar_\S*?(?:_bar_([A-Z][A-Za-z]+))?(?=\s)", listed)
        for kind, count in Counter((part or whole).lower() for whole, part in names).items():
            most[kind] = max(most.get(kind, 0), count)
        words |= dict.fromkeys(task.split())
    _tell_damaged(damaged, games, "the tiny model does not learn their words")
    most.pop("loc", None)  # where one can stand: no text says it
    things = [f"{kind} {number}" for kind, count in most.items() for number in range(1, count + 1)]
    return (*words, "go to", *most, *things)


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
