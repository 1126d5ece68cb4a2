"""The command line of a dataclass: read from argv or config.json, shown by --help and by docs/FLAGS.md.

Each field is a flag. Its type is int, float, str, bool, a Literal or tuple[str, ...], or one of these | None.
The docstring below the field is the help text; "Default: ..." at its end describes what a None stands for.
argparse lays out the help. It does not read the arguments: it takes `--kl_coef -1e-3` for a flag without a
value, and its messages do not name the value. A usage error here is one line, `--flag value: why; remedy`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import json
import os
import sys
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

DASHES = ("-", "\N{EN DASH}", "\N{EM DASH}", "\N{MINUS SIGN}")  # word processors turn -- into one of these


class UsageError(Exception):
    """A flag has an impossible value. The message is `--flag value: why; remedy`."""


def text_of(value) -> str:
    """Return a value as on a command line, cut to one line of readable length."""
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    if text != text.strip() or not text or not text.isprintable():
        text = repr(text)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-50:]}"


def refuse(settings, name: str, why: str):
    """Raise a UsageError about one flag."""
    raise UsageError(f"--{name} {text_of(getattr(settings, name))}: {why}")


@dataclass(frozen=True)
class Flag:
    """One flag, as the parser and the page need it."""

    name: str
    kind: object  # str, int, float, bool, a Literal or tuple[str, ...]; never with None
    is_switch: bool  # a flag without a value, such as --resume
    default: str
    meaning: str

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the texts that the flag accepts, or () if there is no list of them."""
        if self.kind is bool:
            return ("True", "False")
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def placeholder(self) -> str:
        """Return the name of the value in --help."""
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        return {int: "INT", float: "FLOAT"}.get(self.kind, "TEXT")

    @property
    def takes_many(self) -> bool:
        """Return True if the flag takes one or more values."""
        return get_origin(self.kind) is tuple

    def read(self, texts: list[str]):
        """Return the value that the texts after the flag stand for. Raises UsageError."""
        values = [self._read_one(text) for text in texts]
        return tuple(values) if self.takes_many else values[0]

    def _read_one(self, text: str):
        if not text.strip():
            why = "is empty; give a value or leave the flag out"
        elif self.choices:
            if text in self.choices:
                return text == "True" if self.kind is bool else text
            why = f"must be one of {', '.join(self.choices)}"
        elif self.kind in (int, float):
            number = number_of(text, self.kind)
            if number is not None:
                return number
            why = "must be a whole number" if self.kind is int else "must be a number"
        elif any(unicodedata.category(sign) in ("Cc", "Cs") for sign in text):
            why = "contains a control character or a byte that is no text; give another"
        elif text != text.strip():
            why = "begins or ends with a blank; remove it"
        else:
            return text
        raise UsageError(f"--{self.name} {text_of(text)}: {why}")

    def read_json(self, value):
        """Return the value that a value of config.json stands for. Raises UsageError."""
        many = isinstance(value, list)
        right_type = isinstance(value, bool) if self.is_switch else many == self.takes_many and value != []
        found = value
        if right_type and not self.is_switch:
            found = self.read([str(item) for item in value] if many else [str(value)])
            right_type = found == (tuple(value) if many else value)  # not for "8", which reads as 8
        if not right_type:
            raise UsageError(f"--{self.name} {text_of(repr(value))}: has the wrong type; see --help")
        return found


NO_BREAK = "\N{NO-BREAK SPACE}"  # keeps "[default:" and the value on one line
LONGEST_NUMBER = 40  # characters


def number_of(text: str, kind: type) -> int | float | None:
    """Return the number that a text stands for, or None. A float may be a fraction such as 1/8."""
    if len(text) > LONGEST_NUMBER:
        return None
    try:
        if kind is float and "/" in text:
            return float(Fraction(text))
        return kind(text)
    except (ValueError, ZeroDivisionError):
        return None


def flags_of(settings: type) -> list[Flag]:
    """Return the flags of a dataclass, in the order of its fields."""
    flags, hints, docs = [], get_type_hints(settings), docstrings(settings)
    for field in dataclasses.fields(settings):
        kind, is_switch = hints[field.name], isinstance(field.default, bool)
        if type(None) in get_args(kind):  # X | None
            kind = get_args(kind)[0]
        meaning, _, default = docs[field.name].partition(" Default: ")
        if is_switch:
            default = "on" if field.default else "off"
        elif field.default is not None:
            default = str(field.default)
        flags.append(Flag(field.name, kind, is_switch, default, meaning))
    return flags


def docstrings(settings: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of its parents, by the field's name."""
    found = {}
    for cls in settings.__mro__[:-1]:
        body = ast.parse(inspect.getsource(cls)).body[0].body
        for field, below in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign):
                found[field.target.id] = " ".join(below.value.value.split())
    return found


class CommandLine:
    """The command line of a dataclass."""

    def __init__(
        self, settings: type, sections: dict[str, str], old_names: dict[str, str], unsaved: list[str]
    ):
        """Describe the flags of `settings`.

        sections: the title of each section of --help, by the name of its first flag.
        old_names: present names of flags, by the names that are accepted too.
        unsaved: names of the flags that config.json does not contain.
        """
        self.settings, self.titles, self.old_names, self.unsaved = settings, sections, old_names, unsaved

    @functools.cached_property
    def sections(self) -> dict[str, list[Flag]]:
        """Return the flags by the title of their section."""
        sections = {}
        for flag in flags_of(self.settings):
            if flag.name in self.titles:
                flags = sections[self.titles[flag.name]] = []
            flags.append(flag)
        return sections

    @functools.cached_property
    def flags(self) -> dict[str, Flag]:
        """Return the flags by name."""
        return {flag.name: flag for flags in self.sections.values() for flag in flags}

    def help(self) -> str:
        """Return the text of --help, as wide as the terminal."""
        parser = argparse.ArgumentParser(
            usage="python train.py [--flag value ...]",
            description="RSPO: Reward-Swap Policy Optimization. docs/FLAGS.md contains this list as tables.",
            formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
        )
        for title, flags in self.sections.items():
            group = parser.add_argument_group(title)
            for flag in flags:
                text = flag.meaning.replace("%", "%%")
                if flag.default == "on":
                    text += f" [default: on; --no_{flag.name} switches it off]"
                elif not flag.is_switch:
                    text += f" [default:{NO_BREAK}{flag.default}]"
                options = {"action": "store_true"}
                if not flag.is_switch:
                    options = {"metavar": flag.placeholder, "nargs": "+" if flag.takes_many else None}
                group.add_argument(f"--{flag.name}", help=text, **options)
        return parser.format_help().replace(NO_BREAK, " ")

    def print_help(self) -> None:
        """Print the help."""
        try:
            print(self.help(), flush=True)
        except OSError:  # `--help | head` has closed the pipe. Closing stdout would raise this again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def read(self, argv: list[str]) -> dict:
        """Return the values of the flags that a command line contains, by name. Raises UsageError.

        The later of two equal flags wins. --help or -h prints the help and ends the process.
        """
        if "--help" in argv or "-h" in argv:
            self.print_help()
            sys.exit(0)
        found, flag, rest = {}, None, list(argv)
        while rest:
            argument = rest.pop(0)
            name, equals, text = self.present_name(argument).partition("=")
            is_off = name.startswith("--no_") and self.can_be_switched_off(name.removeprefix("--no_"))
            before, flag = flag, self.flags.get(name.removeprefix("--no_" if is_off else "--"))
            if not name.startswith("--") or flag is None:
                raise UsageError(self.complaint(argument, before))
            if flag.is_switch:
                if equals:
                    off = f" or --no_{flag.name}" if self.can_be_switched_off(flag.name) else ""
                    raise UsageError(f"{text_of(argument)}: takes no value; give --{flag.name}{off}")
                found[flag.name] = not is_off
                continue
            texts = [text] if equals else []
            while rest and not equals and not rest[0].startswith("--") and (flag.takes_many or not texts):
                texts.append(rest.pop(0))
            if not texts:
                wanted = f"one of {', '.join(flag.choices)}" if flag.choices else f"{name} {flag.placeholder}"
                raise UsageError(f"{name}: needs a value; give {wanted}")
            if flag.kind is str:
                texts = [os.path.expanduser(text) for text in texts]  # shells leave --out=~/run as it is
            found[flag.name] = flag.read(texts)
        return found

    def can_be_switched_off(self, name: str) -> bool:
        """Return True if --no_NAME is a flag: NAME is a switch of a run, and not an action like --resume."""
        return name in self.flags and self.flags[name].is_switch and name not in self.unsaved

    def complaint(self, argument: str, before: Flag | None) -> str:
        """Return the message for an argument that is neither a flag nor the value of the flag before it."""
        if argument.startswith(DASHES):
            flag, *_ = argument.partition("=")
            similar = [f"--{name}" for name in self.similar_names(flag)]
            remedy = f"did you mean {' or '.join(similar)}?" if similar else "see --help"
            return f"{text_of(flag)}: there is no such flag; {remedy}"
        remedy = "write --flag value; see --help"
        if before and before.is_switch:
            remedy = f"--{before.name} takes no value"
        elif before and not before.takes_many:
            remedy = f"--{before.name} takes one value; quote a value that contains blanks"
        return f"{text_of(argument)}: belongs to no flag; {remedy}"

    def similar_names(self, flag: str) -> list[str]:
        """Return the flags, at most three, that a misspelt or shortened flag may stand for."""
        bare = flag.lstrip("".join(DASHES)).lower().replace("-", "_")
        if bare in self.flags:
            return [bare]
        known = [*self.flags, *self.old_names]
        close = [name for name in known if bare and name.startswith(bare)][:3]
        close = close or difflib.get_close_matches(bare.removeprefix("no_"), known, 1, cutoff=0.7)
        return [self.old_names.get(name, name) for name in close]

    def present_name(self, argument: str) -> str:
        """Replace dashes and an old name: `--tasks-per-step=8` becomes `--tasks_per_update=8`."""
        if not argument.startswith("--"):
            return argument
        name, equals, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        return f"--{self.old_names.get(name, name)}{equals}{value}"

    def read_file(self, path: Path) -> dict:
        """Return the values in a config.json, by name.

        Raises UsageError for a key or value that is not possible, OSError or ValueError for any other file.
        """
        try:
            values = json.loads(path.read_text())
        except RecursionError:
            raise ValueError("its lists are nested too deeply") from None
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        if "model_type" in values:
            raise ValueError("it describes a model")
        for old, name in self.old_names.items():
            if old in values and name in values:
                raise UsageError(f"{old} and {name} are one flag; remove {old}")
        values = {self.old_names.get(name, name): value for name, value in values.items()}
        for name in values:
            if name not in self.flags or name in self.unsaved:
                raise UsageError(f"{text_of(name)} is no flag of a run; remove it")
        return {name: self.flags[name].read_json(v) for name, v in values.items() if v is not None}

    def page(self) -> str:
        """Return docs/FLAGS.md: a table for each section."""
        text = "# Flags\n\n"
        text += "Written by `python flags.py > docs/FLAGS.md`; `python train.py --help` shows the same.\n"
        for title, flags in self.sections.items():
            text += f"\n## {title[0].upper()}{title[1:]}\n\n| flag | default | meaning |\n|---|---|---|\n"
            for flag in flags:
                value = "" if flag.is_switch else f" {flag.placeholder}"
                if flag.is_switch and flag.default == "on":
                    value = f"`, `--no_{flag.name}"
                cells = [f"`--{flag.name}{value}`", escaped(flag.default), escaped(flag.meaning)]
                text += f"| {' | '.join(cells)} |\n"
        return text


def escaped(text: str) -> str:
    """Return the text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")
