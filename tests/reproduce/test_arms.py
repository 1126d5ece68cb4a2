"""The experiments: every arm is a valid command line, and claims name arms of their experiment."""

import pytest

from reproduce.arms import ARMS, EXPERIMENTS, STARTS
from reproduce.runs import args_of
from scale.plan import loop_size

SCALE = ["--total_updates", "45"]  # of published RSPO


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_plays_as_many_episodes_as_published_rspo(arm):
    # published RSPO: 3 updates of B and 3 of A on 7 tasks x 8 episodes, and 14 x 8 for the buffer:
    # 2 * 3 * 56 + 112 = 448 in each of 15 loops, 6720 together. Whole loops end at most half a loop away.
    args = args_of(SCALE, "default", arm)
    episodes = loop_size(args)["episodes"] * args.total_updates // args.k
    assert abs(episodes - 6720) <= loop_size(args)["episodes"] / 2


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_evaluated_five_to_ten_times(arm):
    args = args_of(SCALE, "default", arm)
    assert args.eval_every % args.k == 0
    assert 5 <= args.total_updates / args.eval_every <= 10


@pytest.mark.parametrize("start", STARTS)
def test_the_flags_of_a_start_are_valid(start):
    assert args_of(SCALE, start, "rspo").total_updates == 45  # 15 loops of k = 3


def test_arms_have_the_updates_that_the_episodes_allow():
    # GRPO: 64 episodes an update, 6720 / 64 = 105. RSPO_H: 56, 6720 / 56 = 120.
    # k = 10: a loop has 2 * 10 * 56 + 112 = 1232 episodes, 6720 / 1232 = 5.45, so 5 loops.
    # 19 tasks, because RSPO plays 448 / 3 = 149.3 episodes an update, 18.7 tasks; 6720 / 152 = 44.2 updates,
    # in loops of 3: 45.
    updates = {arm: args_of(SCALE, "default", arm).total_updates for arm in ARMS}
    wanted = {"rspo": 45, "grpo": 105, "rspo_h": 120, "k-10": 50, "grpo-tasks": 45}
    assert {arm: updates[arm] for arm in wanted} == wanted
    assert args_of(SCALE, "default", "grpo-tasks").tasks_per_update == 19


@pytest.mark.parametrize("arm", ["grpo", "rspo", "grpo-tasks", "alpha-1-16", "rspo-ppo", "k-10"])
def test_an_arm_is_valid_at_other_scales(arm):
    scale = "--tasks_per_update 16 --buffer_tasks 28 --total_updates 150 --minibatch_turns 256"
    args = args_of(scale.split(), "default", arm)
    # the paper's sizes: 2 * 3 * 14 * 8 + 28 * 8 = 896 episodes in each of 50 loops
    assert abs(loop_size(args)["episodes"] * args.total_updates / args.k - 44800) <= 1400


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_names_arms_and_starts_that_exist(name):
    experiment = EXPERIMENTS[name]
    assert set(experiment.arms) <= set(ARMS) and set(experiment.starts) <= set(STARTS)
    for claim in experiment.claims + experiment.leads:
        assert {claim.ahead, claim.behind} <= set(experiment.arms)
    for paper in experiment.papers:
        assert set(paper.success) <= set(experiment.arms)


def test_every_arm_and_every_start_is_in_an_experiment():
    assert {arm for experiment in EXPERIMENTS.values() for arm in experiment.arms} == set(ARMS)
    assert {start for experiment in EXPERIMENTS.values() for start in experiment.starts} == set(STARTS)
