"""Measure the time of a run by phase: `python -m bench run [flags of train.py]`.

The run takes place in this process, on one rank. A `Clock` wraps a few functions of the program and adds the
time spent in each to its phase. If one wrapped function calls another, the time of the inner one counts only
for the inner phase. So the phases add up to the whole run. Times are wall-clock seconds.

Left out: time inside environment workers and in other ranks.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable

DEFAULT = ["--total_updates", "45"]  # a quarter of the default run
REST = "everything else"


class Clock:
    """Adds up the time of named phases. Time inside an inner phase does not count for the outer one."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now, self.last = now, now()
        self.running = [REST]
        self.seconds: dict[str, float] = defaultdict(float)

    def charge(self) -> None:
        """Add the time since the last change of phase to the running phase."""
        now = self.now()
        self.seconds[self.running[-1]] += now - self.last
        self.last = now

    def enter(self, phase: str) -> None:
        """Begin a phase inside the running one."""
        self.charge()
        self.running.append(phase)

    def leave(self) -> None:
        """End the running phase. The outer one goes on."""
        self.charge()
        self.running.pop()

    def watch(self, owner, name: str, phase: Callable[..., str] | str) -> None:
        """Wrap a function of a module or a method of a class.

        phase: a name, or a function that returns it from the call's arguments.
        """
        call = getattr(owner, name)

        @functools.wraps(call)
        def timed(*arguments, **options):
            self.enter(phase if isinstance(phase, str) else phase(*arguments))
            try:
                return call(*arguments, **options)
            finally:
                self.leave()

        setattr(owner, name, timed)


def watch_run(clock: Clock) -> None:
    """Wrap the functions whose times are shown."""
    import rspo
    import train
    from record import artifacts, checkpoint
    from record.recorder import Recorder
    from reward_model import StepRewardModel

    clock.watch(artifacts, "load_base", "loading models")
    clock.watch(train, "demonstrations", "playing demonstrations")
    clock.watch(artifacts, "warm_start", "warm start")
    clock.watch(StepRewardModel, "fit", "fitting the step reward model")
    clock.watch(StepRewardModel, "score", "dense scores")
    clock.watch(Recorder, "collect", lambda recorder, agent, tasks: f"playing: {agent.name}")
    clock.watch(Recorder, "evaluate", "playing: panels")
    clock.watch(rspo, "set_behavior_logprobs", "log pi_B of the buffer")
    clock.watch(rspo, "score_minibatches", lambda agent, *rest: f"update of {agent.name}: scoring")
    clock.watch(rspo, "update", lambda agent, *rest: f"update of {agent.name}: gradients and the rest")
    clock.watch(checkpoint, "write", "checkpoints")
    clock.watch(train, "conclude", "summary, curves and page")


def table(seconds: dict[str, float]) -> str:
    """Return the phases as a Markdown table, the longest first."""
    whole = sum(seconds.values())
    lines = ["| phase | seconds | share |", "|---|---|---|"]
    for phase, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        lines.append(f"| {phase} | {spent:.1f} | {spent / whole:.1%} |")
    return "\n".join([*lines, f"| the whole run | {whole:.1f} | 100% |"])


def bench_run(args: argparse.Namespace) -> int:
    """Run train.py with the given flags and print where its time went. Return the exit status."""
    clock = Clock()
    clock.enter("imports")
    import train

    clock.leave()
    watch_run(clock)
    profile = cProfile.Profile() if args.functions else None
    with tempfile.TemporaryDirectory() as folder:
        given = args.flags or DEFAULT
        flags = ["--ranks=1", f"--out={folder}/run", *given]
        print(f"python train.py --ranks=1 {' '.join(given)}", flush=True)
        if profile:
            profile.runcall(train.main, flags)
        else:
            train.main(flags)
    clock.charge()
    print(f"\n{table(clock.seconds)}")
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(args.functions)
    return 0
