"""Tests of Household: exact rules and texts, the games, the experts, and that no hidden fact leaks."""

import itertools
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from chat import first_message, next_message, parse_action, window_message
from envs import Household, make_env
from games import household
from games.household import (
    APPLIANCES,
    KITCHENWARE,
    LAMP,
    NOTHING,
    STEP_LIMIT,
    TASK_TYPES,
    Game,
    Room,
    draw_goal,
    make_game,
)


def room_for(task_type, thing, target, **contents):
    """Make the room of a hand-made game. Keywords are receptacles without their numbers."""
    items = sorted((f"{name} 1", tuple(sorted(held))) for name, held in contents.items())
    return Room(Game(task_type, thing, target, tuple(items)), [name for name, _ in items])


KITCHEN = {
    "countertop": ["egg 1", "mug 1"],
    "drawer": ["pen 1"],
    "fridge": ["apple 1"],
    "microwave": [],
    "shelf": ["desklamp 1"],
    "sinkbasin": [],
}

# One winning episode of each type: (command, answer). The last command wins, no earlier one does.
EPISODES = {
    "Pick": (
        ("mug", "drawer 1", "put a mug in drawer."),
        [
            (
                "go to countertop 1",
                "You arrive at countertop 1. On the countertop 1, you see a egg 1, and a mug 1.",
            ),
            ("take mug 1 from countertop 1", "You pick up the mug 1 from the countertop 1."),
            ("go to drawer 1", "You arrive at drawer 1. The drawer 1 is closed."),
            ("move mug 1 to drawer 1", "Nothing happens."),
            ("open drawer 1", "You open the drawer 1. The drawer 1 is open. In it, you see a pen 1."),
            ("move mug 1 to drawer 1", "You move the mug 1 to the drawer 1."),
        ],
    ),
    "Look": (
        ("pen", "", "examine the pen with the desklamp."),
        [
            ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a desklamp 1."),
            ("take desklamp 1 from shelf 1", "Nothing happens."),
            ("go to drawer 1", "You arrive at drawer 1. The drawer 1 is closed."),
            ("open drawer 1", "You open the drawer 1. The drawer 1 is open. In it, you see a pen 1."),
            ("take pen 1 from drawer 1", "You pick up the pen 1 from the drawer 1."),
            ("use desklamp 1", "Nothing happens."),
            ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a desklamp 1."),
            ("use desklamp 1", "You turn on the desklamp 1."),
        ],
    ),
    "Clean": (
        ("mug", "countertop 1", "put a clean mug in countertop."),
        [
            (
                "go to countertop 1",
                "You arrive at countertop 1. On the countertop 1, you see a egg 1, and a mug 1.",
            ),
            ("take mug 1 from countertop 1", "You pick up the mug 1 from the countertop 1."),
            ("clean mug 1 with sinkbasin 1", "Nothing happens."),
            ("move mug 1 to countertop 1", "You move the mug 1 to the countertop 1."),  # it is not clean yet
            ("take mug 1 from countertop 1", "You pick up the mug 1 from the countertop 1."),
            ("go to sinkbasin 1", "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing."),
            ("clean mug 1 with sinkbasin 1", "You clean the mug 1 using the sinkbasin 1."),
            ("examine mug 1", "This is a clean mug 1."),
            ("go to countertop 1", "You arrive at countertop 1. On the countertop 1, you see a egg 1."),
            ("move mug 1 to countertop 1", "You move the mug 1 to the countertop 1."),
        ],
    ),
    "Heat": (
        ("egg", "fridge 1", "put a hot egg in fridge."),
        [
            (
                "go to countertop 1",
                "You arrive at countertop 1. On the countertop 1, you see a egg 1, and a mug 1.",
            ),
            ("take egg 1 from countertop 1", "You pick up the egg 1 from the countertop 1."),
            ("take mug 1 from countertop 1", "Nothing happens."),  # only one object can be held
            ("go to microwave 1", "You arrive at microwave 1. The microwave 1 is closed."),
            ("heat egg 1 with microwave 1", "You heat the egg 1 using the microwave 1."),
            ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
            ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1."),
            ("move egg 1 to fridge 1", "You move the egg 1 to the fridge 1."),
        ],
    ),
    "Cool": (
        ("apple", "shelf 1", "put a cool apple in shelf."),
        [
            ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
            ("take apple 1 from fridge 1", "Nothing happens."),
            ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1."),
            ("take apple 1 from fridge 1", "You pick up the apple 1 from the fridge 1."),
            ("cool apple 1 with fridge 1", "You cool the apple 1 using the fridge 1."),
            ("close fridge 1", "You close the fridge 1."),
            ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a desklamp 1."),
            ("move apple 1 to shelf 1", "You move the apple 1 to the shelf 1."),
        ],
    ),
}


@pytest.mark.parametrize("task_type", EPISODES)
def test_an_episode_of_each_type_has_exactly_these_texts(task_type):
    (thing, target, sentence), turns = EPISODES[task_type]
    room = room_for(task_type, thing, target, **KITCHEN)
    assert room.game.sentence == sentence
    for command, answer in turns:
        assert not room.won
        assert room.act(command) == answer
    assert room.won and room.admissible == ()


def test_pick2_is_won_by_the_second_object():
    room = room_for("Pick2", "mug", "desk 1", desk=["pen 1"], bed=["mug 1"], safe=["mug 2"])
    assert room.game.sentence == "put two mug in desk."
    assert room.act("go to bed 1") == "You arrive at bed 1. On the bed 1, you see a mug 1."
    room.act("take mug 1 from bed 1")
    room.act("go to desk 1")
    assert room.act("move mug 1 to desk 1") == "You move the mug 1 to the desk 1."
    assert not room.won
    assert room.notes() == "search safe 1"  # the object in the target is not noted
    room.act("go to safe 1")
    assert room.act("open safe 1") == "You open the safe 1. The safe 1 is open. In it, you see a mug 2."
    assert room.notes() == "seen mug 2 in safe 1"
    assert room.act("take mug 2 from safe 1") == "You pick up the mug 2 from the safe 1."
    assert room.act("go to desk 1") == "You arrive at desk 1. On the desk 1, you see a mug 1, and a pen 1."
    room.act("move mug 2 to desk 1")
    assert room.won


def test_the_room_describes_itself_as_alfworld_does():
    room = room_for("Pick", "mug", "drawer 1", **KITCHEN)
    assert room.opening == (
        "You are in the middle of a room. Looking quickly around you, you see a countertop 1, a drawer 1, "
        "a fridge 1, a microwave 1, a shelf 1, and a sinkbasin 1."
    )
    assert room.act("look") == room.opening
    assert room.act("inventory") == "You are not carrying anything."
    room.act("go to countertop 1")
    assert room.act("look") == "You are facing the countertop 1. Next to it, you see nothing."
    assert room.act("examine countertop 1") == "On the countertop 1, you see a egg 1, and a mug 1."
    room.act("take egg 1 from countertop 1")
    assert room.act("inventory") == "You are carrying: a egg 1."
    assert room.act("examine egg 1") == "There's nothing special about egg 1."
    room.act("go to drawer 1")
    assert room.act("examine drawer 1") == "The drawer 1 is closed."
    room.act("open drawer 1")
    assert room.act("examine drawer 1") == "The drawer 1 is open. In it, you see a pen 1."


def test_heating_removes_cool_and_keeps_clean():
    room = room_for("Pick", "mug", "drawer 1", **KITCHEN)
    for command in ("go to countertop 1", "take egg 1 from countertop 1", "go to fridge 1"):
        room.act(command)
    room.act("cool egg 1 with fridge 1")
    assert room.act("examine egg 1") == "This is a cold egg 1."
    room.act("go to sinkbasin 1")
    room.act("clean egg 1 with sinkbasin 1")
    assert room.act("examine egg 1") == "This is a cool and clean egg 1."
    room.act("go to microwave 1")
    room.act("heat egg 1 with microwave 1")
    assert room.act("examine egg 1") == "This is a hot and clean egg 1."
    notes = "search fridge 1 microwave 1 shelf 1; seen mug 1 in countertop 1; holding clean hot egg 1"
    assert room.notes() == notes


def test_a_pen_cannot_be_heated():
    room = room_for("Look", "pen", "", **KITCHEN)
    for command in ("go to drawer 1", "open drawer 1", "take pen 1 from drawer 1", "go to microwave 1"):
        room.act(command)
    assert room.act("heat pen 1 with microwave 1") == NOTHING


def test_look_is_won_when_the_object_comes_to_a_lamp_that_is_on():
    room = room_for("Look", "mug", "", **KITCHEN)
    for command in ("go to shelf 1", "use desklamp 1", "go to countertop 1", "take mug 1 from countertop 1"):
        room.act(command)
    assert not room.won  # the lamp is on and the object is held, but not at the lamp
    room.act("go to shelf 1")
    assert room.won


def test_admissible_commands_are_sorted_and_complete():
    room = room_for("Pick", "mug", "drawer 1", countertop=["mug 1"], drawer=[], fridge=["egg 1"])
    assert room.admissible == ("go to countertop 1", "go to drawer 1", "go to fridge 1", "inventory", "look")
    room.act("go to fridge 1")
    everywhere = ("go to countertop 1", "go to drawer 1", "inventory", "look")
    assert room.admissible == ("examine fridge 1", *everywhere, "open fridge 1")
    room.act("open fridge 1")
    assert room.admissible == ("close fridge 1", "examine fridge 1", *everywhere, "take egg 1 from fridge 1")
    room.act("take egg 1 from fridge 1")
    assert room.admissible == (
        "close fridge 1",
        "cool egg 1 with fridge 1",
        "examine egg 1",
        "examine fridge 1",
        *everywhere,
        "move egg 1 to fridge 1",
    )


def test_notes_contain_only_facts_that_were_seen():
    room = room_for("Clean", "mug", "drawer 1", **KITCHEN)
    assert room.notes() == "search countertop 1 fridge 1 microwave 1 shelf 1 sinkbasin 1"
    room.act("go to fridge 1")  # closed, so it does not count as searched
    assert room.notes() == "search countertop 1 fridge 1 microwave 1 shelf 1 sinkbasin 1"
    room.act("open fridge 1")
    assert room.notes() == "search countertop 1 microwave 1 shelf 1 sinkbasin 1"
    room.act("go to countertop 1")
    assert room.notes() == "search microwave 1 shelf 1 sinkbasin 1; seen mug 1 in countertop 1"
    room.act("take mug 1 from countertop 1")
    assert room.notes() == "search microwave 1 shelf 1 sinkbasin 1; holding mug 1"


# --- The games ----------------------------------------------------------------------------------------------


def test_the_first_eval_game_never_changes():
    """It is the same in every version of Python, because only random.random() is used."""
    game, order = make_game("eval", 0)
    assert game.sentence == "put a plate in shelf."
    assert game.contents == (
        ("bed 1", ()),
        ("cabinet 1", ("keychain 1",)),
        ("countertop 1", ("cd 1",)),
        ("drawer 1", ("plate 1",)),
        ("shelf 1", ("egg 1",)),
        ("sidetable 1", ()),
    )
    assert order == ["drawer 1", "shelf 1", "sidetable 1", "bed 1", "cabinet 1", "countertop 1"]


def test_games_have_the_right_size_and_are_not_won_at_the_start():
    for split in ("train", "eval"):
        for index in range(300):
            game, order = make_game(split, index)
            names = [name for _, held in game.contents for name in held]
            assert (len(game.contents), len(names), len(set(names))) == (6, 4, 4)
            assert sorted(order) == [receptacle for receptacle, _ in game.contents]
            assert game.task_type == TASK_TYPES[index % 6]
            assert not Room(game, order).won
            kinds = Counter(name.split()[0] for name in names)
            assert max(kinds.values()) == (2 if game.task_type == "Pick2" else 1)
            here = dict(game.contents)
            needed = {"Clean": "sinkbasin 1", "Heat": "microwave 1", "Cool": "fridge 1"}.get(game.task_type)
            assert needed is None or needed in here
            assert (game.target in here) == (game.task_type != "Look") == ("desklamp 1" not in names)


def test_eval_has_fifty_games_of_each_type():
    env = Household()
    assert env.size("eval") == 300 and env.size("train") >= 100_000
    types = Counter(make_game("eval", index)[0].task_type for index in range(300))
    assert types == dict.fromkeys(("Pick", "Look", "Clean", "Heat", "Cool", "Pick2"), 50)


def test_train_and_eval_share_no_game():
    train = {make_game("train", index)[0] for index in range(3000)}
    panel = {make_game("eval", index)[0] for index in range(300)}
    assert not train & panel
    assert len(panel) == 300
    # This is no accident: only the content of a game decides about its split.
    assert {game.split for game in train} == {"train"} and {game.split for game in panel} == {"eval"}


@pytest.mark.parametrize("split, index", [("test", 0), ("eval", 300), ("train", -1)])
def test_an_unknown_game_raises_an_error(split, index):
    with pytest.raises(ValueError, match=rf"no household game '{split}' {index}"):
        make_game(split, index)


def test_processes_with_different_hash_seeds_show_the_same_games():
    code = (
        "from envs import make_env\n"
        "env = make_env('household')\n"
        "for split, index in (('train', 7), ('eval', 11), ('train', 99_999)):\n"
        "    view = env.reset(split, index)\n"
        "    for _ in range(14):\n"
        "        print(view)\n"
        "        if view.done: break\n"
        "        view = env.step(env.searching_expert())\n"
    )
    root = Path(household.__file__).parent.parent
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert len(texts.pop().splitlines()) > 15


# --- Episodes -----------------------------------------------------------------------------------------------


def play(env, split, index, choose):
    """Play a game with the actions of choose(env, view). Returns the last view and the number of turns."""
    view = env.reset(split, index)
    for turn in range(STEP_LIMIT):
        view = env.step(choose(env, view))
        if view.done:
            return view, turn + 1
    return view, STEP_LIMIT


def noisy(rng, share=0.35):
    """Return a player: the searching expert's action with probability `share`, else a random action."""

    def choose(env, view):
        return env.searching_expert() if rng.random() < share else rng.choice(view.admissible)

    return choose


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_expert_wins_every_game_in_at_most_ten_moves(split):
    def expert(env, view):
        action = env.expert()
        assert action in view.admissible
        return action

    env = Household()
    for index in range(300):
        view, turns = play(env, split, index, expert)
        assert view.success and view.outcome == 1.0 and turns <= (10 if view.task_type == "Pick2" else 8)


def test_both_experts_win_from_any_state():
    """After seven random actions they put down wrong objects, search, and heat again if necessary."""
    rng = random.Random(0)
    env = Household()
    for index in range(300):
        view = env.reset("train", index)
        for _ in range(7):
            if not view.done:
                view = env.step(rng.choice(view.admissible))
        for turn in itertools.count():
            if view.done:
                break
            assert turn < 30
            action = env.expert() if index % 2 else env.searching_expert()
            assert action in view.admissible
            view = env.step(action)
        assert view.success


def test_the_searching_expert_usually_wins_within_the_step_limit():
    env = Household()
    views = [play(env, "eval", index, lambda env, view: env.searching_expert())[0] for index in range(300)]
    won = Counter(view.task_type for view in views if view.success)
    assert all(won[task_type] == 50 for task_type in TASK_TYPES[:5])
    assert won["Pick2"] >= 40


def test_the_searching_expert_and_the_notes_use_no_hidden_fact():
    """Swapping the contents of unseen receptacles changes no action, no notes and no admissible commands."""
    rng = random.Random(1)
    env, choose = Household(), noisy(random.Random(2))
    swaps = 0
    for index in range(200):
        view = env.reset("train", index)
        while not view.done and rng.random() < 0.9:
            room = env._room
            before = env.searching_expert(), room.notes(), room.admissible
            hidden = [r for r in room.contents if r not in room.searched and r != room.game.target]
            original = {r: room.contents[r] for r in hidden}
            for r, other in zip(hidden, rng.sample(hidden, len(hidden)), strict=True):
                swaps += original[r] != original[other]
                room.contents[r] = original[other]
            assert (env.searching_expert(), room.notes(), room.admissible) == before
            room.contents.update(original)
            view = env.step(choose(env, view))
    assert swaps > 500


def test_another_goal_can_be_reached_in_its_room_and_is_not_the_task():
    seen = Counter()
    for index in range(600):
        game, _ = make_game("train", index)
        goal = draw_goal(game, f"goal {index}")
        seen[goal.task_type] += 1
        starts = {r for r, names in game.contents if f"{goal.thing} 1" in names or f"{goal.thing} 2" in names}
        places = dict(game.contents)
        assert goal.contents == game.contents and goal[:3] != game[:3] and starts
        if goal.task_type == "Look":
            assert goal.target == "" and any(LAMP in names for names in places.values())
        else:
            assert goal.target in places and goal.target not in starts
        if goal.task_type in ("Clean", "Heat", "Cool"):
            assert goal.thing in KITCHENWARE
            (appliance,) = [r for r, verb in APPLIANCES.items() if verb == goal.task_type.lower()]
            assert appliance in places and goal.target != appliance
    assert set(seen) == set(TASK_TYPES) - {"Pick2"} and min(seen.values()) > 20
    assert draw_goal(game, "a") == draw_goal(game, "a")
    assert len({draw_goal(game, str(seed)) for seed in range(50)}) > 5


def test_the_wandering_expert_reaches_its_goal_from_any_state_and_then_looks_around():
    rng = random.Random(0)
    env, reached = Household(), 0
    for index in range(300):
        view, seed = env.reset("train", index), f"goal {index}"
        for _ in range(7):
            if not view.done:
                view = env.step(rng.choice(view.admissible))
        for turn in itertools.count():
            room = env._room.pursuing(draw_goal(env._room.game, seed))
            if view.done or room.won:
                break
            assert turn < 30
            action = env.wandering_expert(seed)
            assert action in view.admissible and action != "look"
            view = env.step(action)
        if not view.done:  # the task was not done on the way
            reached += 1
            assert env.wandering_expert(seed) == "look"
    assert reached > 250


def test_the_wandering_expert_seldom_solves_the_task():
    env = Household()
    views = [play(env, "eval", i, lambda env, _, i=i: env.wandering_expert(str(i)))[0] for i in range(300)]
    assert sum(view.success for view in views) < 15


def test_the_wandering_expert_uses_no_hidden_fact():
    """Swapping the contents of unseen receptacles changes no action, as long as the goal is the same."""
    rng = random.Random(1)
    env, swaps = Household(), 0
    for index in range(200):
        view = env.reset("train", index)
        goal = draw_goal(env._room.game, str(index))
        for _ in range(rng.randrange(10)):
            room = env._room.pursuing(goal)
            if view.done or room.won:
                break
            action = env.wandering_expert(str(index))
            hidden = [r for r in room.contents if r not in room.searched and r != goal.target]
            original = {r: room.contents[r] for r in hidden}
            for r, other in zip(hidden, rng.sample(hidden, len(hidden)), strict=True):
                swaps += original[r] != original[other]
                room.contents[r] = original[other]
            assert env.wandering_expert(str(index)) == action
            room.contents.update(original)
            view = env.step(action)
    assert swaps > 300


def test_two_environments_are_independent():
    first, second = make_env("household"), make_env("household")
    view = first.reset("train", 0)
    start = second.reset("train", 1)
    while not view.done:
        view = first.step(first.expert())
        other = second.step("look")
        assert not other.done and other.observation == start.observation
    assert (view.success, other.success) == (True, False)


def test_a_reset_removes_all_traces_of_the_last_episode():
    env = Household()
    start = env.reset("train", 5)
    play(env, "train", 5, noisy(random.Random(0)))
    assert env.reset("train", 5) == start


def test_an_action_that_is_not_admissible_changes_nothing():
    env = Household()
    rng = random.Random(3)
    for index in range(60):
        view = env.reset("train", index)
        while not view.done and rng.random() < 0.9:
            wrong = env.step(rng.choice(["put mug 1 in/on desk 1", "go to moon 1", "", "take"]))
            assert wrong.observation == "Nothing happens."
            assert (wrong.admissible, wrong.notes, wrong.done) == (view.admissible, view.notes, False)
            view = env.step(rng.choice(view.admissible))
            assert view.observation != "Nothing happens."


def test_random_and_malformed_actions_raise_no_error():
    rng = random.Random(4)
    garbage = [
        "",
        "<action>",
        "take mug 1 from",
        "open",
        "go to",
        "☃" * 50,
        "heat with",
        "move mug 1 to desk 1",
    ]
    env = Household()
    view = env.reset("train", 0)
    for step in range(2000):
        if view.done or step % 20 == 0:
            view = env.reset("train", step)
        view = env.step(rng.choice([*view.admissible, *garbage, rng.choice(env.vocabulary)]))


def test_an_episode_at_the_step_limit_is_no_success():
    view, turns = play(Household(), "eval", 0, lambda env, view: "look")
    assert (turns, view.done, view.success, view.outcome) == (14, False, False, 0.0)


def test_a_won_game_stays_won():
    env = Household()
    view, _ = play(env, "eval", 0, lambda env, view: env.expert())
    after = env.step("go to desk 1")
    assert (after.observation, after.done, after.outcome, after.admissible) == (NOTHING, True, 1.0, ())
    assert view.admissible == ()


def test_a_second_visit_gives_the_same_observation():
    """GiGPO groups turns by observation, so the observation must not contain the notes."""
    room = room_for("Pick", "mug", "drawer 1", **KITCHEN)
    once, notes = room.act("go to countertop 1"), room.notes()
    room.act("go to shelf 1")
    again, later_notes = room.act("go to countertop 1"), room.notes()
    assert once == again == "You arrive at countertop 1. On the countertop 1, you see a egg 1, and a mug 1."
    assert notes != later_notes


# --- The vocabulary of the tiny model -----------------------------------------------------------------------

WORD = re.compile(r"[a-z]+ \d+|[A-Za-z]+|\d+|[^\sA-Za-z\d]")  # "mug 1" is one word


def test_the_vocabulary_covers_all_prompts_and_actions():
    env, choose = Household(), noisy(random.Random(5))
    rng = random.Random(6)
    said, acted = set(), set()
    for index in range(400):
        view, history = env.reset("train", index), []
        said.update(WORD.findall(first_message("short", view)))
        for turn in range(STEP_LIMIT):
            said.update(WORD.findall(window_message("short", view, history[-2:], turn)))
            said.update(WORD.findall(next_message("short", view, turn)))
            acted.update(word for action in view.admissible for word in WORD.findall(action))
            if view.done:
                break
            action = choose(env, view)
            if rng.random() < 0.2:  # a model can answer with any words, and the next prompt repeats them
                babble = " ".join(rng.choices(env.vocabulary, k=3))
                action = rng.choice(["no action", parse_action("short", babble)[0]])
            history.append((view.observation, action))
            view = env.step(action)
    vocabulary = set(env.vocabulary)
    assert len(vocabulary) == len(env.vocabulary) < 200
    assert said <= vocabulary and acted <= vocabulary
    lowered = {word.lower() for word in vocabulary if word != word.lower()}
    # "go to" is one token of the tiny model, but two words for the pattern above.
    unused = vocabulary - said - acted - lowered - {"go to"}
    assert not [word for word in unused if not word[-1].isdigit()]
