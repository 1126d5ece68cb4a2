"""Playing episodes: what is recorded and shown, how they end, and that none depends on its neighbours."""

import dataclasses
import random

import pytest

from batch import rows_of
from buffer import StopReason
from chat import Dialogue
from demo.toy import ToyChat, ToyEnv, ToyPolicy, ToySampler, toy_world
from envs import EnvironmentCrashed
from rollout import World
from sampler import Sample


class Scripted(ToySampler):
    """Answers with the given replies, turn by turn; each is a list of words, with or without its <end>."""

    def __init__(self, replies):
        super().__init__()
        self.replies, self.prompts = replies, []

    def sample(self, policy, prompts, episodes, rngs, temperature, max_tokens):
        self.prompts.append(prompts)
        text = self.replies[(len(self.prompts) - 1) % len(self.replies)]
        ids = [5 if word == "right" else 4 if word == "left" else 1 for word in text.split()]
        return [Sample(list(ids), [-0.5] * len(ids), ids[-1:] == [1]) for _ in prompts]


def scripted_world(replies, context="window", make_env=ToyEnv, max_prompt_tokens=60, **options):
    dialogue = Dialogue(ToyChat(), "short", context, 2, max_prompt_tokens, 3)
    return World(make_env, Scripted(replies), dialogue, group_size=2, **options)


def test_a_won_episode_is_recorded_as_played():
    (group,) = scripted_world(["right <end>"]).collect(ToyPolicy(), 1)
    won = group.trajectories[0]
    assert (won.outcome, won.success, won.stop_reason) == (1.0, True, StopReason.FINISHED)
    assert [step.observation for step in won.steps] == ["door 0", "door 1", "door 2"]
    assert [step.action_ids for step in won.steps] == [[5, 1]] * 3  # "right" and its end-of-turn token
    assert [step.action for step in won.steps] == ["right"] * 3
    assert won.steps[0].sampler_logprobs == [-0.5, -0.5]


def test_done_is_not_success():
    (group,) = scripted_world(["left <end>"]).collect(ToyPolicy(), 1)
    assert [(m.outcome, m.success, m.stop_reason) for m in group.trajectories] == [
        (0, False, StopReason.FINISHED)
    ] * 2


def test_the_step_limit_is_a_failure_whatever_the_environment_thinks():
    (group,) = scripted_world(["right <end>"], step_limit=2).collect(ToyPolicy(), 1)
    lost = group.trajectories[0]
    assert (lost.outcome, lost.success, lost.stop_reason, len(lost.steps)) == (
        0.0,
        False,
        StopReason.STEP_LIMIT,
        2,
    )


def test_an_invalid_reply_spends_the_turn_and_never_reaches_the_environment():
    # turns 1 and 3 are cut off before their end, so they are not actions although they read "right"
    world = scripted_world(["right right right", "right <end>"], step_limit=6)
    (group,) = world.collect(ToyPolicy(), 1)
    steps = group.trajectories[0].steps
    assert [step.valid for step in steps] == [False, True] * 3
    assert [step.truncated for step in steps] == [True, False] * 3
    assert [step.action for step in steps] == ["", "right"] * 3
    assert [step.observation for step in steps] == [
        "door 0",
        "door 0",
        "door 1",
        "door 1",
        "door 2",
        "door 2",
    ]
    assert group.trajectories[0].success
    shown = ToyChat().decode(world.sampler.prompts[1][0])
    assert "no action" in shown


def test_window_prompts_show_the_last_two_turns_and_full_ones_extend_the_last():
    chat = ToyChat()
    window = scripted_world(["left <end>"])
    window.collect(ToyPolicy(), 1)
    # task | notes (none) | the last two actions | observation
    assert chat.decode(window.sampler.prompts[2][0]) == "<user> walk | | left left | door 2 <agent>"
    full = scripted_world(["left <end>", "right right right"], "full")
    (group,) = full.collect(ToyPolicy(), 1)
    first, second, third = (prompts[0] for prompts in full.sampler.prompts)
    assert second == first + [4, 1] + [2, *chat.encode("| door 1"), 3]
    assert third == second + [5, 5, 5] + [
        1,
        2,
        *chat.encode("| door 1"),
        3,
    ]  # the cut reply is closed by the prompt
    (row,) = rows_of(group.trajectories[0])
    assert [row.input_ids[start:end] for _, start, end in row.spans] == [[4, 1], [5, 5, 5], [4, 1]]


def test_an_over_long_window_prompt_loses_its_oldest_history_first():
    world = scripted_world(["left <end>"], max_prompt_tokens=10)
    world.collect(ToyPolicy(), 1)
    # <user> walk | | left left | door 2 <agent> is 10 tokens, so 9 hold one action less
    tight = scripted_world(["left <end>"], max_prompt_tokens=9)
    tight.collect(ToyPolicy(), 1)
    chat = ToyChat()
    assert chat.decode(world.sampler.prompts[2][0]) == "<user> walk | | left left | door 2 <agent>"
    assert chat.decode(tight.sampler.prompts[2][0]) == "<user> walk | | left | door 2 <agent>"


def test_an_over_long_chat_loses_its_oldest_turns_and_begins_a_new_row():
    world = scripted_world(
        ["left <end>"], "full", step_limit=9, max_prompt_tokens=24, make_env=lambda: Endless()
    )
    (group,) = world.collect(ToyPolicy(), 1)
    episode = group.trajectories[0]
    assert len(episode.steps) == 9
    prompts = [step.prompt_ids for step in episode.steps]
    assert max(map(len, prompts)) <= 24
    opening = prompts[0]
    assert all(prompt[: len(opening)] == opening for prompt in prompts)  # the task always stays
    rows = rows_of(episode)
    assert len(rows) > 1 and sum(row.action_tokens for row in rows) == 18


class Endless(ToyEnv):
    def step(self, action):
        return super().reset("train", 0)


def test_a_prompt_that_cannot_be_made_short_enough_ends_the_episode():
    (group,) = scripted_world(["left <end>"], max_prompt_tokens=5).collect(ToyPolicy(), 1)
    episode = group.trajectories[0]
    assert (episode.stop_reason, episode.steps, episode.success) == (StopReason.TOKEN_LIMIT, [], False)


class Fragile(ToyEnv):
    def step(self, action):
        if len(self.path) == 1:
            raise EnvironmentCrashed("the engine broke")
        return super().step(action)


def test_a_crash_is_marked_and_kept_out():
    world = scripted_world(["right <end>"], make_env=Fragile)
    (group,) = world.collect(ToyPolicy(), 1)
    assert [m.stop_reason for m in group.trajectories] == [StopReason.CRASHED] * 2
    assert not any(m.usable for m in group.trajectories)
    assert world.episodes == 2  # really played, so counted


def test_groups_hold_n_episodes_of_one_game_and_the_stream_plays_every_game_once_per_epoch():
    world = toy_world(group_size=3)
    groups = [group for _ in range(4) for group in world.collect(ToyPolicy(), 5)]
    assert all(len({member.task_id for member in group.trajectories}) == 1 for group in groups)
    assert len({group.task_id for group in groups}) == 20  # the second epoch's groups are groups of their own
    games = [group.trajectories[0].task_id for group in groups]
    assert sorted(games[:10]) == sorted(games[10:]) == sorted(f"toy/train/{i}" for i in range(10))
    assert games[:10] != games[10:]
    assert (world.tasks, world.episodes, world.turns) == (20, 60, 180)


def actions(world, policy=None, tasks=6):
    groups = world.collect(policy or ToyPolicy(), tasks)
    return [[step.action_ids for step in member.steps] for group in groups for member in group.trajectories]


def test_an_episode_does_not_depend_on_its_neighbours():
    together, few = actions(toy_world(4)), actions(toy_world(4, parallel=3))
    assert together == few
    assert actions(toy_world(4), tasks=2) == together[:8]
    assert actions(toy_world(4, seed=1)) != together


def test_a_resumed_stream_goes_on_where_it_stood():
    straight = toy_world(4)
    expected = [actions(straight, tasks=3) for _ in range(2)][1]
    first, second = toy_world(4), toy_world(4)
    actions(first, tasks=3)
    second.load_state_dict(first.state_dict())
    assert actions(second, tasks=3) == expected and second.state_dict() == straight.state_dict()


def test_draws_differ_between_seeds_tasks_members_and_purposes():
    names = [f"{purpose} {i} {j}" for purpose in ("train", "eval") for i in range(28) for j in range(8)]
    draws = {random.Random(f"{seed} {name}").random() for seed in (0, 200, 400) for name in names}
    assert len(draws) == 3 * 2 * 224
    members = actions(toy_world(8), tasks=1)
    assert len({str(member) for member in members}) > 1


def test_evaluation_plays_the_fixed_panel_at_its_own_temperature_and_is_not_counted():
    world, policy = toy_world(4), ToyPolicy()
    panel = world.evaluate(policy, "eval", 4, temperature=0.4)
    assert [episode.task_id for episode in panel] == [f"toy/eval/{i}" for i in range(4)]
    world.collect(policy, 1)
    assert [temperature for _, _, temperature, _ in world.sampler.calls] == [0.4] * 3 + [1.0] * 3
    assert (world.tasks, world.episodes) == (1, 4)
    again = world.evaluate(policy, "eval", 4, temperature=0.4)
    assert [e.to_dict() for e in panel] == [e.to_dict() for e in again]
    other = world.evaluate(policy, "train", 3, temperature=0.4)
    assert [episode.task_id for episode in other] == [f"toy/train/{i}" for i in range(3)]


class Open(ToyEnv):
    """The toy with one more door to look at, which leads nowhere."""

    def _view(self):
        return dataclasses.replace(super()._view(), admissible=("left", "look", "right"))


def test_demonstrations_mix_the_expert_with_hesitation_and_random_actions():
    expert = toy_world().demonstrations(20, expert_share=1.0, hesitation_share=0.0)
    assert all(episode.success for episode in expert)
    assert expert[0].steps[0].action_ids == [5, 1] and expert[0].steps[0].valid

    def share(of, world, **shares):
        episodes = world.demonstrations(400, **shares)
        return sum(step.action == of for episode in episodes for step in episode.steps) / 1200

    half = {"expert_share": 0.5, "hesitation_share": 0.0}
    assert share("left", toy_world(), **half) == pytest.approx(
        0.25, abs=0.04
    )  # half of the half that is random
    shares = {"expert_share": 0.4, "hesitation_share": 0.3}
    assert share("look", toy_world(make_env=Open), **shares) == pytest.approx(0.4, abs=0.04)  # .3 + .3 / 3
    assert share("left", toy_world(), **shares) == pytest.approx(0.3, abs=0.04)  # nothing to look at: .6 / 2


class Shop(ToyEnv):
    """The toy with a template among its actions, and an idle action that is another in each state."""

    blind, says = False, ("search[<your query>]", "left", "right", "left <")

    @property
    def look_around(self):
        return f"look {len(self.path)}"

    def searching_expert(self):
        if self.blind and self.path:
            raise EnvironmentCrashed("the engine broke")
        return "right"

    def _view(self):
        return dataclasses.replace(super()._view(), admissible=(*self.says, self.look_around))


class Templates(Shop):
    """Nothing but a template is admissible."""

    says, look_around = (), "search[<your query>]"


class Blind(Shop):
    blind = True


def said(world, *shares):
    return [[step.action for step in episode.steps] for episode in world.demonstrations(60, *shares)]


def test_a_demonstration_errs_with_actions_that_can_be_typed_and_looks_around_where_it_is():
    errs = said(toy_world(make_env=Shop), 0.0, 0.0)
    kinds = {f"look {turn}" for turn in range(3)} | {"left", "right", "left <"}
    assert {action for episode in errs for action in episode} == kinds
    assert said(toy_world(make_env=Shop), 0.0, 1.0) == [["look 0", "look 1", "look 2"]] * 60
    assert said(toy_world(make_env=Templates), 0.0, 0.0) == [["right"] * 3] * 60  # the expert's, for want


def test_an_expert_that_crashes_costs_its_episode():
    episodes = toy_world(make_env=Blind).demonstrations(60, 0.5, 0.0)
    crashed = [episode for episode in episodes if episode.stop_reason is StopReason.CRASHED]
    assert 30 < len(crashed) < 60  # the expert is asked in turn 2 or 3: 3 in 4
    assert {len(episode.steps) for episode in crashed} == {1, 2}
    assert all(len(episode.steps) == 3 for episode in episodes if episode not in crashed)


def test_what_stops_a_rollout_is_not_hidden_by_a_sampler_that_cannot_be_reset_then():
    class Engine(ToySampler):
        busy = False

        def reset(self):
            if self.busy:
                raise RuntimeError("requests are still running")

        def sample(self, *given, **named):
            self.busy = True
            raise KeyboardInterrupt

    world = toy_world()
    world.sampler = Engine()
    with pytest.raises(KeyboardInterrupt):
        world.collect(ToyPolicy(), 1)


def test_the_opening_is_that_of_a_game_that_can_be_played():
    class Broken(ToyEnv):
        def reset(self, split, index):
            if index < 2:
                raise EnvironmentCrashed("no such game")
            return super().reset(split, index)

    assert toy_world().opening_tokens() > 0
    with pytest.warns(UserWarning, match="the episode of game train 0 crashed: no such game"):
        assert toy_world(make_env=Broken).opening_tokens() == toy_world().opening_tokens()


def test_demonstrations_need_an_expert():
    class Unknown(ToyEnv):
        searching_expert = property()  # as if there were none

    with pytest.raises(ValueError, match="toy has no expert"):
        toy_world(make_env=Unknown).demonstrations(2, 0.5, 0.2)


def test_demonstration_i_is_the_same_however_many_are_asked_for():
    few, many = (toy_world().demonstrations(n, 0.5, 0.2) for n in (3, 9))
    assert [episode.to_dict() for episode in few] == [episode.to_dict() for episode in many[:3]]


def test_the_cache_is_given_up_before_an_update():
    world, events = toy_world(), []
    sample = world.sampler.sample
    world.sampler.reset = lambda: events.append("reset")
    world.sampler.sample = lambda *args, **named: events.append("sample") or sample(*args, **named)
    world.collect(ToyPolicy(), 1)
    assert events == ["reset", "sample", "sample", "sample", "reset"]  # three doors
