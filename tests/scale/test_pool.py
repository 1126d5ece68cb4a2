"""Test the pool: equal episodes with any number of workers, lost workers, crashes, bugs, and a clean end.

Quick tests play in this process or start few workers. Slow tests start workers for each case.
"""

import functools
import gc
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
from tally import Late, Tally, only_in

from buffer import StopReason
from chat import Dialogue
from demo.warm_start import demonstrations
from envs import Household, make_env
from rollout import World
from sampler import Sample
from scale.pool import ROOT, Pool, Slots, assign

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads processes from /proc")


def texts(views):
    """Return the observations by slot; None for a crashed episode."""
    return {slot: view and view.observation for slot, view in views.items()}


def pid_of(view):
    """Return the id of the process that made this view of a Tally."""
    return int(view.notes.split()[0])


def is_running(pid):
    """Return True unless the process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def child_processes():
    """Return the ids of this process's children, zombies included; nothing without /proc."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return set(path.read_text().split() if path.exists() else [])


@pytest.fixture
def before():
    """Return the children that exist before the test."""
    return child_processes()


@pytest.fixture
def pool(request, before):
    """Yield a pool of Tallies with two workers, then check that closing it ends both."""
    pool = Pool(Tally, 2, **getattr(request, "param", {}))
    yield pool
    pool.close()
    assert child_processes() == before


# --- in this process, or with few workers ---------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_each_slot_plays_its_own_game(workers):
    pool = Pool(Tally, workers)
    first = pool.reset({0: ("train", 5), 4: ("eval", 0), 1: ("train", 5)})
    assert texts(first) == {0: "train 5", 4: "eval 0", 1: "train 5"}
    assert texts(pool.step({1: "a", 4: "b"})) == {1: "train 5 a", 4: "eval 0 b"}
    assert texts(pool.step({4: "a", 0: "a"})) == {4: "eval 0 b a", 0: "train 5 a"}
    assert texts(pool.reset({0: ("train", 6)})) == {0: "train 6"}
    assert pool.expert([4, 0]) == {4: ("after a", "look 2"), 0: ("after 6", "look 0")}
    seeds = {0: "goal 7", 9: "goal of no slot"}
    assert pool.expert([4, 0], seeds) == {4: ("after a", "look 2"), 0: ("goal 7", "look 0")}
    assert pool.reset({}) == pool.step({}) == pool.expert([]) == {}
    pool.close()
    if workers:  # neither torch nor the caller's program is in a worker
        assert all(view.notes.split()[1:3] == ["False", "False"] for view in first.values())
        assert len({os.getpid(), *map(pid_of, first.values())}) == 3


@pytest.mark.parametrize("games, load, expected", [
    ("aabbaabb", [0, 0], ["aaaa", "bbbb"]),
    ("aaaabb", [0, 0], ["aaa", "abb"]),  # equal shares of 3: one slot of game a moves
    ("aaaa", [0, 0], ["aa", "aa"]),
    ("abcd", [0, 0], ["ac", "bd"]),
    ("a", [0, 0], ["a", ""]),
    ("ab", [0, 2], ["ab", ""]),  # worker 1 still plays two episodes
    ("aaa", [1, 0, 0], ["", "aa", "a"]),  # 4 episodes for 3 workers: shares of 2
])  # fmt: skip
def test_a_game_stays_in_one_worker_up_to_equal_shares(games, load, expected):
    shares = [""] * len(load)
    for slot, worker in assign({slot: ("train", ord(game)) for slot, game in enumerate(games)}, load).items():
        shares[worker] += games[slot]
    assert ["".join(sorted(share)) for share in shares] == expected


def test_a_released_environment_is_used_for_another_slot():
    first = Tally()
    slots = Slots(Tally, first)
    slots.ask("reset", 0, "train", 1)
    slots.ask("reset", 1, "train", 2)
    assert slots.envs[0] is first and slots.envs[1] is not first
    slots.release([0, 7])  # slot 7 has no environment
    assert slots.ask("step", 0, "a") is None
    slots.ask("reset", 2, "train", 3)
    assert slots.envs[2] is first


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:the episode of game")
def test_an_engine_that_breaks_ends_its_own_episode(workers):
    pool = Pool(Tally, workers)
    pool.reset({slot: ("train", slot) for slot in range(3)})
    assert texts(pool.step({0: "crash", 1: "a", 2: "a"})) == {0: None, 1: "train 1 a", 2: "train 2 a"}
    assert texts(pool.step({0: "a", 2: "blind"})) == {0: None, 2: "train 2 a blind"}
    assert pool.expert([2, 1]) == {2: None, 1: ("after a", "look 1")}
    assert texts(pool.reset({0: ("train", 4)})) == {0: "train 4"}
    pool.close()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_each_reason_of_a_crash_is_shown_once(workers):
    pool = Pool(Tally, workers)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for index in (5, 6):
            pool.reset({0: ("train", index), 1: ("eval", index), 2: ("eval", 7)})
            pool.step({0: "crash", 1: "crash", 2: "blind"})
            assert pool.expert([2]) == {2: None}
    pool.close()
    engine, expert = (str(warning.message) for warning in shown)
    assert engine in [
        f"the episode of game {split} 5 crashed: the engine broke" for split in ("train", "eval")
    ]
    assert expert == "the episode of game eval 7 crashed: the expert broke"
    assert {Path(warning.filename).name for warning in shown} == {"test_pool.py"}


def test_a_killed_worker_is_replaced_and_its_episodes_crash(pool):
    views = pool.reset({slot: ("train", slot) for slot in range(4)})
    victim = pid_of(views[1])
    os.kill(victim, signal.SIGKILL)
    with pytest.warns(UserWarning, match="ended with exit status -9"):
        views = pool.step({0: "a", 1: "a", 2: "a"})  # slot 3 takes no action in this turn
    assert texts(views) == {0: "train 0 a", 1: None, 2: "train 2 a"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts(pool.step({3: "a", 2: "b"})) == {3: None, 2: "train 2 a b"}
        assert pool.expert([1, 0]) == {1: None, 0: ("after a", "look 1")}
        views = pool.reset({3: ("eval", 7)})
        assert texts(views) == {3: "eval 7"} and texts(pool.step({3: "b"})) == {3: "eval 7 b"}
    assert pid_of(views[3]) != victim and not is_running(victim)


@needs_proc
def test_a_bug_in_an_environment_is_raised_and_closes_the_pool(before):
    pool = Pool(Tally, 2)
    pool.reset({slot: ("train", 0) for slot in range(3)})
    with pytest.raises(RuntimeError, match=r"(?s)in step.*ValueError: a mistake in the environment"):
        pool.step({0: "a", 1: "err", 2: "a"})
    assert child_processes() == before
    with pytest.raises(RuntimeError, match="closed"):
        pool.step({0: "a"})


def test_a_bug_in_this_process_is_raised_as_it_is():
    pool = Pool(Tally)
    pool.reset({0: ("train", 0)})
    with pytest.raises(ValueError, match="a mistake in the environment"):
        pool.step({0: "err"})


# --- slow: workers ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_shares_stay_equal_while_games_end_at_different_times(pool):
    views = pool.reset({slot: ("train", slot) for slot in range(6)})
    for turn in range(20):
        views |= pool.step({slot: "a" for slot in range(6)})
        ended = {slot: ("train", 90 - turn) for slot in ((turn, turn + 1) if turn % 3 else range(6))}
        views |= pool.reset({slot % 6: game for slot, game in ended.items()})
        assert sorted(Counter(map(pid_of, views.values())).values()) == [3, 3]
    assert max(int(view.notes.split()[3]) for view in views.values()) <= 5  # environments made in a worker


@pytest.mark.slow
def test_workers_run_side_by_side(pool):
    pool.reset({0: ("train", 0), 1: ("train", 0)})
    start = time.monotonic()
    pool.step({0: "sleep 2", 1: "sleep 2"})
    assert time.monotonic() - start < 3.8  # one after the other: 4 or more


@pytest.mark.slow
def test_a_slot_is_independent_of_the_others():
    # The expert wins game 0, while game 1, in the same or in another worker, only looks around
    for workers, idle in [(0, 1), (1, 1), (2, 1), (2, 2)]:
        pool = Pool(Late, workers)
        opening = pool.reset({0: ("train", 0), idle: ("train", 1)})
        alone = Household()
        assert opening[idle] == alone.reset("train", 1)
        looked = alone.step("look")
        for _ in range(50):
            views = pool.step({0: pool.expert([0])[0][0], idle: "look"})
            assert views[idle] == looked
            if views[0].done:
                break
        assert (views[0].success, views[idle].success) == (True, False)
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("action, status", [("die", "-9"), ("exit", "3")])
def test_a_worker_that_dies_in_a_step_is_replaced(pool, action, status):
    pool.reset({0: ("train", 0), 1: ("train", 1), 2: ("train", 2)})
    with pytest.warns(UserWarning, match=f"ended with exit status {status}:"):
        assert texts(pool.step({0: action, 1: "a", 2: "a"})) == {0: None, 1: "train 1 a", 2: None}
    assert texts(pool.reset({0: ("train", 3)})) == {0: "train 3"}


@pytest.mark.slow
@pytest.mark.parametrize("pool", [{"timeout": 2.0}], indirect=True)
def test_a_worker_that_hangs_is_replaced(pool):
    views = pool.reset({0: ("train", 0), 1: ("train", 1)})
    for slot, action in [(0, "sleep 1000"), (1, "spin")]:
        with pytest.warns(UserWarning, match="gave no answer in time"):
            views = pool.step({slot: action, 1 - slot: "a"})
        assert views[slot] is None and views[1 - slot].observation.endswith("a")
        pool.reset({slot: ("train", 0)})
    os.kill(pid_of(views[0]), signal.SIGSTOP)  # a stopped worker reads nothing
    with pytest.warns(UserWarning, match="gave no answer in time"):
        assert pool.step({0: "a"}) == {0: None}


@pytest.mark.slow
def test_long_messages_arrive_whole(pool):
    pool.reset({0: ("train", 0)})
    long = "a" * 2_000_000  # ten times the socket's buffer
    assert texts(pool.step({0: long})) == {0: f"train 0 {long}"}


@pytest.mark.slow
@pytest.mark.parametrize("pool", [{"timeout": 1.6}], indirect=True)
def test_the_time_limit_is_per_slot(pool):
    pool.reset({slot: ("train", slot) for slot in range(8)})
    views = pool.step({slot: "sleep 0.5" for slot in range(8)})  # four slots a worker, one after the other
    assert texts(views)[7] == "train 7 sleep 0.5" and None not in views.values()
    with pytest.warns(UserWarning, match="gave no answer in time"):
        views = pool.step({0: "a", 2: "sleep 1000", 1: "a"})
    assert texts(views) == {0: None, 2: None, 1: "train 1 sleep 0.5 a"}


@pytest.mark.slow
@needs_proc
def test_an_environment_that_cannot_be_built_is_an_error(before):
    with pytest.raises(ValueError, match="'elsewhere' is unknown"):
        Pool(functools.partial(make_env, "elsewhere"), 2)
    with pytest.raises(RuntimeError, match=r"(?s)only_in.*OSError: the disk is on fire"):
        Pool(functools.partial(only_in, os.getpid(), "raise"), 1)
    with pytest.raises(RuntimeError, match=r"new worker process \d+ ended with exit status 7"):
        Pool(functools.partial(only_in, os.getpid(), "exit"), 1)
    assert child_processes() == before


@pytest.mark.slow
@needs_proc
def test_closing_leaves_no_process(before):
    pool = Pool(Tally, 3)
    assert len(child_processes() - before) == 3
    pool.close()
    assert child_processes() == before
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.reset({0: ("train", 0)})
    pool = Pool(Tally, 1)
    del pool
    gc.collect()
    assert child_processes() == before


PROGRAM = """
import os, signal, sys
from scale.pool import Pool
from tally import Tally

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest in the background ignores SIGINT
    pool = Pool(Tally, 2)
    views = pool.reset({0: ("train", 0), 1: ("train", 0)})
    pool.step({0: "print"})
    print(*(view.notes.split()[0] for view in views.values()), flush=True)
    if sys.argv[1] == "raise":
        raise KeyError
    if sys.argv[1] != "end":
        pool.step({0: sys.argv[1]})
"""


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("action, number, group", [
    ("end", None, False),
    ("raise", None, False),
    ("spin", signal.SIGKILL, False),
    ("sleep 1000", signal.SIGTERM, False),
    ("sleep 1000", signal.SIGINT, False),
    ("sleep 1000", signal.SIGINT, True),
])  # fmt: skip
def test_no_worker_outlives_its_parent(tmp_path, action, number, group):
    (tmp_path / "program.py").write_text(PROGRAM)
    here = Path(__file__).parent
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), action],
        env=os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]  # standard output has no engine's noise
    assert len(workers) == 2
    if number:
        time.sleep(0.1)
        (os.killpg if group else os.kill)(parent.pid, number)
    noise = parent.communicate(timeout=600)[1]
    assert "noise of an engine" in noise
    assert noise.count("Traceback") == (action == "raise" or number == signal.SIGINT)
    deadline = time.monotonic() + 600
    while any(is_running(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_running(worker) for worker in workers)


# --- slow: whole episodes of a World --------------------------------------------------------------


class Words:
    """A chat of whole words. All samplers share one numbering, in order of first use."""

    numbers = {}
    opened = ""

    def encode(self, text):
        return [self.numbers.setdefault(word, len(self.numbers) + 4) for word in text.split()]

    def decode(self, ids):
        return " ".join(list(self.numbers)[i - 4] for i in ids if i >= 4)

    def first(self, user, system=None):
        return [2, *self.encode(user), 3]

    def extend(self, action_ids, user):
        return [2, *self.encode(user), 3]

    def reply(self, text):
        return [*self.encode(text), 1]


class RandomReplies:
    """A sampler that replies with one of a few texts. Some replies are cut off."""

    def __init__(self, replies):
        self.chat, self.replies = Words(), replies

    def reset(self):
        pass

    close = reset

    def sample(self, policy, prompts, episodes, rngs, temperature, max_tokens):
        samples = []
        for rng in rngs:
            ids = self.chat.reply(rng.choice(self.replies))
            samples.append(Sample(ids, [rng.random() for _ in ids], rng.random() < 0.9))
        return samples


def make_world(make_env, replies, workers, parallel=128, group_size=3):
    sampler = RandomReplies(replies)
    dialogue = Dialogue(sampler.chat, "short", "window", 2, 400, 30)
    return World(
        make_env,
        sampler,
        dialogue,
        group_size=group_size,
        parallel=parallel,
        workers=workers,
        step_limit=8,
    )


def play(make_env, workers, parallel):
    """Return all episodes of a world's methods as dictionaries, its opening tokens and its state."""
    replies = ["look", "go to desk 1", "go to fridge 1", "open fridge 1", "inventory", "a < b"]
    world = make_world(make_env, replies, workers, parallel)
    groups = world.collect(None, 3)
    episodes = [member for group in groups for member in group.trajectories]
    faithful = 0.5 if hasattr(world.pool.env, "wandering_expert") else 1.0
    episodes += world.evaluate(None, "eval", 5, 0.4) + demonstrations(world, 9, 0.5, 0.2, faithful)
    opening = world.opening_tokens()
    world.close()
    return [episode.to_dict() for episode in episodes], opening, world.state_dict()


@pytest.mark.slow
def test_episodes_are_equal_with_any_number_of_workers():
    household = functools.partial(make_env, "household")
    expected = play(household, 0, 128)
    assert len(expected[0]) == 3 * 3 + 5 + 9
    assert len({step["observation"] for episode in expected[0] for step in episode["steps"]}) > 30
    assert play(household, 1, 128) == expected
    assert play(household, 2, 4) == expected
    assert play(Late, 3, 128) == expected  # workers answer at different times


@pytest.mark.slow
@needs_proc
def test_a_world_plays_on_without_the_episodes_of_a_lost_worker(before):
    world = make_world(Tally, ["a"], workers=2, group_size=4)
    second = max(int(pid) for pid in child_processes() - before)
    sample, turns = world.sampler.sample, []

    def sample_and_kill(policy, prompts, **options):
        turns.append(len(prompts))
        if len(turns) == 3:
            os.kill(second, signal.SIGKILL)
        return sample(policy, prompts, **options)

    world.sampler.sample = sample_and_kill
    with pytest.warns(UserWarning, match="its episodes crashed"):
        (group,) = world.collect(None, 1)
    reasons = [member.stop_reason for member in group.trajectories]
    assert reasons == [StopReason.STEP_LIMIT] * 2 + [StopReason.CRASHED] * 2
    assert world.episodes == 4
    turns.extend([0] * 9)
    (group,) = world.collect(None, 1)
    assert all(member.usable for member in group.trajectories)
    world.close()
