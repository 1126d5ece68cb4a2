"""Household: a small ALFWorld in pure Python. envs.py wraps it as an environment.

`make_game` makes the game of a split and an index. `Room` is a game in play: the rules, the texts, the test
for a win, and two scripted experts. Texts, commands and rules follow ALFWorld 0.4 (Shridhar et al. 2021). The
agent sees only the receptacle at which it stands, must open closed receptacles, carries one object, and must
stand at an appliance to use it.

Left out, to stay small:
* different kinds of rooms, several receptacles of one kind, objects that contain others, and slicing;
* limits on which object fits where: every object fits into every receptacle;
* different sentences for the same task: each task type has one.
"""

from __future__ import annotations

import copy
import random
import zlib
from typing import NamedTuple

TASK_TYPES = ("Pick", "Look", "Clean", "Heat", "Cool", "Pick2")
SENTENCES = {
    "Pick": "put a {thing} in {target}.",
    "Look": "examine the {thing} with the desklamp.",
    "Clean": "put a clean {thing} in {target}.",
    "Heat": "put a hot {thing} in {target}.",
    "Cool": "put a cool {thing} in {target}.",
    "Pick2": "put two {thing} in {target}.",
}
SURFACES = ("bed 1", "countertop 1", "desk 1", "diningtable 1", "shelf 1", "sidetable 1")
CLOSABLE = ("cabinet 1", "drawer 1", "fridge 1", "microwave 1", "safe 1")
APPLIANCES = {"sinkbasin 1": "clean", "microwave 1": "heat", "fridge 1": "cool"}
RECEPTACLES = (*SURFACES, *CLOSABLE, "sinkbasin 1")
KITCHENWARE = ("apple", "cup", "egg", "mug", "plate", "potato", "tomato")  # can be cleaned, heated and cooled
THINGS = (*KITCHENWARE, "book", "cd", "cellphone", "creditcard", "keychain", "pen", "watch")
LAMP = "desklamp 1"  # cannot be carried
STATE = {"clean": "clean", "heat": "hot", "cool": "cool"}  # verb -> the state that it gives an object

N_RECEPTACLES, N_OBJECTS, STEP_LIMIT = 6, 4, 14
SIZES = {"train": 100_000, "eval": 300}
EVAL_SHARE = 3  # one game in three is reserved for eval
NOTHING = "Nothing happens."

# Every word of every text and command. A name with its number ("mug 1") is one word. Each word is listed in
# lower case too: a model may put any word into an action, and prompts repeat actions in lower case.
_WORDS = """
You are in the middle of a room Looking quickly around you see and nothing arrive at The is open closed In it
On the close pick up from move to clean heat cool using turn on facing Next carrying not anything There ' s
special about This hot cold Nothing happens put two examine with desklamp go take use inventory look search
seen holding no action . , : ; |
"""


def _vocabulary() -> tuple[str, ...]:
    words = _WORDS.split() + _WORDS.lower().split()
    for receptacle in RECEPTACLES:
        words += [receptacle.removesuffix(" 1"), receptacle]
    for thing in THINGS:
        words += [thing, f"{thing} 1", f"{thing} 2"]
    words += [LAMP, "go to"]
    return tuple(dict.fromkeys(words))


VOCABULARY = _vocabulary()


class Game(NamedTuple):
    """The content of a game. Every receptacle that can be closed is closed at the start."""

    task_type: str
    thing: str  # "mug"
    target: str  # "desk 1"; "" for Look
    contents: tuple[tuple[str, tuple[str, ...]], ...]  # sorted: ("desk 1", ("book 1", "mug 1")), ...

    @property
    def split(self) -> str:
        """The split of this game. It depends only on the content, so no game is in both splits."""
        return "train" if zlib.crc32(repr(self).encode()) % EVAL_SHARE else "eval"

    @property
    def sentence(self) -> str:
        return SENTENCES[self.task_type].format(thing=self.thing, target=self.target.removesuffix(" 1"))


# All draws use random.random(): only its numbers are the same in every version of Python.
def _choice(rng: random.Random, items):
    return items[int(rng.random() * len(items))]


def _shuffled(rng: random.Random, items) -> list[str]:
    return sorted(items, key=lambda _: rng.random())


def _suits(thing: str, receptacle: str) -> bool:
    """Keep pens out of fridges at the start of a game. The rules allow the player to put them there."""
    return thing in KITCHENWARE or receptacle not in APPLIANCES


def _draw(rng: random.Random, task_type: str) -> Game:
    """Draw a game of this type. Its objects never start in the target, so no game is won at the start."""
    needed = {r for r, verb in APPLIANCES.items() if task_type.lower() == verb}
    thing = _choice(rng, KITCHENWARE if needed else THINGS)
    target, lamp_place = "", _choice(rng, SURFACES)
    if task_type == "Look":
        needed.add(lamp_place)
    else:
        targets = SURFACES if task_type == "Pick2" else RECEPTACLES  # a game can then be won in ten moves
        target = _choice(rng, [r for r in targets if r not in needed and _suits(thing, r)])
        needed.add(target)
    others = _shuffled(rng, [r for r in RECEPTACLES if r not in needed])
    contents = {r: [] for r in sorted([*needed, *others[: N_RECEPTACLES - len(needed)]])}

    sought = [f"{thing} 1", f"{thing} 2"] if task_type == "Pick2" else [f"{thing} 1"]
    n_others = N_OBJECTS - len(sought) - (task_type == "Look")
    more = [f"{other} 1" for other in _shuffled(rng, [t for t in THINGS if t != thing])[:n_others]]
    for name in sought + more:
        places = [r for r in contents if _suits(name.split()[0], r) and not (name in sought and r == target)]
        contents[_choice(rng, places)].append(name)
    if task_type == "Look":
        contents[lamp_place].append(LAMP)
    return Game(task_type, thing, target, tuple((r, tuple(sorted(names))) for r, names in contents.items()))


def make_game(split: str, index: int) -> tuple[Game, list[str]]:
    """Make the game of a split and an index, the same in every process.

    Also returns the order in which the searching expert of this game visits the receptacles. The task types
    alternate, so each split has the same number of games of each type. Raises ValueError if there is no such
    game.
    """
    if split not in SIZES or not 0 <= index < SIZES[split]:
        known = ", ".join(f"{name} 0..{size - 1}" for name, size in SIZES.items())
        raise ValueError(f"there is no household game {split!r} {index}: choose one of {known}")
    rng = random.Random(f"household {split} {index}")
    task_type = TASK_TYPES[index % len(TASK_TYPES)]
    while (game := _draw(rng, task_type)).split != split:
        pass
    return game, _shuffled(rng, [r for r, _ in game.contents])


def draw_goal(game: Game, seed: str) -> Game:
    """Return this game with another task that its room allows, drawn with the seed.

    The new task is Pick, Clean, Heat, Cool or Look. Its object, and its appliance or lamp, are in the room.
    As in a game, the object does not start in the target.
    """
    rng = random.Random(seed)
    places = {name: receptacle for receptacle, names in game.contents for name in names}
    receptacles = [receptacle for receptacle, _ in game.contents]
    goal = game
    while goal == game:
        thing = _choice(rng, sorted({name.split()[0] for name in places if name != LAMP}))
        appliances = {"Pick": ""}
        if thing in KITCHENWARE:
            for receptacle, verb in APPLIANCES.items():
                if receptacle in receptacles:
                    appliances[verb.capitalize()] = receptacle
        task_type = _choice(rng, [*appliances, *(["Look"] if LAMP in places else [])])
        target = ""
        if task_type != "Look":
            starts = {place for name, place in places.items() if name.split()[0] == thing}
            excluded = starts | {appliances[task_type]}
            target = _choice(rng, [receptacle for receptacle in receptacles if receptacle not in excluded])
        goal = game._replace(task_type=task_type, thing=thing, target=target)
    return goal


def _listing(names) -> str:
    """List names as ALFWorld does: "a mug 1, a egg 1, and a watch 1", with "a" before every name."""
    names = [f"a {name}" for name in names]
    if len(names) > 1:
        names[-1] = f"and {names[-1]}"
    return ", ".join(names) or "nothing"


class Room:
    """A game in play: its state, admissible commands, answers, and the receptacles that were searched."""

    def __init__(self, game: Game, search_order: list[str]):
        """Start the game. search_order: the receptacles in the order in which `advice` searches them."""
        self.game = game
        self.search_order = search_order
        self.contents = {r: list(names) for r, names in game.contents}
        self.closed = {r for r in self.contents if r in CLOSABLE}
        self.here = ""  # the receptacle at which the player stands; "" in the middle of the room
        self.held = ""
        self.states = {name: set() for names in self.contents.values() for name in names}  # {"clean", "hot"}
        self.lamp_is_on = False
        self.searched: set[str] = set()  # receptacles whose contents were seen; only the player changes them
        self.admissible = self._admissible()

    @property
    def opening(self) -> str:
        listing = _listing(self.contents)
        return f"You are in the middle of a room. Looking quickly around you, you see {listing}."

    @property
    def won(self) -> bool:
        if self.game.task_type == "Look":
            lit = self.lamp_is_on and LAMP in self.contents.get(self.here, ())
            return lit and self.held == f"{self.game.thing} 1"
        done = [name for name in self.contents[self.game.target] if self._sought(name) and self._ready(name)]
        return len(done) >= (2 if self.game.task_type == "Pick2" else 1)

    def progress(self) -> float:
        """Return the share of the task's subgoals that are reached, in [0, 1]. It is 1 exactly after a win.

        Look: the object is held; the lamp is on; the object is held beside the lit lamp. Other types, for
        each object that the task needs: it has the demanded state, if there is one; it is held or delivered;
        it is delivered, that is, in the target with the demanded state.
        """
        if self.game.task_type == "Look":
            reached = [self.held == f"{self.game.thing} 1", self.lamp_is_on, self.won]
            return sum(reached) / len(reached)
        reached = []
        for name in self.states:
            if self._sought(name):
                delivered = name in self.contents[self.game.target] and self._ready(name)
                reached += [self.held == name or delivered, delivered]
                if self.game.task_type.lower() in STATE:
                    reached.append(self._ready(name))
        return sum(reached) / len(reached)

    def _sought(self, name: str) -> bool:
        return name.startswith(f"{self.game.thing} ")

    def _ready(self, name: str) -> bool:
        """Return True if the object has the state that the task demands: clean, hot, cool, or any state."""
        state = STATE.get(self.game.task_type.lower())
        return state is None or state in self.states[name]

    def _admissible(self) -> tuple[str, ...]:
        """Return the commands of this state, sorted as in ALFWorld. There are none after a win."""
        if self.won:
            return ()
        here, held = self.here, self.held
        out = [f"go to {r}" for r in self.contents if r != here] + ["inventory", "look"]
        if held:
            out.append(f"examine {held}")
        if here:
            out.append(f"examine {here}")
            if here in CLOSABLE:
                out.append(f"{'open' if here in self.closed else 'close'} {here}")
            if here in APPLIANCES and held.split(" ")[0] in KITCHENWARE:
                out.append(f"{APPLIANCES[here]} {held} with {here}")
            if here not in self.closed:
                if held:
                    out.append(f"move {held} to {here}")
                else:
                    out += [f"take {name} from {here}" for name in self.contents[here] if name != LAMP]
                if LAMP in self.contents[here]:
                    out.append(f"use {LAMP}")
        return tuple(sorted(out))

    def act(self, command: str) -> str:
        """Carry out the command and return ALFWorld's answer. Only admissible commands change anything."""
        if command not in self.admissible:
            return NOTHING
        answer = self._do(command)
        self.admissible = self._admissible()
        return answer

    def _do(self, command: str) -> str:
        verb, _, rest = command.partition(" ")
        here, held = self.here, self.held
        match verb:
            case "go":
                self.here = rest.removeprefix("to ")
                return f"You arrive at {self.here}. {self._see(self.here)}"
            case "open":
                self.closed.remove(here)
                return f"You open the {here}. {self._see(here)}"
            case "close":
                self.closed.add(here)
                return f"You close the {here}."
            case "take":
                self.held = rest.removesuffix(f" from {here}")
                self.contents[here].remove(self.held)
                return f"You pick up the {self.held} from the {here}."
            case "move":
                self.contents[here] = sorted([*self.contents[here], held])
                self.held = ""
                return f"You move the {held} to the {here}."
            case "clean" | "heat" | "cool":
                if verb != "clean":
                    self.states[held] -= {"hot", "cool"}
                self.states[held].add(STATE[verb])
                return f"You {verb} the {held} using the {here}."
            case "use":
                self.lamp_is_on = True  # as in ALFWorld, a second use gives the same answer: lamps stay on
                return f"You turn on the {LAMP}."
            case "examine":
                return self._see(here) if rest == here else self._examined(held)
            case "inventory":
                return f"You are carrying: a {held}." if held else "You are not carrying anything."
            case "look":
                return f"You are facing the {here}. Next to it, you see nothing." if here else self.opening
        raise AssertionError(f"the command {command!r} is admissible but has no rule")

    def _see(self, receptacle: str) -> str:
        """Describe the receptacle. It counts as searched if its contents are shown."""
        if receptacle in self.closed:
            return f"The {receptacle} is closed."
        self.searched.add(receptacle)
        listing = _listing(self.contents[receptacle])
        if receptacle in CLOSABLE:
            return f"The {receptacle} is open. In it, you see {listing}."
        return f"On the {receptacle}, you see {listing}."

    def _examined(self, name: str) -> str:
        state = self.states[name]
        words = [word for word in ("hot", "cool", "clean") if word in state]
        if not words:
            return f"There's nothing special about {name}."
        if words == ["cool"]:
            words = ["cold"]  # ALFWorld's word for an object that is only cool
        return f"This is a {' and '.join(words)} {name}."

    def notes(self) -> str:
        """Write the notes for a prompt: receptacles to search, places of objects for the task, held object.

        They contain only facts that observations have shown. The target needs no search, as the objects for
        the task never start in it. Example: "search safe 1; seen mug 1 in bed 1; holding clean cup 1".
        """
        out = []
        if left := [r for r in self.contents if r not in self.searched and r != self.game.target]:
            out.append("search " + " ".join(left))
        seen = []
        for receptacle in self.contents:
            if receptacle in self.searched:
                for name in self.contents[receptacle]:
                    if name == LAMP or self._to_move(name, receptacle):
                        seen.append(f"{name} in {receptacle}")
        if seen:
            out.append("seen " + ", ".join(seen))
        if self.held:
            out.append("holding " + " ".join([*sorted(self.states[self.held]), self.held]))
        return "; ".join(out)

    def _to_move(self, name: str, receptacle: str) -> bool:
        """Return True if the task needs the object, and it is not yet in the target in the demanded state."""
        return self._sought(name) and not (receptacle == self.game.target and self._ready(name))

    def advice(self, known) -> str:
        """Return the next command of an expert that knows the contents of the `known` receptacles.

        The expert searches the other receptacles if it has to.
        """
        game, held = self.game, self.held
        if held and not self._sought(held):
            return f"open {self.here}" if self.here in self.closed else f"move {held} to {self.here}"
        places = {}  # object -> receptacle
        for receptacle in self.contents:
            if receptacle in known:
                for name in self.contents[receptacle]:
                    places[name] = receptacle
        if not held:
            for name, place in places.items():
                if self._to_move(name, place):
                    return self._at(place, f"take {name} from {place}")
            return self._search(known)
        if game.task_type == "Look":
            return self._at(places[LAMP], f"use {LAMP}") if LAMP in places else self._search(known)
        if not self._ready(held):
            verb = game.task_type.lower()
            appliance = next(r for r, v in APPLIANCES.items() if v == verb)
            return self._at(appliance, f"{verb} {held} with {appliance}", opened=False)
        return self._at(game.target, f"move {held} to {game.target}")

    def pursuing(self, goal: Game) -> Room:
        """Return this room with the task of `goal`, to read `won` and `advice` in the current state."""
        room = copy.copy(self)
        room.game = goal
        return room

    def _search(self, known) -> str:
        order = [r for r in self.search_order if r not in known and r != self.game.target]
        place = self.here if self.here in order else order[0]  # first open the receptacle at hand
        return self._at(place, f"open {place}")

    def _at(self, place: str, command: str, opened: bool = True) -> str:
        """Return the command, or the step that must come before it: go to the place, or open it."""
        if self.here != place:
            return f"go to {place}"
        return f"open {place}" if opened and place in self.closed else command
