"""Scripted players of ALFWorld: notes for prompts, and demonstrations for the warm start.

`Notebook` keeps notes of an episode. It reads only observations and admissible commands, so the notes may
stand in prompts. The tiny model needs them: it sees one past turn and would not know where it has searched.

`Walkthrough` plays the stored solution of a game as if it had to search: it visits wrong places first, and it
repairs mistakes. It knows hidden facts, so it is used only for demonstrations.

`Wanderer` has goals of its own, and never reads the task.

The texts are parsed as alfworld 0.4 writes them.
"""

from __future__ import annotations

import random
import re

NOTHING = "Nothing happens."
DETOURS = (0, 0, 1, 2, 3, 4, 6, 9)  # the number of wrong places to search first is drawn from these
LISTING = re.compile(r"(?:On the (\S+ \d+)|The (\S+ \d+) is open\. In it), you see (.*)")
CHANGES = re.compile(r"You (pick up|move|clean|heat|cool) the (\S+ \d+) (?:from|to|using) the (\S+ \d+)\.")
STATE = {"clean": "clean", "heat": "hot", "cool": "cool"}
APPLIANCES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


class Notebook:
    """Notes on the facts that one episode has shown. Names are ALFWorld's: "mug 1", "cabinet 4"."""

    def __init__(self, task: str, admissible: list[str]):
        """Start the notes of an episode with its task and the commands that are admissible at its start."""
        self.sought = set(task.split())  # contains the types of the things that the task names
        self.places = [
            command.removeprefix("go to ") for command in admissible if command.startswith("go to ")
        ]
        self.contents: dict[str, list[str]] = {}  # place -> things, for places whose contents were seen
        self.states: dict[str, set[str]] = {}  # thing -> {"clean", "hot", "cool"}
        self.held = ""
        self.here = ""

    def read(self, text: str, admissible: list[str]) -> None:
        """Note the facts in the answer to a command and in the admissible commands."""
        if arrived := re.match(r"You arrive at (\S+ \d+)\.", text):
            self.here = arrived[1]
        if listing := LISTING.search(text):
            self.contents[listing[1] or listing[2]] = re.findall(r"\ba (\S+ \d+)", listing[3])
        if change := CHANGES.match(text):
            verb, thing, place = change.groups()
            if verb == "pick up":
                self.held = thing
                self.contents[place] = [name for name in self.contents.get(place, ()) if name != thing]
            elif verb == "move":
                self.held = ""
                self.contents.setdefault(place, []).append(thing)
            else:
                states = self.states.setdefault(thing, set())
                if verb != "clean":
                    states -= {"hot", "cool"}
                states.add(STATE[verb])
        for command in admissible:  # several places can be in reach, but a text describes only one of them
            if command.startswith("take "):
                thing, _, place = command.removeprefix("take ").partition(" from ")
                if thing not in self.contents.setdefault(place, []):
                    self.contents[place].append(thing)

    def place_of(self, thing: str) -> str | None:
        """Return the first noted place that contains the thing, or None."""
        return next((place for place, things in self.contents.items() if thing in things), None)

    def text(self) -> str:
        """Write the notes for a prompt: places to search, places of things named by the task, the held thing.

        Example: "search desk 1 drawer 1; seen mug 2 in fridge 1; holding hot mug 1".
        """
        out = []
        if left := [place for place in self.places if place not in self.contents]:
            out.append("search " + " ".join(left))
        seen = []
        for place, things in self.contents.items():
            for thing in things:
                if thing.split()[0] in self.sought:
                    seen.append(f"{self._described(thing)} in {place}")
        if seen:
            out.append("seen " + ", ".join(seen))
        if self.held:
            out.append("holding " + self._described(self.held))
        return "; ".join(out)

    def _described(self, thing: str) -> str:
        """Return the thing with its states, such as "clean hot mug 1"."""
        return " ".join([*sorted(self.states.get(thing, ())), thing])


class Walkthrough:
    """A player that follows the stored solution of a game, but searches like a player without it.

    The plan keeps only the commands that change things. The player finds its own way from place to place, so
    it can continue after a mistake that led it elsewhere.
    """

    def __init__(self, commands: list[str], places: list[str], rng: random.Random):
        """Make the plan from the stored commands, and draw the number of places to search first."""
        self.plan: list[str] = []
        self.spots: list[str] = []  # the place of each command of the plan; a "use" does not name its place
        spot = ""
        for command in commands:
            if command.startswith("go to "):
                spot = command.removeprefix("go to ")
            elif not command.startswith("open "):
                self.plan.append(command)
                self.spots.append(spot)
        self.done = 0  # the number of commands of the plan that were carried out
        self.detours = places[: rng.choice(DETOURS)]  # in the order of the notes, which a model can learn

    def heard(self, command: str, text: str) -> None:
        """Count the command as done if it is the next one of the plan and had an effect."""
        if self.done < len(self.plan) and command == self.plan[self.done] and text != NOTHING:
            self.done += 1

    def next(self, notes: Notebook, admissible: list[str]) -> str:
        """Return the command for the present state."""
        if self.done == len(self.plan):  # the game is not won, so something was undone: start the plan again
            self.done = 0
        verb, thing, place = self._parts(self.plan[self.done])
        if verb == "take" and notes.held == thing:
            self.done += 1
            return self.next(notes, admissible) if self.done < len(self.plan) else "look"
        if verb == "take" and notes.place_of(thing) is None:
            thing, place = self._seen_instead(thing, place, notes)
            if notes.place_of(thing) is None and (detour := self._detour(notes, admissible)):
                return detour
        needed = "" if verb == "take" else self._object_held(verb)
        if notes.held and notes.held != needed:
            return self._put_down(notes, admissible)
        if needed and not notes.held:  # the thing was put down on the way
            verb, thing, place = "take", needed, notes.place_of(needed) or place
        if verb == "take":
            if thing not in notes.contents.get(place, [thing]):  # some things are listed in two places
                place = notes.place_of(thing) or place
            return way_to(place, f"take {thing} from {place}", admissible)
        if verb == "use":
            place = notes.place_of(thing) or self.spots[self.done]
        return way_to(place, self.plan[self.done], admissible)

    def _parts(self, command: str) -> tuple[str, str, str]:
        """Split a command of the plan into (verb, thing, place). The place of "use" is ""."""
        verb, _, rest = command.partition(" ")
        thing, _, place = re.sub(r" (?:from|to|with) ", "|", rest).partition("|")
        return verb, thing, place

    def _object_held(self, verb: str) -> str:
        """Return the thing that the player must hold for the next command of the plan, or ""."""
        if verb != "use":
            return self._parts(self.plan[self.done])[1]
        takes = [command for command in self.plan[: self.done] if command.startswith("take ")]
        return self._parts(takes[-1])[1] if takes else ""

    def _seen_instead(self, thing: str, place: str, notes: Notebook) -> tuple[str, str]:
        """Replace a hidden thing in the plan by one of the same kind that was seen. Returns (thing, place).

        The thing is not replaced if the plan ends before it is moved or used. Then the target contains one of
        its kind already, and no other thing than the plan's is sure to win.
        """
        if not self.plan[-1].startswith(("move ", "use ")):
            return thing, place
        kind = thing.split()[0]
        taken = {name for command in self.plan for name in self._parts(command)[1:]}
        targets = {self._parts(command)[2] for command in self.plan if command.startswith("move ")}
        for where, things in notes.contents.items():
            for name in things:
                if name.split()[0] == kind and name not in taken and where not in targets:
                    swap = re.compile(rf"\b{re.escape(thing)}\b")
                    self.plan = [swap.sub(name, command) for command in self.plan]
                    self.plan[self.done] = f"take {name} from {where}"
                    return name, where
        return thing, place

    def _detour(self, notes: Notebook, admissible: list[str]) -> str | None:
        """Return the next command of the search in wrong places, or None after the last of them."""
        while self.detours:
            place = self.detours[0]
            if place not in notes.contents:
                if f"open {place}" in admissible:
                    return f"open {place}"
                if f"go to {place}" in admissible:
                    return f"go to {place}"
            self.detours.pop(0)
        return None

    def _put_down(self, notes: Notebook, admissible: list[str]) -> str:
        """Return the command to put down a wrong thing, or to go to the next place where that is possible."""
        after = notes.places.index(notes.here) + 1 if notes.here in notes.places else 0
        ways = [f"go to {place}" for place in notes.places[after:] + notes.places[:after]]
        for start in [f"move {notes.held} to ", f"open {notes.here}", *ways]:
            for command in admissible:
                if command.startswith(start):
                    return command
        return "look"


def way_to(place: str, command: str, admissible: list[str]) -> str:
    """Return the command, or the step that must come before it: open the place, or go to it. Else "look"."""
    for step in (command, f"open {place}", f"go to {place}"):
        if step in admissible:
            return step
    return "look"


class Wanderer:
    """A player with a goal of its own: it takes a thing, may clean, heat or cool it, and moves it elsewhere.

    It searches places in the order of the notes, and takes a thing from one of them. When the goal is reached
    it draws another one. It uses no hidden fact.
    """

    def __init__(self, places: list[str], seed: str):
        """Draw the first goal."""
        self.places, self.rng = places, random.Random(seed)
        self.thing = ""  # the thing that is or was held
        self.last = ""  # the thing of the goal before, which it leaves alone
        self._draw_goal()

    def _draw_goal(self) -> None:
        self.searches = self.rng.choice(DETOURS)  # places to search before a thing is taken
        self.verb = self.rng.choice(["", *APPLIANCES])
        self.targets = self.rng.sample(self.places, len(self.places))  # the first one that takes the thing

    def next(self, notes: Notebook, admissible: list[str]) -> str:
        """Return the command for the present state."""
        if self.thing and not notes.held:  # the thing was put down
            self.last, self.thing = self.thing, ""
            self._draw_goal()
        if not notes.held:
            return self._search(notes, admissible)
        if not self.thing:
            self.thing = notes.held
            if notes.here in self.targets:  # the thing was taken here
                self.targets.remove(notes.here)
        if self.verb and STATE[self.verb] not in notes.states.get(self.thing, ()):
            appliances = [place for place in self.places if place.startswith(APPLIANCES[self.verb])]
            if appliances:
                command = f"{self.verb} {self.thing} with {appliances[0]}"
                if command in admissible or notes.here != appliances[0]:
                    return way_to(appliances[0], command, admissible)
            self.verb = ""  # there is no such appliance, or it does not take the thing
        while self.targets:
            step = way_to(self.targets[0], f"move {self.thing} to {self.targets[0]}", admissible)
            if step != "look":
                return step
            self.targets.pop(0)  # the place does not take the thing
        return "look"

    def _search(self, notes: Notebook, admissible: list[str]) -> str:
        """Return the next command of the search, or a command that takes a thing."""
        things = []
        for command in admissible:
            if command.startswith("take ") and not command.startswith(f"take {self.last} from "):
                things.append(command)
        if things and self.searches <= 0:
            return self.rng.choice(things)
        for place in notes.places:
            if place not in notes.contents and (step := way_to(place, "", admissible)) != "look":
                self.searches -= not step.startswith("open ")
                return step
        if things:
            return self.rng.choice(things)
        full = [place for place, names in notes.contents.items() if names and place != notes.here]
        return way_to(self.rng.choice(full), "", admissible) if full else "look"
