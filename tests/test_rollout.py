"""Playing episodes: records and prompts, the ends of an episode, and independence of its neighbours."""

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
    """A sampler with a fixed reply for each turn, for example "right <end>"; after the last, the first again.

    `prompts` records the prompts of each call.
    """

    def __init__(self, replies):
        super().__init__()
        self.replies, self.prompts = replies, []

    def sample(self, policy, prompts, episodes, rngs, temperature, max_tokens):
        self.prompts.append(prompts)
        text = self.replies[(len(self.prompts) - 1) % len(self.replies)]
        ids = [{"left": 4, "right": 5, "<end>": 1}[word] for word in text.split()]
        return [Sample(list(ids), [-0.5] * len(ids), ids[-1:] == [1]) for _ in prompts]


def scripted_world(replies, context="window", make_env=ToyEnv, max_prompt_tokens=60, **options):
    dialogue = Dialogue(ToyChat(), "short", context, 2, max_prompt_tokens, 3)
    return World(make_env, Scripted(replies), dialogue, group_size=2, **options)


def test_a_won_episode_is_recorded():
    (group,) = scripted_world(["right <end>"]).collect(ToyPolicy(), 1)
    won = group.trajectories[0]
    assert (won.outcome, won.success, won.stop_reason) == (1.0, True, StopReason.FINISHED)
    assert [step.observation for step in won.steps] == ["door 0", "door 1", "door 2"]
    assert [step.action_ids for step in won.steps] == [[5, 1]] * 3  # "right" and the end-of-turn token
    assert [step.action for step in won.steps] == ["right"] * 3
    assert won.steps[0].sampler_logprobs == [-0.5, -0.5]


def test_a_finished_episode_can_be_a_failure():
    (group,) = scripted_world(["left <end>"]).collect(ToyPolicy(), 1)
    for member in group.trajectories:
        assert (member.outcome, member.success, member.stop_reason) == (0, False, StopReason.FINISHED)


def test_an_episode_at_the_step_limit_is_a_failure():
    (group,) = scripted_world(["right <end>"], step_limit=2).collect(ToyPolicy(), 1)
    lost = group.trajectories[0]
    assert (lost.outcome, lost.success, lost.stop_reason) == (0.0, False, StopReason.STEP_LIMIT)
    assert len(lost.steps) == 2


def test_an_invalid_reply_uses_up_its_turn_and_never_reaches_the_environment():
    # Turns 1, 3 and 5 are truncated before <end>, so they are invalid although they say "right"
    world = scripted_world(["right right right", "right <end>"], step_limit=6)
    (group,) = world.collect(ToyPolicy(), 1)
    steps = group.trajectories[0].steps
    assert [step.valid for step in steps] == [False, True] * 3
    assert [step.truncated for step in steps] == [True, False] * 3
    assert [step.action for step in steps] == ["", "right"] * 3
    doors = [0, 0, 1, 1, 2, 2]
    assert [step.observation for step in steps] == [f"door {door}" for door in doors]
    assert group.trajectories[0].success
    assert "no action" in ToyChat().decode(world.sampler.prompts[1][0])


def test_a_window_prompt_shows_the_last_two_turns_and_a_full_prompt_extends_the_one_before():
    chat = ToyChat()
    window = scripted_world(["left <end>"])
    window.collect(ToyPolicy(), 1)
    # task | notes (none) | the last two actions | observation
    assert chat.decode(window.sampler.prompts[2][0]) == "<user> walk | | left left | door 2 <agent>"
    full = scripted_world(["left <end>", "right right right"], "full")
    (group,) = full.collect(ToyPolicy(), 1)
    first, second, third = (prompts[0] for prompts in full.sampler.prompts)
    assert second == first + [4, 1] + [2, *chat.encode("| door 1"), 3]
    # The truncated reply has no <end>, so the next prompt adds it (1)
    assert third == second + [5, 5, 5] + [1, 2, *chat.encode("| door 1"), 3]
    (row,) = rows_of(group.trajectories[0])
    assert [row.input_ids[start:end] for _, start, end in row.spans] == [[4, 1], [5, 5, 5], [4, 1]]


def test_a_window_prompt_that_is_too_long_loses_its_oldest_turn_first():
    world = scripted_world(["left <end>"], max_prompt_tokens=10)
    world.collect(ToyPolicy(), 1)
    # <user> walk | | left left | door 2 <agent> has 10 tokens, so 9 tokens hold one action less
    tight = scripted_world(["left <end>"], max_prompt_tokens=9)
    tight.collect(ToyPolicy(), 1)
    chat = ToyChat()
    assert chat.decode(world.sampler.prompts[2][0]) == "<user> walk | | left left | door 2 <agent>"
    assert chat.decode(tight.sampler.prompts[2][0]) == "<user> walk | | left | door 2 <agent>"


class Endless(ToyEnv):
    """Every action leads to the first door."""

    def step(self, action):
        return super().reset("train", 0)


def test_a_full_prompt_that_is_too_long_loses_its_oldest_turns_and_starts_a_new_row():
    world = scripted_world(["left <end>"], "full", Endless, max_prompt_tokens=24, step_limit=9)
    (group,) = world.collect(ToyPolicy(), 1)
    episode = group.trajectories[0]
    assert len(episode.steps) == 9
    prompts = [step.prompt_ids for step in episode.steps]
    assert max(map(len, prompts)) <= 24
    opening = prompts[0]
    assert all(prompt[: len(opening)] == opening for prompt in prompts)  # the message with the task is kept
    rows = rows_of(episode)
    assert len(rows) > 1 and sum(row.action_tokens for row in rows) == 18


def test_a_prompt_whose_shortest_form_is_too_long_ends_the_episode():
    (group,) = scripted_world(["left <end>"], max_prompt_tokens=5).collect(ToyPolicy(), 1)
    episode = group.trajectories[0]
    assert (episode.stop_reason, episode.steps, episode.success) == (StopReason.TOKEN_LIMIT, [], False)


class Fragile(ToyEnv):
    """Crashes at the second action."""

    def step(self, action):
        if len(self.path) == 1:
            raise EnvironmentCrashed("the engine broke")
        return super().step(action)


def test_a_crashed_episode_is_marked_and_unusable():
    world = scripted_world(["right <end>"], make_env=Fragile)
    with pytest.warns(UserWarning, match="crashed: the engine broke"):
        (group,) = world.collect(ToyPolicy(), 1)
    assert [m.stop_reason for m in group.trajectories] == [StopReason.CRASHED] * 2
    assert not any(m.usable for m in group.trajectories)
    assert world.episodes == 2  # crashed episodes count as played


def test_a_group_has_n_episodes_of_one_game_and_an_epoch_has_every_game_once():
    world = toy_world(group_size=3)
    groups = [group for _ in range(4) for group in world.collect(ToyPolicy(), 5)]
    assert all(len({member.task_id for member in group.trajectories}) == 1 for group in groups)
    assert len({group.task_id for group in groups}) == 20  # a game has another group in each epoch
    games = [group.trajectories[0].task_id for group in groups]
    assert sorted(games[:10]) == sorted(games[10:]) == sorted(f"toy/train/{i}" for i in range(10))
    assert games[:10] != games[10:]
    assert (world.tasks, world.episodes, world.turns) == (20, 60, 180)


def actions(world, tasks=6):
    """Play `tasks` tasks; return the action tokens of each turn of each episode."""
    groups = world.collect(ToyPolicy(), tasks)
    episodes = [member for group in groups for member in group.trajectories]
    return [[step.action_ids for step in episode.steps] for episode in episodes]


def test_an_episode_does_not_depend_on_its_neighbours():
    together, few = actions(toy_world(4)), actions(toy_world(4, parallel=3))
    assert together == few
    assert actions(toy_world(4), tasks=2) == together[:8]
    assert actions(toy_world(4, seed=1)) != together


def test_a_resumed_world_continues_the_stream_of_tasks():
    uninterrupted = toy_world(4)
    actions(uninterrupted, tasks=3)
    expected = actions(uninterrupted, tasks=3)
    stopped, resumed = toy_world(4), toy_world(4)
    actions(stopped, tasks=3)
    resumed.load_state_dict(stopped.state_dict())
    assert actions(resumed, tasks=3) == expected
    assert resumed.state_dict() == uninterrupted.state_dict()


def test_draws_differ_between_seeds_tasks_members_and_purposes():
    names = [f"{purpose} {i} {j}" for purpose in ("train", "eval") for i in range(28) for j in range(8)]
    draws = {random.Random(f"{seed} {name}").random() for seed in (0, 200, 400) for name in names}
    assert len(draws) == 3 * 2 * 224
    members = actions(toy_world(8), tasks=1)
    assert len({str(member) for member in members}) > 1


def test_evaluation_plays_a_fixed_panel_at_its_own_temperature_and_is_not_counted():
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


def test_practice_plays_drawn_training_games_and_is_not_counted():
    world = toy_world(4)
    episodes = world.practice(ToyPolicy(), 6, games=2)
    # Only the first two games of the stream are drawn
    first_two = {f"toy/train/{world.game(position)}" for position in (0, 1)}
    assert {episode.task_id for episode in episodes} == first_two
    assert (world.tasks, world.episodes, world.turns) == (0, 0, 0)
    assert world.draw_games("practice", 6, None)[:3] == world.draw_games("practice", 3, None)


def test_an_exception_in_a_rollout_is_not_hidden_by_a_sampler_that_cannot_be_reset():
    class Engine(ToySampler):
        busy = False

        def reset(self):
            if self.busy:
                raise RuntimeError("requests are still running")

        def sample(self, *args, **kwargs):
            self.busy = True
            raise KeyboardInterrupt

    world = toy_world()
    world.sampler = Engine()
    with pytest.raises(KeyboardInterrupt):
        world.collect(ToyPolicy(), 1)


def test_the_opening_length_is_that_of_the_first_game_that_does_not_crash():
    class Broken(ToyEnv):
        def reset(self, split, index):
            if index < 2:
                raise EnvironmentCrashed("no such game")
            return super().reset(split, index)

    assert toy_world().opening_tokens() > 0
    with pytest.warns(UserWarning, match="the episode of game train 0 crashed: no such game"):
        assert toy_world(make_env=Broken).opening_tokens() == toy_world().opening_tokens()


def test_the_sampler_is_reset_before_and_after_a_rollout():
    events = []

    class Recording(ToySampler):
        def reset(self):
            events.append("reset")

        def sample(self, *args, **kwargs):
            events.append("sample")
            return super().sample(*args, **kwargs)

    world = toy_world()
    world.sampler = Recording()
    world.collect(ToyPolicy(), 1)
    assert events == ["reset", "sample", "sample", "sample", "reset"]  # three doors
