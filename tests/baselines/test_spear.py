"""SPEAR: each equation against literal numbers, the buffer, and whole runs on the toy world."""

import dataclasses
import json
import math
import random

import pytest
import torch

import rspo
from baselines import spear
from baselines.spear import TurnBuffer
from buffer import Group, Step, StopReason, Trajectory
from config import Config
from demo.toy import LEFT, RIGHT, CountingScorer, ToyPolicy, toy_world

SMALL = dict(method="spear", total_updates=6, k=2, tasks_per_update=4, group_size=4, spear_buffer=4)
RIGHT_LOGPROB = -math.log(1 + math.exp(0.5))  # -.974077: the toy's log-prob of "right"; that of <end> is 0


def config_of(**options):
    return Config(**{**SMALL, **options})


def step(advantage=1.0, action=RIGHT, valid=True, door=0):
    made = Step([2, 6, 7 + door, 3], [action, 1], [0.0, 0.0], f"door {door}", "right", valid)
    made.advantage, made.behavior_logprobs = advantage, [RIGHT_LOGPROB, 0.0]
    return made


def episode(outcome, *steps):
    return Trajectory(
        "toy", "walk", "Left", list(steps) or [step()], outcome, outcome == 1, StopReason.FINISHED
    )


def group(*outcomes):
    return Group("toy", [episode(outcome) for outcome in outcomes])


def drawn(buffer, update):
    return buffer.draw(update, random.Random(0))


# --- the weight ---------------------------------------------------------------------------------------------


def test_the_weight_rises_along_a_cosine():
    # gamma (1 - cos(pi t / 4)) / 2: cos 45 degrees = .707107, cos 90 = 0, cos 135 = -.707107, cos 180 = -1
    config = config_of(spear_weight=0.1, spear_warmup=4)
    weights = [spear.imitation_weight(update, config) for update in (1, 2, 3, 4, 5, 400)]
    assert weights == pytest.approx([0.0146447, 0.05, 0.0853553, 0.1, 0.1, 0.1], abs=1e-7)


# --- the baseline and A~ ------------------------------------------------------------------------------------


def test_the_baseline_is_the_median_of_the_last_group_means():
    buffer = TurnBuffer(config_of(spear_baseline_groups=3, reward_scale=10.0))
    seen = []
    for outcomes in ((1, 0), (0, 0), (1, 1), (1, 0, 0, 0)):  # means of R: 5, 0, 10, 2.5
        buffer.add([group(*outcomes)], 0)
        seen.append(drawn(buffer, 1)[1]["spear_baseline"])
    # 5 | 5, 0 | 5, 0, 10 | 0, 10, 2.5
    assert seen == [5.0, 2.5, 5.0, 2.5]


def test_the_advantage_of_an_imitated_turn_is_the_return_less_the_baseline():
    # R = 10 - .1 for the invalid reply = 9.9. The group means are 9.9 and 0, their median 4.95.
    buffer = TurnBuffer(config_of(spear_buffer=2, reward_scale=10.0, invalid_penalty=0.1))
    steps = [step(0.5, door=0), step(0.5, valid=False, door=1)]
    buffer.add([Group("toy", [episode(1, *steps)]), group(0, 0)], 3)
    (imitated,), metrics = drawn(buffer, 4)
    assert [one.advantage for one in imitated.steps] == pytest.approx([4.95, 4.95])
    assert metrics == {
        "spear_baseline": pytest.approx(4.95),
        "spear_buffer_turns": 2,  # the two failures' turns are in the buffer too, but have A~ = 0 - 4.95
        "spear_turns": 2,
        "replay_age_mean": 1,
        "replay_age_max": 1,
    }
    assert [one.advantage for one in steps] == [0.5, 0.5]  # A's own records are not changed


def test_a_group_without_a_usable_episode_has_no_mean():
    buffer = TurnBuffer(config_of())
    crashed = group(0)
    crashed.trajectories[0].stop_reason = StopReason.CRASHED
    buffer.add([crashed], 0)
    assert drawn(buffer, 1) == ([], {}) and not buffer.group_means


# --- the buffer ---------------------------------------------------------------------------------------------


def test_only_turns_with_a_positive_advantage_are_imitated():
    buffer = TurnBuffer(config_of(spear_buffer=2))
    steps = [step(0.3, door=0), step(-0.2, door=1), step(0.0, door=2), step(0.1, door=0)]
    buffer.add([Group("toy", [episode(1, *steps), episode(0, step(-1.0))])], 0)
    (imitated,), _ = drawn(buffer, 1)
    assert [one.observation for one in imitated.steps] == ["door 0", "door 0"]


def test_turns_that_are_no_longer_better_than_the_baseline_are_not_imitated():
    buffer = TurnBuffer(config_of(spear_buffer=1))
    buffer.add([Group("toy", [episode(0.5)])], 0)  # R = 5
    assert drawn(TurnBuffer(config_of(spear_buffer=1)), 1) == ([], {})
    buffer.add([group(1), group(1)], 1)  # means 5, 10, 10: the baseline is 10
    imitated, metrics = drawn(buffer, 2)
    assert imitated == [] and (metrics["spear_baseline"], metrics["spear_buffer_turns"]) == (10.0, 0)


def test_turns_leave_the_buffer_at_the_age_limit():
    def turns_after(update):
        buffer = TurnBuffer(config_of(spear_age=5, spear_buffer=9))
        buffer.add([group(1, 0)], 2)  # both turns have advantage 1, but R - P50 = 10 - 5 and 0 - 5
        return drawn(buffer, update)[1]["spear_buffer_turns"]

    assert [turns_after(update) for update in (3, 7, 8)] == [1, 1, 0]  # ages 1, 5 and 6


def test_a_full_buffer_is_drawn_from_once_and_emptied():
    buffer = TurnBuffer(config_of(spear_buffer=4))
    steps = [[step(1.0, door=door) for door in range(3)] for _ in range(2)]
    buffer.add([group(0), Group("toy", [episode(1, *steps[0])])], 0)  # means 0 and 10
    imitated, metrics = drawn(buffer, 1)
    assert imitated == [] and (metrics["spear_turns"], metrics["spear_buffer_turns"]) == (0, 3)
    buffer.add([group(0), Group("toy", [episode(1, *steps[1])])], 1)
    imitated, metrics = drawn(buffer, 2)
    assert sum(len(member.steps) for member in imitated) == 4 == metrics["spear_turns"]
    assert metrics["spear_buffer_turns"] == 6 and metrics["replay_age_max"] == 2
    assert drawn(buffer, 3)[1]["spear_buffer_turns"] == 0
    assert list(buffer.group_means) == [0.0, 10.0, 0.0, 10.0]


def test_another_seed_draws_other_turns():
    def doors(seed):
        buffer = TurnBuffer(config_of(spear_buffer=3))
        steps = [dataclasses.replace(step(), observation=str(number)) for number in range(9)]
        buffer.add([group(0, 0), Group("toy", [episode(1, *steps)])], 0)
        (imitated,), _ = buffer.draw(1, random.Random(seed))
        return [one.observation for one in imitated.steps]

    draws = [doors(seed) for seed in range(5)]
    assert doors(0) == draws[0] and len({tuple(draw) for draw in draws}) > 1
    assert all(draw == sorted(set(draw)) and len(draw) == 3 for draw in draws)


def test_a_restored_buffer_draws_the_same():
    config = config_of(spear_buffer=2, spear_baseline_groups=3)
    buffer, other = TurnBuffer(config), TurnBuffer(config)
    buffer.add([group(1, 0), group(0, 0), group(1, 0, 0, 0), group(1, 1)], 4)
    other.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert other.state_dict() == buffer.state_dict() and other.group_means.maxlen == 3
    assert drawn(other, 5) == drawn(buffer, 5)


# --- the covariance clip ------------------------------------------------------------------------------------

LOGPROBS = torch.tensor([0.0, -1.0, -2.0, -5.0])  # mean -2, so 2, 1, 0, -3 from it
ADVANTAGES = torch.tensor([8.0, 5.0, 1.0, 2.0])  # mean 4, so 4, 1, -3, -2 from it


def dropped(seed=0, behavior=LOGPROBS, **options):
    config = config_of(**{"spear_cov_share": 1.0, "spear_cov_low": 2.0, "spear_cov_high": 60.0, **options})
    return spear.tokens_to_drop(LOGPROBS, behavior, ADVANTAGES, config, random.Random(seed))


def test_the_covariance_of_a_token_is_the_product_of_its_distances_from_the_means():
    # 2 * 4, 1 * 1, 0 * -3, -3 * -2
    assert spear.covariances(LOGPROBS, ADVANTAGES).tolist() == [8.0, 1.0, 0.0, 6.0]


def test_tokens_in_the_covariance_band_are_dropped():
    assert dropped() == [0, 3]
    assert dropped(spear_cov_low=6.5) == [0]
    assert dropped(spear_cov_high=8.0) == [3]  # the ends do not belong to the band
    assert dropped(spear_cov_low=8.0) == []
    assert dropped(spear_cov_low=-1.0) == [0, 1, 2, 3]


def test_a_random_share_of_all_tokens_is_dropped_and_at_least_one():
    assert {tuple(dropped(seed, spear_cov_share=0.02)) for seed in range(20)} == {(0,), (3,)}  # .02 * 4 < 1
    assert {len(dropped(seed, spear_cov_share=0.5)) for seed in range(20)} == {2}  # .5 * 4 = 2
    assert dropped(spear_cov_share=0.0) == []


def test_a_token_that_the_clip_stops_is_not_dropped():
    behavior = LOGPROBS - torch.tensor([0.0, 0.0, 0.0, 0.2])  # r = e^.2 = 1.22 > 1.2 of the last token
    assert dropped(behavior=behavior) == [0]
    assert dropped(behavior=behavior, clip_eps=0.25) == [0, 3]


@pytest.mark.parametrize("tokens_per_micro_batch", [1, 10**6])
def test_a_dropped_token_has_advantage_0(tokens_per_micro_batch):
    # Log-probs -.974, 0, -.974, 0 with mean -.487, and A~ 8, 8, 4, 4 with mean 6, so
    # Cov = -.974, .974, .974, -.974. Half of the tokens are in the band.
    config = config_of(
        spear_cov_share=1.0,
        spear_cov_low=0.5,
        spear_cov_high=60.0,
        tokens_per_micro_batch=tokens_per_micro_batch,
    )
    episodes = [episode(1, step(8.0)), episode(1, step(4.0))]
    assert spear.drop_tokens(ToyPolicy(), episodes, config, random.Random(0)) == 0.5
    assert [member.steps[0].advantage for member in episodes] == [[8.0, 0.0], [0.0, 4.0]]


# --- the objective ------------------------------------------------------------------------------------------


def gradient(imitated, gamma):
    """Update on a success by "right" and a failure by "left". Return the gradient of "right", and alpha."""
    config = config_of(clip_centre="one", kl_coef=0.0, entropy_coef=0.0)
    fresh = [Group("toy", [episode(1, step(None)), episode(0, step(None, LEFT))])]
    for member in fresh[0].trajectories:
        member.steps[0].behavior_logprobs = None
    policy, grads = ToyPolicy(), []
    policy.step = lambda norm: grads.append(policy.logits.grad[3, RIGHT].item()) or 0.0
    metrics = rspo.update(policy, fresh, imitated, "outcome", config, random.Random(0), (1.0, gamma))
    return grads[0], metrics["alpha"]


def test_the_objective_is_j_on_plus_gamma_j_sil():
    # J_on: R = 10, 0, so A = 5 / 7.071068 = +-.707107, over 4 tokens. d log pi / d logit is 1 - p for "right"
    # and -p for "left", so their difference is 1: -.707107 / 4 = -.176777.
    # J_SIL: A~ = 2 over 2 tokens, r = 1: -gamma * 2 / 2 * (1 - .377541) = -gamma * .622459.
    assert gradient([], 0.0) == pytest.approx((-0.176777, 0.0), abs=1e-5)
    assert gradient([episode(1, step(2.0))], 0.3) == pytest.approx(
        (-0.176777 - 0.3 * 0.622459, 0.3), abs=1e-5
    )
    assert gradient([episode(1, step([0.0, 2.0]))], 0.3)[0] == pytest.approx(-0.176777, abs=1e-5)  # dropped


def test_an_imitated_token_that_has_become_much_likelier_is_clipped_at_1_plus_eps():
    old = step(2.0)
    old.behavior_logprobs = [RIGHT_LOGPROB - 0.2, 0.0]  # r = e^.2 = 1.22 > 1.2
    assert gradient([episode(1, old)], 0.3)[0] == pytest.approx(-0.176777, abs=1e-5)


# --- whole runs ---------------------------------------------------------------------------------------------


def run(context="window", train=spear.train, start=0, **options):
    config = config_of(**options)
    policy, scorer, lines, weights = ToyPolicy(), CountingScorer(), [], []
    world = toy_world(config.episodes_per_task, context)

    def log(agent, groups, metrics, updates):
        lines.append((agent, metrics, updates))
        weights.append(policy.logits.detach().clone())

    loops = []
    train(policy, world, scorer, config, log, lambda updates, replay: loops.append(updates), start)
    assert scorer.scored == 0 and policy.explorer is None
    return lines, weights, loops


@pytest.mark.parametrize("context", ["window", "full"])
@pytest.mark.parametrize("algo", ["grpo", "gigpo"])
def test_a_run_imitates_and_ends(algo, context):
    lines, _, loops = run(context, algo=algo)
    assert [(agent, updates) for agent, _, updates in lines] == [("policy", i) for i in range(1, 7)]
    assert loops == [2, 4, 6]
    assert all(math.isfinite(value) for _, metrics, _ in lines for value in metrics.values())
    first, *others = [metrics for _, metrics, _ in lines]
    assert "spear_baseline" not in first and first["alpha"] == 0.0  # the buffer is empty
    assert any(metrics["spear_turns"] for metrics in others)
    for metrics in others:
        assert metrics["spear_turns"] in (0, 4)
        assert metrics["alpha"] == (metrics["spear_weight"] if metrics["spear_turns"] else 0.0)
        assert (metrics["replayed_episodes"] > 0) == (metrics["spear_turns"] > 0)
        assert metrics.get("replay_age_max", 1) <= 5


def test_without_imitation_a_run_is_the_baseline():
    lines, weights, _ = run(spear_buffer=10**6)
    others, baseline, _ = run(train=rspo.train, method="outcome")
    assert not any(metrics.get("spear_turns") for _, metrics, _ in lines)
    for (_, metrics, _), (_, wanted, _), ours, theirs in zip(lines, others, weights, baseline, strict=True):
        assert (ours - theirs).abs().max() < 1e-5
        assert metrics["policy_loss_on"] == pytest.approx(wanted["policy_loss_on"], abs=1e-5)


@pytest.mark.slow
def test_a_run_learns_the_toy():
    lines, weights, _ = run(total_updates=30, k=3, tasks_per_update=8, spear_warmup=5, spear_buffer=8)
    assert sum(metrics.get("spear_turns", 0) for _, metrics, _ in lines) >= 40  # in 5 updates or more
    chances = [torch.softmax(logits[3], -1)[RIGHT].item() for logits in weights]
    assert chances[0] < 0.7 and chances[-1] > 0.9
