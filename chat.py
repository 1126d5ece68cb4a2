"""Text to token ids and back: the messages of an episode, the chat format, the action parser.

An episode is a conversation. Each turn, the environment shows a `View`. A *style* turns the view into a
message, a *context* chooses the messages of the prompt, and `Chat` turns them into token ids. The model
replies with token ids, and `parse_action` reads the action from their text.

Two styles:
  "think"   for real language models, with verl-agent's conventions: the reply has its reasoning in
            <think></think> and one action in <action></action>; the prompt lists the admissible actions.
  "short"   for the tiny model: the whole reply is the action. The prompt has notes on the episode so far, and
            long pages are abbreviated.

Two contexts, with user messages M0, M1, ... and replies R0, R1, ...:
  "window"  each prompt is one new message that repeats the last turns as text:    M0 | M1 | M2 | ...
  "full"    each prompt extends the last prompt and reply:    M0 | M0 R0 M1 | M0 R0 M1 R1 M2 | ...

Text from an environment or a model is data: a control token that is written in it stays plain text, whatever
flags the tokenizer gives that token. Sampled token ids are never decoded and encoded again, so the loss sees
exactly the tokens that were sampled.

Some templates open the model's reasoning at the end of each prompt, for example with "<think>\n". The reply
then begins inside the reasoning. `Chat.opened` is what the prompt has opened.

Left out: tool calls and images. A template that rewrites earlier turns, for example to drop their reasoning,
supplies only the tokens between turns; earlier turns stay unchanged.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from buffer import Step
from envs import SEARCH, View

# --- messages -----------------------------------------------------------------------------------------------
# `turn` counts the actions taken before this message.

FORMAT = (
    "Think step by step about where you are and what is still to be done, inside <think></think>. "
    "Then choose one admissible action and give it inside <action></action>, once, after your reasoning. "
    "That is:\n<think>your reasoning</think><action>your action</action>"
)
HOME = "a household that is described to you in text"
SCENES = {"household": HOME, "alfworld": HOME, "webshop": "an online shop that is described to you in text"}
NO_ACTION = "no action"  # stands in the history of a window prompt for a reply that was not an action


def system_message(style: str, env_name: str) -> str | None:
    """Write the system message of a full context. The short style has none."""
    if style == "short":
        return None
    scene = SCENES.get(env_name, f"{env_name}, a world that is described to you in text")
    return f"You act in {scene}, one action at a time, until the task is done. {FORMAT}"


def window_message(style: str, view: View, history: list[tuple[str, str]], turn: int) -> str:
    """Write the only message of a window prompt.

    history: the last (observation, action) pairs, oldest first. The caller cuts it to the length it wants.
    """
    if style == "short":
        actions = "; ".join(action for _, action in history)
        return " | ".join([view.task, view.notes, actions, view.brief or view.observation])
    parts = [f"You act in a world that is described to you in text. Your task is to: {view.task}"]
    if history:
        pairs = [f"[Observation: {observation}]\n[Action: {action}]" for observation, action in history]
        steps = "1 step" if turn == 1 else f"{turn} steps"
        parts.append(f"You have taken {steps} so far. The last {len(history)}:\n" + "\n".join(pairs))
    parts.append(f"You are at step {turn + 1}. You observe: {view.observation}\n{_admissible(view)}")
    parts.append(FORMAT)
    return "\n\n".join(parts)


def first_message(style: str, view: View) -> str:
    """Write the first user message of a full context."""
    if style == "short":
        return " | ".join([view.task, view.notes, view.brief or view.observation])
    return f"Your task is to: {view.task}\n\nYou observe: {view.observation}\n{_admissible(view)}"


def next_message(style: str, view: View, turn: int) -> str:
    """Write a later user message of a full context, without the task."""
    if style == "short":
        return f"{view.notes} | {view.brief or view.observation}"
    return f"You are at step {turn + 1}. You observe: {view.observation}\n{_admissible(view)}"


def _admissible(view: View) -> str:
    hint = " In place of <your query> write what you search for." if SEARCH in view.admissible else ""
    return "Admissible actions: " + ", ".join(f"'{action}'" for action in view.admissible) + "." + hint


def reply_text(style: str, action: str, opened: str = "") -> str:
    """Write the reply of a demonstration that takes this action. `parse_action` reads the action back.

    opened: the reasoning tag that the prompt ends with. The reply does not open it again, but closes it.
    """
    tag = opened.strip() or "<think>"
    close = tag[0] + "/" + tag[1:]
    if style == "short":
        return close + action if opened else action
    return f"{'' if opened else tag}I take the next step towards the goal.{close}<action>{action}</action>"


# Reasoning tags: <think>, <thinking>, <seed:think>, <chain_of_thought>, <|begin_of_thought|>, [THINK],
# <|channel|>analysis and so on. An opening tag counts even if its ">" is missing.
REASONING = (
    r"(?:[^\W_]+[:._-])*"  # the parts of the name before the last, for example "chain_of_"
    r"(?:think|thinking|thoughts?|reason|reasoning|rationale|reflect|reflection|analysis|scratch_?pad"
    r"|monologue|plan|planning|cot)(?![^\W_])"
)
OPENS = re.compile(
    rf"(?i)<\|?\s*(?!end_){REASONING}(?!\s*/>)|(?<!\w)\[think\]|◁think▷|<\|channel\|?>\s*(?:thought|analysis)"
)
CLOSES = re.compile(
    rf"(?i)<\|?\s*(?:/\s*|end_){REASONING}[^<>]*>|\[/think\]|◁/think▷|<channel\|>|<\|channel\|>\s*final"
)


def _open_reasoning(text: str) -> str:
    """Return the end of the text from a reasoning tag that it leaves open, or ""."""
    start = max((match.start() for match in OPENS.finditer(text)), default=len(text))
    return "" if CLOSES.search(text, start) else text[start:]


def parse_action(style: str, reply: str, opened: str = "") -> tuple[str, bool]:
    """Read the action of a reply. Returns (action, True), or ("", False) if the reply is invalid.

    "think": the reply must have exactly one closed <action></action> block, outside and after the reasoning.
    "short": the whole reply is the action. The action is lower-cased and its whitespace is normalised.
    opened: the reasoning tag that the prompt ends with (`Chat.opened`). The reply must close it.

    An empty action is invalid, and so is an action with the beginning of a tag or of a template: "<" before a
    letter or most signs, as in "search[<your query>]". "click[< prev]" and "search[laptop <$500]" are valid.
    A valid action need not be admissible; the environment answers it.
    """
    text = (opened + reply).lower()
    if style != "short":
        if text.count("<action>") != 1 or text.count("</action>") != 1:
            return "", False
        before, _, text = text.partition("<action>")
        text, closed, after = text.partition("</action>")
        if not closed or _open_reasoning(before) or OPENS.search(after) or CLOSES.search(after):
            return "", False
    elif opened:
        text = CLOSES.split(text)[-1] if CLOSES.search(text) else ""
    action = " ".join(text.split())
    signs = re.findall(r"<([^\s\d=.+-])", action)
    has_tag = any(unicodedata.category(sign) != "Sc" for sign in signs)  # Sc: a currency, as in "<$500"
    if not action or has_tag:
        return "", False
    return action, True


# --- chat format --------------------------------------------------------------------------------------------

TODAY = "26 Jul 2024"  # the date that chat templates get: prompts must not depend on the day of the run
# Sentinels for the texts in a rendered template: no template contains them.
USER, SYSTEM, REPLY, LATER = "RSPOuserRSPO", "RSPOsystemRSPO", "RSPOreplyRSPO", "RSPOlaterRSPO"


@dataclass(frozen=True)
class Glue:
    """The token ids that a chat template puts around and between the texts of a conversation.

    Without a system message:  start USER generate header REPLY between USER generate header REPLY ...
    With a system message:     opening[0] SYSTEM opening[1] USER generate header REPLY ...
    """

    start: list[int]
    generate: list[int]
    end: int  # ends a reply that a model writes; gpt-oss closes earlier turns with another token
    header: list[int]  # what a model writes before its text, for example a channel; most templates have none
    between: list[int]
    opening: tuple[list[int], list[int]] | None  # None: the template has no system message
    opened: str  # the end of the text of `generate`, from a reasoning tag that it leaves open, or ""


def render(tokenizer, messages: list[tuple[str, str]], generate=True) -> str:
    """Render (role, text) messages and, by default, the generation prompt. The date in templates is TODAY.

    Raises ValueError if the template refuses the messages or is damaged.
    """
    from jinja2 import TemplateError

    clock = f"{{% macro strftime_now(format) %}}{TODAY}{{% endmacro %}}"
    try:
        return tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in messages],
            chat_template=clock + tokenizer.get_chat_template(),
            tokenize=False,
            add_generation_prompt=generate,
            date_string=TODAY,
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template cannot be rendered ({' '.join(str(error).split())})") from error


def _cut(rendered: str, *sentinels: str) -> list[str]:
    """Split a rendered conversation at its texts. Raises ValueError unless each occurs once, in order."""
    parts = []
    for sentinel in sentinels:
        part, found, rendered = rendered.partition(sentinel)
        if not found or sentinel in rendered:
            raise ValueError("the chat template does not show the text of each message once, in order")
        parts.append(part)
    return [*parts, rendered]


def _glue_of(tokenizer) -> Glue:
    """Render the tokenizer's chat template with sentinels for the texts, and encode the text between them.

    Raises ValueError if the template does not close an assistant turn with a control token.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]

    start, generate = _cut(render(tokenizer, [("user", USER)]), USER)
    turns = [("user", USER), ("assistant", REPLY)]
    _, turn, between, _ = _cut(render(tokenizer, [*turns, ("user", LATER)]), USER, REPLY, LATER)
    *_, closing = _cut(render(tokenizer, turns, generate=False), USER, REPLY)
    try:
        instructed = render(tokenizer, [("system", SYSTEM), ("user", USER)])
        before, after, _ = _cut(instructed, SYSTEM, USER)
        opening = encode(before), encode(after)
    except ValueError:  # the template refuses the role, or leaves it out
        opening = None

    control_ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    header = turn.removeprefix(generate) if turn.startswith(generate) else ""
    header_ids = encode(header)
    if OPENS.search(header) or not control_ids.intersection(header_ids):
        header_ids = []  # an empty reasoning that the template adds to earlier turns, or blanks

    between_ids = encode(between)
    if not between_ids or between_ids[0] not in control_ids:
        raise ValueError(f"the chat template closes a reply with {between!r}, not with a control token")
    closing_ids = encode(closing)  # GLM has none: the next role ends a reply
    end = closing_ids[0] if control_ids.intersection(closing_ids[:1]) else between_ids[0]
    opened = _open_reasoning(generate)
    return Glue(encode(start), encode(generate), end, header_ids, between_ids, opening, opened)


def control_tokens(tokenizer, glue: Glue) -> dict[int, str]:
    """Return the added tokens that may not come from a text, by id: all but words and whitespace.

    Words and whitespace belong to ordinary text, unless they are special or the template uses the word.
    """
    special_ids = {*tokenizer.all_special_ids, glue.end}
    template_ids = {*glue.start, *glue.generate, *glue.header, *glue.between, *sum(glue.opening or (), [])}
    control = {}
    for i, token in tokenizer.added_tokens_decoder.items():
        is_word = re.fullmatch(r"\w+", token.content) and i not in template_ids
        if token.special or i in special_ids or not (is_word or token.content.isspace()):
            control[i] = token.content
    return control


def plain_encoder(tokenizer, control: dict[int, str]) -> Callable[[str], tuple[int, ...]]:
    """Return encode(text) -> token ids without control tokens.

    `split_special_tokens` lets a slow tokenizer match no added token, but a fast one still matches those
    without the special flag. So a fast tokenizer is built anew around the same model.
    """
    from tokenizers import Tokenizer

    # Any text may become <unk>, or bytes such as <0x0A>
    forged = {i for i, text in control.items() if i != tokenizer.unk_token_id and text[:3] != "<0x"}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        plain = Tokenizer(backend.model)
        if backend.normalizer is not None:
            plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            plain.pre_tokenizer = backend.pre_tokenizer
        words = {i: token for i, token in backend.get_added_tokens_decoder().items() if i not in control}
        plain.add_tokens([words[i] for i in sorted(words)])
        own_ids = {plain.token_to_id(token.content): i for i, token in words.items()}

    def encode(text: str) -> tuple[int, ...]:
        if backend is None:
            ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        else:
            ids = [own_ids.get(i, i) for i in plain.encode(text, add_special_tokens=False).ids]
        if forged.isdisjoint(ids):
            return tuple(ids)
        spelled = []  # a unigram model has its control tokens among its pieces, and finds them in the text
        for i in ids:
            letters = tokenizer.convert_tokens_to_ids(list(control[i])) if i in forged else [i]
            spelled += [letter for letter in letters if letter is not None]
        return tuple(spelled)

    return encode


class Chat:
    """A tokenizer and its chat template as an append-only format: a new turn changes no earlier token.

    The template is rendered only once (`Glue`). Texts are encoded separately from it and from each other.

    stop_ids: token ids that end a reply, sorted. end_id: the one that the template puts after the last reply.
    opened: the reasoning tag that each prompt leaves open, for example "<think>\n", or "".
    """

    def __init__(self, tokenizer, stop_ids: Iterable[int] = ()):
        """stop_ids: further token ids that end a reply, beside the template's and the tokenizer's own.

        Raises ValueError if the chat template cannot be used.
        """
        self.tokenizer = tokenizer
        self._glue = _glue_of(tokenizer)
        self.opened = self._glue.opened
        self.end_id = self._glue.end
        ends = {self.end_id, *stop_ids}
        if tokenizer.eos_token_id is not None:
            ends.add(tokenizer.eos_token_id)
        self.stop_ids = sorted(ends)
        self.pad_id = self.stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        control = control_tokens(tokenizer, self._glue)
        self._tags = {}  # the reasoning tags that are tokens of this model
        for token, text in control.items():
            if OPENS.match(text) or CLOSES.match(text):
                self._tags[text] = token
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._word_level = backend is not None and type(backend.model).__name__ == "WordLevel"
        self._encode = plain_encoder(tokenizer, control)
        self._decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        if self._word_level:
            # Short texts of a word-level tokenizer recur. Longer texts do not, and would only fill the cache.
            remember = functools.lru_cache(maxsize=2**16)
            self._encode, self._decode = remember(self._encode), remember(self._decode)

    def encode(self, text: str) -> list[int]:
        """Encode plain text. A control token that is written in it becomes ordinary tokens."""
        if not self._word_level:
            return list(self._encode(text.strip()))
        # Word-level text can be cut between words; the parts between "|" recur more often than the whole.
        return [token for part in re.split(r"(?=\|)", text) for token in self._encode(part)]

    def decode(self, ids: list[int]) -> str:
        """Decode the token ids of a reply to its text, without its header and its stop tokens."""
        header = self._glue.header
        if header and ids[: len(header)] == header:
            ids = ids[len(header) :]
        return self._decode(tuple(i for i in ids if i not in self.stop_ids))

    def first(self, user: str, system: str | None = None) -> list[int]:
        """Encode the first prompt of a chat. Without `system`, the template's default system message is used.

        A template without system messages gets the system text at the start of the user's.
        """
        glue = self._glue
        if system is None:
            return [*glue.start, *self.encode(user), *glue.generate]
        if glue.opening is None:
            return self.first(f"{system.strip()}\n\n{user.strip()}")
        before, after = glue.opening
        return [*before, *self.encode(system), *after, *self.encode(user), *glue.generate]

    def extend(self, action_ids: list[int], user: str) -> list[int]:
        """Encode what follows a prompt and its reply: the end of the reply and the next user turn.

        action_ids: the sampled reply. The template's end of a turn is added unless the reply ends with it or
        with `end_id`. Another stop token does not take its place.
        """
        between = self._glue.between
        if action_ids and action_ids[-1] in (self.end_id, between[0]):
            between = between[1:]
        return [*between, *self.encode(user), *self._glue.generate]

    def reply(self, text: str) -> list[int]:
        """Encode a whole reply as the model would write it: its header, its text and the token that ends it.

        The text comes from this program, so its reasoning tags become the model's own tokens if it has them.
        """
        ids = list(self._glue.header)
        parts = [text]
        if self._tags:
            parts = re.split("(" + "|".join(map(re.escape, self._tags)) + ")", text)
        for part in parts:
            ids += [self._tags[part]] if part in self._tags else self.encode(part)
        return [*ids, self.end_id]


# --- prompts of an episode ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dialogue:
    """Makes the prompts of episodes, no longer than `max_prompt_tokens` if their oldest turns can be cut."""

    chat: Chat  # or any object with its methods
    style: str  # "think" or "short"
    context: str  # "window" or "full"
    history: int  # window context: number of past (observation, action) pairs in a prompt
    max_prompt_tokens: int
    max_new_tokens: int

    def read(self, action_ids: list[int]) -> tuple[str, bool]:
        """Read the action of a sampled reply. Returns (action, True), or ("", False) if it is invalid."""
        return parse_action(self.style, self.chat.decode(action_ids), self.chat.opened)

    def reply(self, action: str) -> list[int]:
        """Encode the reply of a demonstration that takes this action."""
        return self.chat.reply(reply_text(self.style, action, self.chat.opened))

    def window_prompt(self, view: View, past: list[tuple[str, str]]) -> list[int]:
        """Encode one message with the last turns of `past`, as many as `history` and the limit allow.

        Only history is cut. A prompt that is too long even without history is returned uncut.
        """
        for length in range(min(self.history, len(past)), -1, -1):
            text = window_message(self.style, view, past[len(past) - length :], turn=len(past))
            prompt = self.chat.first(text)
            if len(prompt) <= self.max_prompt_tokens:
                break
        return prompt

    def full_prompt(self, env_name: str, messages: list[str], steps: list[Step]) -> list[int]:
        """Encode the chat so far. The prompt extends the tokens of the last turn by the newest message.

        A chat that grows too long loses its oldest turns, down to three quarters of the limit, but never the
        first, which has the task. Such a prompt does not extend the last one, so it begins a new row.
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
        """Encode the first turn and the turns from `first_kept` on: for 3, M0 R0 M3 R3 M4."""
        prompt = self.chat.first(messages[0], system_message(self.style, env_name))
        replies = [step.action_ids for step in steps[:1] + steps[first_kept:]]
        for reply, message in zip(replies, messages[first_kept:], strict=True):
            prompt = prompt + reply + self.chat.extend(reply, message)
        return prompt
