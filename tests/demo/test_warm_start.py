"""Demonstrations mix the expert with noise; the warm start teaches them to the base, reproducibly."""

import dataclasses

import pytest
import torch
from tiny import BATCH, agent, episode, needs_models, tiny

from buffer import StopReason
from demo.toy import ToyEnv, toy_world
from demo.warm_start import demonstrations, warm_start
from envs import EnvironmentCrashed

# --- demonstrations


class Open(ToyEnv):
    """The toy environment with one more admissible action, which leads nowhere."""

    def _view(self):
        return dataclasses.replace(super()._view(), admissible=("left", "look", "right"))


def share(of, world, expert_share, hesitation_share):
    """Return the share of turns with this action."""
    episodes = demonstrations(world, 400, expert_share, hesitation_share)
    return sum(step.action == of for episode in episodes for step in episode.steps) / 1200


def test_the_expert_without_noise_always_wins():
    episodes = demonstrations(toy_world(), 20, expert_share=1.0, hesitation_share=0.0)
    assert all(episode.success for episode in episodes)
    assert episodes[0].steps[0].action_ids == [5, 1] and episodes[0].steps[0].valid


def test_demonstrations_mix_the_expert_with_hesitation_and_random_actions():
    # half of the turns are random, half of these "left"
    assert share("left", toy_world(), 0.5, 0.0) == pytest.approx(0.25, abs=0.04)
    # 0.3 of the turns hesitate, 0.3 are one of three actions at random: 0.3 + 0.3 / 3
    assert share("look", toy_world(make_env=Open), 0.4, 0.3) == pytest.approx(0.4, abs=0.04)
    # "look" is not admissible, so 0.6 of the turns are random, half of these "left"
    assert share("left", toy_world(), 0.4, 0.3) == pytest.approx(0.3, abs=0.04)


class Shop(ToyEnv):
    """The toy environment with a template among its actions, and another idle action in each state."""

    blind, extra = False, ("search[<your query>]", "left", "right", "left <")

    @property
    def look_around(self):
        return f"look {len(self.path)}"

    def searching_expert(self):
        if self.blind and self.path:
            raise EnvironmentCrashed("the engine broke")
        return "right"

    def _view(self):
        return dataclasses.replace(super()._view(), admissible=(*self.extra, self.look_around))


class Templates(Shop):
    """Only a template is admissible."""

    extra, look_around = (), "search[<your query>]"


class Blind(Shop):
    blind = True


def actions(world, *shares):
    return [[step.action for step in episode.steps] for episode in demonstrations(world, 60, *shares)]


def test_random_actions_can_be_typed_and_hesitation_takes_the_idle_action_of_the_state():
    random_actions = {action for played in actions(toy_world(make_env=Shop), 0.0, 0.0) for action in played}
    assert random_actions == {"look 0", "look 1", "look 2", "left", "right", "left <"}
    assert actions(toy_world(make_env=Shop), 0.0, 1.0) == [["look 0", "look 1", "look 2"]] * 60
    # without an action that can be typed, the expert's is taken
    assert actions(toy_world(make_env=Templates), 0.0, 0.0) == [["right"] * 3] * 60


@pytest.mark.filterwarnings("ignore:the episode of game")
def test_an_expert_that_crashes_ends_its_episode():
    episodes = demonstrations(toy_world(make_env=Blind), 60, 0.5, 0.0)
    crashed = [episode for episode in episodes if episode.stop_reason is StopReason.CRASHED]
    # half of the turns query the expert, so it is queried in turn 2 or 3 of 3 in 4 episodes
    assert 30 < len(crashed) < 60
    assert {len(episode.steps) for episode in crashed} == {1, 2}
    assert all(len(episode.steps) == 3 for episode in episodes if episode not in crashed)


def test_demonstrations_need_an_expert():
    class Unknown(ToyEnv):
        searching_expert = property()  # reading it raises AttributeError

    with pytest.raises(ValueError, match="toy has no searching expert"):
        demonstrations(toy_world(make_env=Unknown), 2, 0.5, 0.2)


class Wanderer(ToyEnv):
    """The toy environment with an expert that notes the seed of its other goal and walks left."""

    seeds = []

    def wandering_expert(self, seed):
        self.seeds.append(seed)
        return "left"


def test_a_demonstration_pursues_the_task_or_one_other_goal_from_start_to_end():
    Wanderer.seeds.clear()
    played = demonstrations(toy_world(make_env=Wanderer), 400, 1.0, 0.0, faithful_share=0.3)
    paths = [[step.action for step in episode.steps] for episode in played]
    assert all(path in (["right"] * 3, ["left"] * 3) for path in paths)
    faithful = paths.count(["right"] * 3)
    assert 90 < faithful < 150  # 120 +- 3 std
    assert len(Wanderer.seeds) == 3 * (400 - faithful)
    assert len(set(Wanderer.seeds)) == 400 - faithful  # each goal has its own seed, the same in all turns


def test_a_wandering_demonstration_errs_as_a_faithful_one_does():
    played = demonstrations(toy_world(make_env=Wanderer), 400, 0.5, 0.0, faithful_share=0.0)
    right = sum(step.action == "right" for episode in played for step in episode.steps) / 1200
    assert right == pytest.approx(0.25, abs=0.04)  # half of the turns are random, half of these "right"


def test_faithful_demonstrations_are_those_of_an_environment_without_other_goals():
    wanderer, toy = (demonstrations(toy_world(make_env=env), 30, 0.5, 0.2) for env in (Wanderer, ToyEnv))
    assert [episode.to_dict() for episode in wanderer] == [episode.to_dict() for episode in toy]


def test_other_goals_need_an_expert_that_has_them():
    with pytest.raises(ValueError, match="toy has no expert that plays for another goal"):
        demonstrations(toy_world(), 2, 0.5, 0.2, faithful_share=0.9)


def test_demonstration_i_does_not_depend_on_the_number_of_demonstrations():
    few, many = (demonstrations(toy_world(make_env=Wanderer), count, 0.5, 0.2, 0.5) for count in (3, 9))
    assert [episode.to_dict() for episode in few] == [episode.to_dict() for episode in many[:3]]


# --- supervised learning


@needs_models
def test_warm_start_teaches_the_base_and_is_reproducible():
    base, again = tiny(), tiny()
    episodes = [episode(2, seed=seed) for seed in range(4)]
    before = agent(tiny()).logprobs(BATCH)[0].detach()
    seen = []
    settings = {"updates": 15, "turns_per_update": 3, "learning_rate": 1e-2, "seed": 1}
    losses = warm_start(base, episodes, **settings, progress=lambda update, loss: seen.append(update))
    assert seen == list(range(15)) and losses[-1] < 0.5 * losses[0]
    in_small_parts = warm_start(again, episodes, **settings, tokens_per_micro_batch=1)
    assert in_small_parts == pytest.approx(losses, rel=1e-3)
    policy = agent(base)
    start = policy.logprobs(BATCH)[0].detach()
    assert torch.equal(policy.reference_logprobs(BATCH), start) and not torch.equal(start, before)
    assert not policy.optimizer.state  # the warm start's optimizer is gone


@needs_models
def test_a_warm_start_without_usable_demonstrations_is_refused():
    crashed = dataclasses.replace(episode(2), stop_reason=StopReason.CRASHED)
    with pytest.raises(ValueError, match="the episodes ended with: 2 x crashed"):
        warm_start(tiny(), [crashed, crashed], updates=3, turns_per_update=2, learning_rate=1e-3)


@needs_models
def test_a_warm_start_that_diverges_is_an_error():
    with pytest.raises(FloatingPointError, match="diverged at update 2 of 3: lower its learning rate of 1e"):
        warm_start(tiny(), [episode(2)], updates=3, turns_per_update=2, learning_rate=1e38)


@needs_models
def test_warm_start_restores_autocast_and_the_stored_precision():
    base = tiny(dtype="bfloat16", autocast=True)
    rotary = base.model.get_decoder().rotary_emb
    warm_start(base, [episode(2)], updates=1, turns_per_update=2, learning_rate=0.1)
    assert base.autocast and base.model.dtype == torch.bfloat16
    base.fp32()
    # 10000^(-i/4): a head has 8 dimensions, so 4 frequencies, which were never rounded to 16 bits
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(rotary.inv_freq.cpu(), frequencies, atol=0, rtol=1e-6)
