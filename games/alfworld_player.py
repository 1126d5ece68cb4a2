"""A scripted player of ALFWorld: its notebook, and the demonstrations of a warm start.

`Notebook` holds what an attentive player would have written down. It is read from observations and admissible
commands alone, so it goes into prompts: the tiny model sees one past turn and would otherwise not know where
it has searched. `Walkthrough` plays a game's stored solution the way someone would who has to search: with
detours to places that hold nothing, and with repairs after a mistake. It knows what is hidden and is asked
for demonstrations alone. The wordings are those of alfworld 0.4.
"""

from __future__ import annotations

import random
import re

NOTHING = "Nothing happens."
DETOURS = (0, 0, 1, 2, 3, 4, 6, 9)  # places searched in vain before a hidden object is found: one is drawn
LISTING = re.compile(r"(?:On the (\S+ \d+)|The (\S+ \d+) is open\. In it), you see (.*)")
CHANGES = re.compile(r"You (pick up|move|clean|heat|cool) the (\S+ \d+) (?:from|to|using) the (\S+ \d+)\.")
STATE = {"clean": "clean", "heat": "hot", "cool": "cool"}


class Notebook:
    """What one episode has shown. Names are ALFWorld's: "mug 1", "cabinet 4"."""

    def __init__(self, task: str, admissible: list[str]):
        self.sought = set(task.split())  # types of things that the task names
        self.places = [
            command.removeprefix("go to ") for command in admissible if command.startswith("go to ")
        ]
        self.contents: dict[str, list[str]] = {}  # of the places seen, inside too
        self.states: dict[str, set[str]] = {}
        self.held = ""
        self.here = ""

    def read(self, text: str, admissible: list[str]) -> None:
        """Take down what a command's answer says, and what the commands now offered give away."""
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
                states -= {"hot", "cool"} if verb != "clean" else set()
                states.add(STATE[verb])
        for command in admissible:  # places that stand together are all in reach, though one is described
            if command.startswith("take "):
                thing, _, place = command.removeprefix("take ").partition(" from ")
                if thing not in self.contents.setdefault(place, []):
                    self.contents[place].append(thing)

    def place_of(self, thing: str) -> str | None:
        return next((place for place, things in self.contents.items() if thing in things), None)

    def text(self) -> str:
        """Where to search still, where what the task names was seen, what is held."""
        out = []
        if left := [place for place in self.places if place not in self.contents]:
            out.append("search " + " ".join(left))
        seen = [
            f"{' '.join([*sorted(self.states.get(thing, ())), thing])} in {place}"
            for place, things in self.contents.items()
            for thing in things
            if thing.split()[0] in self.sought
        ]
        if seen:
            out.append("seen " + ", ".join(seen))
        if self.held:
            out.append("holding " + " ".join([*sorted(self.states.get(self.held, ())), self.held]))
        return "; ".join(out)


class Walkthrough:
    """Plays a game's stored solution, searching on the way; `next` gives the command for the present state.

    Of the solution only the commands that change things count; the ways between them are found again, so that
    a player who was led astray by a mistake comes back to it.
    """

    def __init__(self, commands: list[str], places: list[str], rng: random.Random):
        self.plan: list[str] = []
        self.spots: list[str] = []  # where each is carried out: "use" names no place
        spot = ""
        for command in commands:
            if command.startswith("go to "):
                spot = command.removeprefix("go to ")
            elif not command.startswith("open "):
                self.plan.append(command)
                self.spots.append(spot)
        self.done = 0  # commands of the plan carried out
        self.detours = places[: rng.choice(DETOURS)]  # in the notes' order: a search that can be learned

    def heard(self, command: str, text: str) -> None:
        """Note that a command was carried out."""
        if self.done < len(self.plan) and command == self.plan[self.done] and text != NOTHING:
            self.done += 1

    def next(self, notes: Notebook, admissible: list[str]) -> str:
        if self.done == len(self.plan):  # something was undone since: once more from the start
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
        if needed and not notes.held:  # it was put down on the way
            verb, thing, place = "take", needed, notes.place_of(needed) or place
        if verb == "take":
            if thing not in notes.contents.get(place, [thing]):  # a few are listed in two places
                place = notes.place_of(thing) or place
            return self._at(place, f"take {thing} from {place}", admissible)
        if verb == "use":
            place = notes.place_of(thing) or self.spots[self.done]
        return self._at(place, self.plan[self.done], admissible)

    def _parts(self, command: str) -> tuple[str, str, str]:
        """(verb, thing, place) of a command of the plan; "use" has no place."""
        verb, _, rest = command.partition(" ")
        thing, _, place = re.sub(r" (?:from|to|with) ", "|", rest).partition("|")
        return verb, thing, place

    def _object_held(self, verb: str) -> str:
        """What is in hand at this point of the plan."""
        if verb != "use":
            return self._parts(self.plan[self.done])[1]
        takes = [command for command in self.plan[: self.done] if command.startswith("take ")]
        return self._parts(takes[-1])[1] if takes else ""

    def _seen_instead(self, thing: str, place: str, notes: Notebook) -> tuple[str, str]:
        """Another thing of the same kind that was seen on the way replaces a hidden one throughout the plan;
        what to take, and where. Not where the plan ends before it is put anywhere: one of its kind lies there
        already."""
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
        """A step of the search in the wrong places; None when it is over."""
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
        """Get rid of what is held by mistake: here, or at the next place that takes it."""
        after = notes.places.index(notes.here) + 1 if notes.here in notes.places else 0
        ways = [f"go to {place}" for place in notes.places[after:] + notes.places[:after]]
        starts = (f"move {notes.held} to ", f"open {notes.here}", *ways)
        commands = (command for start in starts for command in admissible if command.startswith(start))
        return next(commands, "look")

    def _at(self, place: str, command: str, admissible: list[str]) -> str:
        """The command, or what must come before it: going there, opening."""
        steps = (command, f"open {place}", f"go to {place}")
        return next((step for step in steps if step in admissible), "look")
