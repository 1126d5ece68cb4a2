"""An ALFWorld game file as plain data, and the sentences made of that data (alfworld_engine.py plays it).

`translate` lets the libraries do once what the stock engine does at every reset: Fast Downward's translator
grounds the planning task, TextWorld parses the grammar. What it returns is JSON: operators, axioms, goal, the
facts that sentences speak of, the sentences as small trees. `Sentences` walks those trees.
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

# --- Sentences: the grammar's trees, walked with the facts of a state ---------------------------------------


class Sentences:
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


# --- Translation: by the libraries --------------------------------------------------------------------------

_TRANSLATING = threading.Lock()  # the libraries' parsers and options are global


def translate(game: dict) -> dict:
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
    sentences = Sentences(data)
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
        "arguments": _packed([arguments for *_, arguments, _ in rows]),
        "conditions": _packed([literals(condition) for _, condition, *_ in rows]),
        "effects": _packed([literals(certain(effects)) for *_, effects in rows]),
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


def _packed(rows: list[list[int]]) -> list:
    """[all their numbers, where each row ends]"""
    return [[value for row in rows for value in row], list(itertools.accumulate(map(len, rows)))]


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
    """The grammar's rules, and its actions' commands and answers, as the trees that `Sentences` walks.

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
