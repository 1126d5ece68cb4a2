"""The implicit reward: scores, loss and gradient by hand on the toy, and agents of a real model."""

import math
import random

import pytest
import torch

import rspo
from buffer import Group, Step, StopReason, Trajectory
from config import Config
from demo.toy import AGENT, END, LEFT, RIGHT, ToyPolicy, toy_world
from dense.implicit import ImplicitReward, cross_entropy

CONFIG = Config(max_grad_norm=1e9)


def prm(odds=1.0, **settings):
    """Make pi_prm, which plays "right" with these odds. pi_ref plays "left" and "right" with 1/2 each."""
    policy = ToyPolicy(lead=0.0, **settings)
    policy.logits.data[AGENT, RIGHT] = math.log(odds)
    return policy


def play(*actions, outcome=0.0, stop_reason=StopReason.FINISHED):
    """Make an episode of one-word replies, each in a row of its own."""
    steps = [
        Step([2, 6 + i, AGENT], [action, END], [0.0, 0.0], f"door {i}", "", True)
        for i, action in enumerate(actions)
    ]
    return Trajectory("toy", "walk", "Left", steps, outcome, outcome == 1, stop_reason)


def test_a_score_is_beta_times_the_log_ratio_of_the_reply():
    # odds 3: pi_prm(right) = 3/4 and pi_prm(left) = 1/4; the end token is as likely under both
    reward = ImplicitReward(prm(odds=3.0), 2.0, CONFIG)
    crashed = play(RIGHT, stop_reason=StopReason.CRASHED)
    episodes = [play(RIGHT, LEFT), play(LEFT), crashed]
    reward.score([Group("toy", episodes)])
    found = [[step.dense_score for step in episode.steps] for episode in episodes]
    right, left = 2 * math.log(3 / 2), 2 * math.log(1 / 2)  # 0.811 and -1.386
    assert found[0] == pytest.approx([right, left], abs=1e-5) and found[1] == pytest.approx([left], abs=1e-5)
    assert found[2] == [None]


def test_all_scores_are_exactly_0_before_the_first_step():
    episodes = [play(RIGHT, LEFT), play(LEFT)]
    ImplicitReward(prm(), 0.05, CONFIG).score([Group("toy", episodes)])
    assert {step.dense_score for episode in episodes for step in episode.steps} == {0.0}


def test_equal_replies_to_equal_prompts_have_equal_scores_and_are_read_once():
    policy, read = prm(odds=3.0), []
    logprobs = policy.logprobs
    policy.logprobs = lambda batch: read.extend(batch.rows) or logprobs(batch)
    episodes = [play(RIGHT, LEFT), play(RIGHT, LEFT), play(RIGHT, RIGHT)]
    ImplicitReward(policy, 1.0, CONFIG).score([Group("toy", episodes)])
    assert len(read) == 3  # right at door 0, left and right at door 1
    one, two, _ = ([step.dense_score for step in episode.steps] for episode in episodes)
    assert one == two


def test_noise_is_added_to_each_score():
    episodes, rng = [play(RIGHT, LEFT)], random.Random(4)
    drawn = [rng.gauss(0.0, 0.3) for _ in range(2)]
    ImplicitReward(prm(), 0.05, CONFIG).score([Group("toy", episodes)], noise=0.3, rng=random.Random(4))
    assert [step.dense_score for step in episodes[0].steps] == drawn


def test_the_cross_entropy_by_hand():
    # sigmoid(0) = 1/2, sigmoid(ln 3) = 3/4: -(ln 1/2 + ln 1/4) / 2 = 1.0397; 1 - 1/2 and 0 - 3/4
    loss, weights = cross_entropy([0.0, math.log(3)], [1.0, 0.0])
    assert loss == pytest.approx(1.0397, abs=1e-4)
    assert weights == pytest.approx([0.5, -0.75])


class Held(ToyPolicy):
    """A policy that keeps its gradient in place of a step."""

    def step(self, max_grad_norm):
        self.gradient = self.logits.grad.clone()
        return 0.0


def held(odds=1.0):
    policy = Held(lead=0.0)
    policy.logits.data[AGENT, RIGHT] = math.log(odds)
    return policy


def test_the_gradient_by_hand():
    # R = 0 for both. d R / d logit of "right" = beta (count of right - n / 2): 2 (2 - 1) and 2 (0 - 1/2).
    # d loss / d R = (1/2 - outcome) / 2: -1/4 and 1/4. So -1/4 * 2 + 1/4 * -1 = -0.75
    policy = held()
    metrics = ImplicitReward(policy, 2.0, CONFIG).learn(
        [Group("toy", [play(RIGHT, RIGHT, outcome=1.0)]), Group("toy", [play(LEFT)])]
    )
    assert policy.gradient[AGENT, RIGHT].item() == pytest.approx(-0.75, abs=1e-5)
    assert policy.gradient[AGENT, LEFT].item() == pytest.approx(0.75, abs=1e-5)
    assert metrics == {"implicit_loss": pytest.approx(math.log(2)), "implicit_return": 0, "implicit_auc": 0.5}


@pytest.mark.parametrize("tokens", [1, 10_000])
def test_the_gradient_is_that_of_the_loss_however_rows_are_split(tokens):
    episodes = [
        play(RIGHT, LEFT, RIGHT, outcome=1.0),
        play(LEFT),
        play(LEFT, RIGHT, outcome=0.25),
        play(RIGHT, stop_reason=StopReason.CRASHED),
    ]
    policy = held(odds=2.0)
    config = Config(max_grad_norm=1e9, tokens_per_micro_batch=tokens)
    ImplicitReward(policy, 0.7, config).learn([Group("toy", episodes)])

    logits = torch.tensor([0.0, math.log(2)], requires_grad=True)  # of left and right
    ratios = torch.log_softmax(logits, 0) - math.log(1 / 2)
    left, right = ratios
    returns = 0.7 * torch.stack([2 * right + left, left, left + right])
    outcomes = torch.tensor([1.0, 0.0, 0.25])
    losses = -(outcomes * torch.sigmoid(returns).log() + (1 - outcomes) * torch.sigmoid(-returns).log())
    losses.mean().backward()
    assert policy.gradient[AGENT, [LEFT, RIGHT]].tolist() == pytest.approx(logits.grad.tolist(), abs=1e-5)


def test_it_learns_which_replies_solve_the_game():
    reward = ImplicitReward(prm(learning_rate=0.1), 1.0, CONFIG)
    groups = [Group("toy", [play(RIGHT, RIGHT, outcome=1.0), play(LEFT, RIGHT), play(LEFT, LEFT)])]
    losses = [reward.learn(groups)["implicit_loss"] for _ in range(20)]
    assert losses[-1] < losses[0] == pytest.approx(math.log(2))
    reward.score(groups)
    solved, *_ = groups[0].trajectories
    assert solved.steps[0].dense_score > 0 > groups[0].trajectories[2].steps[0].dense_score
    assert reward.learn(groups)["implicit_auc"] == 1.0


def test_without_a_success_there_is_no_auc_and_damaged_weights_end_the_run():
    policy = prm()
    reward, groups = ImplicitReward(policy, 1.0, CONFIG), [Group("toy", [play(LEFT)])]
    assert set(reward.learn(groups)) == {"implicit_loss", "implicit_return"}
    policy.logits.data[AGENT] = float("nan")
    with pytest.raises(FloatingPointError, match="lower --implicit_lr"):
        reward.learn(groups)
    with pytest.raises(FloatingPointError, match="is not a finite number"):
        reward.score(groups)


def test_algorithm_1_trains_it_on_the_episodes_of_a_after_each_update_of_a():
    config = Config(
        dense_reward="implicit",
        total_updates=4,
        k=2,
        tasks_per_update=4,
        group_size=4,
        off_policy_fraction=0.25,
        buffer_tasks=2,
    )
    seen, lines = [], []

    class Watched(ImplicitReward):
        def score(self, groups, **noise):
            seen.append("score")
            super().score(groups, **noise)

        def learn(self, groups):
            seen.append(groups)
            return super().learn(groups)

    policy = ToyPolicy()
    rspo.train(
        policy,
        toy_world(4),
        Watched(ToyPolicy("implicit"), 1.0, config),
        config,
        lambda *line: lines.append(line),
    )
    of_a = [groups for agent, groups, _, _ in lines if agent == "policy"]
    scored = ["score", "score"]
    assert seen == [*scored, *of_a[:2], *scored, *of_a[2:]]
    assert all("implicit_loss" in metrics for agent, _, metrics, _ in lines if agent == "policy")
    assert not any("implicit_loss" in metrics for agent, _, metrics, _ in lines if agent != "policy")


@pytest.mark.parametrize("rank", [0, 4])
def test_pi_prm_of_a_real_model_starts_as_the_start_and_training_it_moves_no_other_agent(rank):
    from tiny import BATCH, agent, episode, same, snapshot, tiny, train

    from policy import Policy

    policy = agent(tiny(), rank)
    train(policy)
    before, reference = snapshot(policy), policy.reference_logprobs(BATCH)
    own = Policy(policy.base, "implicit", **vars(policy.settings))
    reward, groups = ImplicitReward(own, 1.0, CONFIG), [Group("", [episode(3, 1), episode(2, 2)])]
    groups[0].trajectories[1].outcome = 0.0
    reward.score(groups)
    assert {step.dense_score for member in groups[0].trajectories for step in member.steps} == {0.0}
    reward.learn(groups)
    reward.score(groups)
    better, worse = (member.reward("dense") for member in groups[0].trajectories)
    assert better > worse
    assert same(snapshot(policy), before)
    assert torch.equal(policy.reference_logprobs(BATCH), reference)
