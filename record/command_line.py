"""The command line of a dataclass: read from argv or config.json, shown by --help and by docs/FLAGS.md.

Each field is a flag. Its type is int, float, str, bool, a Literal or tuple[str, ...], or one of these | None.
The docstring below the field is the help text; "Default: ..." at its end describes what a None stands for.
argparse does the parsing. It is here instead of tyro, which has no public way to group the flags of a flat
dataclass or to shorten its messages: a usage error here is one line, `--flag value: why; remedy`.
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
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints


class UsageError(Exception):
    """A flag has an impossible value. The message is `--flag value: why; remedy`."""


def text_of(value) -> str:
    """Return a value as on a command line."""
    return " ".join(value) if isinstance(value, tuple) else str(value)


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

    def read(self, text: str):
        """Return the value that a text stands for. Raises UsageError."""
        if self.choices:
            if text not in self.choices:
                raise UsageError(f"--{self.name} {text}: must be one of {', '.join(self.choices)}")
            return text == "True" if self.kind is bool else text
        try:
            if self.kind is float and "/" in text:
                return float(Fraction(text))  # --off_policy_fraction 1/8
            return self.kind(text) if self.kind in (int, float) else text
        except (ValueError, ZeroDivisionError):
            number = "a whole number" if self.kind is int else "a number"
            raise UsageError(f"--{self.name} {text}: must be {number}") from None


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


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError."""

    def error(self, message):
        raise UsageError(f"{message.removeprefix('argument ')}; see --help")

    def print_help(self, file=None):
        try:
            print(self.format_help(), flush=True)
        except BrokenPipeError:  # `--help | head`: without this, Python fails once more when it closes stdout
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    def parser(self) -> Parser:
        """Return the parser. Its result holds only the flags that a command line contains."""
        parser = Parser(
            usage="python train.py [--flag value ...]",
            description="RSPO: Reward-Swap Policy Optimization. docs/FLAGS.md contains this list as tables.",
            formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        for title, flags in self.sections.items():
            group = parser.add_argument_group(title)
            for flag in flags:
                self._add(group, flag)
        return parser

    def _add(self, group, flag: Flag) -> None:
        """Add a flag to the parser. A switch of config.json can be switched off by --no_NAME."""
        on, off, help = f"--{flag.name}", f"--no_{flag.name}", flag.meaning.replace("%", "%%")
        if not flag.is_switch:
            help += f" [default: {flag.default}]"
            count = "+" if get_origin(flag.kind) is tuple else None
            group.add_argument(on, type=flag.read, nargs=count, metavar=flag.placeholder, help=help)
            return
        if flag.default == "on":
            help += f" [default: on; {off} switches it off]"
        group.add_argument(on, action="store_true", help=help)
        if flag.name not in self.unsaved:
            group.add_argument(off, dest=flag.name, action="store_false", help=argparse.SUPPRESS)

    def read(self, argv: list[str]) -> dict:
        """Return the values of the flags that a command line contains, by name. Raises UsageError."""
        found, unknown = self.parser.parse_known_args([self.present_name(argument) for argument in argv])
        if unknown:
            flag, *_ = unknown[0].partition("=")
            names = [f"--{field.name}" for field in dataclasses.fields(self.settings)]
            close = difflib.get_close_matches(flag, names, 1)
            remedy = f"did you mean {close[0]}?" if close else "see --help"
            raise UsageError(f"{flag}: there is no such flag; {remedy}")
        return {name: tuple(v) if isinstance(v, list) else v for name, v in vars(found).items()}

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
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError("it contains no names")
        values = {self.old_names.get(name, name): value for name, value in values.items()}
        fields = {field.name: field for field in dataclasses.fields(self.settings)}
        argv = []
        for name, value in values.items():
            if name not in fields or name in self.unsaved:
                raise UsageError(f"{name} is no flag of a run; remove it")
            if isinstance(value, list):
                argv += [f"--{name}", *map(str, value)]
            elif isinstance(value, bool) and isinstance(fields[name].default, bool):
                argv.append(f"--{name}" if value else f"--no_{name}")
            elif value is not None:
                argv.append(f"--{name}={value}")
        known = self.read(argv)
        for name in known:
            value = tuple(values[name]) if isinstance(values[name], list) else values[name]
            if known[name] != value:  # for example "8", which reads as 8
                raise UsageError(f"--{name} {value!r}: has the wrong type; see --help")
        return known

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
