"""Updates of a real model on real episodes: ratios, centres and gradients, in both contexts, LoRA and full.

A model this small never solves a game, so `Dealt` sets outcomes and dense scores. All else is a real run:
World and KVSampler play Household; `rspo` scores, replays and updates.
"""

import dataclasses
import functools
import random

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import losses
import rspo
from batch import rows_of
from buffer import ReplayBuffer
from chat import Dialogue
from config import Config
from demo.tiny_model import tiny_base
from envs import make_env
from policy import Policy
from rollout import World
from sampler import KVSampler

torch.set_num_threads(1)  # models this small are slower with more threads

CONFIG = Config(
    total_updates=2,
    k=1,
    tasks_per_update=4,
    group_size=4,
    off_policy_fraction=0.25,
    buffer_tasks=2,
    minibatch_turns=10**6,
    kl_coef=0.1,
    entropy_coef=0.01,
)
KINDS = [("window", 0), ("full", 8)]  # full weights and LoRA, both contexts


class Dealt:
    """A world that sets outcomes, and a dense reward that depends only on the actions."""

    def __init__(self, world):
        self.world = world

    def collect(self, agent, tasks):
        groups = self.world.collect(agent, tasks)
        for group in groups:
            for i, member in enumerate(group.trajectories):
                member.outcome, member.success = float(i == 0), i == 0
        return groups

    def score(self, groups, noise=0.0, rng=None):
        for step in (s for group in groups for member in group.trajectories for s in member.steps):
            step.dense_score = random.Random(str(step.action_ids)).uniform(-1, 1)


def make(context, rank, group_size=4):
    """Make a policy with a critic, far from uniform, and a world. Prompts of the full context are cut."""
    env = make_env("household")
    base = tiny_base(env.vocabulary, env.silent_words, d_model=16, layers=1, heads=2, intermediate=32)
    with torch.no_grad():
        for weight in base.model.parameters():
            weight.mul_(2.0 if weight.ndim == 2 else 1.0)
    policy = Policy(base, lora_rank=rank, lora_alpha=rank or 1, learning_rate=0.02, critic_learning_rate=0.02)
    dialogue = Dialogue(base.chat, "short", context, 2, 100 if context == "full" else 200, 6)
    world = World(functools.partial(make_env, "household"), KVSampler(), dialogue, group_size=group_size)
    world.step_limit = 6
    return policy, Dealt(world)


@functools.cache
def played(context, rank):
    """Return A after one update, fresh episodes of A, and replayed episodes of B after three more."""
    policy, world = make(context, rank)
    rspo.update(policy, world.collect(policy, 2), [], "outcome", CONFIG, random.Random(0))
    explorer = policy.fork("explorer")
    for i in range(3):
        groups = world.collect(explorer, 2)
        world.score(groups)
        rspo.update(explorer, groups, [], "dense", CONFIG, random.Random(i))
    buffer = ReplayBuffer("reward")
    groups = world.collect(explorer, 2)
    rspo.set_behavior_logprobs(explorer, groups, CONFIG)
    rspo.swap_rewards(groups, CONFIG)
    buffer.add(groups)
    explorer.discard()
    return policy, world.collect(policy, 2), buffer.sample(4)


def first_step(context, rank, monkeypatch, **options):
    """Return the gradients, the metrics and the arguments of the surrogate of an update without its step."""
    policy, on, off = played(context, rank)
    seen, gradients = [], []

    def surrogate(logprobs, old_logprobs, behavior_logprobs, advantages, mask, *clip):
        seen.append([x.detach()[mask] for x in (logprobs, old_logprobs, behavior_logprobs)])
        return original(logprobs, old_logprobs, behavior_logprobs, advantages, mask, *clip)

    def stay(agent, max_grad_norm):
        gradients.extend(p.grad.clone() for p in agent.parameters if p.grad is not None)
        agent.optimizer.zero_grad(set_to_none=True)
        return 0.0

    original = losses.clipped_surrogate
    with monkeypatch.context() as patch:
        patch.setattr(losses, "clipped_surrogate", surrogate)
        patch.setattr("policy.Agent.step", stay)
        config = dataclasses.replace(CONFIG, **options)
        metrics = rspo.update(policy, on, off, "outcome", config, random.Random(0))
    return gradients, metrics, seen


@pytest.mark.parametrize(("context", "rank"), KINDS)
def test_with_unchanged_weights_fresh_ratios_are_1_and_replayed_ratios_equal_their_centres(
    context, rank, monkeypatch
):
    _, metrics, seen = first_step(context, rank, monkeypatch, tokens_per_micro_batch=300)
    replayed = [values for values in seen if not torch.equal(values[1], values[2])]
    fresh = [values for values in seen if torch.equal(values[1], values[2])]
    assert fresh and replayed
    for logprobs, _, behavior in fresh:
        assert ((logprobs - behavior).exp() - 1).abs().max() < 1e-4
    for logprobs, old, _ in replayed:  # r / c = pi / pi_old
        assert ((logprobs - old).exp() - 1).abs().max() < 1e-4
    centres = torch.cat([(old - behavior).exp() for _, old, behavior in replayed])
    assert ((centres - 1).abs() > CONFIG.clip_eps).float().mean() > 0.1  # a clip around 1 would cut these
    assert metrics["centre_log_mean_abs"] > 0.1 and metrics["replayed_episodes"] == 4
    assert metrics["clip_fraction_on"] == metrics["clip_fraction_off"] == 0.0


@pytest.mark.parametrize(("context", "rank"), KINDS)
def test_the_sampler_and_the_trainer_agree_on_every_sampled_token(context, rank):
    policy, on, off = played(context, rank)
    for episode in off:  # B played them after its last update
        for step in episode.steps:
            assert step.behavior_logprobs == pytest.approx(step.sampler_logprobs, abs=1e-4)
    episodes = [member for group in on for member in group.trajectories]
    rows = [row for episode in episodes for row in rows_of(episode)]
    if context == "full":  # some chats grew too long and were cut, none at every turn
        assert len(episodes) < len(rows) < sum(len(episode.steps) for episode in episodes)
    rspo.score_rows(policy, rows, "old_logprobs", CONFIG)
    for row in rows:
        sampled = row.column_of("sampler_logprobs")
        assert (row.old_logprobs - sampled).abs().max() < 1e-4


@pytest.mark.parametrize(("context", "rank"), KINDS)
def test_the_gap_between_sampler_and_trainer_is_rounding(context, rank, monkeypatch):
    _, metrics, _ = first_step(context, rank, monkeypatch, tokens_per_micro_batch=300)
    assert 0 < metrics["sampler_gap_mean"] < 1e-5 and metrics["sampler_gap_max"] < 1e-4


def test_the_gap_shows_a_sampler_that_is_one_update_behind(monkeypatch):
    policy, world = make("window", 8)
    groups = world.collect(policy, 2)
    config = dataclasses.replace(CONFIG, method="outcome")
    fresh, stale = (rspo.update(policy, groups, [], "outcome", config, random.Random(0)) for _ in range(2))
    assert fresh["sampler_gap_max"] < 1e-4
    assert stale["sampler_gap_mean"] > 1e-2 and stale["sampler_gap_max"] > 0.1


@pytest.mark.parametrize(("context", "rank", "algo"), [("window", 0, "ppo"), ("full", 8, "grpo")])
def test_the_micro_batch_size_never_changes_the_gradient(context, rank, algo, monkeypatch):
    whole, metrics, _ = first_step(context, rank, monkeypatch, algo=algo, tokens_per_micro_batch=10**6)
    policy = played(context, rank)[0]
    assert len(whole) == len(policy.parameters) + (len(policy.critic.parameters) if algo == "ppo" else 0)
    assert max(gradient.abs().max() for gradient in whole) > 1e-2
    parts, others, _ = first_step(context, rank, monkeypatch, algo=algo, tokens_per_micro_batch=150)
    assert max((a - b).abs().max() for a, b in zip(whole, parts, strict=True)) < 1e-6
    for name in metrics.keys() - {"seconds_update"}:
        assert metrics[name] == pytest.approx(others[name], abs=1e-5), name


@pytest.mark.parametrize(("context", "rank"), KINDS)
def test_phase_one_changes_only_b_and_b_keeps_its_critic_from_loop_to_loop(context, rank):
    policy, world = make(context, rank, group_size=1)
    config = dataclasses.replace(CONFIG, algo="ppo")
    seen = []

    def log(agent, groups, metrics, updates):
        states = policy.state_dicts() | {"explorer": policy._explorer.state_dict()}
        seen.append((agent, states, metrics))

    rspo.train(policy, world, world, config, log)
    agents, states = [agent for agent, _, _ in seen], [state for _, state, _ in seen]
    assert agents == ["explorer", "buffer", "policy"] * 2

    def same(name, i, j):
        one, other = states[i][name], states[j][name]
        return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

    for i, j in ((0, 1), (2, 3), (3, 4)):  # B's update and its filling of the buffer
        assert same("policy", i, j) and same("critic", i, j)
    for i, j in ((1, 2), (4, 5)):  # A's update
        assert not same("policy", i, j) and not same("critic", i, j)
        assert same("explorer", i, j) and same("explorer_critic", i, j)
    assert not same("explorer", 2, 3) and not same("explorer_critic", 2, 3)
    # B's critic took its second step in loop 2. B starts with A's one step and takes its own
    steps = [
        {int(v) for k, v in states[3][name].items() if k.startswith("step/")}
        for name in ("explorer_critic", "explorer")
    ]
    assert steps == [{2}, {2}]
