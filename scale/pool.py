"""Play many environments with one call per turn, in this process or in worker processes.

A `Pool` holds one environment per slot. A turn sends one message to each worker that has work, then collects
the answers, so the workers run side by side. Each reset divides its slots among the workers in equal shares
and keeps slots with the same game together, so that an engine prepares a game in as few workers as possible.
The caller draws all random numbers, so episodes do not depend on the number of workers.

A worker is a new Python process with one connection to its parent. It uses neither multiprocessing's "spawn",
which would import the caller's program again (and torch with it), nor "fork", which would copy a process that
has threads. A worker ends when its parent does, however the parent ended.

Failures:
    EnvironmentCrashed in an engine   ends its own episode
    a worker that dies or hangs       is replaced; all episodes in it end
    any other exception               is a bug, and is raised in the caller with the worker's traceback

Left out: moving an episode to another worker after its start, and workers on other machines.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from envs import Env, EnvironmentCrashed, View

START_SECONDS = 900.0  # time limit for building a worker's first environment, which may read large files
GRACE_SECONDS = 1.0  # time for a worker to end by itself after its connection is closed
ALIVE_SECONDS = 0.1  # shortest time between two signs of life of a busy worker
ROOT = Path(__file__).resolve().parents[__name__.count(".")]  # the folder from which this module is imported
WORKER = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from {__name__} import main; main()"  # for python -c


class Slots:
    """Hold the environments of one process by slot.

    An environment that has crashed is dropped; the next reset of its slot takes another one.
    """

    def __init__(self, make_env: Callable[[], Env], first: Env):
        self.make_env = make_env
        self.spare = [first]  # environments without a slot
        self.envs: dict[int, Env] = {}
        self.games: dict[int, tuple[str, int]] = {}
        self.crashes: list[tuple[str, str]] = []  # (game, reason), not reported yet

    def ask(self, kind: str, slot: int, *arguments):
        """Return the environment's answer to "reset", "step" or "expert".

        Returns None if the environment crashes, or if the slot has none because it crashed earlier.
        """
        if kind == "reset" and slot not in self.envs:
            self.envs[slot] = self.spare.pop() if self.spare else self.make_env()
        if slot not in self.envs:
            return None
        env = self.envs[slot]
        try:
            if kind == "reset":
                self.games[slot] = arguments
                return env.reset(*arguments)
            if kind == "step":
                return env.step(*arguments)
            action = env.wandering_expert(*arguments) if arguments else env.searching_expert()
            return action, env.look_around
        except EnvironmentCrashed as crash:
            del self.envs[slot]
            split, index = self.games[slot]
            self.crashes.append((f"{split} {index}", str(crash)))
            return None

    def release(self, slots: list[int]) -> None:
        """Free these slots; their environments become spare. Another worker plays the slots' next games."""
        for slot in slots:
            if slot in self.envs:
                self.spare.append(self.envs.pop(slot))

    def take_crashes(self) -> list[tuple[str, str]]:
        """Return the crashes (game, reason) since the last call."""
        crashes, self.crashes = self.crashes, []
        return crashes


def assign(games: dict[int, tuple[str, int]], load: list[int]) -> dict[int, int]:
    """Choose a worker for each slot.

    games: the game that each slot is about to start.
    load: for each worker, the number of episodes that it still plays.

    Each game goes to the worker with the least load. When that worker has its equal share of all episodes,
    the game's other slots go to the next worker.
    """
    load = list(load)
    share = math.ceil((sum(load) + len(games)) / len(load))
    workers: dict[int, int] = {}
    last, worker = None, 0
    for slot in sorted(games, key=games.__getitem__):
        if games[slot] != last or load[worker] >= share:
            last, worker = games[slot], load.index(min(load))
        load[worker] += 1
        workers[slot] = worker
    return workers


class _WorkerLost(Exception):
    """A worker died or did not answer in time."""


class _Worker:
    """One child process and the connection to it.

    The worker answers each message with one result, after any number of signs of life.
    """

    def __init__(self):
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                # -u: what an engine prints is not lost in a buffer if the worker is killed
                [sys.executable, "-u", "-c", WORKER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # engines print to standard error: standard output belongs to the caller
                start_new_session=True,  # Ctrl-C in a terminal interrupts only the parent
            )

    def send(self, message, timeout: float) -> None:
        """Send a message. The answer may take `timeout` seconds per slot."""
        # Connection.send has no time limit: it waits while the socket's buffer (about 200 KB) is full. That
        # is safe: a worker gets a message only after it has answered the last one, and by then it reads.
        # Only a worker that is stopped from outside (SIGSTOP) can block the parent, if the message is larger
        # than the buffer. Connection.recv is safe for the same reason: a worker sends only whole answers.
        self.heard, self.timeout = time.monotonic(), timeout
        try:
            self.connection.send(message)
        except OSError as error:
            raise _WorkerLost(self._exit_status()) from error

    def receive(self):
        """Return the answer to the last message. Raises _WorkerLost, or RuntimeError for a worker's bug."""
        while True:
            left = self.heard + self.timeout - time.monotonic()
            try:
                if not self.connection.poll(max(left, 0.0)):  # 0.0: an answer that has arrived is still read
                    raise _WorkerLost(f"{self.process.pid} gave no answer in time")
                kind, value = self.connection.recv()
            except (OSError, EOFError) as error:
                raise _WorkerLost(self._exit_status()) from error
            if kind == "answer":
                return value
            if kind == "error":
                raise RuntimeError(f"an environment failed in a worker process:\n{value}")
            self.heard = value  # kind "alive": the time at which it was sent

    def hang_up(self) -> None:
        """Close the connection. The worker then reads its end and exits."""
        self.connection.close()

    def end(self, seconds: float) -> int:
        """Return the exit status. A worker that does not exit by itself within `seconds` is killed."""
        self.hang_up()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _exit_status(self) -> str:
        return f"{self.process.pid} ended with exit status {self.end(GRACE_SECONDS)}"


class Pool:
    """Any number of slots, each with an environment that is built at the slot's first reset.

    make_env: builds one environment; with workers it must be picklable.
    workers: number of worker processes; 0 plays in this process.
    timeout: seconds that a worker may take for the answer of one slot. A worker answers its slots one after
        another. One that takes longer counts as hung and loses all its episodes.

    `env` is an environment of this process, for facts that never change: name, splits, vocabulary.

    Answers are dictionaries by slot. None means that the slot's episode has crashed; a warning shows each
    reason once. Any exception other than a crash closes a pool that has workers. Otherwise the pool is closed
    by `close`, by garbage collection or when Python exits.
    """

    def __init__(self, make_env: Callable[[], Env], workers: int = 0, timeout: float = 300.0):
        self.timeout = timeout
        self.env = make_env()
        self._local = Slots(make_env, self.env)
        self._reasons: set[str] = set()  # of crashes that a warning has shown
        self._workers: list[_Worker] = []
        self._worker_of: dict[int, int] = {}  # by slot
        self._released: dict[int, list[int]] = {}  # by worker: slots that left it since its last message
        self._playing: set[int] = set()  # the slots of the last step
        self._finalizer = weakref.finalize(self, _end, self._workers)
        if workers:
            self._make_env = pickle.dumps(make_env)
            with self._closed_by_exceptions():
                for _ in range(workers):
                    self._workers.append(_Worker())
                self._build_first(range(workers))

    def reset(self, games: dict[int, tuple[str, int]]) -> dict[int, View | None]:
        """Start a game (split, index) in each slot; return the first views."""
        if self._workers:
            self._assign(games)
        return self._ask([("reset", slot, *game) for slot, game in games.items()])

    def step(self, actions: dict[int, str]) -> dict[int, View | None]:
        """Take each slot's action; return the next views."""
        self._playing = set(actions)
        return self._ask([("step", slot, action) for slot, action in actions.items()])

    def expert(
        self, slots: Iterable[int], goals: dict[int, str] | None = None
    ) -> dict[int, tuple[str, str] | None]:
        """Return (the searching expert's action, the action that looks around) in each slot's state.

        goals: by slot, the seed of another goal, which the expert pursues in place of the task.
        """
        goals = goals or {}
        return self._ask([("expert", slot, *([goals[slot]] if slot in goals else [])) for slot in slots])

    def close(self) -> None:
        """End the workers, within `GRACE_SECONDS`. A closed pool raises RuntimeError when it is used."""
        self._finalizer()

    def _assign(self, games: dict[int, tuple[str, int]]) -> None:
        """Assign each slot that starts a game to a worker; note the slots that leave another worker."""
        load = [0] * len(self._workers)
        for slot in self._playing - games.keys():
            if slot in self._worker_of:
                load[self._worker_of[slot]] += 1
        for slot, worker in assign(games, load).items():
            before = self._worker_of.get(slot, worker)
            if before != worker:
                self._released.setdefault(before, []).append(slot)
            self._worker_of[slot] = worker

    def _ask(self, calls: list[tuple]) -> dict:
        """Return the answers to calls (kind, slot, ...) by slot, and warn of crashes."""
        if not self._finalizer.alive:
            raise RuntimeError("this pool of environments is closed")
        if self._workers:
            with self._closed_by_exceptions():
                answers, crashes = self._ask_workers(calls)
        else:
            answers = {call[1]: self._local.ask(*call) for call in calls}
            crashes = self._local.take_crashes()
        for game, reason in crashes:
            if reason not in self._reasons:
                self._reasons.add(reason)
                warnings.warn(f"the episode of game {game} crashed: {reason}", stacklevel=3)
        return answers

    def _ask_workers(self, calls: list[tuple]) -> tuple[dict, list]:
        """Return the answers by slot and the crashes (game, reason). Workers that are lost are replaced."""
        shares: dict[int, list[tuple]] = {}
        for call in calls:
            shares.setdefault(self._worker_of.get(call[1], 0), []).append(call)
        answers: dict[int, object] = {call[1]: None for call in calls}
        crashes: list[tuple[str, str]] = []
        lost: dict[int, _WorkerLost] = {}
        for i, share in shares.items():
            try:
                self._workers[i].send((self._released.pop(i, []), share), self.timeout)
            except _WorkerLost as loss:
                lost[i] = loss
        for i in [i for i in shares if i not in lost]:
            try:
                worker_answers, worker_crashes = self._workers[i].receive()
            except _WorkerLost as loss:
                lost[i] = loss
            else:
                answers |= worker_answers
                crashes += worker_crashes
        for i, loss in lost.items():
            warnings.warn(f"worker process {loss}: it is replaced, its episodes crashed", stacklevel=4)
            self._workers[i].end(0.0)
            self._workers[i] = _Worker()
        self._build_first(lost)
        return answers, crashes

    def _build_first(self, places: Iterable[int]) -> None:
        """Make new workers build their first environments, side by side.

        Raises RuntimeError if a worker ends first, because a replacement would fail in the same way.
        """
        try:
            for i in places:
                self._workers[i].send((sys.path, self._make_env), START_SECONDS)
            for i in places:
                self._workers[i].receive()
        except _WorkerLost as loss:
            raise RuntimeError(f"new worker process {loss}") from loss

    @contextlib.contextmanager
    def _closed_by_exceptions(self):
        """Close the pool after an exception.

        Unread answers may remain in the connections. They must not be read as answers to later calls.
        """
        try:
            yield
        except BaseException:
            self.close()
            raise


def _end(workers: list[_Worker]) -> None:
    """End all workers of a pool at the same time."""
    for worker in workers:
        worker.hang_up()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.end(max(deadline - time.monotonic(), 0.0))
    workers.clear()


# --- in the worker process ----------------------------------------------------------------------------------


def _serve(parent: Connection) -> None:
    """Answer the parent's messages until the connection ends (EOFError).

    A reply is any number of ("alive", time), then ("answer", value) or ("error", traceback).
    """
    path, pickled = parent.recv()
    sys.path[:] = path  # the worker can import all that the caller can
    try:
        make_env = pickle.loads(pickled)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the caller's own environment has shown the same warnings
            slots = Slots(make_env, make_env())
    except Exception:
        parent.send(("error", traceback.format_exc()))
        return
    parent.send(("answer", None))
    while True:
        released, calls = parent.recv()
        slots.release(released)
        answers, last_sign = {}, time.monotonic()
        try:
            for call in calls:
                answers[call[1]] = slots.ask(*call)
                now = time.monotonic()
                if now > last_sign + ALIVE_SECONDS:
                    last_sign = now
                    parent.send(("alive", now))
        except Exception:  # a bug of any kind is raised in the caller
            parent.send(("error", traceback.format_exc()))
        else:
            parent.send(("answer", (answers, slots.take_crashes())))


def _exit_with(parent: Connection) -> None:
    """End this worker when its parent is gone, even while an environment is busy or hangs (in a thread)."""
    gone = select.poll()
    gone.register(parent, 0)
    gone.poll()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def main() -> None:
    """Run a worker. Its last argument is the file descriptor of its end of the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(sys.argv[-1])
    os.set_inheritable(descriptor, False)
    parent = Connection(descriptor)
    threading.Thread(target=_exit_with, args=[parent], daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone, or has closed the connection
        _serve(parent)
