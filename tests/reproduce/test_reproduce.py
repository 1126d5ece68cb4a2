"""`python -m reproduce`: usage errors, the list, and one experiment from nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import reproduce.__main__ as command
from reproduce.__main__ import experiments_at, main, parser, scale_of
from reproduce.arms import EXPERIMENTS, STARTS
from reproduce.runs import Run

ROOT = Path(__file__).parent.parent.parent
EVERY = list(STARTS)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "NAME: is missing; give table1"),
        (["table9"], "table9: there is no such experiment; give table1"),
        (["table1", "--seeds", "a,b"], "--seeds a,b: must be whole numbers"),
        (["table1", "--seeds", "1,1"], "--seeds 1,1: must differ"),
        (
            ["pays", "--starts", "easy"],
            "--starts easy: there is no start 'easy'; give sparse, default, easier",
        ),
        (["table1", "--processes", "0"], "--processes 0: must be 1 or more"),
        (["table1", "--env", "chess"], "--env chess: "),
        (["table1", "--seed", "3"], "--seed: the experiments set it"),
        (["table1", "--clip_epps", "3"], "--clip_epps: there is no such flag; did you mean --clip_eps?"),
        (["table1", "--clip_eps", "-1"], "--clip_eps -1.0: must be between 1e-06"),
    ],
)
def test_a_usage_error_is_one_line_before_any_run(argv, message, capsys, tmp_path):
    assert main([*argv, "--out", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_the_list_has_every_experiment_with_its_cost(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [*EXPERIMENTS, "all"]
    hours = {line.split()[0]: float(line.split()[2]) for line in lines[1:]}
    assert 0 < hours["states"] < hours["all"] <= 10  # the budget of one core


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_ends_early_brings_no_traceback(unbuffered):
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "reproduce", "--list"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(argv, cwd=ROOT, env=environment, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 1 and done.stderr == b""


def test_a_quick_experiment_has_one_start():
    assert {one.starts for one in experiments_at(["--env", "household"], True, EVERY).values()} == {
        ("default",)
    }
    assert len(experiments_at(["--env", "household"], False, EVERY)["pays"].starts) == 4


def test_only_the_tiny_model_on_household_has_several_starts():
    flags = ["--warm_start", "0"]
    assert experiments_at(flags, False, EVERY)["pays"].starts == ("default",)


def test_the_starts_of_pays_can_be_chosen():
    experiments = experiments_at(["--env", "household"], False, ["default", "easier"])
    assert experiments["pays"].starts == ("default", "easier")
    assert experiments["table1"].starts == ("default",)
    assert experiments_at(["--env", "household"], False, ["easier"])["table1"].starts == ("default",)


@pytest.mark.parametrize(("finished", "written"), [(True, ["states"]), (False, [])])
def test_an_interrupt_writes_the_tables_of_the_finished_runs(finished, written, monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    tables = []
    monkeypatch.setattr(command, "run_all", interrupted)
    monkeypatch.setattr(command, "write_results", lambda experiments, *_: tables.extend(experiments))
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(Run, "finished", finished)
    assert main(["states", "--out", str(tmp_path)]) == 130
    assert tables == written


def test_each_scale_has_a_folder_of_its_own():
    names = [scale_of(parser().parse_args(["k", *more]), [])[0] for more in ([], ["--quick"])]
    assert names == ["household", "household-quick"]


@pytest.mark.slow
def test_a_kill_stops_the_runs_also_in_the_background_of_a_shell(tmp_path):
    argv = [sys.executable, "-m", "reproduce", "states", "--quick", "--out", str(tmp_path)]
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `command &` in a script does
    try:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, ignored)
    console = tmp_path / "household-quick" / "runs" / "default" / "start-s0" / "console.log"
    while not (console.exists() and "run folder" in console.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    _, error = process.communicate(timeout=600)
    assert process.returncode == 130 and error.startswith(
        "stopped; continue with: python -m reproduce states"
    )
    assert "stopped; resume with" in console.read_text()


@pytest.mark.slow
def test_an_experiment_is_remade_from_nothing_and_not_run_twice(tmp_path):
    argv = [sys.executable, "-m", "reproduce", "states", "--quick", "--out", str(tmp_path)]
    first = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert first.returncode == 0, first.stdout + first.stderr
    folder = tmp_path / "household-quick"
    report = json.loads((folder / "states.json").read_text())
    assert report["missing"] == []
    for arm in report["sections"][0]["arms"].values():
        assert arm["seeds"]["0"]["curve"][0][2] == arm["start"]["mean"]
    text = (folder / "states.md").read_text()
    assert "| RSPO + GRPO | 6 | 896 |" in text and "claim: RSPO repeats fewer" in text
    assert (folder / "states.png").is_file()
    second = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert "3 of 3 runs are finished" in second.stdout and second.returncode == 0
    assert json.loads((folder / "states.json").read_text()) == report
