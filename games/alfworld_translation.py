"""Translate an ALFWorld game file to plain data, and make sentences from that data.

`translate` calls the libraries once. Without it, the stock engine repeats this work at every reset: Fast
Downward's translator grounds the planning task, and TextWorld parses the grammar of the sentences. The result
is JSON: operators, axioms, the goal, the facts that sentences query, and the sentences as small trees.
`Sentences` walks these trees. alfworld_engine.py plays the game.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import re
import sys
import threading
from dataclasses import dataclass
from typing import NamedTuple

# --- Sentences: the grammar's trees, walked with the facts of a state ---------------------------------------


class _Predicate(NamedTuple):
    """One predicate of a query, with the facts that can answer it."""

    negative: bool  # the query demands that the fact is denied
    placeholders: list[tuple]  # (name, type)
    facts: list[tuple]  # (entities, atom) in the order in which they are tried; atom -1: always true
    index: dict[tuple, dict]  # places of bound placeholders -> {their entities: the facts}, filled on demand


class Sentences:
    """The grammar of one game.

    A sentence is a list of symbols: ["text", t], ["rule", name], ["each", symbol, query or None], or ["list",
    symbol], whose symbol is an "each". The symbol in an "each" is a rule or ["value", expression]; it is
    repeated for each answer to the query. A query is a list of predicates that must all hold.

    `mapping` maps placeholders, (name, type), to entities. `true` and `denied` are sets of atoms as bits: the
    true atoms and the denied atoms. With None, a query of an atom raises ValueError.
    """

    def __init__(self, data: dict):
        self._entities = data["entities"]
        self._rules = data["rules"]
        self._queries = data["queries"]
        self._flat_facts = {(name, tuple(types)): flat for name, types, flat in data["facts"]}
        self._predicates: dict[int, list[_Predicate]] = {}  # by query, filled on demand
        self._facts: dict[tuple, tuple] = {}  # equal predicates share their facts and the index of them

    def _predicates_of(self, query: int) -> list[_Predicate]:
        if query not in self._predicates:
            self._predicates[query] = []
            for name, placeholders, signatures in self._queries[query]:
                facts, index = self._facts_of(name, signatures)
                placeholders = [tuple(placeholder) for placeholder in placeholders]
                predicate = _Predicate(name.startswith("not_"), placeholders, facts, index)
                self._predicates[query].append(predicate)
        return self._predicates[query]

    def _facts_of(self, name: str, signatures: list) -> tuple[list, dict]:
        """Return the facts of a predicate with these argument types, and their index."""
        key = name, tuple(map(tuple, signatures))
        if key not in self._facts:
            facts = []
            for types in key[1]:
                flat, width = self._flat_facts[name.removeprefix("not_"), types], len(types) + 1
                for start in range(0, len(flat), width):
                    *entities, atom = flat[start : start + width]
                    if atom >= 0 or not name.startswith("not_"):
                        facts.append((entities, atom))
            self._facts[key] = facts, {}
        return self._facts[key]

    def derive(self, symbols: list, mapping: dict, true: int | None, denied: int | None) -> str:
        """Make the text of a sentence.

        Raises ValueError if no alternative of a rule applies, or if the sentence depends on the state and
        `true` or `denied` is None.
        """
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
                items = self._each(symbol[1], mapping, true, denied)
                parts.append(self._listed(items, mapping, true, denied))
        return "".join(parts)

    def _rule(self, name: str, mapping: dict, true: int | None, denied: int | None) -> str:
        """Return the first alternative whose query has an answer."""
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
        last_separator = self._rule("list_last_separator", mapping, true, denied)
        return separator.join(items[:-1]) + last_separator + items[-1]

    def _value(self, expression: list, variables: dict):
        kind, *rest = expression
        if kind == "text":
            return rest[0]
        if kind == "+":
            return self._value(rest[0], variables) + self._value(rest[1], variables)
        if kind == "or":
            values = [self._value(part, variables) for part in rest]
            return next((value for value in values if value), values[-1])
        variable, attribute = rest
        id_, type_, name = self._entities[variables[variable]]
        return {"id": id_, "type": type_, "name": name, "definite": "the", "indefinite": "a"}[attribute]

    def _answers(self, query: int, mapping: dict, true: int | None, denied: int | None):
        """Yield the mappings that extend `mapping` so that the query holds, in a fixed order."""
        predicates = self._predicates_of(query)
        return self._search(predicates, 0, mapping, set(mapping.values()), true, denied)

    def _search(self, predicates: list, depth: int, mapping: dict, used: set, true, denied):
        """Yield the answers to the predicates from `depth` on, by backtracking."""
        if depth == len(predicates):
            yield mapping
            return
        predicate = predicates[depth]
        bits = denied if predicate.negative else true
        for entities, atom in self._candidates(predicate, mapping):
            if atom >= 0:
                if bits is None:
                    raise ValueError("the text of a command depends on the state of the game")
                if not bits >> atom & 1:
                    continue
            new = _bound(predicate.placeholders, entities, mapping, used)
            if new is not None:
                extended = mapping | new if new else mapping
                yield from self._search(
                    predicates, depth + 1, extended, used | set(new.values()), true, denied
                )

    def _candidates(self, predicate: _Predicate, mapping: dict) -> list[tuple]:
        """Return the facts that agree with the bound placeholders."""
        placeholders = predicate.placeholders
        bound = tuple(i for i, placeholder in enumerate(placeholders) if placeholder in mapping)
        if not bound:
            return predicate.facts
        if bound not in predicate.index:
            found: dict[tuple, list] = {}
            for fact in predicate.facts:
                found.setdefault(tuple(fact[0][i] for i in bound), []).append(fact)
            predicate.index[bound] = found
        return predicate.index[bound].get(tuple(mapping[placeholders[i]] for i in bound), [])


def _bound(placeholders: list[tuple], entities: list[int], mapping: dict, used: set) -> dict | None:
    """Bind the placeholders to the entities: the new bindings, or None if that is impossible.

    It is impossible if a placeholder is bound to another entity, or if the entity has another placeholder.
    """
    new: dict[tuple, int] = {}
    for placeholder, entity in zip(placeholders, entities, strict=True):
        known = mapping.get(placeholder, new.get(placeholder))
        if known is None:
            if entity in used or entity in new.values():
                return None
            new[placeholder] = entity
        elif known != entity:
            return None
    return new


# --- Translation: by the libraries --------------------------------------------------------------------------

_TRANSLATING = threading.Lock()  # the parsers and options of the libraries are global


@dataclass
class _Task:
    """A grounded planning task and the grammar of its sentences. An atom is (predicate, arguments)."""

    variables: list[tuple]  # the atoms that can change: (atom, axiom layer); layer -1: not derived
    start: list[int]  # the value of each variable at the start
    goal: list[tuple]  # goal, operators and axioms have the form that `_read_sas` returns
    operators: list[tuple]
    axioms: list[tuple]
    constant: set[tuple]  # the atoms that are always true
    entity: dict[str, int]  # entity id -> its number, in the order of the ids
    type_of: dict[str, str]  # entity id -> its type
    names: dict[str, str]  # entity id -> the name in sentences
    parameters: dict[str, list]  # action -> [(placeholder, type)]
    grammar: dict
    queried: set[str]  # the predicates that sentences query
    denied: set[str]  # the predicates whose negation sentences query
    hierarchy: object  # TextWorld's tree of types


class _Operator(NamedTuple):
    command: str
    condition: list[tuple]  # sorted
    action: int  # its place among the names of the actions
    arguments: list[int]  # entities
    effects: list[tuple]


def translate(game: dict) -> dict:
    """Translate the content of a game file to the plain data that alfworld_engine plays.

    In that data an atom is a number, and a literal is 2 * atom + [true]. Raises ValueError for a game that
    the engine cannot play; the libraries raise other errors for broken files.
    """
    task = _ground(game)
    twins = _add_twins(task)
    facts = _facts_of(task)
    number_of = _number_atoms(task, facts)
    data = {"walkthrough": game.get("walkthrough") or []}
    data |= _sentence_tables(task, facts, number_of)
    operators = _operator_rows(task, Sentences(data))
    data |= _command_tables(task, operators)
    data |= _change_tables(operators, twins, number_of)
    data |= _state_tables(task, number_of)
    return data


def _ground(game: dict) -> _Task:
    """Ground the planning task and parse the grammar."""
    import fast_downward

    with _TRANSLATING:
        argv = sys.argv
        try:
            pddl, sas = fast_downward.pddl2sas(game["pddl_domain"], game["pddl_problem"])
        finally:
            sys.argv = argv  # pddl2sas replaces it
        grammar = _grammar(game["grammar"])
    variables, start, goal, operators, axioms = _read_sas(sas)

    initial = set()
    for atom in pddl.init:
        if hasattr(atom, "predicate") and atom.predicate != "=":
            initial.add((atom.predicate, tuple(atom.args)))
    ids = sorted({argument for _, arguments in initial for argument in arguments})
    parameters = {}
    for action in pddl.actions:
        external = action.parameters[: action.num_external_parameters]
        parameters[action.name] = [(p.name.strip("?"), p.type_name) for p in external]
    predicates = [name for query in grammar["queries"] for name, _ in query]
    return _Task(
        variables=variables,
        start=start,
        goal=goal,
        operators=operators,
        axioms=axioms,
        constant=initial - {atom for atom, _ in variables},
        entity={id_: number for number, id_ in enumerate(ids)},
        type_of={thing.name: thing.type_name for thing in pddl.objects},
        names=_names(ids),
        parameters=parameters,
        grammar=grammar,
        queried={name.removeprefix("not_") for name in predicates},
        denied={name.removeprefix("not_") for name in predicates if name.startswith("not_")},
        hierarchy=_hierarchy(pddl.types),
    )


def _add_twins(task: _Task) -> dict[int, int]:
    """Add a second variable for each atom that sentences query and that has conditional effects.

    In the stock engine a sentence sees each effect of an operator, even if the condition of the effect is not
    met. The sentences read the second variable, which such an effect always changes. Returns {variable: its
    twin}.
    """
    uncertain = set()
    for _, _, effects in task.operators:
        uncertain.update(variable for condition, variable, _ in effects if condition)
    twins = {}
    for variable in sorted(uncertain):
        atom, _ = task.variables[variable]
        if atom[0] in task.queried:
            twins[variable] = len(task.variables)
            task.variables.append((atom, -1))
            task.start.append(task.start[variable])
    return twins


def _facts_of(task: _Task) -> dict[tuple, list]:
    """Return the facts that sentences query: {(predicate, types): [(entities, variable)]}.

    The variable is -1 for a fact that never changes.
    """
    variable_of = {}
    for variable, (atom, layer) in enumerate(task.variables):
        if layer >= 0 and atom[0] in task.queried:
            raise ValueError(
                f"a sentence queries {atom[0]}, a derived fact: the engine does not support this"
            )
        variable_of[atom] = variable  # a twin comes later than its variable, so it replaces the variable
    facts: dict[tuple, list] = {}
    for atom in sorted(task.constant | set(variable_of)):
        predicate, arguments = atom
        if predicate in task.queried:
            types = tuple(task.type_of[argument] for argument in arguments)
            entities = [task.entity[argument] for argument in arguments]
            facts.setdefault((predicate, types), []).append((entities, variable_of.get(atom, -1)))
    return facts


def _number_atoms(task: _Task, facts: dict[tuple, list]) -> dict[int, int]:
    """Number the variables that something reads: {variable: atom}, both increasing.

    The other variables are dropped, so states that differ only in them become one state.
    """
    read = {variable for variable, _ in task.goal}
    for _, condition, effects in task.operators:
        read.update(variable for variable, _ in condition)
        for effect_condition, _, _ in effects:
            read.update(variable for variable, _ in effect_condition)
    for head, body in task.axioms:
        read.update(variable for variable, _ in [head, *body])
    for found in facts.values():
        read.update(variable for _, variable in found if variable >= 0)
    return {variable: atom for atom, variable in enumerate(sorted(read))}


def _sentence_tables(task: _Task, facts: dict[tuple, list], number_of: dict[int, int]) -> dict:
    """Return the tables that `Sentences` reads. The facts of a predicate are one flat list of numbers."""
    flat_facts = []
    for (predicate, types), found in facts.items():
        flat = []
        for entities, variable in found:
            flat += [*entities, number_of.get(variable, -1)]
        flat_facts.append([predicate, types, flat])
    queries = []
    for query in task.grammar["queries"]:
        predicates = []
        for name, placeholders in query:
            predicates.append([name, placeholders, _signatures(task, name, placeholders, facts)])
        queries.append(predicates)
    return {
        "entities": [[id_, task.type_of[id_], task.names[id_]] for id_ in task.entity],
        "rules": task.grammar["rules"],
        "queries": queries,
        "facts": flat_facts,
    }


def _signatures(task: _Task, name: str, placeholders: list, facts: dict[tuple, list]) -> list[tuple]:
    """Return the argument types for which the predicate has facts, in the order of TextWorld's visits."""
    supertypes = [task.hierarchy.get(type_) for _, type_ in placeholders]
    signatures = []
    for subtypes in task.hierarchy.multi_subtypes(supertypes):
        types = tuple(type_.name for type_ in subtypes)
        if (name.removeprefix("not_"), types) in facts:
            signatures.append(types)
    return signatures


def _operator_rows(task: _Task, sentences: Sentences) -> list[_Operator]:
    """Sort the operators by their commands, then in the planner's order: by preconditions."""
    actions = _action_names(task)
    rows = []
    for (name, *arguments), condition, effects in task.operators:
        entities = [task.entity[argument] for argument in arguments]
        mapping = dict(zip(task.parameters[name], entities, strict=True))
        command = sentences.derive(task.grammar["templates"][name], mapping, None, None)
        if "{" in command or "}" in command:
            command = command.format(**task.names)
        rows.append(_Operator(command, sorted(condition), actions.index(name), entities, effects))
    return sorted(rows, key=lambda row: (row.command, row.condition))


def _action_names(task: _Task) -> list[str]:
    return sorted({name for (name, *_), _, _ in task.operators})


def _command_tables(task: _Task, operators: list[_Operator]) -> dict:
    """Return the commands of the game, and the command, the action and the arguments of each operator."""
    commands = sorted({row.command for row in operators})
    place = {command: number for number, command in enumerate(commands)}
    feedback = task.grammar["feedback"]
    return {
        "commands": commands,
        "actions": [[feedback[name], task.parameters[name]] for name in _action_names(task)],
        "command_of": [place[row.command] for row in operators],
        "action_of": [row.action for row in operators],
        "arguments": _packed([row.arguments for row in operators]),
    }


def _change_tables(operators: list[_Operator], twins: dict[int, int], number_of: dict[int, int]) -> dict:
    """Return the conditions and the effects of the operators.

    "effects" holds an operator's unconditional effects, "uncertain" its conditional effects: [operator,
    condition, literal].
    """
    certain = []
    uncertain = []
    for number, row in enumerate(operators):
        changes = []
        for condition, variable, value in row.effects:
            if variable in number_of:
                if condition:
                    literal = _literal(number_of, variable, value)
                    uncertain.append([number, _literals(number_of, condition), literal])
                else:
                    changes.append((variable, value))
            if variable in twins:
                changes.append((twins[variable], value))
        certain.append(_literals(number_of, changes))
    return {
        "conditions": _packed([_literals(number_of, row.condition) for row in operators]),
        "effects": _packed(certain),
        "uncertain": uncertain,
    }


def _state_tables(task: _Task, number_of: dict[int, int]) -> dict:
    """Return the goal, the axioms by layer, the atoms true at the start, and the atoms that can be denied.

    "default" holds the derived atoms that are true unless an axiom makes them false.
    """
    layers: dict[int, list] = {}
    for (variable, value), body in task.axioms:
        if value != task.start[variable]:  # an axiom that derives the default value changes nothing
            _, layer = task.variables[variable]
            axiom = [_literal(number_of, variable, value), _literals(number_of, body)]
            layers.setdefault(layer, []).append(axiom)
    start, default, deniable = [], [], []
    for variable, atom in number_of.items():
        (predicate, _), layer = task.variables[variable]
        if task.start[variable] == TRUE and layer < 0:
            start.append(atom)
        if task.start[variable] == TRUE and layer >= 0:
            default.append(atom)
        if predicate in task.denied:
            deniable.append(atom)
    return {
        "goal": _literals(number_of, task.goal),
        "axioms": [layers[layer] for layer in sorted(layers)],
        "start": start,
        "default": default,
        "deniable": deniable,
    }


def _literal(number_of: dict[int, int], variable: int, value: int) -> int:
    return 2 * number_of[variable] + (value == TRUE)


def _literals(number_of: dict[int, int], pairs: list[tuple]) -> list[int]:
    return [_literal(number_of, variable, value) for variable, value in pairs]


def _packed(rows: list[list[int]]) -> list:
    """Join lists of numbers: [all numbers, where each list ends]."""
    return [[value for row in rows for value in row], list(itertools.accumulate(map(len, rows)))]


TRUE = 0  # variables of the planning task have two values: 0 means "Atom x", 1 "NegatedAtom x"


def _read_sas(sas: str):
    """Parse the output of Fast Downward's translator: variables, start values, goal, operators, axioms.

    variable:   (atom, axiom layer), and an atom is (predicate, arguments)
    condition:  [(variable, value)]; the goal is one
    operator:   (name, condition, effects), and an effect is (condition, variable, value)
    axiom:      ((variable, value), condition)
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
            raise ValueError(f"the planning task has a variable with other values than one atom: {values}")
        predicate, _, arguments = values[TRUE].removeprefix("Atom ").partition("(")
        arguments = arguments.removesuffix(")")
        atom = predicate, tuple(arguments.split(", ")) if arguments else ()
        variables.append((atom, layer))
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
            _, *flat, variable, before, after = numbers()
            effect_condition = list(zip(flat[::2], flat[1::2], strict=True))
            effects.append((effect_condition, variable, after))
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
    """Parse the grammar of a game to the trees that `Sentences` walks.

    Returns {"rules", "templates", "feedback", "queries"}: the templates are the commands of the actions, the
    feedback their answers. Games differ only in the sentence that states the task, so one parsed grammar
    serves all of them: a stand-in takes the place of that sentence while the grammar is parsed. The sentence
    must be plain text without any symbol of the grammar.
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

    rules = {}
    for name, alternatives in logic.grammar._rules.items():
        rules[name] = [
            [query(rule.condition), [tree(symbol) for symbol in rule.rhs]] for rule in alternatives
        ]
    templates = {name: trees(action.template) for name, action in logic.actions.items()}
    feedback = {name: trees(action.feedback_rule) for name, action in logic.actions.items()}
    predicates = [_predicates(condition) for condition in queries]
    return json.dumps(dict(rules=rules, templates=templates, feedback=feedback, queries=predicates))


def _predicates(condition: str) -> list:
    """Parse a query: "p(x:t) & q(x:t, y:u)" -> [["p", [["x", "t"]]], ["q", [["x", "t"], ["y", "u"]]]]."""
    from textworld.logic import Rule

    predicates = Rule.parse_conjunctive_query(condition).preconditions
    return [[predicate.name, [[p.name, p.type] for p in predicate.parameters]] for predicate in predicates]


def _expression(code: str) -> list:
    """Parse an expression of the grammar, such as "o.indefinite + ' ' + o.name", to a tree.

    The text of a game file is never run as Python.
    """

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
        raise ValueError(f"the grammar has an expression that the engine does not know: {code.strip()}")

    return tree(ast.parse(code.strip(), mode="eval").body)


ATTRIBUTES = ("id", "type", "name", "definite", "indefinite")


def _hierarchy(types: list):
    """Build TextWorld's tree of types. It decides in which order facts of mixed types are visited."""
    from textworld.logic import Type, TypeHierarchy

    hierarchy = TypeHierarchy()
    first_of_name = {type_.name: type_ for type_ in reversed(types)}  # the list can name a type twice
    for type_ in first_of_name.values():
        hierarchy.add(Type(type_.name, type_.supertype_names))
    return hierarchy


def _names(ids: list[str]) -> dict[str, str]:
    """Map entity ids to the names that ALFWorld shows, such as "cabinet 4"."""
    from alfworld.agents.utils.misc import Demangler

    demangler = Demangler(game_infos={id_: argparse.Namespace(id=id_) for id_ in ids})
    return {id_: demangler.demangle_alfred_name(id_) for id_ in ids}
