"""Runs: their order, what is done again, what is shared. Stub commands take the place of train.py."""

import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from flags import UsageError, config_text, prepare
from reproduce import runs
from reproduce.arms import EXPERIMENTS
from reproduce.runs import Run, check_same, make_folder, plan_runs, run_all, with_preparing_runs

FLAGS = prepare(["--total_updates", "3"])
FINISH = "import pathlib, sys; pathlib.Path(sys.argv[1], 'summary.json').write_text('{}')"
FAIL = "print('one'); print('two'); print('error: no memory'); raise SystemExit(1)"
WAIT = """
import pathlib, sys, time
pathlib.Path(sys.argv[1], 'started').touch()
try:
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path(sys.argv[1], 'stopped').touch()
    sys.exit(130)
"""


class Commands:
    """Starts a stub in place of train.py, and remembers the order."""

    def __init__(self, programs=None):
        self.programs, self.started = programs or {}, []

    def __call__(self, run):
        self.started.append(run.folder.name)
        run.folder.mkdir(parents=True, exist_ok=True)
        program = self.programs.get(run.folder.name, FINISH)
        with open(run.folder / "console.log", "a") as console:
            command = [sys.executable, "-I", "-S", "-c", program, str(run.folder)]
            return subprocess.Popen(command, stdout=console, stderr=console)


def three_runs(folder):
    """A preparing run, and two that need it."""
    first = Run(folder / "start", FLAGS)
    return [first, Run(folder / "a", FLAGS, first), Run(folder / "b", FLAGS, first)]


def run_quietly(runs, processes=2, start=None):
    """Return the failed runs and what was printed."""
    said = []
    failed = run_all(runs, processes, start or Commands(), said.append, pause=0.005)
    return [run.folder.name for run in failed], "\n".join(said)


def test_a_run_starts_after_its_preparing_run(tmp_path):
    start = Commands()
    waiting = three_runs(tmp_path)[::-1]  # also if it comes later in the list
    failed, said = run_quietly(waiting, start=start)
    assert failed == [] and start.started[0] == "start" and sorted(start.started[1:]) == ["a", "b"]
    assert "0 of 3 runs are finished" in said


def test_a_finished_run_is_not_run_again(tmp_path):
    run_quietly(three_runs(tmp_path)[:2])
    start = Commands()
    _, said = run_quietly(three_runs(tmp_path), start=start)
    assert start.started == ["b"] and "2 of 3 runs are finished" in said


def test_a_failed_run_is_reported_with_its_last_lines_and_others_go_on(tmp_path):
    start = Commands({"a": FAIL})
    failed, said = run_quietly(three_runs(tmp_path), start=start)
    assert failed == ["a"] and (tmp_path / "b" / "summary.json").exists()
    assert f"failed: {tmp_path.name}/a with status 1" in said and "error: no memory" in said
    again = Commands()
    assert run_quietly(three_runs(tmp_path), start=again)[0] == [] and again.started == ["a"]


def test_runs_are_not_started_if_their_preparing_run_failed(tmp_path):
    start = Commands({"start": FAIL})
    failed, said = run_quietly(three_runs(tmp_path), start=start)
    assert failed == ["start", "a", "b"] and start.started == ["start"]
    assert f"not started: {tmp_path.name}/b, because {tmp_path.name}/start failed" in said


def test_only_so_many_runs_are_active_at_once(tmp_path):
    active, most = set(), []

    def start(run):
        process = Commands()(run)
        active.add(process)
        most.append(sum(other.poll() is None for other in active))
        return process

    others = [Run(tmp_path / str(i), FLAGS) for i in range(6)]
    run_quietly(others, processes=2, start=start)
    assert len(most) == 6 and max(most) <= 2


def test_an_interrupt_stops_the_runs_and_the_same_call_continues(tmp_path):
    start = Commands({"start": WAIT})

    def interrupt():
        while not (tmp_path / "start" / "started").exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_quietly(three_runs(tmp_path), start=start)
    thread.join()
    assert (tmp_path / "start" / "stopped").exists()
    again = Commands()
    run_quietly(three_runs(tmp_path), start=again)
    assert again.started[0] == "start" and len(again.started) == 3


def test_a_new_run_gets_the_models_of_its_preparing_run(tmp_path):
    first, second, _ = three_runs(tmp_path)
    for name in ("start", "reward_model"):
        (first.folder / name).mkdir(parents=True)
        (first.folder / name / "model.safetensors").write_text(name)
    make_folder(second)
    assert (second.folder / "start" / "model.safetensors").read_text() == "start"
    assert (second.folder / "reward_model" / "model.safetensors").read_text() == "reward_model"
    same = (second.folder / "start" / "model.safetensors").samefile(
        first.folder / "start" / "model.safetensors"
    )
    assert same  # a hard link
    assert json.loads((second.folder / "config.json").read_text())["total_updates"] == 3


def test_a_run_without_dense_rewards_gets_no_reward_model(tmp_path):
    first, second, _ = three_runs(tmp_path)
    second = dataclasses.replace(second, args=dataclasses.replace(FLAGS, method="outcome"))
    for name in ("start", "reward_model"):
        (first.folder / name).mkdir(parents=True)
    make_folder(second)
    assert (second.folder / "start").is_dir() and not (second.folder / "reward_model").exists()


def test_a_folder_with_other_flags_is_refused(tmp_path):
    run = Run(tmp_path / "a", FLAGS)
    check_same(run)  # there is no folder yet
    make_folder(run)
    check_same(run)
    other = dataclasses.replace(run, args=dataclasses.replace(FLAGS, clip_eps=0.3))
    with pytest.raises(UsageError, match="clip_eps 0.2, not 0.3; give another --out"):
        check_same(other)


def test_a_folder_of_an_older_version_had_the_defaults_of_the_flags_that_it_lacks(tmp_path):
    run = Run(tmp_path / "a", FLAGS)
    make_folder(run)
    path = tmp_path / "a" / "config.json"
    saved = json.loads(path.read_text())
    del saved["dense_reward"], saved["implicit_lr"]
    path.write_text(json.dumps(saved))
    check_same(run)
    other = dataclasses.replace(run, args=dataclasses.replace(FLAGS, dense_reward="novelty"))
    with pytest.raises(UsageError, match="dense_reward step_model, not novelty; give another --out"):
        check_same(other)


def test_only_the_step_reward_model_is_shared(tmp_path):
    first, second, _ = three_runs(tmp_path)
    second = dataclasses.replace(second, args=dataclasses.replace(FLAGS, dense_reward="shaped"))
    for name in ("start", "reward_model"):
        (first.folder / name).mkdir(parents=True)
    make_folder(second)
    assert (second.folder / "start").is_dir() and not (second.folder / "reward_model").exists()


def test_flags_of_the_machine_may_differ(tmp_path):
    run = Run(tmp_path / "a", FLAGS)
    make_folder(run)
    check_same(dataclasses.replace(run, args=dataclasses.replace(FLAGS, threads=2, env_workers=1)))


def test_seeds_share_flags_and_differ_in_the_seed(tmp_path):
    plan = plan_runs([EXPERIMENTS["states"]], [], [0, 200], tmp_path)
    assert [run.args.seed for run in plan.values()] == [0, 0, 200, 200]
    assert [run.source.folder.name for run in plan.values()] == ["start-s0"] * 2 + ["start-s200"] * 2
    assert len(with_preparing_runs(plan)) == 6


def test_experiments_share_their_common_arms(tmp_path):
    # table1 has 8 arms, states 2 of them; a preparing run for the one seed
    plan = plan_runs([EXPERIMENTS["table1"], EXPERIMENTS["states"]], [], [0], tmp_path)
    assert len(with_preparing_runs(plan)) == 9


def test_a_preparing_run_has_the_start_of_its_arms(tmp_path):
    """Flags of the starting model and of the reward model; the method's flags do not matter to them."""
    (run, *_) = plan_runs([EXPERIMENTS["states"]], ["--warm_start", "20"], [7], tmp_path).values()
    own, source = (json.loads(config_text(args)) for args in (run.args, run.source.args))
    different = {name for name in own if own[name] != source[name]}
    assert different == {
        "method", "k", "total_updates", "tasks_per_update", "group_size", "eval_games", "eval_every"
    }  # fmt: skip


def test_the_cost_counts_played_and_trained_episodes():
    # GRPO, 3 updates of 64 fresh episodes, evaluated at the start and at the end:
    # 5 + 2 * 1 + 192 * 0.004 + 192 * 0.014 = 10.456
    args = prepare(["--method", "outcome", "--total_updates", "3", "--eval_every", "3"])
    assert runs.core_seconds(Run(None, args, Run(None, args))) == pytest.approx(10.456)
