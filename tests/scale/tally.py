"""Environments for tests of the pool. Workers import this file, so it imports nothing heavy."""

import os
import signal
import sys
import time

from envs import EnvironmentCrashed, Household, View


class Tally:
    """Show the game and all actions so far; some actions fail in a certain way.

    The notes of a view hold four facts of its process: the id, whether torch is imported, whether pytest (the
    caller's program) is imported, and the number of Tallies made.
    """

    name, task_types, step_limit, vocabulary = "tally", ("count",), 9, None
    made = 0  # in this process

    def __init__(self):
        Tally.made += 1

    def size(self, split):
        return 100

    def reset(self, split, index):
        self.done = [split, str(index)]
        return self._view()

    def step(self, action):
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "exit":
            sys.exit(3)
        if action.startswith("sleep"):
            time.sleep(float(action.split()[1]))
        if action == "spin":
            while True:
                pass
        if action == "crash":
            raise EnvironmentCrashed("the engine broke")
        if action == "err":
            raise ValueError("a mistake in the environment")
        if action == "print":
            print("noise of an engine")
        self.done.append(action)
        return self._view()

    def searching_expert(self):
        if "blind" in self.done:
            raise EnvironmentCrashed("the expert broke")
        return f"after {self.done[-1]}"

    def wandering_expert(self, seed):
        return seed

    @property
    def look_around(self):
        return f"look {len(self.done) - 2}"

    def _view(self):
        notes = f"{os.getpid()} {'torch' in sys.modules} {'pytest' in sys.modules} {self.made}"
        return View("count", "count", " ".join(self.done), ("a", "b"), notes=notes)


class Late(Household):
    """Answer late in games with an even number."""

    def reset(self, split, index):
        self.delay = 0.005 * (index % 2 == 0)
        return super().reset(split, index)

    def step(self, action):
        time.sleep(self.delay)
        return super().step(action)


def only_in(process, failure):
    """Return a Tally in the given process; raise OSError or exit in any other one."""
    if os.getpid() != process:
        if failure == "exit":
            os._exit(7)
        raise OSError("the disk is on fire")
    return Tally()
