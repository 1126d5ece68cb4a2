import json
import math
from collections import Counter

import pytest

from buffer import Group, ReplayBuffer, Step, StopReason, Trajectory

NAN = float("nan")


def step(prompt_ids=(1, 2), action_ids=(3,), observation="room", **more):
    logprobs = [-0.5] * len(action_ids)
    return Step(list(prompt_ids), list(action_ids), logprobs, observation, "look", True, **more)


def episode(outcome=1.0, advantage=None, task="task", steps=None, stop=StopReason.FINISHED):
    steps = [step(advantage=advantage)] if steps is None else steps
    return Trajectory(task, "find the mug", "pick", steps, outcome, outcome == 1.0, stop)


def group(*outcomes, task="task"):
    return Group(task, [episode(outcome, task=task) for outcome in outcomes])


def outcomes(trajectories):
    return [trajectory.outcome for trajectory in trajectories]


def tasks(trajectories):
    return [trajectory.task_id for trajectory in trajectories]


def distinct(trajectories):
    return len({id(trajectory) for trajectory in trajectories})


# Records


def test_a_group_returns_the_usable_episodes_with_a_finite_reward():
    scored = episode(steps=[step(dense_score=0.5)])
    infinite = episode(steps=[step(dense_score=math.inf)])
    crashed = episode(steps=[step(dense_score=0.5)], stop=StopReason.CRASHED)
    members = Group("task", [scored, infinite, crashed])
    assert members.usable_episodes("dense") == [scored]
    assert members.usable_episodes("outcome") == [scored, infinite]


def test_both_rewards_of_an_episode_can_be_read():
    failed = episode(0.0, steps=[step(dense_score=9.0) for _ in range(3)])
    assert failed.reward("outcome") == 0 and failed.reward("dense") == 27
    won = episode(1.0, steps=[step(dense_score=score) for score in (0.25, -0.5, 0.125)])
    assert won.step_rewards("outcome") == [0, 0, 1] and won.step_rewards("dense") == [0.25, -0.5, 0.125]
    assert won.outcome == 1


def test_an_unknown_or_missing_reward_is_refused():
    with pytest.raises(ValueError, match="'swapped'.*'outcome' or 'dense'"):
        episode().reward("swapped")
    with pytest.raises(ValueError, match="step 1 of task task .* score it first"):
        episode(steps=[step(dense_score=0.1), step()]).reward("dense")


def test_crashed_empty_and_undefined_episodes_are_not_usable():
    assert episode().usable and episode(0.0, stop=StopReason.STEP_LIMIT).usable
    assert episode(0.0, stop=StopReason.TOKEN_LIMIT).usable
    assert not episode(stop=StopReason.CRASHED).usable
    assert not episode(NAN).usable and not episode(math.inf).usable and not episode(steps=[]).usable


def test_a_repeated_state_is_an_observation_seen_before_in_the_episode():
    assert episode(steps=[step(observation=text) for text in "abaac"]).repeated_states == 2


@pytest.mark.parametrize("stop", StopReason)
def test_a_trajectory_survives_json_unchanged(stop):
    seen = step(
        (5, 6),
        (7, 8),
        "a \u201cquoted\u201d\nroom",
        truncated=True,
        dense_score=0.1 + 0.2,
        behavior_logprobs=[-1 / 3, -1e-300],
        advantage=-2 / 3,
    )
    trajectory = episode(1 / 3, steps=[seen, step()], stop=stop)
    again = Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict())))
    assert again == trajectory and again.stop_reason is stop
    assert again.steps[1].dense_score is None and isinstance(again.steps[0], Step)


# The order of the replay buffer


def test_equal_scores_never_compare_payloads():
    buffer = ReplayBuffer()
    buffer.add([Group("task", [episode(task={"not": "comparable"}) for _ in range(5)])])
    assert distinct(buffer.sample(5)) == 5


def test_the_highest_outcomes_come_first():
    buffer = ReplayBuffer()
    buffer.add([group(0.2, 1.0, 0.0), group(0.9, 0.5)])
    assert outcomes(buffer.sample(4)) == [1.0, 0.9, 0.5, 0.2]


def test_among_equal_outcomes_those_above_the_mean_of_their_group_come_first():
    for seed in range(20):
        buffer = ReplayBuffer(seed=seed)
        easy = [episode(1.0, advantage, "easy") for advantage in (0.0, None, -1.0)]
        buffer.add(
            [Group("easy", easy), Group("hard", [episode(1.0, 2.0, "hard"), episode(0.0, -2.0, "hard")])]
        )
        for _ in range(3):  # and stay first, however often they were drawn
            assert buffer.sample(1)[0].task_id == "hard"
        assert outcomes(buffer.sample(5)) == [1, 1, 1, 1, 0]


def test_the_advantage_of_an_episode_is_the_sum_over_its_steps():
    up = episode(1.0, task="up", steps=[step(advantage=a) for a in (-1.0, 3.0, None)])
    down = episode(1.0, task="down", steps=[step(advantage=a) for a in (1.0, -3.0)])
    for seed in range(10):
        buffer = ReplayBuffer(seed=seed)
        buffer.add([Group("task", [down, up])])
        assert tasks(buffer.sample(2)) == ["up", "down"]


def test_ties_go_to_the_episode_with_the_fewest_draws():
    buffer = ReplayBuffer()
    buffer.add([group(1, 1, 1, 0, 1, 1, 1)])
    draws = [buffer.sample(2) for _ in range(3)]
    assert distinct([trajectory for draw in draws for trajectory in draw]) == 6
    assert all(outcomes(draw) == [1, 1] for draw in draws)


def test_few_successes_are_drawn_by_every_update():
    buffer = ReplayBuffer()
    buffer.add([group(*[1.0] * 5, *[0.0] * 11)])
    failures = []
    for _ in range(5):
        draw = buffer.sample(6)
        assert outcomes(draw) == [1, 1, 1, 1, 1, 0]
        failures.append(draw[-1])
    assert distinct(failures) == 5


def test_ties_are_broken_by_the_seed_not_by_the_order_of_arrival():
    def first(strategy, seed):
        buffer = ReplayBuffer(strategy, seed=seed)
        buffer.add([Group("task", [episode(1.0, task=str(i)) for i in range(4)])])
        return tuple(tasks(buffer.sample(4)))

    for strategy in ("reward", "variance", "random"):
        orders = [first(strategy, seed) for seed in range(400)]
        assert orders == [first(strategy, seed) for seed in range(400)]
        assert len(set(orders)) == 24  # 4! orders
        assert all(
            70 < count < 130 for count in Counter(order[0] for order in orders).values()
        )  # 100 +- 3.5 std


def test_variance_draws_from_the_most_mixed_groups_first():
    buffer = ReplayBuffer("variance")
    buffer.add(
        [group(1, 1, 1, 1, task="easy"), group(0, 1, 0, 1, task="mixed"), group(0, 0, 0, 1, task="hard")]
    )
    assert tasks(buffer.sample(12)) == ["mixed"] * 4 + ["hard"] * 4 + ["easy"] * 4


def test_variance_is_that_of_the_whole_group_without_its_crashed_episodes():
    buffer = ReplayBuffer("variance")
    crashed = [episode(0.0, task="won", stop=StopReason.CRASHED), episode(NAN, task="won")]
    buffer.add([Group("won", [episode(1.0, task="won"), *crashed])])
    buffer.add([group(0, 0, 0, 0, 1, task="hard"), group(1, 0, task="even")])
    buffer.add([group(0, 1, 1, task="later")])
    # variances: even 0.25, later 2/9, hard 0.16, and won 0, since its crashed episodes are left out
    assert tasks(buffer.sample(11)) == ["even"] * 2 + ["later"] * 3 + ["hard"] * 5 + ["won"]


def test_one_success_in_five_ties_with_one_failure_in_five():
    buffer = ReplayBuffer("variance")  # both 0.16, to the last bit
    buffer.add([group(1, 0, 0, 0, 0, task="one"), group(0, 1, 1, 1, 1, task="four")])
    assert set(tasks(buffer.sample(5))) == {"one", "four"}


def test_random_ignores_outcomes_and_earlier_draws():
    successes, repeats = 0, 0
    for seed in range(400):
        buffer = ReplayBuffer("random", seed=seed)
        buffer.add([group(0, 0, 0, 1)])
        first, second = buffer.sample(1) + buffer.sample(1)
        successes += first.outcome
        repeats += first is second
    assert 70 < successes < 130 and 70 < repeats < 130  # 100 +- 3.5 std


def test_positive_draws_only_episodes_above_the_mean_of_their_group_the_best_first():
    buffer = ReplayBuffer("positive")
    won = [episode(1.0, 0.0, "won") for _ in range(3)]  # a group without spread: A is 0
    hard = [episode(1.0, 2.47, "hard"), *(episode(0.0, -0.35, "hard") for _ in range(7))]
    even = [episode(1.0, 0.93, "even"), episode(0.0, -0.93, "even"), episode(1.0, None, "even")]
    buffer.add([Group("won", won), Group("even", even), Group("hard", hard)])
    assert tasks(buffer.sample(1)) == ["hard"]
    assert tasks(buffer.sample(9)) == ["even", "hard"]  # "even" was never drawn, "hard" once
    assert tasks(buffer.sample(9)) == ["even", "hard"]  # once and twice
    assert len(buffer) == 14


def test_positive_draws_no_failure_that_only_the_penalty_of_others_makes_positive():
    # R = 0 seven times and -0.1: mean -.0125, std .03536, so A = .35 seven times and -2.47
    buffer = ReplayBuffer("positive")
    buffer.add(
        [Group("lost", [*(episode(0.0, 0.35, "lost") for _ in range(7)), episode(0.0, -2.47, "lost")])]
    )
    assert buffer.sample(8) == []
    half = [episode(0.5, 0.7, "half"), episode(0.1, 0.2, "low"), episode(0.3, -0.1, "penalised")]
    buffer.add([Group("task", half)])  # mean outcome .3
    assert tasks(buffer.sample(8)) == ["half"]


def test_positive_takes_the_least_drawn_first():
    buffer = ReplayBuffer("positive")
    members = [episode(1.0, advantage, str(advantage)) for advantage in (3.0, 1.0, 2.0)]
    buffer.add([Group("", [*members, episode(0.0, -6.0)])])
    # draws so far of 3, 2, 1:  0 0 0 -> 3, 2   1 1 0 -> 1, 3   2 1 1 -> 2, 1   2 2 2 -> 3, 2
    drawn = [tasks(buffer.sample(2)) for _ in range(4)]
    assert drawn == [["3.0", "2.0"], ["1.0", "3.0"], ["2.0", "1.0"], ["3.0", "2.0"]]


def test_positive_ranks_by_the_mean_over_turns_so_a_long_episode_has_no_advantage():
    long = episode(1.0, task="long", steps=[step(advantage=0.1)] * 10)  # sum 1, mean 0.1
    short = episode(1.0, task="short", steps=[step(advantage=0.4), step(advantage=0.0)])  # sum 0.4, mean 0.2
    buffer = ReplayBuffer("positive")
    buffer.add([Group("task", [long, short, episode(0.0, -0.3)])])
    assert tasks(buffer.sample(2)) == ["short", "long"]


def test_turns_of_equal_advantage_tie_whatever_their_number():
    """The sum of 0.1 over 3 turns, divided by 3, is not 0.1 in floats. A tie is broken by chance."""
    orders = set()
    for seed in range(20):
        buffer = ReplayBuffer("positive", seed=seed)
        members = [episode(task=str(n), steps=[step(advantage=0.1)] * n) for n in (1, 3, 7)]
        buffer.add([Group("task", [*members, episode(0.0, -0.3)])])
        orders.add(tuple(tasks(buffer.sample(3))))
    assert len(orders) > 3


def test_a_draw_reports_the_age_of_its_episodes_in_updates_of_a():
    buffer = ReplayBuffer()
    buffer.add([group(1, 0, task="old")], update=3)
    buffer.add([group(1, task="new")], update=6)
    # at update 7: 4, 4 and 1, mean 3
    assert buffer.draw_metrics(buffer.sample(3), 7) == {
        "buffer_episodes": 3,
        "replay_age_mean": 3.0,
        "replay_age_max": 4,
    }
    assert sorted((episode.task_id, age) for episode, age in buffer.last_draw) == [
        ("new", 1),
        ("old", 4),
        ("old", 4),
    ]
    assert buffer.draw_metrics([], 7) == {} and buffer.last_draw == []


# Units and age


def test_a_sample_holds_distinct_episodes_and_fewer_if_there_are_fewer():
    for strategy in ("reward", "variance", "random"):
        buffer = ReplayBuffer(strategy)
        assert buffer.sample(3) == []
        buffer.add([group(1, 0, 1), group(0, 0)])
        assert buffer.sample(0) == []
        assert distinct(buffer.sample(4)) == 4
        assert distinct(buffer.sample(99)) == 5 and len(buffer) == 5


def test_a_sample_of_whole_groups_holds_distinct_episodes():
    buffer = ReplayBuffer(unit="group")
    buffer.add([group(1, *[0] * 7, task=str(i)) for i in range(4)])
    draw = buffer.sample(16)
    assert distinct(draw) == 16 and sorted(Counter(tasks(draw)).values()) == [8, 8]
    assert set(tasks(buffer.sample(16))) | set(tasks(draw)) == set("0123")  # the other two groups
    buffer.add([group(1, 1, *[0] * 6, task="better")])
    assert len(buffer) == 40
    assert set(tasks(buffer.sample(8))) == {"better"}


def test_groups_without_spread_are_never_drawn_whole():
    for strategy in ("reward", "variance", "random"):
        buffer = ReplayBuffer(strategy, unit="group")
        buffer.add([group(1, 1, task="won"), group(0, 1, task="mixed"), group(0, 0, task="lost")])
        assert tasks(buffer.sample(6)) == ["mixed"] * 2 and len(buffer) == 6


def test_whole_groups_are_drawn_by_mean_outcome_while_they_fit():
    buffer = ReplayBuffer(unit="group")
    buffer.add([group(0, 1, 0, 0, task="c"), group(1, 1, 0, task="a"), group(1, 0, task="b")])
    assert tasks(buffer.sample(5)) == [*"aaabb"]
    assert tasks(buffer.sample(8)) == [*"aaabb"]  # c would make 9
    assert tasks(buffer.sample(2)) == [*"bb"]  # a would make 3
    assert buffer.sample(1) == []


def test_whole_groups_are_drawn_by_variance():
    buffer = ReplayBuffer("variance", unit="group")
    buffer.add([group(1, 1, 1, 0, task="easy"), group(1, 0, 1, 0, task="mixed")])
    assert tasks(buffer.sample(4)) == ["mixed"] * 4


def test_unusable_episodes_are_left_out():
    for unit in ("episode", "group"):
        buffer = ReplayBuffer(unit=unit)
        crashed = episode(1.0, stop=StopReason.CRASHED)
        buffer.add(
            [Group("task", [episode(1.0), crashed, episode(NAN), episode(0.0)]), Group("task", [crashed])]
        )
        assert len(buffer) == 2
        assert outcomes(buffer.sample(4)) == [1, 0]


def test_keep_newest_drops_the_oldest_groups():
    for unit in ("episode", "group"):
        buffer = ReplayBuffer(unit=unit)
        for task in "abcd":
            buffer.add([group(1, 0, task=task)])
        buffer.keep_newest(9)
        assert len(buffer) == 8
        buffer.keep_newest(2)
        assert set(tasks(buffer.sample(9))) == {"c", "d"} and len(buffer) == 4
        buffer.add([group(1, 0, task="e")])
        buffer.keep_newest(2)
        assert set(tasks(buffer.sample(9))) == {"d", "e"}
        buffer.keep_newest(0)
        assert len(buffer) == 0


def test_clear_empties_the_buffer():
    buffer = ReplayBuffer()
    buffer.add([group(1, 0)])
    buffer.clear()
    assert len(buffer) == 0 and buffer.sample(2) == []
    buffer.add([group(0.5)])
    assert outcomes(buffer.sample(2)) == [0.5]


def test_three_tasks_are_stored_as_they_were_played():
    """Three tasks, all lost, mixed, and all won: 12 episodes, each with its own tokens."""
    groups = []
    for task, results in enumerate([[0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1]]):
        steps = [[step(action_ids=[10 * task + i])] for i in range(4)]
        groups.append(
            Group(str(task), [episode(r, 0.0, str(task), s) for r, s in zip(results, steps, strict=True)])
        )
    buffer = ReplayBuffer()
    buffer.add(groups)
    drawn = [(t.task_id, t.steps[0].action_ids[0], t.outcome) for t in buffer.sample(12)]
    assert sorted(drawn) == [
        *[("0", i, 0) for i in range(4)],
        *[("1", 10, 0), ("1", 11, 1), ("1", 12, 0), ("1", 13, 1)],
        *[("2", 20 + i, 1) for i in range(4)],
    ]


@pytest.mark.parametrize("unit", ["episode", "group"])
@pytest.mark.parametrize("strategy", ["reward", "variance", "random"])
def test_a_restored_buffer_draws_as_if_nothing_had_happened(strategy, unit):
    buffer = ReplayBuffer(strategy, unit, seed=3)
    for i in range(6):
        buffer.add([group(1, 0, 1, 0, task=str(i)), Group("", [episode(NAN)])])
        buffer.sample(4)
    again = ReplayBuffer(strategy, unit, seed=99)
    again.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert len(again) == len(buffer) == 24
    for i in range(6):
        assert again.sample(4) == buffer.sample(4)
        for each in (buffer, again):
            each.add([group(1, 0, 0, 1, task=f"later {i}")])
            each.keep_newest(4)
        assert again.sample(9) == buffer.sample(9)


def test_a_restored_buffer_knows_draws_advantages_and_ages():
    buffer = ReplayBuffer("positive", seed=3)
    members = [episode(1.0, advantage, str(advantage)) for advantage in (3.0, 1.0, 2.0)]
    buffer.add([Group("", [*members, episode(0.0, -6.0)])], update=5)
    buffer.sample(1)
    again = ReplayBuffer("positive", seed=99)
    again.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    drawn = again.sample(9)
    assert tasks(drawn) == ["2.0", "1.0", "3.0"]  # 3.0 was drawn before
    assert again.draw_metrics(drawn, 7)["replay_age_max"] == 2


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: ReplayBuffer("best"), "'best'.*'reward', 'variance', 'random' or 'positive'"),
        (lambda: ReplayBuffer(unit="step"), "'step'.*'episode' or 'group'"),
        (lambda: ReplayBuffer().sample(-1), "-1 episodes .* 0 or more"),
        (lambda: ReplayBuffer().keep_newest(-2), "-2 groups .* 0 or more"),
    ],
)
def test_bad_arguments_are_named_with_their_remedy(use, message):
    with pytest.raises(ValueError, match=message):
        use()
