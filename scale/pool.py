"""Many environments behind one call per turn: in this process, or spread over worker processes.

`Pool` holds environments by slot. A turn sends one message to each worker that has something to do, then
gathers the answers, so workers run side by side. A reset deals its slots to the workers anew, in equal shares
and those of one game together: an engine that must prepare a game does so in one worker. All randomness of an
episode is the caller's, so nothing depends on the number of workers.

A worker is this file run as a script, with one socket to its parent. It begins from nothing, so it holds
neither torch nor the caller's program, which multiprocessing's "spawn" would import again and "fork" would
copy with its threads. It ends when the socket does, however the parent ended.

An engine that breaks (EnvironmentCrashed) costs its own episode; a worker that dies or hangs is replaced and
costs the episodes it held. Any other exception is a mistake in a program and is raised in the caller.

Left out: moving an episode that has begun, and workers on other machines.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from envs import Env, EnvironmentCrashed, View

ROOT = str(Path(__file__).parent.parent)
START = f"import sys; sys.path[:0] = [{ROOT!r}]; from scale.pool import main; main()"
START_SECONDS = 900.0  # for a worker to build its first environment, which may read much
GRACE_SECONDS = 1.0  # for a worker to end by itself once its socket is closed
ALIVE_SECONDS = 0.1  # a worker that is busy for longer says so, after each of its slots


class _Slots:
    """The environments of one process by slot. One that crashed is not used again."""

    def __init__(self, make_env: Callable[[], Env], first: Env):
        self.make_env, self.spare, self.envs = make_env, [first], {}
        self.games: dict[int, tuple[str, int]] = {}
        self.crashes: list[tuple[str, str]] = []  # (game, reason), until they are told

    def ask(self, kind: str, slot: int, *given):
        """The answer of that slot; None where the environment crashed or there is none."""
        if kind == "reset" and slot not in self.envs:
            self.envs[slot] = self.spare.pop() if self.spare else self.make_env()
        if slot not in self.envs:
            return None
        env = self.envs[slot]
        try:
            if kind == "reset":
                self.games[slot] = given
                return env.reset(*given)
            if kind == "step":
                return env.step(*given)
            return env.searching_expert(), env.look_around
        except EnvironmentCrashed as crash:
            del self.envs[slot]
            self.crashes.append(("{} {}".format(*self.games[slot]), str(crash)))
            return None

    def leave(self, slots: list[int]) -> None:
        """Their next games are another worker's."""
        self.spare += [self.envs.pop(slot) for slot in slots if slot in self.envs]

    def crashes_untold(self) -> list[tuple[str, str]]:
        told, self.crashes = self.crashes, []
        return told


class _WorkerLost(Exception):
    """A worker died or did not answer in time."""


class _Worker:
    """One child process and the socket to it. Each message is answered by one, after any signs of life."""

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        self.answers = self.socket.makefile("rb")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # engines print; the caller's standard output is the caller's
                start_new_session=True,  # Ctrl-C in a terminal reaches the parent alone
            )

    def send(self, message, timeout: float) -> None:
        self.heard, self.timeout = time.monotonic(), timeout
        try:
            self._wait()
            self.socket.sendall(pickle.dumps(message))
        except OSError as error:
            raise _WorkerLost(self._why(error)) from error

    def receive(self):
        try:
            self._wait()
            while (said := pickle.load(self.answers))[0] == "alive":
                self.heard = said[1]
                self._wait()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise _WorkerLost(self._why(error)) from error
        if said[0] == "mistake":
            raise RuntimeError(f"an environment failed in a worker process:\n{said[1]}")
        return said[1]

    def hang_up(self) -> None:
        """Close the socket: the worker reads its end and ends."""
        self.answers.close()
        self.socket.close()

    def end(self, seconds: float) -> int:
        """Its exit status; it is killed if it has not ended by itself in so long."""
        self.hang_up()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _wait(self) -> None:
        left = self.heard + self.timeout - time.monotonic()
        self.socket.settimeout(max(left, 0.01))  # what has come already is still read

    def _why(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"{self.process.pid} gave no answer in time"
        return f"{self.process.pid} ended with exit status {self.end(GRACE_SECONDS)}"


class Pool:
    """Environments by slot, any number of slots; a slot's environment is built at its first reset.

    workers: 0 plays in this process; else that many processes, for which `make_env` must be picklable.
    timeout: seconds a worker may take for the answer of one slot before it counts as hung; it answers one
    after the other. All it held is lost then, also what it did for other slots in that turn.
    `env` is an environment of this process, to be asked for what never changes: name, splits, vocabulary.

    An answer of None says that the episode in that slot has crashed; a warning tells each reason once. Any
    exception but a crash closes a pool that has workers. Else it is closed by `close`, by garbage collection
    or at Python's exit.
    """

    def __init__(self, make_env: Callable[[], Env], workers: int = 0, timeout: float = 300.0):
        self.timeout = timeout
        self.env = make_env()
        self._here = _Slots(make_env, self.env)
        self._reasons: set[str] = set()  # of crashes, told already
        self._workers: dict[int, _Worker] = {}
        self._place: dict[int, int] = {}  # of each slot, among the workers
        self._left: dict[int, list[int]] = {}  # slots that have left a place, until that worker is told
        self._playing: set[int] = set()  # the slots of the last step
        self._end = weakref.finalize(self, _end, self._workers)
        if workers:
            self._make_env = pickle.dumps(make_env)
            with self._closed_by_exceptions():
                self._start(range(workers))

    def reset(self, games: dict[int, tuple[str, int]]) -> dict[int, View | None]:
        """Begin the games (split, index) in their slots."""
        if self._workers:
            self._deal(games)
        return self._ask([("reset", slot, *game) for slot, game in games.items()])

    def step(self, actions: dict[int, str]) -> dict[int, View | None]:
        """Act in those slots."""
        self._playing = set(actions)
        return self._ask([("step", slot, action) for slot, action in actions.items()])

    def expert(self, slots: Iterable[int]) -> dict[int, tuple[str, str] | None]:
        """(the searching expert's action, the action that looks around) in those slots' present states."""
        return self._ask([("expert", slot) for slot in slots])

    def close(self) -> None:
        """End the workers, at once or within `GRACE_SECONDS`. A closed pool plays no more."""
        self._end()

    def _deal(self, games: dict[int, tuple[str, int]]) -> None:
        """Give each game to the worker that has least to do, what is over its share to the next."""
        load = Counter(self._place[slot] for slot in self._playing - games.keys() if slot in self._place)
        share = math.ceil((load.total() + len(games)) / len(self._workers))
        last, place = None, 0
        for slot in sorted(games, key=games.__getitem__):
            if games[slot] != last or load[place] >= share:
                last, place = games[slot], min(self._workers, key=load.__getitem__)
            load[place] += 1
            if self._place.get(slot, place) != place:
                self._left.setdefault(self._place[slot], []).append(slot)
            self._place[slot] = place

    def _ask(self, calls: list[tuple]) -> dict:
        """The answers to (kind, slot, ...) by slot."""
        if not self._end.alive:
            raise RuntimeError("this pool of environments is closed")
        if self._workers:
            with self._closed_by_exceptions():
                answers, crashes = self._ask_workers(calls)
        else:
            answers = {call[1]: self._here.ask(*call) for call in calls}
            crashes = self._here.crashes_untold()
        for game, reason in crashes:
            if reason not in self._reasons:
                self._reasons.add(reason)
                warnings.warn(f"the episode of game {game} crashed: {reason}", stacklevel=3)
        return answers

    def _ask_workers(self, calls: list[tuple]) -> tuple[dict, list]:
        """The answers, and the crashes among them."""
        shares: dict[int, list[tuple]] = {}
        for call in calls:
            shares.setdefault(self._place.get(call[1], 0), []).append(call)
        answers: dict[int, object] = {call[1]: None for call in calls}
        crashes: list[tuple[str, str]] = []
        lost: dict[int, _WorkerLost] = {}
        for place, share in shares.items():
            try:
                self._workers[place].send((self._left.pop(place, []), share), self.timeout)
            except _WorkerLost as loss:
                lost[place] = loss
        for place in shares:
            if place not in lost:
                try:
                    given, broken = self._workers[place].receive()
                except _WorkerLost as loss:
                    lost[place] = loss
                else:
                    answers |= given
                    crashes += broken
        for place, loss in lost.items():
            warnings.warn(f"worker process {loss}: it is replaced, its episodes crashed", stacklevel=4)
            self._workers[place].end(0.0)
        self._start(lost)
        return answers, crashes

    def _start(self, places: Iterable[int]) -> None:
        """Put new workers there. One that does not come up is an error: a second one would not either."""
        for place in places:
            self._workers[place] = _Worker()
        try:
            for place in places:
                self._workers[place].send((sys.path, self._make_env), START_SECONDS)
            for place in places:
                self._workers[place].receive()
        except _WorkerLost as loss:
            raise RuntimeError(f"new worker process {loss}") from loss

    @contextlib.contextmanager
    def _closed_by_exceptions(self):
        """Answers may be on their way still when one is raised: none may be taken for a later one's."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _end(workers: dict[int, _Worker]) -> None:
    for worker in workers.values():
        worker.hang_up()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers.values():
        worker.end(max(deadline - time.monotonic(), 0.0))
    workers.clear()


# The worker's side.


def _serve(parent: socket.socket) -> None:
    """Answer what comes until the parent is gone.

    What is said: ("alive", the time), any number of them, then ("answer", value) or ("mistake", its text).
    """
    requests = parent.makefile("rb")

    def say(what: str, value) -> None:
        parent.sendall(pickle.dumps((what, value)))

    path, make_env = pickle.load(requests)
    sys.path[:] = path  # what the caller can import can be imported here
    try:
        make_env = pickle.loads(make_env)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the caller's own environment has told of the data already
            slots = _Slots(make_env, make_env())
    except Exception:
        return say("mistake", traceback.format_exc())
    say("answer", None)
    while True:
        left, calls = pickle.load(requests)
        slots.leave(left)
        answers, said = {}, time.monotonic()
        try:
            for call in calls:
                answers[call[1]] = slots.ask(*call)
                if (now := time.monotonic()) > said + ALIVE_SECONDS:
                    said = now
                    say("alive", now)
        except Exception:  # whatever it is, the caller is to see it
            say("mistake", traceback.format_exc())
        else:
            say("answer", (answers, slots.crashes_untold()))


def _end_with(parent: socket.socket) -> None:
    """A thread that ends a worker whose parent is gone even while an environment is busy or hangs."""
    gone = select.poll()
    gone.register(parent, 0)
    gone.poll()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = socket.socket(fileno=int(sys.argv[1]))
    parent.set_inheritable(False)
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone, or done
        _serve(parent)
