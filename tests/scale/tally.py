"""Environments that behave well and badly in workers, which import this file: it holds nothing heavy."""

import os
import signal
import sys
import time

from envs import EnvironmentCrashed, Household, View


class Tally:
    """Shows its game and what was done in it; some actions end badly."""

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

    @property
    def look_around(self):
        return f"look {len(self.done) - 2}"

    def _view(self):
        place = f"{os.getpid()} {'torch' in sys.modules} {'__mp_main__' in sys.modules} {self.made}"
        return View("count", "count", " ".join(self.done), ("a", "b"), notes=place)


class Late(Household):
    """Answers for even games come late."""

    def reset(self, split, index):
        self.late = 0.005 * (index % 2 == 0)
        return super().reset(split, index)

    def step(self, action):
        time.sleep(self.late)
        return super().step(action)


def here_only(home, how):
    """An environment that can be built in one process alone."""
    if os.getpid() != home:
        if how == "exit":
            os._exit(7)
        raise OSError("the disk is on fire")
    return Tally()
