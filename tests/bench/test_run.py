"""`python -m bench run`: the phases of a run and their times."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.run import REST, Clock, table

ROOT = Path(__file__).parent.parent.parent


def test_an_inner_phase_does_not_count_for_the_outer_one():
    times = iter([0.0, 1.0, 3.0, 7.0, 8.0, 10.0])  # start, enter, enter, leave, leave, charge
    clock = Clock(lambda: next(times))
    clock.enter("update")
    clock.enter("scoring")
    clock.leave()
    clock.leave()
    clock.charge()
    # rest: 0 to 1 and 8 to 10; update: 1 to 3 and 7 to 8; scoring: 3 to 7
    assert clock.seconds == {REST: 3.0, "update": 3.0, "scoring": 4.0}
    assert table({"scoring": 3.0, "update": 1.0}).splitlines()[2:] == [
        "| scoring | 3.0 | 75.0% |",
        "| update | 1.0 | 25.0% |",
        "| the whole run | 4.0 | 100% |",
    ]


def test_a_watched_call_returns_its_result_and_leaves_its_phase_after_an_error():
    class Player:
        def play(self, name, fail=False):
            if fail:
                raise RuntimeError(name)
            return [name]

    times = iter(range(100))
    clock = Clock(lambda: next(times))
    clock.watch(Player, "play", lambda player, name, *rest: f"playing: {name}")
    assert Player().play("A") == ["A"]
    with pytest.raises(RuntimeError):
        Player().play("B", fail=True)
    assert clock.running == [REST]
    assert clock.seconds == {REST: 2, "playing: A": 1, "playing: B": 1}


def test_only_run_passes_flags_on(capsys):
    with pytest.raises(SystemExit):
        main(["core", "--total_updates", "3"])
    assert "unrecognized arguments: --total_updates 3" in capsys.readouterr().err


@pytest.mark.slow
def test_the_phases_of_a_short_run():
    flags = ["--total_updates=3", "--warm_start=2", "--warm_start_episodes=20", "--reward_model_episodes=40"]
    flags += ["--eval_games=4", "--tasks_per_update=2", "--off_policy_fraction=0.5"]
    command = [sys.executable, "-m", "bench", "run", *flags]  # a process of its own: it wraps functions
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for phase in ("imports", "warm start", "playing: explorer", "update of policy: scoring", "checkpoints"):
        assert f"| {phase} |" in done.stdout
