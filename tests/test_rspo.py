"""Algorithm 1 driven end to end on the toy world, and each of its parts against literal numbers."""

import dataclasses
import math
import random

import pytest
import torch

import rspo
from batch import rows_of
from buffer import Group, ReplayBuffer, Step, StopReason, Trajectory
from config import Config
from demo.toy import CountingScorer, ToyPolicy, toy_world
from record.metrics import episode_metrics

SMALL = dict(total_updates=4, k=2, tasks_per_update=4, group_size=4, off_policy_fraction=0.25, buffer_tasks=3)


def run(policy=None, scorer=None, context="window", world=None, start=0, **options):
    config = Config(**{**SMALL, **options})
    policy, scorer = policy or ToyPolicy(), scorer or CountingScorer()
    world = world or toy_world(config.episodes_per_task, context)
    lines = []

    def log(agent, groups, metrics, updates):
        reward = {"policy": config.policy_reward, "explorer": config.explorer_reward}.get(agent, "outcome")
        lines.append((agent, {**episode_metrics(groups, reward), **metrics}, updates))

    rspo.train(policy, world, scorer, config, log, start=start)
    return policy, world, lines


def step(action_ids=(5, 1), prompt_ids=(2, 6, 7, 3), observation="door 0", valid=True, **more):
    ids = list(action_ids)
    return Step(list(prompt_ids), ids, [0.0] * len(ids), observation, "right", valid, **more)


def column(row, values):
    """Make a column of the row from one list of numbers per step."""
    filled = torch.zeros(len(row.input_ids))
    for index, start, end in row.spans:
        filled[start:end] = torch.tensor(values[index])
    return filled


def episode(outcome, steps, stop_reason=StopReason.FINISHED):
    return Trajectory("toy", "walk", "Left", steps, outcome, outcome == 1, stop_reason)


@pytest.mark.parametrize("context", ["window", "full"])
@pytest.mark.parametrize("algo", ["grpo", "gigpo", "ppo"])
@pytest.mark.parametrize("method", ["rspo", "outcome", "dense", "rspo_h", "rspo_o"])
def test_every_method_runs_with_every_algorithm_in_both_contexts(method, algo, context):
    policy, world, lines = run(method=method, algo=algo, context=context)
    assert [step for agent, _, step in lines if agent == "policy"] == [1, 2, 3, 4]
    assert [step for agent, _, step in lines if agent == "explorer"] == [0, 0, 2, 2] * (
        method in ("rspo", "rspo_o")
    )
    assert all(math.isfinite(value) for _, metrics, _ in lines for value in metrics.values())
    # A: 4 updates on 3 of 4 tasks (all if nothing is replayed) x 4 episodes; B: the same, 2 x 3 x 4 stored
    on = 4 * 16 if method in ("outcome", "dense") else 4 * 12
    assert world.episodes == (on + 4 * 12 + 24 if method in ("rspo", "rspo_o") else on)
    assert policy.version >= 4


@pytest.mark.slow
def test_the_toy_is_solved_from_outcomes_and_by_the_swap_although_the_dense_reward_pulls_the_other_way():
    for method, wins in (("outcome", True), ("rspo", True), ("dense", False)):
        _, _, lines = run(method=method, total_updates=30, k=3, tasks_per_update=8, off_policy_fraction=0.125)
        last = [metrics["success"] for agent, metrics, _ in lines if agent == "policy"][-5:]
        assert (sum(last) / 5 > 0.9) == wins, (method, last)


def test_phase_one_leaves_agent_a_bit_identical():
    policy = ToyPolicy()
    seen = []

    def log(agent, groups, metrics, updates):
        moments = policy.optimizer.state_dict()["state"].get(0, {})
        seen.append((agent, policy.logits.detach().clone(), {k: v.clone() for k, v in moments.items()}))

    rspo.train(policy, toy_world(), CountingScorer(), Config(**SMALL), log)
    kinds = [agent for agent, _, _ in seen]
    assert kinds == ["explorer", "explorer", "buffer", "policy", "policy"] * 2
    for before, after in ((4, 5), (5, 6), (6, 7)):  # from A's last update through B's two and the filling
        assert torch.equal(seen[before][1], seen[after][1])
        assert all(torch.equal(seen[before][2][name], seen[after][2][name]) for name in seen[before][2])
    assert not torch.equal(seen[3][1], seen[4][1])


def test_b_starts_each_loop_as_a_with_its_optimizer_and_is_discarded():
    policy = ToyPolicy()
    forks = []
    fork = policy.fork

    def spy(name):
        explorer = fork(name)
        forks.append(torch.equal(explorer.logits, policy.logits))
        return explorer

    policy.fork = spy
    rspo.train(policy, toy_world(), CountingScorer(), Config(**SMALL))
    assert forks == [True, True] and not policy.explorer.alive


def test_dense_rewards_never_reach_the_update_of_a():
    def poisoned(world, poison):
        """Give every episode this dense score. Only scoring, as for B's updates, replaces it."""
        collect = world.collect

        def spy(agent, tasks):
            groups = collect(agent, tasks)
            for group in groups:
                for member in group.trajectories:
                    for one in member.steps:
                        one.dense_score = poison
            return groups

        world.collect = spy
        return world

    clean, _, lines = run()
    poisoned_policy, _, poisoned_lines = run(world=poisoned(toy_world(4), float("nan")))
    assert torch.equal(clean.logits, poisoned_policy.logits)
    for (agent, metrics, _), (_, others, _) in zip(lines, poisoned_lines, strict=True):
        if agent == "policy":
            assert {**metrics, "seconds_update": 0} == {**others, "seconds_update": 0}


def test_the_reward_model_scores_the_episodes_that_are_trained_on_dense_rewards_only():
    for method, scored in (("rspo", 4 * 12), ("dense", 4 * 16), ("outcome", 0), ("rspo_h", 0), ("rspo_o", 0)):
        scorer = CountingScorer()
        run(method=method, scorer=scorer)
        assert scorer.scored == scored, method


def test_every_update_has_its_own_noise_on_dense_scores():
    class Listening(CountingScorer):
        def score(self, groups, noise=0.0, rng=None):
            heard.append((noise, rng.random()))
            super().score(groups)

    for method, updates in (("rspo", 4), ("dense", 4)):
        heard = []
        run(method=method, scorer=Listening(), reward_noise=0.3)
        assert [noise for noise, _ in heard] == [0.3] * updates and len(set(heard)) == updates


def test_episode_advantages_are_over_episodes_with_scale_and_penalty():
    # returns 10*1 - .1*1 invalid = 9.9, and 0, 0, 0: mean 2.475, std (ddof 1) 4.95 -> 1.5, -.5, -.5, -.5
    members = [episode(1.0, [step(valid=False), step()]), *(episode(0.0, [step()] * n) for n in (1, 5, 9))]
    rspo.set_advantages([Group("t", members)], "outcome", Config())
    assert [member.steps[0].advantage for member in members] == pytest.approx(
        [1.5, -0.5, -0.5, -0.5], abs=1e-5
    )
    assert {one.advantage for one in members[0].steps} == {members[0].steps[0].advantage}
    assert members[0].outcome == 1.0  # the penalty is never written into the outcome


def test_dense_advantages_compare_sums_of_scores_and_outcome_advantages_outcomes():
    first, second = (
        episode(0.0, [step(dense_score=0.5), step(dense_score=0.25)]),
        episode(1.0, [step(dense_score=-1.0)]),
    )
    rspo.set_advantages([Group("t", [first, second])], "dense", Config())
    assert first.steps[0].advantage == pytest.approx(0.7071, abs=1e-4)  # 7.5 and -10: +-1/sqrt(2)
    rspo.set_advantages([Group("t", [first, second])], "outcome", Config())
    assert first.steps[0].advantage == pytest.approx(-0.7071, abs=1e-4)


def test_gigpo_adds_the_step_advantage_of_equal_observations_inside_the_group():
    won = episode(1.0, [step(observation="a"), step(observation="b")])  # returns .95*10 = 9.5 at a, 10 at b
    lost = episode(0.0, [step(observation="a"), step(observation="c")])  # 0 at a
    other = Group("u", [episode(0.0, [step(observation="a")]), episode(0.0, [step(observation="a")])])
    rspo.set_advantages([Group("t", [won, lost]), other], "outcome", Config(algo="gigpo", gigpo_std=False))
    # episodes 10, 0 -> 5, -5; at a: 9.5, 0 -> 4.75, -4.75; b and c occur once -> 0; `other` has its own a
    assert [one.advantage for one in won.steps] == pytest.approx([9.75, 5.0])
    assert [one.advantage for one in lost.steps] == pytest.approx([-9.75, -5.0])
    assert [member.steps[0].advantage for member in other.trajectories] == [0.0, 0.0]
    rspo.set_advantages([Group("t", [won, lost]), other], "outcome", Config(algo="gigpo"))
    assert [one.advantage for one in won.steps] == pytest.approx([2 * 0.70711, 0.70711], abs=1e-4)


def test_ppo_runs_gae_over_the_action_tokens_of_the_whole_episode():
    # Two turns of two action tokens; values .1 .2 | .3 .4, gamma .9, lambda .8, reward 1 on the last token.
    # Backwards, deltas 1-.4=.6, .9*.4-.3=.06, .9*.3-.2=.07, .9*.2-.1=.08 and the factor .9*.8=.72:
    # .6, .06+.432=.492, .07+.35424=.42424, .08+.3054528=.3854528
    config = Config(algo="ppo", gamma=0.9, gae_lambda=0.8, reward_scale=1.0)
    for prompts in (
        ([2, 6, 3], [2, 7, 3]),
        ([2, 6, 3], [2, 6, 3, 5, 1, 2, 7, 3]),
    ):  # window: two rows; full: one
        member = episode(1.0, [step(prompt_ids=prompt) for prompt in prompts])
        rows = rows_of(member)
        for row in rows:
            values = [[0.1, 0.2], [0.3, 0.4]]
            row.old_values = torch.where(row.action_mask, column(row, values), 9.0)
        rspo.set_token_advantages([rows], [], "outcome", config)
        returns = torch.cat([row.returns[row.action_mask] for row in rows])
        assert returns.tolist() == pytest.approx([0.4854528, 0.62424, 0.792, 1.0])  # advantages + values
        assert all(row.advantages[~row.action_mask].eq(0).all() for row in rows)


def test_ppo_advantages_do_not_leak_from_one_episode_into_another():
    # gamma .9, lambda .8, values .5 .6 in each episode, outcomes 0 and 1. Lost: deltas .9*.6-.5=.04, -.6,
    # advantages .04-.72*.6=-.392, -.6; won: .04+.72*.4=.328, 1-.6=.4. Returns are these plus the values.
    config = Config(algo="ppo", gamma=0.9, gae_lambda=0.8, reward_scale=1.0)
    members = [episode(outcome, [step(action_ids=[5]), step(action_ids=[5])]) for outcome in (0.0, 1.0)]
    episodes = [rows_of(member) for member in members]
    for rows in episodes:
        for row in rows:
            row.old_values = column(row, [[0.5], [0.6]])
    rspo.set_token_advantages(episodes, [], "outcome", config)
    returns = [[row.returns[row.action_mask].item() for row in rows] for rows in episodes]
    assert returns[0] == pytest.approx([-0.392 + 0.5, -0.6 + 0.6], abs=1e-6)
    assert returns[1] == pytest.approx([0.328 + 0.5, 0.4 + 0.6], abs=1e-6)


def test_ppo_puts_each_dense_score_on_the_last_token_of_its_step():
    # 3, 3 and 4 action tokens; with gamma 0 a token's return is its own reward
    config = Config(algo="ppo", gamma=0.0, reward_scale=1.0)
    scores = ((0.2, 3), (0.3, 3), (0.1, 4))
    member = episode(1.0, [step(action_ids=[5] * n, dense_score=score) for score, n in scores])
    rows = rows_of(member)
    for row in rows:
        row.old_values = torch.zeros(len(row.input_ids))
    for which, rewards in (
        ("dense", [0, 0, 0.2, 0, 0, 0.3, 0, 0, 0, 0.1]),
        ("outcome", [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
    ):
        rspo.set_token_advantages([rows], [], which, config)
        returns = torch.cat([row.returns[row.action_mask] for row in rows])
        assert returns.tolist() == pytest.approx(rewards)


def test_gamma_plays_no_part_in_grpo():
    groups = [Group("t", [episode(float(i == 0), [step(valid=i < 2)] * (i + 1)) for i in range(4)])]
    seen = []
    for gamma in (1.0, 0.95, 0.5):
        rspo.set_advantages(groups, "outcome", Config(gamma=gamma, gigpo_gamma=gamma))
        seen.append([one.advantage for member in groups[0].trajectories for one in member.steps])
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][1] == seen[0][2] and seen[0][0] > 0 > seen[0][1]  # one value per episode


def test_the_buffer_holds_exactly_the_episodes_that_b_played_last_each_with_its_own_advantage():
    # 3 tasks of 4 episodes, all lost, mixed, all won: mean .25 and std .5 give 1.5 and -.5, the others 0
    dealt = [[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    world, replay, played, held = toy_world(4), ReplayBuffer(), [], []
    collect = world.collect

    def deal(agent, tasks):
        played[:] = collect(agent, tasks)
        for group, outcomes in zip(played, dealt, strict=True):
            for member, outcome in zip(group.trajectories, outcomes, strict=True):
                member.outcome = outcome
        return list(played)

    def log(agent, groups, metrics, updates):
        if agent == "buffer":
            held.extend(replay.sample(100))
            members = [member for group in played for member in group.trajectories]
            assert sorted(map(id, held)) == sorted(map(id, members))
            given = [[member.steps[0].advantage for member in group.trajectories] for group in played]
            assert given == [[0, 0, 0, 0], pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-3), [0, 0, 0, 0]]

    world.collect = deal
    config = Config(**{**SMALL, "total_updates": 2, "invalid_penalty": 0.0})
    rspo.train(ToyPolicy(), world, CountingScorer(), config, log, replay=replay)
    assert [member.outcome for member in held] == [1.0] * 5 + [0.0] * 7 and held[0].steps[0].advantage > 0
    for one in (one for member in held for one in member.steps):
        assert one.behavior_logprobs == pytest.approx(one.sampler_logprobs, abs=1e-5)


def test_replayed_ppo_tokens_do_not_enter_the_whitening():
    config = Config(algo="ppo", reward_scale=1.0)

    def rows(outcome):
        (row,) = rows_of(episode(outcome, [step(action_ids=[5])]))
        row.old_values = torch.zeros(5)
        return [row]

    on, off = [rows(1.0), rows(0.0)], [rows(1.0), rows(1.0), rows(1.0)]
    rspo.set_token_advantages(on, off, "outcome", config)
    # on-policy 1, 0: mean .5, std .70711 -> +-.70711
    assert [row[0].advantages[4].item() for row in on] == pytest.approx([0.70711, -0.70711], abs=1e-4)
    # all 1, 0, 1, 1, 1: mean .8, std sqrt((.64 + 4 * .04) / 4) = .44721 -> (1 - .8) / .44721 = .44721
    assert [row[0].advantages[4].item() for row in off] == pytest.approx([0.44721] * 3, abs=1e-4)


def test_replayed_ppo_advantages_stay_bounded_without_a_fresh_success():
    config = Config(algo="ppo", reward_scale=10.0, invalid_penalty=0.01)
    episodes = [episode(0.0, [step(action_ids=[5], valid=i > 0)]) for i in range(7)] + [
        episode(1.0, [step([5])])
    ]
    rows = [rows_of(one) for one in episodes]
    for (row,) in rows:
        row.old_values = torch.zeros(5)
    rspo.set_token_advantages(rows[:7], rows[7:], "outcome", config)
    # one success in eight: about (10 - 1.25) / 3.5355 = 2.475, though the on-policy std is only .0038
    assert rows[7][0].advantages[4].item() == pytest.approx(2.475, abs=1e-2)


def collected(config, policy, world=None):
    return (world or toy_world(config.episodes_per_task)).collect(policy, config.on_policy_tasks)


def replayed(config, policy, n=4):
    """Draw successes from a buffer, played by an agent that walks right more often than `policy`."""
    bold = policy.fork("explorer")
    bold.logits.data[3, 5] += 1.0
    buffer = ReplayBuffer(config.replay_strategy, seed=0)
    groups = toy_world(config.episodes_per_task, seed=5).collect(bold, 6)
    rspo.set_behavior_logprobs(bold, groups, config)
    rspo.swap_rewards(groups, config)
    buffer.add(groups)
    return buffer.sample(n)


def gradient(config, off=True, **options):
    policy = ToyPolicy()
    grads = []
    policy.step = lambda norm: grads.append(policy.logits.grad.clone()) or 0.0
    config = dataclasses.replace(config, **options)
    metrics = rspo.update(
        policy,
        collected(config, policy),
        replayed(config, policy) if off else [],
        "outcome",
        config,
        random.Random(0),
    )
    return grads[-1], metrics


ONE_STEP = Config(**{**SMALL, "minibatch_turns": 10_000, "kl_coef": 0.1, "entropy_coef": 0.01})


@pytest.mark.parametrize("algo", ["grpo", "gigpo", "ppo"])
def test_the_micro_batch_size_never_changes_the_gradient(algo):
    whole, metrics = gradient(ONE_STEP, algo=algo)
    small, others = gradient(ONE_STEP, algo=algo, tokens_per_micro_batch=16)
    assert whole.abs().max() > 1e-4
    assert (whole - small).abs().max() < 1e-6
    for name in metrics:
        assert name == "seconds_update" or metrics[name] == pytest.approx(others[name], abs=1e-5), name


@pytest.mark.parametrize("tokens_per_micro_batch", [1, 10**6])
def test_the_sampler_gap_covers_fresh_action_tokens_only(tokens_per_micro_batch):
    policy, world = ToyPolicy(), toy_world(2)
    (group,) = world.collect(policy, 1)
    turns = [turn for member in group.trajectories for turn in member.steps]
    counts = [len(turn.action_ids) for turn in turns]
    turns[0].sampler_logprobs[0] += 0.5  # one token is half a nat off, one a quarter the other way
    turns[-1].sampler_logprobs[0] -= 0.25
    for member, outcome in zip(group.trajectories, (1.0, 0.0), strict=True):
        member.outcome = outcome
    replayed = episode(1.0, [step(behavior_logprobs=[-9.0, -9.0], advantage=1.0)])
    config = Config(**{**SMALL, "tokens_per_micro_batch": tokens_per_micro_batch})
    metrics = rspo.update(policy, [group], [replayed], "outcome", config, random.Random(0))
    assert metrics["sampler_gap_max"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["sampler_gap_mean"] == pytest.approx(0.75 / sum(counts), abs=1e-6)


def test_j_total_has_two_means_each_over_its_own_tokens():
    # By hand: nothing is clipped at the first minibatch, so a token's loss is -ratio A / its source's count.
    policy = ToyPolicy()
    config = dataclasses.replace(ONE_STEP, kl_coef=0.0, entropy_coef=0.0, off_policy_fraction=0.25)
    on, off = collected(config, policy), replayed(config, policy)
    table = policy.logits.detach().clone().requires_grad_()
    expected = 0.0
    rspo.set_advantages(on, "outcome", config)
    sources = ((0.75, [m for g in on for m in g.trajectories]), (0.25, off))
    for weight, episodes in sources:
        tokens = [
            (
                one.prompt_ids + one.action_ids,
                len(one.prompt_ids) + i,
                one.advantage,
                (one.behavior_logprobs or [None] * 9)[i],
            )
            for member in episodes
            for one in member.steps
            for i in range(len(one.action_ids))
        ]
        for ids, at, advantage, behavior in tokens:
            logprob = torch.log_softmax(table[ids[at - 1]], -1)[ids[at]]
            ratio = torch.exp(logprob - (logprob.detach() if behavior is None else behavior))
            expected = expected - weight * ratio * advantage / len(tokens)
    expected.backward()
    grads = []
    policy.step = lambda norm: grads.append(policy.logits.grad.clone()) or 0.0
    rspo.update(policy, on, off, "outcome", config, random.Random(0))
    assert len(off) == 4 and (grads[0] - table.grad).abs().max() < 1e-6


def test_the_first_minibatch_clips_nothing_though_the_replayed_centre_is_not_1():
    _, metrics = gradient(ONE_STEP)
    assert metrics["replayed_episodes"] == 4 and metrics["alpha"] == 0.25
    assert metrics["centre_log_mean_abs"] > 0.1
    assert metrics["clip_fraction_on"] == metrics["clip_fraction_off"] == 0.0


def with_centres(*centres):
    """A replayed success of one turn per pair: `centres` are c of the action and of the end token.

    The toy's log-probs at first: of "right" -log(1 + e^.5) = -.974077, of <end> 0.
    """
    steps = []
    for action, end in centres:
        behavior = [-math.log(1 + math.exp(0.5)) - math.log(action), -math.log(end)]
        steps.append(step(behavior_logprobs=behavior, advantage=1.0))
    return episode(1.0, steps)


def test_replayed_steps_get_their_centre_and_their_ratio():
    fresh = [Group("toy", [episode(0.0, [step()]), episode(0.0, [step()])])]

    def updated(config):
        replayed = with_centres((4.0, 1.0), (0.2, 0.2))
        rspo.update(ToyPolicy(), fresh, [replayed], "outcome", config, random.Random(0))
        return [(step.log_centre, step.log_ratio) for step in replayed.steps]

    # at the first optimizer step r = c; means of log c over two tokens: (log 4 + 0) / 2 and log 0.2
    (one, same), (low, other) = updated(ONE_STEP)
    assert (one, low) == pytest.approx((0.693147, -1.609438), abs=1e-4) and (one, low) == (same, other)
    # --max_centre drops the action of the first step and all of the second one
    (one, near), (low, none) = updated(dataclasses.replace(ONE_STEP, max_centre=2.0))
    assert (one, low) == pytest.approx((0.693147, -1.609438), abs=1e-4)
    assert near == pytest.approx(0.0, abs=1e-4) and none is None
    # in a second epoch the weights have moved: the success became more likely
    (one, later), _ = updated(dataclasses.replace(ONE_STEP, epochs=2))
    assert one == pytest.approx(0.693147, abs=1e-4) and later > one + 1e-4
    assert fresh[0].trajectories[0].steps[0].log_centre is None


@pytest.mark.parametrize("tokens_per_micro_batch", [1, 10**6])
def test_tokens_beyond_max_centre_leave_the_mean_of_j_off(tokens_per_micro_batch):
    # All fresh episodes fail, so their advantages are 0 and only J_off has a gradient. Of the logit of
    # "right" it is -alpha / count * sum of c (1 - .377541), over the counted turns.
    fresh = [Group("toy", [episode(0.0, [step()]), episode(0.0, [step()])])]
    replayed = with_centres((1.0, 1.0), (4.0, 4.0), (0.2, 1.0))
    small = {"kl_coef": 0.0, "entropy_coef": 0.0, "tokens_per_micro_batch": tokens_per_micro_batch}
    for max_centre, count, centres in ((None, 6, 1.0 + 4.0 + 0.2), (3.0, 3, 1.0), (4.5, 5, 1.0 + 4.0)):
        config = dataclasses.replace(ONE_STEP, **small, max_centre=max_centre)
        policy, grads = ToyPolicy(), []
        policy.step = lambda norm, policy=policy, grads=grads: grads.append(policy.logits.grad.clone()) or 0.0
        metrics = rspo.update(policy, fresh, [replayed], "outcome", config, random.Random(0))
        assert grads[0][3, 5].item() == pytest.approx(-0.25 / count * 0.622459 * centres, abs=1e-5)
        assert metrics["centre_max"] == pytest.approx(4.0, abs=1e-4)
        assert metrics["centre_above_2"] == pytest.approx(2 / 6)
        assert metrics["centre_below_half"] == pytest.approx(1 / 6)
        assert metrics.get("centre_dropped", 0.0) == pytest.approx(1 - count / 6)
        sums = {6: 1 + 1 + 4 + 4 + 0.2 + 1, 3: 1 + 1 + 1, 5: 1 + 1 + 4 + 4 + 1}
        assert metrics["policy_loss_off"] == pytest.approx(-sums[count] / count, abs=1e-4)
        assert metrics["alpha"] == 0.25


def test_entropy_and_kl_of_tokens_beyond_max_centre_do_not_count():
    config = dataclasses.replace(ONE_STEP, kl_coef=0.5, entropy_coef=0.5)
    whole, _ = gradient_with(with_centres((1.0, 1.0)), config)
    mixed = with_centres((1.0, 1.0), (9.0, 9.0), (0.1, 0.1))
    near, metrics = gradient_with(mixed, dataclasses.replace(config, max_centre=2.0))
    far, _ = gradient_with(mixed, config)
    assert (near - whole).abs().max() < 1e-6 and (far - whole).abs().max() > 0.1
    assert metrics["centre_dropped"] == pytest.approx(4 / 6)


def gradient_with(replayed, config):
    """The gradient of an update with fresh failures and one replayed episode, and the update's metrics."""
    policy, grads = ToyPolicy(), []
    policy.reference = policy.reference + torch.arange(len(policy.reference))[:, None] * 0.1
    policy.reference[3, 4] += 0.5  # so the KL term has a gradient
    policy.step = lambda norm: grads.append(policy.logits.grad.clone()) or 0.0
    fresh = [Group("toy", [episode(0.0, [step()]), episode(0.0, [step()])])]
    metrics = rspo.update(policy, fresh, [replayed], "outcome", config, random.Random(0))
    return grads[0], metrics


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_an_update_whose_replayed_tokens_are_all_beyond_max_centre_trains_on_fresh_tokens_only(algo):
    config = dataclasses.replace(ONE_STEP, algo=algo, max_centre=2.0)
    policy = ToyPolicy()
    far = with_centres((9.0, 9.0), (0.1, 0.1))
    groups = collected(config, policy)
    metrics = rspo.update(policy, groups, [far], "outcome", config, random.Random(0))
    assert metrics["centre_dropped"] == 1.0 and metrics["replayed_episodes"] == 1
    assert not [name for name in metrics if name.endswith("_off")]
    assert all(math.isfinite(value) for value in metrics.values()) and policy.logits.isfinite().all()


def test_max_centre_far_away_changes_no_bit():
    plain, metrics = gradient(ONE_STEP)
    bounded, others = gradient(ONE_STEP, max_centre=1e6)
    assert torch.equal(plain, bounded) and others["centre_dropped"] == 0.0
    assert all(value == others[name] for name, value in metrics.items() if name != "seconds_update")


@pytest.mark.parametrize("logprobs", [[0.0], [0.0, 0.0, 0.0], []])
def test_a_wrong_number_of_sampler_logprobs_is_found_before_a_weight_moves(logprobs):
    policy = ToyPolicy()
    groups = collected(ONE_STEP, policy)
    groups[0].trajectories[1].steps[2].sampler_logprobs = logprobs
    before = policy.logits.detach().clone()
    task = groups[0].trajectories[1].task_id
    words = f"step 2 of task {task} has {len(logprobs)} sampler_logprobs for 2 action tokens"
    with pytest.raises(ValueError, match=words):
        rspo.update(policy, groups, [], "outcome", ONE_STEP, random.Random(0))
    assert policy.version == 0 and torch.equal(policy.logits, before)


def scored_rows(groups, off, config, policy):
    """Return how many rows an update scores for pi_old before its first step, and its metrics."""
    scored, logprobs = [], policy.logprobs

    def count(batch, with_entropy=False):
        if not with_entropy:
            scored.extend(batch.rows)
        return logprobs(batch, with_entropy)

    policy.logprobs = count
    metrics = rspo.update(policy, groups, off, "outcome", config, random.Random(0))
    return len(scored), metrics


@pytest.mark.parametrize("epochs", [1, 2])
def test_only_rows_of_later_steps_are_scored_before(epochs):
    policy = ToyPolicy()
    config = dataclasses.replace(ONE_STEP, epochs=epochs)
    groups, off = collected(config, policy), replayed(config, policy)
    assert (
        scored_rows(groups, off, config, ToyPolicy())[0] == 0
    )  # 36 + 12 turns, each a row, in one minibatch
    config = dataclasses.replace(config, minibatch_turns=16)  # three minibatches of 12 + 4 rows
    count, metrics = scored_rows(groups, off, config, ToyPolicy())
    assert count == 2 * (12 + 4) and metrics["sampler_gap_max"] < 1e-5
    # with max_centre also the 4 replayed rows of the first minibatch
    assert scored_rows(groups, off, dataclasses.replace(config, max_centre=1e6), ToyPolicy())[0] == count + 4
    # fresh groups that will be replayed have pi_b = pi_old already: only 2 x 4 replayed rows are left
    rspo.set_behavior_logprobs(ToyPolicy(), groups, config)
    count, others = scored_rows(groups, off, config, ToyPolicy())
    assert count == 2 * 4 and others["policy_loss_on"] == pytest.approx(metrics["policy_loss_on"], abs=1e-6)


def test_later_minibatches_do_clip():
    config = dataclasses.replace(ONE_STEP, minibatch_turns=16, epochs=3, clip_eps=0.05)
    policy = ToyPolicy()
    off = replayed(config, policy)
    metrics = rspo.update(policy, collected(config, policy), off, "outcome", config, random.Random(0))
    assert metrics["optimizer_steps"] == 9  # 36 + 12 turns in runs of 16, three times
    assert metrics["clip_fraction_on"] > 0.01 and metrics["clip_fraction_off"] > 0.01


def test_alpha_is_0_if_the_buffer_is_empty():
    with_none, metrics = gradient(ONE_STEP, off=False)
    assert metrics["alpha"] == 0.0 and metrics["replayed_episodes"] == 0
    plain, _ = gradient(ONE_STEP, off=False, method="outcome", off_policy_fraction=0.0, tasks_per_update=3)
    assert torch.equal(with_none, plain)  # all weight on the on-policy mean


def test_replayed_episodes_keep_the_advantage_of_their_own_group():
    config = ONE_STEP
    off = replayed(config, ToyPolicy())
    stored = [[one.advantage for one in member.steps] for member in off]
    assert all(member.outcome == 1.0 and member.steps[0].advantage > 0 for member in off)
    rspo.update(ToyPolicy(), collected(config, ToyPolicy()), off, "outcome", config, random.Random(0))
    assert stored == [[one.advantage for one in member.steps] for member in off]


def test_crashed_and_non_finite_episodes_leave_their_group_and_are_counted():
    groups = collected(ONE_STEP, ToyPolicy())
    members = groups[0].trajectories
    members[0].stop_reason, members[1].outcome = StopReason.CRASHED, float("nan")
    members[2].outcome, members[3].outcome = 1.0, 0.0
    rspo.set_advantages(groups, "outcome", ONE_STEP)
    assert members[0].steps[0].advantage is None and members[1].steps[0].advantage is None
    assert members[2].steps[0].advantage == pytest.approx(
        0.70711, abs=1e-4
    )  # the two that are left: +-1/sqrt(2)
    metrics = episode_metrics(groups, "outcome")
    assert (
        metrics["crashed_episodes"] == 1
        and metrics["left_out_episodes"] == 2
        and metrics["sampled_episodes"] == 12
    )
    metrics = rspo.update(ToyPolicy(), groups, [], "outcome", ONE_STEP, random.Random(0))
    assert math.isfinite(metrics["policy_loss_on"])


@pytest.mark.parametrize("algo", ["grpo", "gigpo", "ppo"])
def test_the_buffer_stays_empty_if_all_episodes_of_b_crash(algo):
    config = Config(**{**SMALL, "algo": algo})
    groups = collected(config, ToyPolicy())
    for member in (member for group in groups for member in group.trajectories):
        member.stop_reason = StopReason.CRASHED
    replay = ReplayBuffer()
    rspo.set_behavior_logprobs(ToyPolicy(), groups, config)
    rspo.swap_rewards(groups, config)
    replay.add(groups)
    assert replay.sample(4) == [] and len(replay) == 0


def test_an_update_without_usable_episodes_is_refused():
    silent = Trajectory("t", "", "", [], 0.0, False, StopReason.TOKEN_LIMIT)
    groups = [Group("t", [episode(float("nan"), [step()]), silent, silent])]
    with pytest.raises(rspo.NothingToTrainOn, match="ended with: 1 x finished, 2 x token limit"):
        rspo.update(ToyPolicy(), groups, [], "outcome", ONE_STEP, random.Random(0))


def test_groups_without_spread_and_repeated_states_are_counted():
    same = Group("a", [episode(1.0, [step(), step()]), episode(1.0, [step()])])
    mixed = Group("b", [episode(1.0, [step()]), episode(0.0, [step(observation="x"), step(), step()])])
    metrics = episode_metrics([same, mixed], "outcome")
    assert metrics["zero_spread_groups"] == 0.5
    assert metrics["repeated_states"] == 2  # door 0 again in the first and in the last episode
    assert metrics["repeated_states_per_episode"] == 0.5  # so 56 episodes compare with 64
    assert metrics["success"] == 0.75


def test_rspo_h_replays_its_own_last_groups_oldest_out_first():
    sizes = []
    config = Config(**{**SMALL, "method": "rspo_h", "buffer_tasks": 4})
    rspo.train(
        ToyPolicy(), toy_world(), None, config, end_loop=lambda step, replay: sizes.append(len(replay))
    )
    assert sizes == [16, 16]  # 2 x 12 episodes played, the last 4 groups of 4 kept; never cleared


def test_the_buffer_is_emptied_after_every_loop_of_methods_with_a_b():
    sizes = []
    config = Config(**SMALL)
    rspo.train(
        ToyPolicy(),
        toy_world(),
        CountingScorer(),
        config,
        end_loop=lambda step, replay: sizes.append(len(replay)),
    )
    assert sizes == [0, 0]


def buffers_of(**options):
    """Run two loops. Return the world's episodes, and the buffer's entries of each loop before it is cleared.

    An entry is (A's updates when it was played, its episode).
    """
    config, kept, logged = Config(**{**SMALL, **options}), [], []
    replay = ReplayBuffer(config.replay_strategy, seed=config.seed)
    clear, world = replay.clear, toy_world(config.episodes_per_task)

    def look(*_):
        kept.append([(entry.update, *entry.trajectories) for entry in replay._entries])

    replay.clear = lambda: (look(), clear())
    end_loop = look if config.kept_groups else lambda *_: None
    rspo.train(
        ToyPolicy(), world, CountingScorer(), config, lambda *line: logged.append(line), end_loop, 0, replay
    )
    return world, kept, logged


def test_the_cheap_swap_stores_the_batches_of_b_and_plays_no_others():
    world, (first, second), logged = buffers_of(buffer_source="phase1")
    played = [groups for agent, groups, _, _ in logged if agent == "explorer"]  # 2 of each loop
    for stored, batches in ((first, played[:2]), (second, played[2:])):
        members = [member for groups in batches for group in groups for member in group.trajectories]
        assert list(map(id, members)) == [id(member) for _, member in stored]
    assert [agent for agent, _, _, _ in logged] == ["explorer", "explorer", "policy", "policy"] * 2
    assert world.episodes == (2 + 2) * 2 * 12  # 2 loops with 2 updates of B and 2 of A, 3 tasks of 4 each
    assert {update for update, _ in first} == {0} and {update for update, _ in second} == {2}


@pytest.mark.parametrize("algo", ["grpo", "gigpo", "ppo"])
@pytest.mark.parametrize("source", ["phase1", "both"])
def test_stored_log_probs_are_those_of_the_agent_when_it_played(source, algo):
    """B and A learn at a rate of 0.5, so log-probs from after an update would differ from the sampler's."""
    _, kept, _ = buffers_of(buffer_source=source, algo=algo)
    for _, member in (entry for stored in kept for entry in stored):
        for one in member.steps:
            assert one.behavior_logprobs == pytest.approx(one.sampler_logprobs, abs=1e-5)


@pytest.mark.parametrize("source", ["phase1", "both"])
def test_stored_advantages_are_those_of_the_outcomes(source):
    """The toy's dense reward is largest for "left" three times, which loses."""
    _, kept, logged = buffers_of(buffer_source=source, invalid_penalty=0.0)
    groups = [group for agent, groups, _, _ in logged if agent == "explorer" for group in groups]
    assert any(len({member.outcome for member in group.trajectories}) == 2 for group in groups)
    for group in groups:
        won = sum(member.success for member in group.trajectories)
        # w of 4 outcomes are 1: mean w/4, std (ddof 1) sqrt(w (4 - w) / 12): .5 for 1 and 3, .57735 for 2
        std = {1: 0.5, 2: 0.57735, 3: 0.5}.get(won, 1.0)
        for member in group.trajectories:
            advantage = (member.outcome - won / 4) / std
            assert [one.advantage for one in member.steps] == pytest.approx([advantage] * 3, abs=1e-4)


def test_a_group_of_successes_leaves_nothing_to_a_draw_of_positives():
    members = [episode(outcome, [step()]) for outcome in (1.0, 1.0, 1.0, 0.0)]
    config, buffer = Config(replay_strategy="positive"), ReplayBuffer("positive")
    groups = [Group("won", members[:3]), Group("lost", [members[3]] * 2)]
    rspo.swap_rewards(groups, config)
    buffer.add(groups)
    assert buffer.sample(9) == [] and len(buffer) == 5
    rspo.swap_rewards([Group("mixed", members)], config)
    buffer.add([Group("mixed", members)])
    assert len(buffer.sample(9)) == 3  # mean .75, std .5: +.5, and -1.5 for the loss


def test_both_sources_fill_the_buffer_in_the_order_of_play():
    _, (first, _), _ = buffers_of(buffer_source="both")
    # B's 2 batches of 12 at A's 0 updates; A's first batch at 0, its second at 1
    assert [update for update, _ in first] == [0] * 24 + [0] * 12 + [1] * 12


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        # groups of 4 episodes; B plays 3 tasks for the buffer, and trains on 2 batches of 3 tasks
        (dict(buffer_keep=3), [3, 3]),
        (dict(buffer_keep=5), [3, 5]),
        (dict(buffer_source="phase1", buffer_keep=9), [6, 9]),
        (dict(buffer_source="both", buffer_keep=20), [12, 20]),
        (dict(method="rspo_h", buffer_keep=5), [5, 5]),
        (dict(method="rspo_o", buffer_source="phase1", buffer_keep=6, algo="gigpo"), [6, 6]),
    ],
)
def test_a_kept_buffer_holds_the_newest_groups_over_loops(options, sizes):
    _, kept, _ = buffers_of(**options)
    assert [len(stored) for stored in kept] == [4 * size for size in sizes]


def test_a_kept_buffer_of_ppo_counts_tasks_of_n_episodes_too():
    _, kept, _ = buffers_of(algo="ppo", buffer_source="phase1", buffer_keep=9)
    assert [len(stored) for stored in kept] == [24, 36]


def test_a_kept_buffer_ages_and_the_log_says_so():
    _, _, logged = buffers_of(buffer_source="phase1", buffer_keep=12)
    lines = [metrics for agent, _, metrics, _ in logged if agent == "policy"]
    # which episodes are drawn depends on outcomes and chance; none is older than its place in the run
    assert [line["buffer_episodes"] for line in lines] == [24, 24, 48, 48]
    assert [line["replay_age_max"] for line in lines[:2]] == [0, 1]
    assert all(line["replay_age_max"] <= age for line, age in zip(lines[2:], (2, 3), strict=True))


def test_the_paper_s_draw_is_as_old_as_the_updates_of_its_loop():
    _, _, logged = buffers_of()
    lines = [metrics for agent, _, metrics, _ in logged if agent == "policy"]
    assert [line["replay_age_mean"] for line in lines] == [0, 1, 0, 1]


def test_rspo_h_is_history_without_b():
    runs = [run(method="rspo_h", buffer_source=source) for source in (None, "history")]
    assert torch.equal(runs[0][0].logits, runs[1][0].logits)
    assert Config(method="rspo_h").buffer_sources == ("history",)
    assert Config(method="rspo_h", buffer_tasks=5).kept_groups == 5
    assert Config(method="rspo_h", buffer_tasks=5, buffer_keep=7).kept_groups == 7


@pytest.mark.parametrize("method", ["outcome", "dense"])
def test_a_method_without_replay_fills_no_buffer(method):
    _, kept, logged = buffers_of(method=method, buffer_source="both")
    assert kept == [[], []] and "buffer_episodes" not in logged[0][2]


def test_the_paper_s_counts():
    paper = dict(
        tasks_per_update=16, group_size=8, off_policy_fraction=1 / 8, buffer_tasks=28, total_updates=150
    )
    config = Config(**paper)
    assert (config.on_policy_tasks, config.off_policy_episodes, config.buffer_groups) == (14, 16, 28)
    # PPO keeps the episode counts, each episode its own task: 112 + 16 replayed, buffer 224
    config = Config(**paper, algo="ppo")
    assert (
        config.on_policy_tasks,
        config.episodes_per_task,
        config.off_policy_episodes,
        config.buffer_groups,
    ) == (112, 1, 16, 224)
    assert Config(**paper, method="outcome").on_policy_tasks == 16


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(off_policy_fraction=0.2), "--off_policy_fraction 0.2 of --tasks_per_update 8 is 1.6 tasks"),
        (dict(off_policy_fraction=0.95), "for example with --off_policy_fraction 0.875"),
        (
            dict(off_policy_fraction=0.5, tasks_per_update=1),
            "--tasks_per_update 1 with --method rspo: an update",
        ),
        (dict(off_policy_fraction=0.0), "--off_policy_fraction 0.0 with --method rspo: nothing is replayed"),
        (dict(off_policy_fraction=1.0), "--off_policy_fraction 1.0: must lie in"),
        (dict(k=0), "--k 0: must be between 1 and 1000000"),
        (dict(total_updates=100), "--total_updates 100: must be a multiple of --k 3, for example 99 or 102"),
        (dict(group_size=1), "--group_size 1 with --algo grpo"),
        (dict(algo="ppo", replay_strategy="variance"), "--replay_strategy variance with --algo ppo"),
        (dict(algo="ppo", replay_unit="group"), "--replay_unit group with --algo ppo"),
        (
            dict(algo="ppo", replay_strategy="positive"),
            "--replay_strategy positive with --algo ppo: A_off is",
        ),
        (
            dict(replay_unit="group", replay_strategy="positive"),
            "--replay_strategy positive with --replay_unit group: the A_off of a group sum to 0; give",
        ),
        (
            dict(method="rspo_h", buffer_source="phase1"),
            "--buffer_source phase1 with --method rspo_h: there is no B; give history",
        ),
        (
            dict(buffer_source="history"),
            "--buffer_source history with --method rspo: no episode of B would be replayed; give both, or",
        ),
        (dict(buffer_keep=13), "--buffer_keep 13: B fills the buffer with 14 tasks in each loop; give 14 or"),
        (  # 3 updates of 7 fresh tasks
            dict(buffer_keep=20, buffer_source="both"),
            "--buffer_keep 20: B fills the buffer with 21 tasks in each loop; give 21 or more",
        ),
        (dict(buffer_keep=0), "--buffer_keep 0: must be between 1 and 1000000"),
        (dict(clip_eps=float("nan")), "--clip_eps nan"),
        (dict(max_centre=0.5), "--max_centre 0.5: must be between 1.001 and 1000000"),
        (dict(kl_coef=-1.0), "--kl_coef -1.0: must be between 0 and 1000"),
        (dict(gigpo_gamma=1.5), "--gigpo_gamma 1.5: must be between 0 and 1"),
    ],
)
def test_bad_values_are_named_with_a_remedy(flags, words):
    with pytest.raises(ValueError) as error:
        Config(**flags)
    assert words in str(error.value)
