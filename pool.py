"""Many environments behind one call per turn: in this process, or spread over worker processes.

`Pool` holds environments by slot: slot i lives in worker i % n. A turn sends one message to each worker that
has something to do, then gathers the answers, so workers run side by side. All randomness of an episode is
the caller's, so nothing depends on the number of workers.

A worker is this file run as a script, with one socket to its parent. It begins from nothing, so it holds
neither torch nor the caller's program, which multiprocessing's "spawn" would import again and "fork" would
copy with its threads. It ends when the socket does, however the parent ended.

An engine that breaks (EnvironmentCrashed) costs its own episode; a worker that dies or hangs is replaced and
costs the episodes it held. Any other exception is a mistake in a program and is raised in the caller.

Left out: moving slots between workers, and workers on other machines.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterable

from envs import Env, EnvironmentCrashed, View

START_SECONDS = 900.0  # for a worker to build its first environment, which may read much
GRACE_SECONDS = 1.0  # for a worker to end by itself once its socket is closed


class _Slots:
    """The environments of one process by slot. One that crashed is not used again."""

    def __init__(self, make_env: Callable[[], Env], first: Env):
        self.make_env, self.spare, self.envs = make_env, [first], {}

    def ask(self, kind: str, calls: list[tuple]) -> list:
        """The answers to (slot, ...) in their order; None where the environment crashed or there is none."""
        return [self._ask(kind, *call) for call in calls]

    def _ask(self, kind: str, slot: int, *given):
        if kind == "reset" and slot not in self.envs:
            self.envs[slot] = self.spare.pop() if self.spare else self.make_env()
        if slot not in self.envs:
            return None
        env = self.envs[slot]
        try:
            if kind == "reset":
                return env.reset(*given)
            if kind == "step":
                return env.step(*given)
            return env.searching_expert(), env.look_around
        except EnvironmentCrashed:
            del self.envs[slot]
            return None


class _WorkerLost(Exception):
    """A worker died or did not answer in time."""


class _Worker:
    """One child process and the socket to it. Each message is answered by one."""

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        self.answers = self.socket.makefile("rb")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # engines print; the caller's standard output is the caller's
                start_new_session=True,  # Ctrl-C in a terminal reaches the parent alone
            )

    def send(self, message, deadline: float) -> None:
        try:
            self._wait_until(deadline)
            self.socket.sendall(pickle.dumps(message))
        except OSError as error:
            raise _WorkerLost(self._why(error)) from error

    def receive(self, deadline: float):
        try:
            self._wait_until(deadline)
            answer, mistake = pickle.load(self.answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise _WorkerLost(self._why(error)) from error
        if mistake:
            raise RuntimeError(f"an environment failed in a worker process:\n{mistake}")
        return answer

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

    def _wait_until(self, deadline: float) -> None:
        self.socket.settimeout(max(deadline - time.monotonic(), 0.01))  # what has come already is still read

    def _why(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"{self.process.pid} gave no answer in time"
        return f"{self.process.pid} ended with exit status {self.end(GRACE_SECONDS)}"


class Pool:
    """Environments by slot, any number of slots; a slot's environment is built at its first reset.

    workers: 0 plays in this process; else that many processes, for which `make_env` must be picklable.
    timeout: seconds a worker may take for one turn of all its slots before it counts as hung.
    `env` is an environment of this process, to be asked for what never changes: name, splits, vocabulary.

    An answer of None says that the episode in that slot has crashed. Any exception but a crash closes a pool
    that has workers. Else it is closed by `close`, by garbage collection or at Python's exit.
    """

    def __init__(self, make_env: Callable[[], Env], workers: int = 0, timeout: float = 300.0):
        self.timeout = timeout
        self.env = make_env()
        self._here = _Slots(make_env, self.env)
        self._workers: dict[int, _Worker] = {}
        self._end = weakref.finalize(self, _end, self._workers)
        if workers:
            self._make_env = pickle.dumps(make_env)
            with self._closed_by_exceptions():
                self._start(range(workers))

    def reset(self, games: dict[int, tuple[str, int]]) -> dict[int, View | None]:
        """Begin the games (split, index) in their slots."""
        return self._ask("reset", [(slot, split, index) for slot, (split, index) in games.items()])

    def step(self, actions: dict[int, str]) -> dict[int, View | None]:
        """Act in those slots."""
        return self._ask("step", list(actions.items()))

    def expert(self, slots: Iterable[int]) -> dict[int, tuple[str, str] | None]:
        """(the searching expert's action, the action that looks around) in those slots' present states."""
        return self._ask("expert", [(slot,) for slot in slots])

    def close(self) -> None:
        """End the workers, at once or within `GRACE_SECONDS`. A closed pool plays no more."""
        self._end()

    def _ask(self, kind: str, calls: list[tuple]) -> dict:
        if not self._end.alive:
            raise RuntimeError("this pool of environments is closed")
        if not self._workers:
            return _by_slot(calls, self._here.ask(kind, calls))
        with self._closed_by_exceptions():
            return self._ask_workers(kind, calls)

    def _ask_workers(self, kind: str, calls: list[tuple]) -> dict:
        shares: dict[int, list[tuple]] = {}
        for call in calls:
            shares.setdefault(call[0] % len(self._workers), []).append(call)
        deadline = time.monotonic() + self.timeout
        answers: dict[int, object] = {slot: None for slot, *_ in calls}
        lost: dict[int, _WorkerLost] = {}
        for place, share in shares.items():
            try:
                self._workers[place].send((kind, share), deadline)
            except _WorkerLost as loss:
                lost[place] = loss
        for place, share in shares.items():
            if place not in lost:
                try:
                    answers |= _by_slot(share, self._workers[place].receive(deadline))
                except _WorkerLost as loss:
                    lost[place] = loss
        for place, loss in lost.items():
            warnings.warn(f"worker process {loss}: it is replaced, its episodes crashed", stacklevel=4)
            self._workers[place].end(0.0)
        self._start(lost)
        return answers

    def _start(self, places: Iterable[int]) -> None:
        """Put new workers there. One that does not come up is an error: a second one would not either."""
        deadline = time.monotonic() + START_SECONDS
        for place in places:
            self._workers[place] = _Worker()
        try:
            for place in places:
                self._workers[place].send((sys.path, self._make_env), deadline)
            for place in places:
                self._workers[place].receive(deadline)
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


def _by_slot(calls: list[tuple], answers: list) -> dict:
    return {slot: answer for (slot, *_), answer in zip(calls, answers, strict=True)}


def _end(workers: dict[int, _Worker]) -> None:
    for worker in workers.values():
        worker.hang_up()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers.values():
        worker.end(max(deadline - time.monotonic(), 0.0))
    workers.clear()


# The worker's side.


def _serve(parent: socket.socket) -> None:
    """Answer what comes until the parent is gone. An answer is (its value, the text of a mistake or None)."""
    requests = parent.makefile("rb")

    def answer(value, mistake=None) -> None:
        parent.sendall(pickle.dumps((value, mistake)))

    path, make_env = pickle.load(requests)
    sys.path[:] = path  # what the caller can import can be imported here
    try:
        make_env = pickle.loads(make_env)
        slots = _Slots(make_env, make_env())
    except Exception:
        return answer(None, traceback.format_exc())
    answer(None)
    while True:
        kind, calls = pickle.load(requests)
        try:
            value, mistake = slots.ask(kind, calls), None
        except Exception:  # whatever it is, the caller is to see it
            value, mistake = None, traceback.format_exc()
        answer(value, mistake)


def _end_with(parent: socket.socket) -> None:
    """A thread that ends a worker whose parent is gone even while an environment is busy or hangs."""
    gone = select.poll()
    gone.register(parent, 0)
    gone.poll()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = socket.socket(fileno=int(sys.argv[1]))
    parent.set_inheritable(False)
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone, or done
        _serve(parent)


if __name__ == "__main__":
    _main()
