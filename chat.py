"""Text to token ids and back: the chat format, the prompts of both styles, the action parser."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from buffer import Step
from envs import SEARCH, View, one_line

TODAY = "26 Jul 2024"  # what chat templates are told: prompts must not depend on the day of the run


class Chat:
    """A tokenizer and its chat template as an append-only format: what a turn adds changes nothing before it.

    The template is rendered once, with sentinels for the texts; what lies between them is the glue. Texts are
    then encoded on their own, so that control tokens written inside a text stay plain text, and sampled token
    ids are never decoded and encoded again.
    """

    def __init__(self, tokenizer, stop_ids: Iterable[int] = ()):
        from jinja2 import TemplateError

        self.tokenizer = tokenizer
        user, system, reply, later = "RSPOuserRSPO", "RSPOsystemRSPO", "RSPOreplyRSPO", "RSPOlaterRSPO"
        turn = {"role": "user", "content": user}
        start, generate = self._render([turn]).split(user)
        answered = [turn, {"role": "assistant", "content": reply}, {"role": "user", "content": later}]
        between = self._render(answered).split(reply)[1].split(later)[0]
        self._start, self._generate, self._between = map(self._glue, (start, generate, between))
        try:
            opening = self._render([{"role": "system", "content": system}, turn]).split(user)[0]
        except TemplateError:  # the template refuses the role
            opening = ""
        self._opening = list(map(self._glue, opening.split(system))) if system in opening else None
        end = self._between[0] if self._between else None
        if end not in tokenizer.all_special_ids and end not in tokenizer.added_tokens_decoder:
            raise ValueError(
                "the chat template does not close an assistant turn with a control token: "
                f"after a reply it puts {between!r}"
            )
        self.end_id = end  # closes an assistant turn
        ends = [end, *stop_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
        self.stop_ids = sorted(set(ends))
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.stop_ids[0]
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._word_level = backend is not None and type(backend.model).__name__ == "WordLevel"
        if (
            self._word_level
        ):  # its texts are short and come again and again; others would only fill the memory
            self._encode = functools.lru_cache(maxsize=2**16)(self._encode)
            self._decode = functools.lru_cache(maxsize=2**16)(self._decode)

    def _render(self, messages: list[dict[str, str]]) -> str:
        """Ends with the generation prompt. A template that asks for the date, or the clock, gets TODAY."""
        clock = f"{{% macro strftime_now(format) %}}{TODAY}{{% endmacro %}}"
        return self.tokenizer.apply_chat_template(
            messages,
            chat_template=clock + self.tokenizer.get_chat_template(),
            tokenize=False,
            add_generation_prompt=True,
            date_string=TODAY,
        )

    def _glue(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _decode(self, ids: tuple[int, ...]) -> str:
        return self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    def encode(self, text: str) -> list[int]:
        """Plain text: a control token spelled out in it is spelled in ordinary tokens."""
        # Between words a word-level text may be cut; its parts repeat much more than the whole
        parts = re.split(r"(?=\|)", text) if self._word_level else [text.strip()]
        return [i for part in parts for i in self._encode(part)]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, stop tokens left out."""
        return self._decode(tuple(i for i in ids if i not in self.stop_ids))

    def first(self, user: str, system: str | None = None) -> list[int]:
        """A chat's first prompt. With no system message the template's own default, if any, stands."""
        if system is None:
            return [*self._start, *self.encode(user), *self._generate]
        if self._opening is None:  # a template without system messages: it goes before the user's text
            return self.first(f"{system.strip()}\n\n{user.strip()}")
        before, after = self._opening
        return [*before, *self.encode(system), *after, *self.encode(user), *self._generate]

    def extend(self, action_ids: list[int], user: str) -> list[int]:
        """What follows prompt + action_ids: the turn's end if it was not sampled, and the next user turn."""
        stopped = bool(action_ids) and action_ids[-1] in self.stop_ids
        return [*self._between[stopped:], *self.encode(user), *self._generate]

    def reply(self, text: str) -> list[int]:
        """The token ids of a turn that says `text` and ends."""
        return [*self.encode(text), self.end_id]


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
    action = one_line(text)
    if not action or re.search(r"<[^\s\d$€£=.+-]", action):
        return "", False
    return action, True


NO_ACTION = "no action"  # shown in the prompt's history in place of one that could not be read


@dataclass(frozen=True)
class Dialogue:
    """How episodes become prompts. `chat` turns text into token ids (policy.Chat, or a stub with its
    methods)."""

    chat: object
    style: str  # "think" for real LLMs, "short" for the tiny model
    context: str  # "window": a fresh prompt per turn with the last turns as text; "full": append-only chat
    history: int  # window context: how many past (observation, action) pairs the prompt shows
    max_prompt_tokens: int
    max_new_tokens: int

    def window_prompt(self, view: View, past: list[tuple[str, str]]) -> list[int]:
        """One user message per turn; an over-long one loses its oldest history first, never the rest."""
        for length in range(min(self.history, len(past)), -1, -1):
            text = window_message(self.style, view, past[len(past) - length :], turn=len(past))
            prompt = self.chat.first(text)
            if len(prompt) <= self.max_prompt_tokens:
                break
        return prompt

    def full_prompt(self, env_name: str, messages: list[str], steps: list[Step]) -> list[int]:
        """The chat so far, extended by the newest of the `messages`: exactly the last turn's tokens, then
        new ones.

        When it grows too long the oldest turns after the first (which holds the task) are left out, down
        to three quarters of the limit; such a prompt no longer extends the last one, so a new row begins
        with it.
        """
        if steps:
            last = steps[-1]
            prompt = last.prompt_ids + last.action_ids + self.chat.extend(last.action_ids, messages[-1])
            if len(prompt) <= self.max_prompt_tokens:
                return prompt
        prompt = self._assemble(env_name, messages, steps, first_kept=1)
        for first_kept in range(2, len(messages)):
            if len(prompt) <= self.max_prompt_tokens * 3 // 4:
                break
            prompt = self._assemble(env_name, messages, steps, first_kept)
        return prompt

    def _assemble(self, env_name: str, messages: list[str], steps: list[Step], first_kept: int) -> list[int]:
        prompt = self.chat.first(messages[0], system_message(self.style, env_name))
        shown = steps[:1] + steps[first_kept:]
        for step, message in zip(shown, messages[first_kept:], strict=True):
            prompt = prompt + step.action_ids + self.chat.extend(step.action_ids, message)
        return prompt
