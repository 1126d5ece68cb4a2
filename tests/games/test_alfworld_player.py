"""Tests of ALFWorld's scripted players: the notebook and the wanderer on literal texts, the walkthrough in a
small stand-in for ALFWorld, and both players in real games."""

import random

import pytest

from envs import AlfWorld
from games.alfworld_player import NOTHING, Notebook, Walkthrough, Wanderer

BASICS = ["help", "inventory", "look"]


# --- The notebook -------------------------------------------------------------------------------------------


def notebook(task="put a clean mug in desk", places=("desk 1", "drawer 1", "fridge 1", "sinkbasin 1")):
    return Notebook(task, sorted([f"go to {place}" for place in places] + BASICS))


def test_the_notes_at_the_start_list_all_places_to_search():
    notes = notebook()
    notes.read(
        "You are in the middle of a room. Looking quickly around you, you see a desk 1, a drawer 1, "
        "a fridge 1, and a sinkbasin 1.",
        ["go to desk 1", *BASICS],
    )
    assert notes.text() == "search desk 1 drawer 1 fridge 1 sinkbasin 1"
    assert (notes.here, notes.held, notes.contents) == ("", "", {})


@pytest.mark.parametrize(
    "text, here, contents",
    [
        (
            "You arrive at desk 1. On the desk 1, you see a bowl 2, a cd 1, and a mug 1.",
            "desk 1",
            {"desk 1": ["bowl 2", "cd 1", "mug 1"]},
        ),
        ("You arrive at desk 1. On the desk 1, you see a mug 12.", "desk 1", {"desk 1": ["mug 12"]}),
        ("You arrive at desk 1. On the desk 1, you see nothing.", "desk 1", {"desk 1": []}),
        ("You arrive at drawer 1. The drawer 1 is closed.", "drawer 1", {}),
        (
            "You arrive at drawer 1. The drawer 1 is open. In it, you see a pen 1, and a pencil 3.",
            "drawer 1",
            {"drawer 1": ["pen 1", "pencil 3"]},
        ),
        (
            "You open the drawer 1. The drawer 1 is open. In it, you see a creditcard 1.",
            "",
            {"drawer 1": ["creditcard 1"]},
        ),
        ("You open the drawer 1. The drawer 1 is open. In it, you see nothing.", "", {"drawer 1": []}),
        ("On the desk 1, you see a mug 1.", "", {"desk 1": ["mug 1"]}),  # examine desk 1
        ("The drawer 1 is closed.", "", {}),  # examine drawer 1
        ("You close the drawer 1.", "", {}),
        ("Nothing happens.", "", {}),
        ("You are facing the desk 1, and drawer 1. Next to it, you see nothing.", "", {}),  # look
        ("You are carrying: a mug 1.", "", {}),
        ("You are not carrying anything.", "", {}),
        ("You turn on the desklamp 1.", "", {}),
        ("This is a normal bowl 1. In it, you see nothing.", "", {}),  # examine bowl 1
        ("This is a cold mug 1.", "", {}),
        ("There's nothing special about mug 1.", "", {}),
    ],
)
def test_each_kind_of_answer_is_read_correctly(text, here, contents):
    notes = notebook()
    notes.read(text, [])
    assert (notes.here, notes.held, notes.contents) == (here, "", contents)


def test_a_place_counts_as_searched_when_its_contents_were_seen():
    notes = notebook()
    notes.read("You arrive at drawer 1. The drawer 1 is closed.", [])
    assert notes.text() == "search desk 1 drawer 1 fridge 1 sinkbasin 1"
    notes.read("You open the drawer 1. The drawer 1 is open. In it, you see nothing.", [])
    assert notes.text() == "search desk 1 fridge 1 sinkbasin 1"
    notes.read("You close the drawer 1.", [])
    notes.read("You arrive at drawer 1. The drawer 1 is closed.", [])
    assert notes.text() == "search desk 1 fridge 1 sinkbasin 1"


def test_the_notes_show_only_things_that_the_task_names():
    notes = notebook()
    notes.read(
        "You arrive at fridge 1. The fridge 1 is open. In it, you see a egg 1, a mug 2, and a pan 1.", []
    )
    assert notes.text() == "search desk 1 drawer 1 sinkbasin 1; seen mug 2 in fridge 1"
    assert notes.place_of("egg 1") == "fridge 1" and notes.place_of("egg 2") is None


def test_the_notes_follow_the_states_of_a_thing():
    notes = notebook(places=("desk 1", "fridge 1"))
    texts = []
    for text in (
        "You arrive at desk 1. On the desk 1, you see a mug 1, and a mug 2.",
        "You pick up the mug 1 from the desk 1.",
        "You heat the mug 1 using the microwave 1.",
        "You clean the mug 1 using the sinkbasin 1.",
        "You cool the mug 1 using the fridge 1.",
        "You arrive at desk 1. On the desk 1, you see a mug 2.",
        "You move the mug 1 to the desk 1.",
    ):
        notes.read(text, [])
        texts.append(notes.text())
    assert texts == [
        "search fridge 1; seen mug 1 in desk 1, mug 2 in desk 1",
        "search fridge 1; seen mug 2 in desk 1; holding mug 1",
        "search fridge 1; seen mug 2 in desk 1; holding hot mug 1",
        "search fridge 1; seen mug 2 in desk 1; holding clean hot mug 1",
        "search fridge 1; seen mug 2 in desk 1; holding clean cool mug 1",
        "search fridge 1; seen mug 2 in desk 1; holding clean cool mug 1",
        "search fridge 1; seen mug 2 in desk 1, clean cool mug 1 in desk 1",
    ]


def test_things_that_only_the_commands_show_are_noted():
    notes = notebook("put some pan on stoveburner", places=("stoveburner 1", "stoveburner 2"))
    offered = ["examine stoveburner 1", "take pan 1 from stoveburner 1", "take pan 2 from stoveburner 2"]
    notes.read("You arrive at stoveburner 1. On the stoveburner 1, you see a pan 1.", offered)
    assert notes.contents == {"stoveburner 1": ["pan 1"], "stoveburner 2": ["pan 2"]}
    assert notes.text() == "seen pan 1 in stoveburner 1, pan 2 in stoveburner 2"


def test_a_moved_thing_is_noted_in_one_place():
    notes = notebook()
    notes.read("You arrive at desk 1. On the desk 1, you see a mug 1.", ["take mug 1 from desk 1"])
    notes.read("You pick up the mug 1 from the desk 1.", ["move mug 1 to desk 1"])
    assert notes.place_of("mug 1") is None
    notes.read("You move the mug 1 to the sinkbasin 1.", ["take mug 1 from sinkbasin 1"])
    assert notes.contents == {"desk 1": [], "sinkbasin 1": ["mug 1"]} and notes.held == ""


@pytest.mark.parametrize(
    "text", ["", "You arrive at", "On the , you see", "You pick up the from the.", "[SEP]" * 9, "\n", "é 1 §"]
)
def test_malformed_texts_change_nothing(text):
    notes = notebook()
    notes.read(text, ["take", "take x", "go to", ""])
    assert notes.held == "" and notes.text().startswith("search desk 1 drawer 1 fridge 1 sinkbasin 1")


# --- The walkthrough in a stand-in for ALFWorld -------------------------------------------------------------


class House:
    """A stand-in for ALFWorld: places with things, some of them closed, and ALFWorld's texts. It has no task.

    Nothing can be put into the places of `refuses`.
    """

    def __init__(self, places: dict[str, list[str]], closed=(), refuses=()):
        self.things = {place: list(things) for place, things in places.items()}
        self.closed, self.openable, self.refuses = set(closed), set(closed), set(refuses)
        self.here, self.held, self.done = "", "", []

    @property
    def commands(self) -> list[str]:
        out = [*BASICS, *(f"go to {place}" for place in self.things if place != self.here)]
        if self.here in self.closed:
            return sorted([*out, f"open {self.here}"])
        if self.here in self.openable:
            out.append(f"close {self.here}")
        inside = self.things.get(self.here, [])
        if not self.held:
            out += [f"take {thing} from {self.here}" for thing in inside]
        elif self.here and self.here not in self.refuses:
            out.append(f"move {self.held} to {self.here}")
            out += [f"clean {self.held} with {self.here}"] if "sink" in self.here else []
        out += [f"use {thing}" for thing in inside if "lamp" in thing]
        return sorted(out)

    def act(self, command: str) -> str:
        if command not in self.commands:
            return NOTHING
        self.done.append(command)
        verb, _, rest = command.partition(" ")
        if verb == "go":
            self.here = rest.removeprefix("to ")
            return f"You arrive at {self.here}. {self._listing()}"
        if verb in ("open", "close"):
            self.closed ^= {rest}
            return f"You open the {rest}. {self._listing()}" if verb == "open" else f"You close the {rest}."
        if verb == "take":
            self.held = rest.partition(" from ")[0]
            self.things[self.here].remove(self.held)
            return f"You pick up the {self.held} from the {self.here}."
        if verb == "move":
            thing, self.held = self.held, ""
            self.things[self.here].append(thing)
            return f"You move the {thing} to the {self.here}."
        if verb == "clean":
            return f"You clean the {self.held} using the {self.here}."
        return f"You turn on the {rest}." if verb == "use" else "You look."

    def _listing(self) -> str:
        inside = ", and ".join(f"a {thing}" for thing in self.things[self.here]) or "nothing"
        if self.here in self.closed:
            return f"The {self.here} is closed."
        if self.here in self.openable:
            return f"The {self.here} is open. In it, you see {inside}."
        return f"On the {self.here}, you see {inside}."


def play(house: House, plan: list[str], detours=(), slips=None, turns=12, task="put a mug on desk"):
    """Play until the plan is done or the turns end. Returns the commands that were carried out.

    `slips` maps turns to commands that replace the player's.
    """
    notes = Notebook(task, house.commands)
    player = Walkthrough(plan, notes.places, random.Random(0))
    player.detours = list(detours)
    for turn in range(turns):
        command = player.next(notes, house.commands)
        assert command in house.commands
        command = (slips or {}).get(turn, command)
        text = house.act(command)
        player.heard(command, text)
        notes.read(text, house.commands)
        if player.done == len(player.plan):
            break
    return house.done


def steps(text: str) -> list[str]:
    return text.split(", ")


PLAN = steps("go to drawer 1, open drawer 1, take mug 1 from drawer 1") + steps(
    "go to sinkbasin 1, clean mug 1 with sinkbasin 1, go to desk 1, move mug 1 to desk 1"
)


def kitchen(more: dict[str, list[str]] | None = None) -> House:
    places = {"desk 1": ["pen 1"], "drawer 1": ["mug 1"], "fridge 1": ["egg 1"], "sinkbasin 1": []}
    return House(places | (more or {}), closed=("drawer 1", "fridge 1"))


def test_without_detours_the_player_follows_the_plan():
    assert play(kitchen(), PLAN) == PLAN


def test_an_open_drawer_is_not_opened_again():
    house = kitchen()
    house.closed.discard("drawer 1")
    assert play(house, PLAN) == [command for command in PLAN if command != "open drawer 1"]


def test_the_player_makes_detours_before_it_finds_a_hidden_thing():
    detours = steps("go to desk 1, go to fridge 1, open fridge 1")
    assert play(kitchen(), PLAN, detours=("desk 1", "fridge 1")) == detours + PLAN


def test_detours_end_when_the_thing_is_seen():
    detours = steps("go to fridge 1, open fridge 1")
    assert play(kitchen(), PLAN, detours=("fridge 1", "drawer 1", "desk 1")) == detours + PLAN


def test_searched_places_are_no_detours():
    detours = steps("go to desk 1, go to fridge 1, open fridge 1")
    assert play(kitchen(), PLAN, ("desk 1", "fridge 1"), slips={0: "go to desk 1"}) == detours + PLAN


def test_the_number_of_detours_is_drawn_from_the_given_generator():
    places = [f"cabinet {i}" for i in range(1, 13)]
    drawn = [Walkthrough(PLAN, places, random.Random(seed)).detours for seed in range(200)]
    assert {len(detours) for detours in drawn} == {0, 1, 2, 3, 4, 6, 9}
    assert all(detours == places[: len(detours)] for detours in drawn)
    assert drawn[7] == Walkthrough(PLAN, places, random.Random(7)).detours
    assert max(len(Walkthrough(PLAN, places[:5], random.Random(seed)).detours) for seed in range(200)) == 5
    assert Walkthrough(PLAN, [], random.Random(4)).detours == []


def test_a_seen_thing_of_the_same_kind_replaces_a_hidden_one():
    house = kitchen({"fridge 1": ["egg 1", "mug 7"]})
    assert play(house, PLAN, detours=("fridge 1",)) == steps(
        "go to fridge 1, open fridge 1, take mug 7 from fridge 1, "
        "go to sinkbasin 1, clean mug 7 with sinkbasin 1, go to desk 1, move mug 7 to desk 1"
    )


def test_a_thing_in_the_target_does_not_replace_a_hidden_one():
    house = kitchen({"desk 1": ["mug 7"]})
    assert play(house, PLAN, detours=("desk 1",)) == ["go to desk 1", *PLAN]


def test_nothing_is_replaced_if_the_plan_does_not_end_with_a_move():
    plan = PLAN[:5]  # cleaning wins this game, because a thing of this kind lies on the desk from the start
    house = kitchen({"fridge 1": ["mug 7"]})
    assert play(house, plan, detours=("fridge 1",)) == ["go to fridge 1", "open fridge 1", *plan]


def test_a_thing_listed_in_two_places_is_taken_from_the_place_in_the_plan():
    house = kitchen({"desk 1": ["mug 1"]})  # the desk is the target
    assert play(house, PLAN, detours=("desk 1",)) == ["go to desk 1", *PLAN]


@pytest.mark.parametrize(
    "slips, repaired",
    [
        ({0: "look"}, ["look", *PLAN]),
        ({1: "go to desk 1"}, ["go to drawer 1", "go to desk 1", *PLAN]),
        ({2: "close drawer 1"}, [*PLAN[:2], "close drawer 1", *PLAN[1:]]),
        # the thing is put down in a wrong place
        (
            {3: "go to desk 1", 4: "move mug 1 to desk 1"},
            [*PLAN[:3], "go to desk 1", "move mug 1 to desk 1", "take mug 1 from desk 1", *PLAN[3:]],
        ),
        # the thing is put into a place that is then closed
        (
            {3: "move mug 1 to drawer 1", 4: "close drawer 1"},
            [*PLAN[:3], "move mug 1 to drawer 1", "close drawer 1", *PLAN[1:]],
        ),
        # the mistake is the next command of the plan by chance
        ({0: "go to drawer 1"}, PLAN),
        ({2: "take mug 1 from drawer 1"}, PLAN),
    ],
)
def test_mistakes_are_repaired(slips, repaired):
    assert play(kitchen(), PLAN, slips=slips) == repaired


def test_a_wrong_thing_is_put_down_where_the_player_is():
    house = kitchen({"drawer 1": ["mug 1", "pen 2"]})
    repair = steps("take pen 2 from drawer 1, move pen 2 to drawer 1")
    assert play(house, PLAN, slips={2: "take pen 2 from drawer 1"}) == PLAN[:2] + repair + PLAN[2:]


def test_a_closed_place_is_opened_to_put_a_wrong_thing_down():
    slips = {0: "go to desk 1", 1: "take pen 1 from desk 1", 2: "go to drawer 1"}
    repair = steps(
        "go to desk 1, take pen 1 from desk 1, go to drawer 1, open drawer 1, move pen 1 to drawer 1"
    )
    assert play(kitchen(), PLAN, slips=slips) == repair + PLAN[2:]


def test_a_wrong_thing_is_carried_to_the_next_place_where_it_can_be_put():
    house = kitchen({"shelf 1": [], "shelf 2": []})
    house.refuses |= {"desk 1", "sinkbasin 1", "shelf 1"}
    house.closed.clear()
    house.refuses |= {"drawer 1", "fridge 1"}
    # The player tries the places after the desk, in the order of the notes.
    assert play(house, PLAN, slips={0: "go to desk 1", 1: "take pen 1 from desk 1"}, turns=8) == steps(
        "go to desk 1, take pen 1 from desk 1, go to drawer 1, go to fridge 1, go to shelf 1, "
        "go to shelf 2, move pen 1 to shelf 2, go to drawer 1"
    )


def test_the_lamp_is_used_at_its_place():
    plan = ["go to bed 1", "take book 1 from bed 1", "go to desk 2", "use desklamp 1"]
    house = House({"bed 1": ["book 1"], "desk 1": [], "desk 2": ["desklamp 1"]})
    assert play(house, plan) == plan
    house = House({"bed 1": ["book 1"], "desk 1": [], "desk 2": ["desklamp 1"]})
    assert play(house, plan, slips={2: "go to desk 1"}) == [*plan[:2], "go to desk 1", *plan[2:]]
    house = House({"bed 1": ["book 1", "pen 1"], "desk 1": [], "desk 2": ["desklamp 1"]})
    slips = {2: "move book 1 to bed 1", 3: "take pen 1 from bed 1"}
    repair = steps("move book 1 to bed 1, take pen 1 from bed 1, move pen 1 to bed 1, take book 1 from bed 1")
    assert play(house, plan, slips=slips) == plan[:2] + repair + plan[2:]


def test_a_lamp_that_comes_first_is_used_with_empty_hands():
    plan = ["go to desk 2", "use desklamp 1", "go to bed 1", "take book 1 from bed 1"]
    house = House({"bed 1": ["book 1"], "desk 1": [], "desk 2": ["desklamp 1"]})
    assert play(house, plan) == plan


TWO = steps("go to desk 1, take pen 1 from desk 1, go to drawer 1, move pen 1 to drawer 1") + steps(
    "go to shelf 1, take pen 2 from shelf 1, go to drawer 1, move pen 2 to drawer 1"
)


def two(in_drawer: list[str]) -> House:
    places = {"desk 1": ["pen 1"], "drawer 1": in_drawer, "shelf 1": ["pen 2"], "shelf 2": ["pen 3"]}
    return House(places)


def test_two_things():
    assert play(two([]), TWO) == TWO
    # By mistake the second thing is taken first.
    slips = {0: "go to shelf 1", 1: "take pen 2 from shelf 1"}
    repair = steps("go to shelf 1, take pen 2 from shelf 1, move pen 2 to shelf 1")
    assert play(two([]), TWO, slips=slips) == repair + TWO


def test_two_things_are_not_replaced_by_each_other_or_by_things_in_the_target():
    house = two(["pen 4"])
    assert play(house, TWO, detours=("shelf 1", "drawer 1")) == ["go to shelf 1", "go to drawer 1", *TWO]
    first = steps("go to shelf 2, take pen 3 from shelf 2, go to drawer 1, move pen 3 to drawer 1")
    assert play(two([]), TWO, detours=("shelf 2",)) == first + TWO[4:]


def test_the_plan_starts_again_if_something_was_undone_after_its_end():
    house = kitchen()
    notes = Notebook("put a mug on desk", house.commands)
    player = Walkthrough(PLAN, notes.places, random.Random(0))
    player.detours = []
    for command in (*PLAN, "take mug 1 from desk 1"):
        text = house.act(command)
        player.heard(command, text)
        notes.read(text, house.commands)
    commands = []
    for _ in range(3):
        command = player.next(notes, house.commands)
        commands.append(command)
        text = house.act(command)
        player.heard(command, text)
        notes.read(text, house.commands)
    assert commands == ["go to sinkbasin 1", "clean mug 1 with sinkbasin 1", "go to desk 1"]


def test_a_command_without_effect_is_not_counted_as_done():
    player = Walkthrough(PLAN, [], random.Random(0))
    player.heard("take mug 1 from drawer 1", NOTHING)
    assert player.done == 0
    player.heard("take mug 1 from drawer 1", "You pick up the mug 1 from the drawer 1.")
    assert player.done == 1


# --- The walkthrough in ALFWorld ----------------------------------------------------------------------------


def won(env: AlfWorld, split: str, mistakes: float) -> dict[str, int]:
    """Play each game of a split, with this share of random actions.

    Returns the number of turns for each game that was won, by the name of its folder.
    """
    turns = {}
    for index, path in enumerate(env.games[split]):
        name = path.parent.parent.name
        view, rng = env.reset(split, index), random.Random(f"mistakes {name}")
        for turn in range(env.step_limit):
            action = env.searching_expert()
            assert action in view.admissible
            action = rng.choice(view.admissible) if rng.random() < mistakes else action
            view = env.step(action)
            if view.success:
                turns[name] = turn + 1
                break
    return turns


@pytest.mark.slow
def test_the_walkthrough_wins_a_game_of_every_type(few_games):
    env = AlfWorld(few_games)
    straight, stumbling = won(env, "train", 0.0), won(env, "train", 0.2)
    assert len(straight) == len(stumbling) == 6
    shortest = {"look": 3, "pick_and": 4, "pick_cl": 6, "pick_he": 6, "pick_co": 6, "pick_tw": 8}
    for name, turns in straight.items():
        (length,) = [n for start, n in shortest.items() if name.startswith(start)]
        assert length <= turns <= length + 18  # at most nine wrong places are searched, two turns for each
    assert sum(stumbling.values()) > sum(straight.values())


@pytest.mark.slow
def test_the_walkthrough_wins_sixty_games_even_with_mistakes(sixty_games):
    env = AlfWorld(sixty_games)
    straight, stumbling, stumbling_more = (won(env, "train", mistakes) for mistakes in (0.0, 0.2, 0.5))
    assert len(env.games["train"]) == len(straight) == len(stumbling) == 60
    assert max(straight.values()) <= 24 and max(stumbling.values()) <= 40
    assert len(stumbling_more) >= 54  # it wins 56; in the others the player cannot put down a wrong thing


# --- The wanderer -------------------------------------------------------------------------------------------


def test_the_wanderer_takes_a_thing_cleans_it_and_moves_it_elsewhere():
    notes = notebook(places=("desk 1", "shelf 1", "sinkbasin 1"))
    ways = ["go to desk 1", "go to shelf 1", "go to sinkbasin 1", *BASICS]
    wanderer = Wanderer(notes.places, "any")
    wanderer.searches, wanderer.verb, wanderer.targets = 0, "clean", ["desk 1", "shelf 1"]
    turns = [  # the answer of the game, further admissible commands, the wanderer's command
        ("You arrive at desk 1. On the desk 1, you see a mug 1.", "take mug 1 from desk 1", None),
        ("You pick up the mug 1 from the desk 1.", "move mug 1 to desk 1", "go to sinkbasin 1"),
        ("You arrive at sinkbasin 1.", "clean mug 1 with sinkbasin 1", None),
        ("You clean the mug 1 using the sinkbasin 1.", "move mug 1 to sinkbasin 1", "go to shelf 1"),
        ("You arrive at shelf 1. On the shelf 1, you see nothing.", "move mug 1 to shelf 1", None),
    ]
    for text, more, expected in turns:
        notes.read(text, [*ways, more])
        assert wanderer.next(notes, [*ways, more]) == (expected or more)


def test_the_wanderer_leaves_the_thing_alone_that_it_has_put_down():
    notes = notebook(places=("desk 1", "shelf 1"))
    ways = ["go to desk 1", *BASICS]
    wanderer = Wanderer(notes.places, "any")
    wanderer.thing = "mug 1"
    notes.read("You move the mug 1 to the shelf 1.", [*ways, "take mug 1 from shelf 1"])
    assert wanderer.next(notes, [*ways, "take mug 1 from shelf 1"]) == "go to desk 1"  # not searched yet
    assert (wanderer.thing, wanderer.last) == ("", "mug 1")


def test_the_wanderer_carries_on_where_a_thing_cannot_be_heated():
    notes = notebook(places=("desk 1", "microwave 1"))
    notes.read("You pick up the book 1 from the desk 1.", [])
    notes.read("You arrive at microwave 1.", [])
    wanderer = Wanderer(notes.places, "any")
    wanderer.thing, wanderer.verb, wanderer.targets = "book 1", "heat", ["desk 1"]
    assert wanderer.next(notes, ["go to desk 1", "open microwave 1", *BASICS]) == "go to desk 1"


def test_a_wanderer_without_a_place_for_its_thing_looks_around():
    notes = notebook(places=("desk 1",))
    notes.read("You pick up the book 1 from the desk 1.", [])
    wanderer = Wanderer(notes.places, "any")
    wanderer.verb, wanderer.targets = "", []
    assert wanderer.next(notes, ["go to desk 1", *BASICS]) == "look"


def wander(env: AlfWorld, index: int, seed: str) -> list[str]:
    """Return the wanderer's commands in 50 turns of a game, or fewer if it is won by chance."""
    view, commands = env.reset("train", index), []
    while len(commands) < 50 and not view.done:
        command = env.wandering_expert(seed)
        assert command in view.admissible
        commands.append(command)
        view = env.step(command)
        assert view.observation != NOTHING
    return commands


@pytest.mark.slow
def test_the_wanderer_moves_things_in_real_games_by_its_seed(few_games):
    env = AlfWorld(few_games)
    games = [wander(env, index, "one") for index in range(6)]
    assert [wander(env, index, "one") for index in range(6)] == games
    assert [wander(env, index, "two") for index in range(6)] != games
    moved = [sum(command.startswith("move ") for command in commands) for commands in games]
    assert sum(moved) >= 6  # about one per ten turns
