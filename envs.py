"""What an agent acts in and how it is asked: `View`, `Env`, the prompts, the parser, `Household`, `make_env`.

An environment hands out a `View` at each turn. Its `observation` is the raw text, GiGPO's anchor: states with
equal text are one state, so prompts, step counts and notes never go into it. Text from an environment or a
model is data: a tag inside an observation means nothing here.

Two prompt styles: "think" for real language models (verl-agent's conventions: reasoning in <think></think>,
one action in <action></action>, the admissible actions listed) and "short" for the tiny model (the reply is
the action). Two contexts: window (a fresh message each turn, the last turns in it as text) and full (a chat
that only grows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import household


@dataclass(frozen=True)
class View:
    """What one turn shows. `success` is the environment's verdict, not `done`; `outcome` is in [0, 1]."""

    task: str
    task_type: str  # a column of the result tables
    observation: str  # raw text: the anchor
    admissible: tuple[str, ...]
    notes: str = ""  # what the environment says about the past; goes into prompts, never into the anchor
    done: bool = False
    outcome: float = 0.0
    success: bool = False


class EnvironmentCrashed(RuntimeError):
    """Raised by an adapter whose engine broke: the episode is then kept out of training and counted."""


class Env(Protocol):
    """One episode at a time; two environments share nothing. The step limit is the caller's to apply.

    `reset` and `step` may raise EnvironmentCrashed, and nothing else for any text they are given.
    """

    name: str
    task_types: tuple[str, ...]
    step_limit: int  # default turns per episode
    vocabulary: tuple[str, ...] | None  # every word it says or accepts; None where that is open
    look_around: str  # the action of one who hesitates: it changes nothing

    def size(self, split: str) -> int:
        """The number of games in "train" or "eval"."""

    def reset(self, split: str, index: int) -> View:
        """Begin that game; the same (split, index) is the same game in every process."""

    def step(self, action: str) -> View:
        """Act. What is not admissible is answered by the environment and changes nothing."""

    def expert(self) -> str:
        """A good action from the present state, by an expert that knows all that is hidden."""

    def searching_expert(self) -> str:
        """The same by an expert that knows only what this episode has shown."""


# Prompts. `turn` counts the actions already taken. `history` is the last (observation, action) pairs, oldest
# first, cut by the caller, who cuts more if a prompt is too long; task, observation, admissible actions stay.

SCENES = {"household": "a household that is described to you in text"}


def reply_text(style: str, action: str) -> str:
    """What a demonstration replies to take this action; `parse_action` gives the action back."""
    if style == "short":
        return action
    return f"<think>I take the next step towards the goal.</think><action>{action}</action>"


FORMAT = (
    "Think step by step about where you are and what is still to be done, inside <think></think>. "
    "Then choose one admissible action and give it inside <action></action>, once, after your reasoning. "
    "For example:\n" + reply_text("think", "your action")
)


def _admissible(view: View) -> str:
    return "Admissible actions: " + ", ".join(f"'{action}'" for action in view.admissible) + "."


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
        return " | ".join([view.task, view.notes, last, view.observation])
    parts = [f"You act in a world that is described to you in text. Your task is to: {view.task}"]
    if history:
        pairs = [f"[Observation: {observation}]\n[Action: {action}]" for observation, action in history]
        steps = "1 step" if turn == 1 else f"{turn} steps"
        parts.append(f"You have taken {steps} so far. The last {len(history)}:\n" + "\n".join(pairs))
    if view.notes:
        parts.append(f"Your notes: {view.notes}.")
    parts.append(f"You are at step {turn + 1}. You observe: {view.observation}\n{_admissible(view)}")
    parts.append(FORMAT)
    return "\n\n".join(parts)


def first_message(style: str, view: View) -> str:
    """The first user message of a full context."""
    if style == "short":
        return " | ".join([view.task, view.notes, view.observation])
    return f"Your task is to: {view.task}\n\nYou observe: {view.observation}\n{_admissible(view)}"


def next_message(style: str, view: View, turn: int) -> str:
    """Every later user message of a full context: what is new, and nothing that the chat already holds."""
    if style == "short":
        return f"{view.notes} | {view.observation}"
    return f"You are at step {turn + 1}. You observe: {view.observation}\n{_admissible(view)}"


def parse_action(style: str, reply: str) -> tuple[str, bool]:
    """(action, valid): the action lower-cased, its whitespace normalised; ("", False) for all else.

    "think": exactly one closed <action></action> block with text in it, after the reasoning. Missing,
    unclosed, empty or several blocks are invalid, and so is one that is quoted inside the reasoning. "short":
    the whole reply. No action holds an angle bracket. The reasoning may be in any language, and the action
    need not be admissible: that is the environment's to answer.
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
    action = " ".join(text.split())
    if not action or "<" in action or ">" in action:
        return "", False
    return action, True


class Household:
    """The embedded environment: household.py, seen through a `View`. Pure Python, microseconds a step."""

    name = "household"
    task_types = household.TASK_TYPES
    step_limit = household.STEP_LIMIT
    vocabulary = household.VOCABULARY
    look_around = "look"

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


def make_env(name: str, data: str | None = None) -> Env:
    """The environment of that name; `data` is the folder of its files, for those that have any."""
    makers = {"household": lambda: Household()}
    if name not in makers:
        raise ValueError(f"environment {name!r} is unknown: this version knows {', '.join(makers)}")
    return makers[name]()
