"""The pool of environments: the same with any number of workers, whatever dies, and nothing left behind."""

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
from tally import Late, Tally, here_only

from buffer import StopReason
from chat import Dialogue
from envs import Household, make_env
from rollout import World
from sampler import Sample
from scale.pool import Pool

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc"
)


def texts(views):
    return {slot: view and view.observation for slot, view in views.items()}


def process(view):
    return int(view.notes.split()[0])


def running(pid):
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def processes():
    """The processes of this one, zombies included."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return set(path.read_text().split() if path.exists() else [])


@pytest.fixture
def before():
    """Those that other tests have left."""
    return processes()


@pytest.fixture
def pool(request, before):
    """Two workers."""
    pool = Pool(Tally, 2, **getattr(request, "param", {}))
    yield pool
    pool.close()
    assert processes() == before


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_slot_plays_its_own_game(workers):
    pool = Pool(Tally, workers)
    assert texts(pool.reset({0: ("train", 5), 4: ("eval", 0), 1: ("train", 5)})) == {
        0: "train 5",
        4: "eval 0",
        1: "train 5",
    }
    assert texts(pool.step({1: "a", 4: "b"})) == {1: "train 5 a", 4: "eval 0 b"}
    assert texts(pool.step({4: "a", 0: "a"})) == {4: "eval 0 b a", 0: "train 5 a"}
    assert texts(pool.reset({0: ("train", 6)})) == {0: "train 6"}
    assert pool.expert([4, 0]) == {4: ("after a", "look 2"), 0: ("after 6", "look 0")}
    assert pool.reset({}) == pool.step({}) == pool.expert([]) == {}
    pool.close()


def test_a_worker_holds_neither_torch_nor_the_program_of_its_parent(pool):
    views = pool.reset({slot: ("train", 0) for slot in range(4)})
    home = str(os.getpid())
    assert all(view.notes.split()[1:3] == ["False", "False"] for view in views.values())
    assert len({home, *(view.notes.split()[0] for view in views.values())}) == 3


@pytest.mark.parametrize("games, shares", [
    ("aabbaabb", ["aaaa", "bbbb"]),
    ("aaaabb", ["aaa", "abb"]),  # three each, though that takes game a to both
    ("aaaa", ["aa", "aa"]),
    ("abcd", ["ac", "bd"]),
    ("a", ["a"]),
])  # fmt: skip
def test_a_game_is_in_one_worker_as_far_as_equal_shares_allow(pool, games, shares):
    views = pool.reset({slot: ("train", ord(game)) for slot, game in enumerate(games)})
    held = {}
    for slot, game in enumerate(games):
        held.setdefault(process(views[slot]), []).append(game)
    assert sorted("".join(sorted(share)) for share in held.values()) == shares


def test_shares_stay_equal_while_games_end_at_different_times(pool):
    views = pool.reset({slot: ("train", slot) for slot in range(6)})
    for turn in range(20):
        views |= pool.step({slot: "a" for slot in range(6)})
        ended = {slot: ("train", 90 - turn) for slot in ((turn, turn + 1) if turn % 3 else range(6))}
        views |= pool.reset({slot % 6: game for slot, game in ended.items()})
        assert sorted(Counter(map(process, views.values())).values()) == [3, 3]
    assert max(int(view.notes.split()[3]) for view in views.values()) <= 5  # environments made in a worker


def test_workers_work_side_by_side(pool):
    pool.reset({0: ("train", 0), 1: ("train", 0)})
    start = time.monotonic()
    pool.step({0: "sleep 2", 1: "sleep 2"})
    assert time.monotonic() - start < 3.8  # one after the other: 4 or more


def test_playing_in_one_slot_does_not_reach_another():
    # game 0 is won by its expert while game 1, in the same and in another worker, is only looked at
    for workers, slots in [(0, (0, 1)), (1, (0, 1)), (2, (0, 1)), (2, (0, 2))]:
        pool, (busy, idle) = Pool(Late, workers), slots
        opening = pool.reset({busy: ("train", 0), idle: ("train", 1)})
        alone = Household()
        assert opening[idle] == alone.reset("train", 1)
        looked = alone.step("look")
        for _ in range(50):
            views = pool.step({busy: pool.expert([busy])[busy][0], idle: "look"})
            assert views[idle] == looked
            if views[busy].done:
                break
        assert (views[busy].success, views[idle].success) == (True, False)
        pool.close()


class Words:
    """A chat of whole words; one numbering for all, as its numbers are given in the order of coming."""

    numbers = {}

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


class Fickle:
    """A sampler that says any of a few things, and is at times cut short."""

    def __init__(self, says):
        self.chat, self.says = Words(), says

    def reset(self):
        pass

    close = reset

    def sample(self, policy, prompts, episodes, rngs, temperature, max_tokens):
        replies = [self.chat.reply(rng.choice(self.says)) for rng in rngs]
        return [
            Sample(ids, [rng.random() for _ in ids], rng.random() < 0.9)
            for ids, rng in zip(replies, rngs, strict=True)
        ]


def world(make_env, says, workers, parallel=128, group_size=3):
    sampler = Fickle(says)
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


def played(make_env, workers, parallel):
    says = ["look", "go to desk 1", "go to fridge 1", "open fridge 1", "inventory", "a < b"]
    place = world(make_env, says, workers, parallel)
    groups = place.collect(None, 3)
    episodes = [member for group in groups for member in group.trajectories]
    episodes += place.evaluate(None, "eval", 5, 0.4) + place.demonstrations(9, 0.5, 0.2)
    opening = place.opening_tokens()
    place.close()
    return [episode.to_dict() for episode in episodes], opening, place.state_dict()


def test_episodes_are_the_same_with_any_number_of_workers():
    household = functools.partial(make_env, "household")
    alone = played(household, 0, 128)
    assert len(alone[0]) == 3 * 3 + 5 + 9
    assert len({step["observation"] for episode in alone[0] for step in episode["steps"]}) > 30
    assert played(household, 1, 128) == alone
    assert played(household, 2, 4) == alone
    assert played(Late, 3, 128) == alone  # answers of some workers come after those of others


def test_a_killed_worker_is_replaced_and_costs_the_episodes_it_held(pool):
    views = pool.reset({slot: ("train", slot) for slot in range(4)})
    victim = process(views[1])
    os.kill(victim, signal.SIGKILL)
    with pytest.warns(UserWarning, match="ended with exit status -9"):
        views = pool.step({0: "a", 1: "a", 2: "a"})  # slot 3 says nothing in this turn
    assert texts(views) == {0: "train 0 a", 1: None, 2: "train 2 a"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts(pool.step({3: "a", 2: "b"})) == {3: None, 2: "train 2 a b"}
        assert pool.expert([1, 0]) == {1: None, 0: ("after a", "look 1")}
        views = pool.reset({3: ("eval", 7)})
        assert texts(views) == {3: "eval 7"} and texts(pool.step({3: "b"})) == {3: "eval 7 b"}
    assert process(views[3]) != victim and not Path(f"/proc/{victim}").exists()


@pytest.mark.parametrize("action, status", [("die", "-9"), ("exit", "3")])
def test_a_worker_that_dies_in_a_step_is_replaced(pool, action, status):
    pool.reset({0: ("train", 0), 1: ("train", 1), 2: ("train", 2)})
    with pytest.warns(UserWarning, match=f"ended with exit status {status}:"):
        assert texts(pool.step({0: action, 1: "a", 2: "a"})) == {0: None, 1: "train 1 a", 2: None}
    assert texts(pool.reset({0: ("train", 3)})) == {0: "train 3"}


@pytest.mark.parametrize("pool", [{"timeout": 2.0}], indirect=True)
def test_a_worker_that_hangs_is_replaced(pool):
    views = pool.reset({0: ("train", 0), 1: ("train", 1)})
    for slot, action in [(0, "sleep 1000"), (1, "spin")]:
        with pytest.warns(UserWarning, match="gave no answer in time"):  # it would never have answered
            views = pool.step({slot: action, 1 - slot: "a"})
        assert views[slot] is None and views[1 - slot].observation.endswith("a")
        pool.reset({slot: ("train", 0)})
    stopped = process(views[0])  # a worker that is stopped reads nothing: long actions fill the socket
    os.kill(stopped, signal.SIGSTOP)
    with pytest.warns(UserWarning, match="gave no answer in time"):
        assert pool.step({0: "a" * 2_000_000}) == {0: None}


@pytest.mark.parametrize("pool", [{"timeout": 1.6}], indirect=True)
def test_the_time_limit_is_that_of_one_answer(pool):
    pool.reset({slot: ("train", slot) for slot in range(8)})
    views = pool.step({slot: "sleep 0.5" for slot in range(8)})  # in each worker four, one after the other
    assert texts(views)[7] == "train 7 sleep 0.5" and None not in views.values()
    with pytest.warns(UserWarning, match="gave no answer in time"):
        views = pool.step({0: "a", 2: "sleep 1000", 1: "a"})
    assert texts(views) == {0: None, 2: None, 1: "train 1 sleep 0.5 a"}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:the episode of game")
def test_an_engine_that_breaks_costs_its_own_episode(workers):
    pool = Pool(Tally, workers)
    pool.reset({slot: ("train", slot) for slot in range(3)})
    assert texts(pool.step({0: "crash", 1: "a", 2: "a"})) == {0: None, 1: "train 1 a", 2: "train 2 a"}
    assert texts(pool.step({0: "a", 2: "blind"})) == {0: None, 2: "train 2 a blind"}
    assert pool.expert([2, 1]) == {2: None, 1: ("after a", "look 1")}
    assert texts(pool.reset({0: ("train", 4)})) == {0: "train 4"}
    pool.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_each_reason_of_a_crash_is_told_once(workers):
    pool = Pool(Tally, workers)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for index in (5, 6):
            pool.reset({0: ("train", index), 1: ("eval", index), 2: ("eval", 7)})
            pool.step({0: "crash", 1: "crash", 2: "blind"})
            assert pool.expert([2]) == {2: None}
    pool.close()
    assert [str(warning.message) for warning in told] in (
        [
            f"the episode of game {first} 5 crashed: the engine broke",
            "the episode of game eval 7 crashed: the expert broke",
        ]
        for first in ("train", "eval")
    )
    assert {Path(warning.filename).name for warning in told} == {"test_pool.py"}


@needs_proc
def test_a_mistake_in_an_environment_is_the_callers_to_see(before):
    for slots in ([0, 1, 2], [1]):
        pool = Pool(Tally, 2)
        pool.reset({slot: ("train", 0) for slot in slots})
        with pytest.raises(RuntimeError, match=r"(?s)in step.*ValueError: a mistake in the environment"):
            pool.step({slot: "err" if slot == 1 else "a" for slot in slots})
        assert processes() == before
        with pytest.raises(RuntimeError, match="closed"):
            pool.step({0: "a"})
    pool = Pool(Tally)
    pool.reset({0: ("train", 0)})
    with pytest.raises(ValueError, match="a mistake in the environment"):
        pool.step({0: "err"})


@needs_proc
def test_an_environment_that_cannot_be_built_is_an_error_at_once(before):
    with pytest.raises(ValueError, match="'elsewhere' is unknown"):
        Pool(functools.partial(make_env, "elsewhere"), 2)
    with pytest.raises(RuntimeError, match=r"(?s)here_only.*OSError: the disk is on fire"):
        Pool(functools.partial(here_only, os.getpid(), "raise"), 1)
    with pytest.raises(RuntimeError, match=r"new worker process \d+ ended with exit status 7"):
        Pool(functools.partial(here_only, os.getpid(), "exit"), 1)
    assert processes() == before


def test_a_world_plays_on_without_the_episodes_of_a_lost_worker():
    place = world(Tally, ["a"], workers=2, group_size=4)
    assert place.step_limit == 8
    sample, turns = place.sampler.sample, []

    def and_kill(policy, prompts, **options):
        turns.append(len(prompts))
        if len(turns) == 3:
            os.kill(place.pool._workers[1].process.pid, signal.SIGKILL)
        return sample(policy, prompts, **options)

    place.sampler.sample = and_kill
    with pytest.warns(UserWarning, match="its episodes crashed"):
        (group,) = place.collect(None, 1)
    reasons = [member.stop_reason for member in group.trajectories]
    assert reasons == [StopReason.STEP_LIMIT] * 2 + [StopReason.CRASHED] * 2
    assert place.episodes == 4
    turns.extend([0] * 9)
    (group,) = place.collect(None, 1)
    assert all(member.usable for member in group.trajectories)
    place.close()


@needs_proc
def test_closing_leaves_nothing_behind(before):
    pool = Pool(Tally, 3)
    assert len(processes() - before) == 3
    pool.close()
    assert processes() == before
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.reset({0: ("train", 0)})
    pool = Pool(Tally, 1)
    del pool
    gc.collect()
    assert processes() == before


PROGRAM = """
import os, signal, sys
from pool import Pool
from tally import Tally

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    pool = Pool(Tally, 2)
    views = pool.reset({0: ("train", 0), 1: ("train", 0)})
    pool.step({0: "print"})
    print(*(view.notes.split()[0] for view in views.values()), flush=True)
    if sys.argv[1] == "raise":
        raise KeyError
    if sys.argv[1] != "end":
        pool.step({0: sys.argv[1]})
"""


@needs_proc
@pytest.mark.parametrize("doing, number, group", [
    ("end", None, False),
    ("raise", None, False),
    ("spin", signal.SIGKILL, False),
    ("sleep 1000", signal.SIGTERM, False),
    ("sleep 1000", signal.SIGINT, False),
    ("sleep 1000", signal.SIGINT, True),
])  # fmt: skip
def test_no_worker_outlives_its_parent(tmp_path, doing, number, group):
    (tmp_path / "program.py").write_text(PROGRAM)
    here = Path(__file__).parent
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), doing],
        env=os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]  # the engine's noise is not here
    assert len(workers) == 2
    if number:
        time.sleep(0.1)
        (os.killpg if group else os.kill)(parent.pid, number)
    noise = parent.communicate(timeout=60)[1]
    assert "noise of an engine" in noise
    assert noise.count("Traceback") == (doing == "raise" or number == signal.SIGINT)
    deadline = time.monotonic() + 60
    while any(running(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(running(worker) for worker in workers)
