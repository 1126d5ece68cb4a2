"""Novelty and shaped rewards: scores by hand, progress of the environments, and what must not change."""

import dataclasses
import functools
import json
import random

import pytest

import flags
from buffer import Group, ReplayBuffer, Step, StopReason, Trajectory
from demo.toy import ToyEnv, ToyPolicy, toy_world
from dense.novelty import NoveltyReward, first_visits
from dense.shaped import ShapedReward, WithProgress, make_with_progress
from envs import AlfWorld, Household, WebShop
from games.household import Game, Room
from record.checks import has_progress
from scale.pool import Pool


def episode(observations, gains=None, stop_reason=StopReason.FINISHED):
    steps = [Step([1], [2], [0.0], observation, "go", True) for observation in observations]
    for step, gain in zip(steps, gains or [], strict=False):
        step.progress_gain = gain
    return Trajectory("task 7", "", "", steps, 1.0, True, stop_reason)


def scores(reward, *episodes, **noise):
    reward.score([Group("task", list(episodes))], **noise)
    return [[step.dense_score for step in episode.steps] for episode in episodes]


# --- novelty ------------------------------------------------------------------------------------------------


def test_a_turn_is_novel_if_it_leads_to_an_observation_that_is_new_in_the_episode():
    # turn 0 leads from a to b (new), turn 1 back to a (seen), turn 2 to a (an invalid reply: seen),
    # turn 3 to c (new), turn 4 to b (seen); no turn shows where turn 5 leads
    assert first_visits(episode("abaacb")) == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    # the sum is the number of different observations less 1
    assert sum(first_visits(episode("abaacb"))) == len(set("abaacb")) - 1
    assert first_visits(episode("a")) == [0.0]


def test_every_episode_has_its_own_first_visits():
    assert scores(NoveltyReward(), episode("ab"), episode("abc")) == [[1.0, 0.0], [1.0, 1.0, 0.0]]


def test_noise_is_drawn_in_the_order_of_the_steps_and_crashed_episodes_have_no_score():
    crashed = episode("ab", stop_reason=StopReason.CRASHED)
    rng = random.Random(5)
    drawn = [rng.gauss(0.0, 0.5) for _ in range(3)]
    found = scores(NoveltyReward(), episode("ab"), crashed, episode("c"), noise=0.5, rng=random.Random(5))
    assert found == [[1.0 + drawn[0], drawn[1]], [None, None], [drawn[2]]]
    with pytest.raises(ValueError, match="noise of 0.5 needs an rng"):
        scores(NoveltyReward(), episode("a"), noise=0.5)


# --- shaped -------------------------------------------------------------------------------------------------


def test_a_turn_is_scored_by_its_gain_of_progress():
    assert scores(ShapedReward(), episode("abc", [0.5, -0.25, 0.75])) == [[0.5, -0.25, 0.75]]
    with pytest.raises(ValueError, match="step 1 of task task 7 has no gain of progress: wrap"):
        scores(ShapedReward(), episode("ab", [0.5]))
    with pytest.raises(FloatingPointError, match="a dense score of task task 7 is not a finite number"):
        scores(ShapedReward(), episode("a", [float("nan")]))


class Walk(ToyEnv):
    """The toy with progress: the share of the three actions that was "right"."""

    def progress(self):
        return self.path.count("right") / 3


def collect(make_env):
    (group,) = toy_world(make_env=make_env, seed=3).collect(ToyPolicy(), 1)
    return group.trajectories


def test_an_episode_records_the_gain_of_each_turn_and_its_sum_is_the_progress_at_the_end():
    played = collect(functools.partial(make_with_progress, Walk))
    assert {len(member.steps) for member in played} == {3}
    for member in played:
        for step in member.steps:  # 1/3 for "right", 0 for "left" and for an invalid reply
            assert step.progress_gain == pytest.approx((step.action == "right") / 3)
        rights = sum(step.action == "right" for step in member.steps)
        assert sum(step.progress_gain for step in member.steps) == pytest.approx(rights / 3)
    assert {step.action for member in played for step in member.steps} == {"left", "right"}


def test_progress_changes_nothing_but_the_recorded_gains():
    with_it, without = collect(functools.partial(make_with_progress, Walk)), collect(Walk)
    for one, other in zip(with_it, without, strict=True):
        assert all(step.progress_gain is None for step in other.steps)
        steps = [dataclasses.replace(step, progress_gain=None) for step in one.steps]
        assert dataclasses.replace(one, steps=steps) == other  # prompts, actions, log-probs, outcome


def test_gains_survive_the_checkpoint_of_a_replay_buffer_and_old_checkpoints_have_none():
    buffer, again = ReplayBuffer(), ReplayBuffer()
    buffer.add([Group("task", [episode("ab", [0.5, 0.25])])])
    state = json.loads(json.dumps(buffer.state_dict()))
    again.load_state_dict(state)
    assert [step.progress_gain for step in again.sample(1)[0].steps] == [0.5, 0.25]
    for step in state["entries"][0]["trajectories"][0]["steps"]:
        del step["progress_gain"]
    again.load_state_dict(state)
    assert [step.progress_gain for step in again.sample(1)[0].steps] == [None, None]


# --- progress of the environments ---------------------------------------------------------------------------

KITCHEN = {
    "countertop": ["egg 1", "mug 1"],
    "drawer": ["mug 2", "pen 1"],
    "microwave": [],
    "shelf": ["desklamp 1"],
    "sinkbasin": [],
}


def progress_after(task_type, thing, target, commands, **contents):
    """Return the progress at the start and after each command."""
    items = sorted((f"{name} 1", tuple(held)) for name, held in (contents or KITCHEN).items())
    room = Room(Game(task_type, thing, target, tuple(items)), [name for name, _ in items])
    found = [room.progress()]
    for command in commands:
        assert command in room.admissible, command
        room.act(command)
        found.append(room.progress())
    assert (found[-1] == 1) == room.won
    return found


def test_picking_has_two_subgoals():
    commands = ["go to countertop 1", "take egg 1 from countertop 1", "move egg 1 to countertop 1"]
    assert progress_after("Pick", "egg", "shelf 1", commands) == [0, 0, 1 / 2, 0]
    commands = [*commands[:2], "go to shelf 1", "move egg 1 to shelf 1"]
    assert progress_after("Pick", "egg", "shelf 1", commands) == [0, 0, 1 / 2, 1 / 2, 1]


def test_heating_has_three_subgoals_and_a_cold_object_in_the_target_reaches_none():
    take = ["go to countertop 1", "take egg 1 from countertop 1"]
    heat = [*take, "go to microwave 1", "heat egg 1 with microwave 1", "go to shelf 1"]
    found = progress_after("Heat", "egg", "shelf 1", [*heat, "move egg 1 to shelf 1"])
    assert found == [0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1]
    too_early = [*take, "go to shelf 1", "move egg 1 to shelf 1"]
    assert progress_after("Heat", "egg", "shelf 1", too_early) == [0, 0, 1 / 3, 1 / 3, 0]
    # hot, but laid down in another place: one of three
    found = progress_after(
        "Heat", "egg", "shelf 1", [*heat[:-1], "go to sinkbasin 1", "move egg 1 to sinkbasin 1"]
    )
    assert found[-1] == 1 / 3


def test_the_lamp_may_be_lit_before_or_after_the_object_is_taken():
    lamp = ["go to shelf 1", "use desklamp 1"]
    take = ["go to countertop 1", "take egg 1 from countertop 1"]
    assert progress_after("Look", "egg", "", [*lamp, *take]) == [0, 0, 1 / 3, 1 / 3, 2 / 3]
    assert progress_after("Look", "egg", "", [*lamp, *take, "go to shelf 1"])[-1] == 1
    assert progress_after("Look", "egg", "", [*take, *lamp]) == [0, 0, 1 / 3, 1 / 3, 1]


def test_two_objects_have_two_subgoals_each():
    first = ["go to countertop 1", "take mug 1 from countertop 1", "go to shelf 1", "move mug 1 to shelf 1"]
    second = ["go to drawer 1", "open drawer 1", "take mug 2 from drawer 1", "go to shelf 1"]
    found = progress_after("Pick2", "mug", "shelf 1", [*first, *second, "move mug 2 to shelf 1"])
    assert found == [0, 0, 1 / 4, 1 / 4, 1 / 2, 1 / 2, 1 / 2, 3 / 4, 3 / 4, 1]


def test_the_expert_of_household_reaches_progress_1_exactly_when_it_wins():
    env = WithProgress(Household())
    for index in range(12):  # two games of each type
        view = env.reset("train", index)
        assert view.progress == 0
        while not view.done:
            assert 0 <= view.progress < 1
            view = env.step(env.expert())
        assert view.progress == 1


def test_alfworld_cannot_tell_its_progress_and_a_wrapped_environment_is_itself_otherwise():
    assert [has_progress(env) for env in (Household, WebShop, AlfWorld)] == [True, True, False]
    env = WithProgress(Household())
    assert (env.name, env.size("eval"), env.look_around) == ("household", 300, "look")
    assert not hasattr(env, "no_such_name")


@pytest.mark.slow
def test_progress_arrives_from_a_worker_process():
    pool = Pool(functools.partial(make_with_progress, Household), workers=1)
    views = pool.reset({0: ("train", 0)})
    assert views[0].progress == 0
    pool.close()


# --- flags --------------------------------------------------------------------------------------------------


def test_only_the_shaped_reward_wraps_the_environment():
    made = {}
    for reward in ("step_model", "shaped", "implicit", "novelty"):
        made[reward] = type(flags.env_maker(flags.prepare(["--dense_reward", reward]))())
    assert made == {
        "step_model": Household,
        "shaped": WithProgress,
        "implicit": Household,
        "novelty": Household,
    }
    outcome = flags.Args(method="outcome", dense_reward="shaped")
    assert type(flags.env_maker(outcome)()) is Household


def test_the_implicit_reward_has_a_learning_rate_for_each_kind_of_weights():
    rates = [
        flags.resolve(flags.Args(**given, autocast=False), Household).implicit_lr
        for given in (
            {},
            {"model": "some/model"},
            {"model": "some/model", "lora_rank": 0},
            {"implicit_lr": 0.5},
        )
    ]
    assert rates == [1e-3, 6e-6, 1e-6, 0.5]
