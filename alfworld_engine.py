"""An engine for ALFWorld's text games: what TextWorld's engine answers, in a fraction of its time.

`Game(path)` plays one `game.tw-pddl` (Shridhar et al. 2021). Two steps make it:

1. `_translate`, once for each game file: the libraries ground the planning task (Fast Downward's translator)
   and parse the grammar of the sentences (TextWorld); the result is written down as plain data: operators,
   axioms, goal, the facts that sentences speak of, the sentences as small trees. It takes 0.2 to 1 s and is
   kept on disk (`cache_folder`), so the second process, and the second run, begin in milliseconds.
2. `_Table`, that data made playable. A state is two integers, one bit an atom. Which commands are possible is
   worked out for all operators at once by bitwise logic, a sentence by walking its tree, and both are kept
   for states already seen, up to a limit. Only Python integers, lists and strings take part, no planner
   library: games cannot disturb each other, a dropped one leaves nothing, equal files share one table.

What decides the text is kept exactly, also where it is odd: facts once denied stay known as denied, an entity
cannot fill two places of one condition, and sentences hear of effects whose condition was not met.
tests/compare_alfworld.py plays beside the stock engine.

Left out: planning (`policy_commands`, the experts), TextWorld's other information (score, facts, inventory),
and what these games do not have, such as commands whose wording depends on the state (a ValueError says so).

    python alfworld_engine.py DIR --processes n     # translate every game below DIR beforehand
"""

from __future__ import annotations

import argparse
import ast
import bisect
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import sys
import tempfile
import threading
import warnings
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TASK_TYPES = (
    "pick_and_place",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
NOTHING = "Nothing happens."
GAME_FILE = "game.tw-pddl"

FORMAT = 1  # of the cached data; a change of `_translate` raises it
PACKAGES = ("textworld", "alfworld", "fast-downward-textworld")
N_TABLES = 64  # games kept playable in memory after their last Game is gone
N_TRANSITIONS = 2000  # remembered in each game, about 1 MB


@dataclass(frozen=True)
class State:
    """What a player sees. `won` is success; `done` says that the game has ended (here: by a win alone)."""

    text: str
    admissible: list[str]  # in the stock engine's order: sorted
    won: bool
    done: bool


class Game:
    """One play of one game file. Games are independent of each other, also those of one file."""

    def __init__(self, path: str | os.PathLike, cache: str | os.PathLike | None = None):
        """cache: the folder of translated games; by default `cache_folder()`.

        ValueError: the file, which it names, is not such a game, or its path names none of the task types.
        ImportError: ALFWorld is not installed; it says how to.
        """
        self.path = os.path.abspath(path)
        self.task_type = task_type(self.path)
        self._table = _table(self.path, cache_folder() if cache is None else Path(cache))
        self._node = None
        # Commands that win the game from its start, as stored in the file (empty: none are).
        self.walkthrough: list[str] = list(self._table.walkthrough)

    def reset(self) -> State:
        if self._table is None:
            raise RuntimeError(f"{self.path}: the game is closed")
        text, self._node = self._table.start()
        return self._state(text)

    def step(self, command: str) -> State:
        """Carry out the command; what is not admissible changes nothing. A won game can be played on."""
        node = self._node
        if node is None:
            raise RuntimeError(f"{self.path}: reset() comes before step()")
        command = command.strip()
        text, self._node = node.next.get(command) or self._table.follow(node, command)
        return self._state(text)

    def close(self) -> None:
        """Let go of the game; it cannot be played any more."""
        self._table = self._node = None

    def _state(self, text: str) -> State:
        return State(text, list(self._node.admissible), self._node.won, self._node.won)


def task_type(path: str) -> str:
    """Which of TASK_TYPES the path names: its last part that names one counts, not a folder further up."""
    for part in reversed(Path(path).parts):
        for name in TASK_TYPES:
            if name in part:
                return name
    raise ValueError(f"{path}: the path names none of the task types {', '.join(TASK_TYPES)}")


# --- Sentences: the grammar's trees, walked with the facts of a state ---------------------------------------


class _Sentences:
    """The grammar of one game.

    A sentence is a list of symbols: ["text", t], ["rule", name], ["each", symbol, query or None] and
    ["list", an "each"]; the symbol inside an "each" is a rule or ["value", expression]. `mapping` says which
    entity each placeholder (name, type) stands for. `true` and `denied` are the state's bits; None: only what
    never changes may be asked.
    """

    def __init__(self, data: dict):
        self._entities = data["entities"]
        self._rules = data["rules"]
        self._queries = data["queries"]
        self._facts = {(name, tuple(types)): flat for name, types, flat in data["facts"]}
        self._plans: dict[int, list] = {}  # made when first asked for, and shared where predicates are equal
        self._known: dict[tuple, tuple] = {}

    def _plan(self, query: int) -> list:
        """For each predicate: whether it asks for a denial, placeholders, facts in order, their index."""
        plan = []
        for name, placeholders, signatures in self._queries[query]:
            key = name, tuple(map(tuple, signatures))
            if key not in self._known:
                facts = []
                for types in key[1]:
                    flat, width = self._facts[name.removeprefix("not_"), types], len(types) + 1
                    rows = zip(*(flat[i::width] for i in range(width)), strict=True)
                    facts += [(arguments, atom) for *arguments, atom in rows]
                if name.startswith("not_"):
                    facts = [fact for fact in facts if fact[1] >= 0]
                self._known[key] = facts, {}
            plan.append((name.startswith("not_"), [tuple(p) for p in placeholders], *self._known[key]))
        return plan

    def derive(self, symbols: list, mapping: dict, true: int | None, denied: int | None) -> str:
        parts = []
        for symbol in symbols:
            kind = symbol[0]
            if kind == "text":
                parts.append(symbol[1])
            elif kind == "rule":
                parts.append(self._rule(symbol[1], mapping, true, denied))
            elif kind == "each":
                parts += self._each(symbol, mapping, true, denied)
            else:
                parts.append(
                    self._listed(self._each(symbol[1], mapping, true, denied), mapping, true, denied)
                )
        return "".join(parts)

    def _rule(self, name: str, mapping: dict, true: int | None, denied: int | None) -> str:
        for query, symbols in self._rules.get(name, ()):
            if query is None or next(self._answers(query, mapping, true, denied), None) is not None:
                return self.derive(symbols, mapping, true, denied)
        raise ValueError(f"the grammar has no applicable rule #{name}#")

    def _each(self, symbol: list, mapping: dict, true: int | None, denied: int | None) -> list[str]:
        _, (kind, inner), query = symbol
        answers = [mapping] if query is None else self._answers(query, mapping, true, denied)
        if kind == "rule":
            return [self._rule(inner, answer, true, denied) for answer in answers]
        return [str(self._value(inner, {name: e for (name, _), e in answer.items()})) for answer in answers]

    def _listed(self, items: list[str], mapping: dict, true: int | None, denied: int | None) -> str:
        if not items:
            return self._rule("list_empty", mapping, true, denied)
        if len(items) == 1:
            return items[0]
        separator = self._rule("list_separator", mapping, true, denied)
        return (
            separator.join(items[:-1]) + self._rule("list_last_separator", mapping, true, denied) + items[-1]
        )

    def _value(self, expression: list, variables: dict):
        kind, *rest = expression
        if kind == "text":
            return rest[0]
        if kind == "+":
            return self._value(rest[0], variables) + self._value(rest[1], variables)
        if kind == "or":
            values = [self._value(part, variables) for part in rest]
            return next((value for value in values if value), values[-1])
        id_, type_, name = self._entities[variables[rest[0]]]
        return {"id": id_, "type": type_, "name": name, "definite": "the", "indefinite": "a"}[rest[1]]

    def _answers(self, query: int, mapping: dict, true: int | None, denied: int | None):
        """The mappings that extend `mapping` so that all the query's predicates hold, in a fixed order."""
        if query not in self._plans:
            self._plans[query] = self._plan(query)
        return self._search(self._plans[query], 0, mapping, set(mapping.values()), true, denied)

    def _search(self, plan: list, depth: int, mapping: dict, used: set, true: int | None, denied: int | None):
        if depth == len(plan):
            yield mapping
            return
        negative, placeholders, facts, index = plan[depth]
        bits = denied if negative else true
        bound = tuple(i for i, placeholder in enumerate(placeholders) if placeholder in mapping)
        if bound:
            if bound not in index:
                index[bound] = found = {}
                for fact in facts:
                    found.setdefault(tuple(fact[0][i] for i in bound), []).append(fact)
            facts = index[bound].get(tuple(mapping[placeholders[i]] for i in bound), ())
        for arguments, atom in facts:
            if atom >= 0:
                if bits is None:
                    raise ValueError("a command that depends on the state of the game")
                if not bits >> atom & 1:
                    continue
            new = {}
            for placeholder, entity in zip(placeholders, arguments, strict=True):
                known = mapping.get(placeholder, new.get(placeholder))
                if known is None:
                    if entity in used or entity in new.values():
                        break
                    new[placeholder] = entity
                elif known != entity:
                    break
            else:
                extended = {**mapping, **new} if new else mapping
                yield from self._search(plan, depth + 1, extended, used | set(new.values()), true, denied)


# --- Play: states as bits -----------------------------------------------------------------------------------


class _Node:
    """One state of a game: its bits, what is possible in it, and the transitions that were taken from it."""

    __slots__ = ("true", "denied", "applicable", "admissible", "won", "next")

    def __init__(self, true, denied, applicable, admissible, won):
        self.true, self.denied, self.applicable = true, denied, applicable
        self.admissible, self.won = admissible, won
        self.next = {}  # command -> (text, node)


class _Table:
    """A translated game, ready to be played; shared by all its games, which keep only their node.

    Operators are numbered by their command's place in the alphabet, then in the planner's order: the set bits
    of an applicable set, read upwards, are the admissible commands in the stock engine's order, and the first
    applicable operator of a command is the one that the stock engine would carry out.
    """

    def __init__(self, data: dict):
        self.walkthrough = data["walkthrough"]
        self._sentences = _Sentences(data)
        self._actions = [(s, [tuple(p) for p in placeholders]) for s, placeholders in data["actions"]]
        self._commands = data["commands"]
        self._place = dict(zip(self._commands, range(len(self._commands)), strict=True))
        self._command_of, self._action_of = (array("i", data[key]) for key in ("command_of", "action_of"))
        self._arguments, self._effects = _Rows(data["arguments"]), _Rows(data["effects"])
        self._uncertain: dict[int, list] = {}
        for number, body, code in data["uncertain"]:
            self._uncertain.setdefault(number, []).append((*_condition_bits(body), code))
        self._index_conditions(_Rows(data["conditions"]))
        self._goal = _condition_bits(data["goal"])
        self._layers = [[(head, *_condition_bits(body)) for head, body in layer] for layer in data["axioms"]]
        self._default = _bits(data["default"])
        self._deniable = _bits(data["deniable"])
        self._beginning = _bits(data["start"])
        self._lock = threading.Lock()
        self._nodes: dict[tuple[int, int], _Node] = {}
        self._lists: dict[int, tuple[str, ...]] = {}
        self._n_transitions = 0
        self._first = None

    def _index_conditions(self, conditions: _Rows) -> None:
        """For each place in the list of a precondition, which operators ask for what there.

        self._places: [(operators that ask for nothing there, {true atom: operators that ask for it there})].
        """
        self._every = (1 << len(conditions)) - 1
        self._unwanted: dict[int, int] = {}  # atom: operators that ask for it to be false
        wanted: list[dict[int, int]] = []
        for number, condition in enumerate(conditions):
            bit, place = 1 << number, 0
            for code in condition:
                atom = code >> 1
                if not code % 2:
                    self._unwanted[atom] = self._unwanted.get(atom, 0) | bit
                    continue
                if place == len(wanted):
                    wanted.append({})
                wanted[place][atom] = wanted[place].get(atom, 0) | bit
                place += 1
        self._places = []
        for operators_of in wanted:
            free = self._every
            for operators in operators_of.values():
                free &= ~operators
            self._places.append((free, operators_of))
        self._asked = _bits({*self._unwanted, *(atom for operators_of in wanted for atom in operators_of)})

    def start(self) -> tuple[str, _Node]:
        """The text and the state at the beginning."""
        with self._lock:
            if self._first is None:
                node = self._node(self._beginning, 0)
                self._first = self._sentences.derive([["rule", "intro"]], {}, node.true, node.denied), node
            return self._first

    def follow(self, node: _Node, command: str) -> tuple[str, _Node]:
        """What the command answers in this state, and the state it leads to."""
        if command not in node.admissible:
            return NOTHING, node
        number = bisect.bisect_left(self._command_of, self._place[command])
        while not node.applicable >> number & 1:
            number += 1
        true, denied = node.true, node.denied
        for code in self._effects[number]:
            true, denied = _put(true, code), _put(denied, code ^ 1)
        if number in self._uncertain:
            before = self._with_axioms(node.true)
            for positive, negative, code in self._uncertain[number]:
                if before & positive == positive and not before & negative:
                    true = _put(true, code)
        denied &= self._deniable
        feedback, placeholders = self._actions[self._action_of[number]]
        mapping = dict(zip(placeholders, self._arguments[number], strict=True))
        text = self._sentences.derive(feedback, mapping, true, denied)
        with self._lock:
            if self._n_transitions >= N_TRANSITIONS:
                self._forget()
            result = node.next[command] = text, self._node(true, denied)
            self._n_transitions += 1
        return result

    def _forget(self) -> None:
        for node in self._nodes.values():
            node.next = {}
        self._nodes.clear()
        self._lists.clear()
        self._n_transitions = 0
        self._first = None  # or all that is reached from it would stay

    def _node(self, true: int, denied: int) -> _Node:
        node = self._nodes.get((true, denied))
        if node is None:
            known = self._with_axioms(true)
            applicable = self._applicable(known)
            if applicable not in self._lists:
                names = dict.fromkeys(self._command_of[number] for number in _numbers(applicable))
                self._lists[applicable] = tuple(self._commands[name] for name in names)
            positive, negative = self._goal
            won = known & positive == positive and not known & negative
            node = _Node(true, denied, applicable, self._lists[applicable], won)
            self._nodes[true, denied] = node
        return node

    def _with_axioms(self, true: int) -> int:
        """The state with its derived atoms: each layer's rules until nothing changes, then the next layer."""
        true |= self._default
        for rules in self._layers:
            before = None
            while before != true:
                before = true
                for head, positive, negative in rules:
                    if true & positive == positive and not true & negative:
                        true = _put(true, head)
        return true

    def _applicable(self, true: int) -> int:
        atoms = list(_numbers(true & self._asked))
        blocked = 0
        for atom in atoms:
            blocked |= self._unwanted.get(atom, 0)
        applicable = self._every & ~blocked
        for free, place in self._places:
            met = free
            for atom in atoms:
                if atom in place:
                    met |= place[atom]
            applicable &= met
        return applicable


class _Rows:
    """Lists of integers in one array: thousands of small objects less for each game."""

    def __init__(self, packed: list):
        self._flat, self._ends = array("i", packed[0]), array("i", packed[1])

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> array:
        return self._flat[self._ends[number - 1] if number else 0 : self._ends[number]]

    def __iter__(self):
        start = 0
        for end in self._ends:
            yield self._flat[start:end]
            start = end

    @staticmethod
    def packed(rows: list[list[int]]) -> list:
        return [[value for row in rows for value in row], list(itertools.accumulate(map(len, rows)))]


def _bits(numbers: Iterable[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits


def _put(bits: int, code: int) -> int:
    """The literal's atom made what the literal says."""
    return bits | 1 << (code >> 1) if code % 2 else bits & ~(1 << (code >> 1))


def _numbers(bits: int):
    """The places of the set bits, upwards."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _condition_bits(codes: list[int]) -> tuple[int, int]:
    """Of literals 2 * atom + [must be true]: the atoms that must be true, and those that must not."""
    return _bits([code >> 1 for code in codes if code % 2]), _bits(
        [code >> 1 for code in codes if not code % 2]
    )


# --- Translation: from the game file to plain data, by the libraries ----------------------------------------

_TRANSLATING = threading.Lock()  # the libraries' parsers and options are global


def _translate(game: dict) -> dict:
    """A game file's content as the plain data that `_Table` plays. A literal is 2 * atom + [true]."""
    import fast_downward

    with _TRANSLATING:
        argv = sys.argv
        try:
            task, sas = fast_downward.pddl2sas(game["pddl_domain"], game["pddl_problem"])
        finally:
            sys.argv = argv
        grammar = _grammar(game["grammar"])
    variables, start, goal, operators, axioms = _read_sas(sas)

    # What is true at the start; entities are numbered in the order of their ids.
    initial = {(atom.predicate, tuple(atom.args)) for atom in task.init if hasattr(atom, "predicate")}
    initial = {(predicate, arguments) for predicate, arguments in initial if predicate != "="}
    fluent = {atom: number for number, (atom, _) in enumerate(variables)}
    constant = initial - set(fluent)
    type_of = {thing.name: thing.type_name for thing in task.objects}
    ids = sorted({argument for _, arguments in initial for argument in arguments})
    names = _names(ids)
    entity = {id_: number for number, id_ in enumerate(ids)}

    # The facts that sentences ask for.
    asked = {predicate[0].removeprefix("not_") for query in grammar["queries"] for predicate in query}
    if any(layer >= 0 and atom[0] in asked for atom, layer in variables):
        raise ValueError("a sentence that asks for a derived fact")
    # The stock engine tells the sentences of each effect, also of one whose condition is not met. So an atom
    # with such effects has a twin, which is what the sentences see.
    uncertain = {atom for *_, effects in operators for condition, atom, _ in effects if condition}
    twins = {}
    for atom in sorted(uncertain):
        if variables[atom][0][0] in asked:
            twins[atom] = len(variables)
            variables.append((variables[atom][0], -1))
            start.append(start[atom])
            fluent[variables[atom][0]] = twins[atom]
    facts: dict[tuple, list] = {}
    for predicate, arguments in sorted(constant | set(fluent)):
        if predicate in asked:
            types = tuple(type_of[argument] for argument in arguments)
            atom = fluent.get((predicate, arguments), -1)
            facts.setdefault((predicate, types), []).append([*(entity[a] for a in arguments), atom])
    hierarchy = _hierarchy(task.types)
    for query in grammar["queries"]:
        for predicate in query:
            types = [hierarchy.get(type_) for _, type_ in predicate[1]]
            signatures = [tuple(t.name for t in found) for found in hierarchy.multi_subtypes(types)]
            predicate.append([s for s in signatures if (predicate[0].removeprefix("not_"), s) in facts])

    # Only atoms that something reads are kept: states that differ elsewhere are one.
    read = {atom for _, condition, _ in operators for atom, _ in condition} | {atom for atom, _ in goal}
    read |= {atom for *_, effects in operators for condition, *_ in effects for atom, _ in condition}
    read |= {atom for head, body in axioms for atom, _ in (head, *body)}
    read |= {atom for found in facts.values() for *_, atom in found if atom >= 0}
    number_of = {-1: -1, **{old: new for new, old in enumerate(sorted(read))}}
    data = {
        "walkthrough": game.get("walkthrough") or [],
        "entities": [[id_, type_of[id_], names[id_]] for id_ in ids],
        "rules": grammar["rules"],
        "queries": grammar["queries"],
        "facts": [
            [*key, [value for *arguments, atom in found for value in (*arguments, number_of[atom])]]
            for key, found in facts.items()
        ],
    }

    # Operators in the order of their commands, then in the planner's, which sorts by preconditions.
    sentences = _Sentences(data)
    parameters = {
        action.name: [
            (p.name.strip("?"), p.type_name) for p in action.parameters[: action.num_external_parameters]
        ]
        for action in task.actions
    }
    actions = sorted({name for (name, *_), *_ in operators})
    rows = []
    for (name, *arguments), condition, effects in operators:
        numbers = [entity[argument] for argument in arguments]
        mapping = dict(zip(parameters[name], numbers, strict=True))
        command = sentences.derive(grammar["templates"][name], mapping, None, None)
        if "{" in command or "}" in command:
            command = command.format(**names)
        rows.append((command, sorted(condition), actions.index(name), numbers, effects))
    rows.sort(key=lambda row: row[:2])
    commands = sorted({row[0] for row in rows})
    place = {command: number for number, command in enumerate(commands)}

    def certain(effects: list):
        for condition, atom, value in effects:
            if not condition and atom in read:
                yield atom, value
            if atom in twins:
                yield twins[atom], value

    def literals(pairs: list) -> list[int]:
        return [2 * number_of[atom] + (value == TRUE) for atom, value in pairs]

    layers: dict[int, list] = {}
    for head, body in axioms:
        if head[1] != start[head[0]]:  # a rule that gives the default value says nothing
            layers.setdefault(variables[head[0]][1], []).append([literals([head])[0], literals(body)])
    true_at_start = [atom for atom in sorted(read) if start[atom] == TRUE]
    denied = {p[0].removeprefix("not_") for q in grammar["queries"] for p in q if p[0].startswith("not_")}
    return {
        **data,
        "commands": commands,
        "actions": [[grammar["feedback"][name], parameters[name]] for name in actions],
        "command_of": [place[command] for command, *_ in rows],
        "action_of": [action for _, _, action, *_ in rows],
        "arguments": _Rows.packed([arguments for *_, arguments, _ in rows]),
        "conditions": _Rows.packed([literals(condition) for _, condition, *_ in rows]),
        "effects": _Rows.packed([literals(certain(effects)) for *_, effects in rows]),
        "uncertain": [
            [number, literals(condition), *literals([pair])]
            for number, (*_, effects) in enumerate(rows)
            for condition, *pair in effects
            if condition and pair[0] in read
        ],
        "goal": literals(goal),
        "axioms": [layers[layer] for layer in sorted(layers)],
        "start": [number_of[atom] for atom in true_at_start if variables[atom][1] < 0],
        "default": [number_of[atom] for atom in true_at_start if variables[atom][1] >= 0],
        "deniable": [number_of[atom] for atom in sorted(read) if variables[atom][0][0] in denied],
    }


TRUE = 0  # the first value of each variable of the planning task: "Atom x"; the second is "NegatedAtom x"


def _read_sas(sas: str):
    """The translator's output: [(atom, axiom layer)], start values, goal, operators, axioms.

    An atom is (predicate, arguments), a condition a list of (variable, value), an operator (name, condition,
    effects), an effect (condition, variable, value), an axiom ((variable, value), condition).
    """
    lines = iter(sas.split("\n"))

    def number() -> int:
        return int(next(lines))

    def numbers() -> list[int]:
        return [int(word) for word in next(lines).split()]

    def pairs() -> list[tuple[int, int]]:
        return [tuple(numbers()) for _ in range(number())]

    def skip_to(line: str) -> None:
        while next(lines) != line:
            pass

    skip_to("end_metric")
    variables = []
    for _ in range(number()):
        skip_to("begin_variable")
        next(lines)
        layer, n_values = number(), number()
        values = [next(lines) for _ in range(n_values)]
        if n_values != 2 or not values[TRUE].startswith("Atom ") or not values[1].startswith("NegatedAtom "):
            raise ValueError(f"a variable that is not one atom: {values}")
        predicate, _, arguments = values[TRUE].removeprefix("Atom ").partition("(")
        variables.append(((predicate, tuple(a for a in arguments[:-1].split(", ") if a)), layer))
    skip_to("begin_state")
    start = [number() for _ in variables]
    skip_to("begin_goal")
    goal = pairs()
    skip_to("end_goal")
    operators = []
    for _ in range(number()):
        skip_to("begin_operator")
        name = next(lines).split()
        condition, effects = pairs(), []
        for _ in range(number()):
            words = numbers()
            *flat, variable, before, after = words[1:]
            effects.append((list(zip(flat[::2], flat[1::2], strict=True)), variable, after))
            if before >= 0:
                condition.append((variable, before))
        operators.append((name, condition, effects))
    skip_to("end_operator")
    axioms = []
    for _ in range(number()):
        skip_to("begin_rule")
        body = pairs()
        variable, _, after = numbers()
        axioms.append(((variable, after), body))
    return variables, start, goal, operators, axioms


STAND_IN = "Your task is to: do it"


def _grammar(text: str) -> dict:
    """The grammar's rules, and its actions' commands and answers, as the trees that `_Sentences` walks.

    Games differ in the words of the task alone, so the rest is parsed once. Those words are plain ones: they
    hold nothing that the grammar could read as more than text.
    """
    task = re.search(r'(?<="rhs": ")Your task is to: [\w ,.]*(?=")', text, re.ASCII)
    if task is None or STAND_IN in text:
        return json.loads(_parsed_grammar(text))
    return json.loads(_parsed_grammar(text.replace(task[0], STAND_IN)).replace(STAND_IN, task[0]))


@functools.lru_cache(maxsize=8)
def _parsed_grammar(text: str) -> str:
    from textworld.envs.pddl.logic import GameLogic
    from textworld.envs.pddl.textgen import ContextSensitiveGrammar

    logic = GameLogic(domain="", grammar=text)
    queries: dict[str, int] = {}

    def tree(symbol) -> list:
        kind = type(symbol).__name__
        if kind == "TerminalSymbol":
            return ["text", str(symbol.symbol)]
        if kind == "NonterminalSymbol":
            return ["rule", symbol.symbol]
        if kind == "EvalSymbol":
            return ["value", _expression(symbol.expression)]
        if kind == "ListSymbol":
            return ["list", tree(symbol.symbol)]
        return ["each", tree(symbol.expression), query(symbol.given)]

    def query(condition: str | None) -> int | None:
        return queries.setdefault(condition, len(queries)) if condition else None

    def trees(sentence: str) -> list:
        parsed = ContextSensitiveGrammar.parse(json.dumps({"it": [{"rhs": sentence}]}))
        return [tree(symbol) for symbol in parsed._rules["it"][0].rhs]

    rules = {
        name: [[query(rule.condition), [tree(symbol) for symbol in rule.rhs]] for rule in alternatives]
        for name, alternatives in logic.grammar._rules.items()
    }
    templates = {name: trees(action.template) for name, action in logic.actions.items()}
    feedback = {name: trees(action.feedback_rule) for name, action in logic.actions.items()}
    predicates = [_predicates(condition) for condition in queries]
    return json.dumps(dict(rules=rules, templates=templates, feedback=feedback, queries=predicates))


def _predicates(condition: str) -> list:
    """Of "p(x:t) & q(x:t, y:u)": [["p", [["x", "t"]]], ["q", [["x", "t"], ["y", "u"]]]]."""
    from textworld.logic import Rule

    predicates = Rule.parse_conjunctive_query(condition).preconditions
    return [[predicate.name, [[p.name, p.type] for p in predicate.parameters]] for predicate in predicates]


def _expression(code: str) -> list:
    """Of "o.indefinite + ' ' + o.name": a tree; nothing of a game file is ever run as Python."""

    def tree(node) -> list:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in ATTRIBUTES:
            return ["of", node.value.id, node.attr]
        if isinstance(node, ast.Name):
            return ["of", node.id, "name"]  # an entity prints as its name
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return ["text", node.value]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return ["+", tree(node.left), tree(node.right)]
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            return ["or", *(tree(value) for value in node.values)]
        raise ValueError(f"an expression that the engine does not know: {code.strip()}")

    return tree(ast.parse(code.strip(), mode="eval").body)


ATTRIBUTES = ("id", "type", "name", "definite", "indefinite")


def _hierarchy(types: list):
    """TextWorld's tree of types; it decides in which order facts of mixed types are visited."""
    from textworld.logic import Type, TypeHierarchy

    hierarchy = TypeHierarchy()
    for type_ in {type_.name: type_ for type_ in reversed(types)}.values():  # the first of a name counts
        hierarchy.add(Type(type_.name, type_.supertype_names))
    return hierarchy


def _names(ids: list[str]) -> dict[str, str]:
    """Entity id -> the name that ALFWorld shows, such as "cabinet 4"."""
    from alfworld.agents.utils.misc import Demangler

    demangler = Demangler(game_infos={id_: argparse.Namespace(id=id_) for id_ in ids})
    return {id_: demangler.demangle_alfred_name(id_) for id_ in ids}


# --- The cache: translated games in memory and on disk ------------------------------------------------------

_tables: OrderedDict[str, _Table] = OrderedDict()  # the last N_TABLES games, by key
_tables_lock = threading.Lock()


def cache_folder() -> Path:
    """Where translated games are kept: $RSPO_CACHE/alfworld, or rspo/alfworld in the user's cache folder."""
    if os.environ.get("RSPO_CACHE"):
        return Path(os.environ["RSPO_CACHE"]) / "alfworld"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rspo" / "alfworld"


def forget() -> None:
    """Let go of the translated games in memory; those on disk and those being played stay."""
    with _tables_lock:
        _tables.clear()


def clear_cache(folder: str | os.PathLike | None = None) -> int:
    """Forget the translated games, in memory and in the folder; how many files that removed.

    A game takes some 40 kB, all 4,027 that ALFWorld has some 150 MB.
    """
    forget()
    files = [*Path(folder or cache_folder()).glob("*.game"), *Path(folder or cache_folder()).glob("*.part")]
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def check_installed() -> None:
    """ImportError where ALFWorld is not installed; it says how to."""
    _versions()


@functools.cache
def _versions() -> str:
    try:
        return " ".join(f"{name}=={importlib.metadata.version(name)}" for name in PACKAGES)
    except importlib.metadata.PackageNotFoundError as error:
        message = f"ALFWorld needs the package {error.name}: pip install -r requirements/alfworld.txt"
        raise ImportError(message) from error


def _table(path: str, folder: Path) -> _Table:
    content = Path(path).read_bytes()
    key = hashlib.sha256(f"{FORMAT} {_versions()}\n".encode() + content).hexdigest()
    with _tables_lock:
        if key in _tables:
            _tables.move_to_end(key)
            return _tables[key]
    table = _build(path, content, folder / f"{key}.game")
    with _tables_lock:
        _tables[key] = table
        while len(_tables) > N_TABLES:
            _tables.popitem(last=False)
    return table


def _build(path: str, content: bytes, file: Path) -> _Table:
    data = _load(file)
    if data is not None:
        try:
            return _Table(data)
        except (LookupError, TypeError, ValueError) as error:
            warnings.warn(f"{file}: not a translated game ({error!r}); translating again", stacklevel=4)
    text = json.dumps(_translated(path, content), separators=(",", ":")).encode()
    _save(file, text)
    return _Table(json.loads(text))  # from the text, as the next process will


def _translated(path: str, content: bytes) -> dict:
    try:
        return _translate(json.loads(content))
    except ImportError:
        raise
    except (Exception, SystemExit) as error:  # the libraries' parsers raise all sorts, and exit
        raise ValueError(f"{path}: not a game that can be played: {error!r}") from error


def _load(file: Path) -> dict | None:
    """The data of a cache file; None when there is none, or a damaged one."""
    try:
        stored = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(file.parent, f"translated games cannot be read: {error.strerror}")
        return None
    digest, packed = stored[:32], stored[32:]
    if hashlib.sha256(packed).digest() != digest:
        warnings.warn(f"{file}: damaged; translating the game again", stacklevel=5)
        return None
    return json.loads(zlib.decompress(packed))


def _save(file: Path, text: bytes) -> None:
    """Write a cache file whole or not at all: other processes may be writing the same one."""
    packed = zlib.compress(text)
    part = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
            part.write(hashlib.sha256(packed).digest() + packed)
        os.replace(part.name, file)
    except OSError as error:
        if part is not None:
            Path(part.name).unlink(missing_ok=True)
        _warn_once(file.parent, f"translated games cannot be kept: {error.strerror}")


_warned: set[Path] = set()


def _warn_once(folder: Path, problem: str) -> None:
    if folder not in _warned:
        _warned.add(folder)
        warnings.warn(f"{folder}: {problem}", stacklevel=6)


# --- Command line -------------------------------------------------------------------------------------------


def _warm(path: str) -> str | None:
    """Translate one game into the cache; the complaint, if it cannot be."""
    try:
        Game(path).close()
    except ValueError as error:
        return str(error)
    return None


def main() -> int:
    from concurrent.futures import ProcessPoolExecutor

    parser = argparse.ArgumentParser(
        description="Translate every ALFWorld game below a folder into the cache."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    paths = sorted(str(path) for path in args.folder.rglob(GAME_FILE))
    if not paths:
        parser.error(f"no {GAME_FILE} below {args.folder}")
    with ProcessPoolExecutor(args.processes) as pool:
        complaints = [complaint for complaint in pool.map(_warm, paths, chunksize=8) if complaint]
    print(*complaints, sep="\n", file=sys.stderr, end="\n" if complaints else "")
    print(f"{len(paths) - len(complaints)} of {len(paths)} games are in {cache_folder()}")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
