"""The launcher of the ranks: how many it starts, and how it ends them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flags import Args, UsageError, prepare
from scale import launch

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", launch.PIPE):
        monkeypatch.delenv(name, raising=False)


def ranks_on(monkeypatch, cores, gpus=0, **given):
    monkeypatch.setattr(launch, "cores", lambda: cores)
    monkeypatch.setattr(launch, "gpus", lambda: gpus)
    return launch.ranks_to_start(Args(**given))


@pytest.mark.parametrize(("cores", "ranks"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 4), (16, 4)])
def test_the_tiny_model_gets_up_to_four_cores_and_leaves_one_free_of_more_than_two(cores, ranks, monkeypatch):
    assert ranks_on(monkeypatch, cores) == ranks
    assert ranks_on(monkeypatch, cores, eval_only=True) == ranks
    assert ranks_on(monkeypatch, cores, model="Qwen/Qwen2.5-1.5B-Instruct") == 1
    assert ranks_on(monkeypatch, cores, sampler="vllm") == 1
    assert ranks_on(monkeypatch, cores, plan=True) == 1


def test_environment_workers_take_cores_from_the_ranks(monkeypatch):
    assert ranks_on(monkeypatch, 16, env_workers=4) == 3  # 15 cores, 5 processes per rank
    assert ranks_on(monkeypatch, 2, env_workers=4) == 1


@pytest.mark.parametrize("model", ["tiny", "Qwen/Qwen2.5-1.5B-Instruct"])
def test_every_gpu_gets_a_rank(model, monkeypatch):
    assert ranks_on(monkeypatch, 16, gpus=8, model=model) == 8
    assert ranks_on(monkeypatch, 16, gpus=8, model=model, device="cuda") == 8
    assert ranks_on(monkeypatch, 16, gpus=8, model=model, device="cuda:3") == 1
    assert ranks_on(monkeypatch, 16, gpus=8, model="tiny", device="cpu") == 4


def test_a_given_number_is_taken_and_torchrun_starts_its_own_ranks(monkeypatch):
    assert ranks_on(monkeypatch, 2, ranks="7") == 7
    assert ranks_on(monkeypatch, 2, ranks="7", model="Qwen/Qwen2.5-1.5B-Instruct") == 7
    monkeypatch.setenv("RANK", "0")
    assert ranks_on(monkeypatch, 16) == 1


@pytest.mark.parametrize("value", ["0", "-1", "two", "1000", "1.5"])
def test_another_value_is_refused(value):
    with pytest.raises(UsageError, match=f"^--ranks {value}: must be auto or a whole number from 1 to 999"):
        prepare(["--ranks", value])
    with pytest.raises(UsageError, match=f"^--ranks {value}: "):
        prepare(["--plan", "--ranks", value])


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "gpus", lambda: 2)
    with pytest.raises(UsageError, match="^--ranks 3: there are 2 GPUs here; give auto"):
        prepare(["--ranks", "3"])
    assert prepare(["--ranks", "3", "--device", "cpu"]).ranks == "3"


def test_torch_is_not_imported_to_find_no_gpu(monkeypatch):
    monkeypatch.setattr(launch, "DRIVERS", ("/dev/no such driver",))
    monkeypatch.setitem(sys.modules, "torch", None)  # an import raises ImportError
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launch.gpus() == 0
    monkeypatch.setattr(launch, "DRIVERS", ("/dev/null",))
    with pytest.raises(ImportError):
        launch.gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launch.gpus() == 0


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("", 8)]
)
def test_the_quota_of_a_container_limits_the_cores(quota, cores, monkeypatch):
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(launch.Path, "read_text", lambda path: quota)
    assert launch.cores() == cores


def test_the_first_line_says_what_the_run_is(monkeypatch, capsys):
    monkeypatch.setattr(launch, "ranks_to_start", lambda args: 1)
    launch.start(Args(seed=3))
    launch.start(Args(eval_only=True))
    launch.start(Args(plan=True))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "household, rspo + grpo, 1 rank, seed 3; loading torch"
    assert second == "household, evaluation, 1 rank, seed 0; loading torch"


def test_a_port_is_reserved_for_programs_that_reuse_it():
    with launch.reserved_port() as reserved:
        place = reserved.getsockname()
        other = launch.socket.socket()
        with pytest.raises(OSError):
            other.bind(place)
        other.setsockopt(launch.socket.SOL_SOCKET, launch.socket.SO_REUSEADDR, 1)
        other.bind(place)
        other.listen()
        other.close()


# --- real processes, small programs as ranks ----------------------------------------------------------------

BEGIN = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from scale import launch
launch.join()
rank = int(os.environ["RANK"])

def say(*words):  # in one write, so that the ranks' lines do not mix
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def launched(tmp_path, program):
    """Start two ranks that run a program. Return the launcher's process."""
    path = tmp_path / "program.py"
    path.write_text(BEGIN.format(root=str(ROOT)) + program)
    return subprocess.Popen(
        [sys.executable, launch.__file__, "2", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process):
    out, errors = process.communicate(timeout=600)
    return process.returncode, out, errors


def test_ranks_get_the_variables_of_torchrun(tmp_path):
    program = "say(rank, *(os.environ[name] for name in ('LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')))"
    status, out, errors = answer(launched(tmp_path, program))
    assert (status, errors) == (0, "") and sorted(out.splitlines()) == ["0 0 2 2", "1 1 2 2"]


@pytest.mark.slow
def test_an_error_of_all_ranks_is_printed_once(tmp_path):
    status, _, errors = answer(launched(tmp_path, "raise ValueError('the disk is on fire')"))
    assert status == 1 and errors.count("ValueError: the disk is on fire") == 1
    assert errors.count("Traceback") == 1


@pytest.mark.slow
def test_a_failing_rank_ends_the_others_and_gives_its_status(tmp_path, monkeypatch):
    program = "time.sleep(60 * rank) or sys.exit(7)"
    began = time.monotonic()
    assert answer(launched(tmp_path, program)) == (7, "", "")
    assert 4 < time.monotonic() - began < 30  # NOTICE_SECONDS


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path):
    program = "time.sleep(60) if rank == 0 else os.kill(os.getpid(), signal.SIGKILL)"
    status, _, errors = answer(launched(tmp_path, program))
    assert status == 128 + 9
    assert errors == "error: rank 1 of 2 was ended by SIGKILL, as when memory runs out\n"


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_the_ranks(sent, expected, tmp_path):
    process = launched(tmp_path, "say('ready'); time.sleep(60)")
    assert process.stdout.readline() == process.stdout.readline() == "ready\n"
    process.send_signal(sent)
    assert answer(process) == (expected, "", "\nstopped\n")


@pytest.mark.slow
def test_ranks_leave_ctrl_c_to_the_launcher(tmp_path):
    program = "os.kill(os.getpid(), signal.SIGINT); time.sleep(0.2); say('alive')"
    assert answer(launched(tmp_path, program)) == (0, "alive\nalive\n", "")


@pytest.mark.slow
def test_a_second_ctrl_c_kills_ranks_that_do_not_end(tmp_path):
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready'); time.sleep(60)"
    process = launched(tmp_path, program)
    assert process.stdout.readline() == process.stdout.readline() == "ready\n"
    began = time.monotonic()
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert answer(process)[0] == 130 and time.monotonic() - began < 20


@pytest.mark.slow
def test_ranks_end_when_the_launcher_is_killed(tmp_path):
    process = launched(tmp_path, "say(os.getpid()); time.sleep(60)")
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    for rank in ranks:
        assert ended(rank)


def ended(process):
    """Wait until a process has ended. Return False if it has not after two minutes."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("Z"):
            return True  # ended, and not yet waited for
        time.sleep(0.05)
    return False


# --- whole runs ---------------------------------------------------------------------------------------------

SMALL = """--k 1 --tasks_per_update 4 --group_size 2 --off_policy_fraction 0.25 --buffer_tasks 2
    --eval_games 6 --eval_every 50 --max_turns 5 --max_prompt_tokens 128 --tiny_width 16 --tiny_layers 1
    --tiny_heads 2 --learning_rate 0.001 --method outcome --warm_start 0 --threads 1"""


def train(folder, *flags):
    """Start `python train.py --ranks 2`, or resume it if the folder exists. Return the process."""
    given = ["--resume"] if folder.exists() else SMALL.split()
    return subprocess.Popen(
        [sys.executable, "train.py", *given, f"--out={folder}", "--ranks=2", *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory):
    """(run folder, output) of a run of one update."""
    folder = tmp_path_factory.mktemp("runs") / "two"
    status, out, errors = answer(train(folder, "--total_updates=1"))
    assert status == 0, errors
    return SimpleNamespace(folder=folder, out=out, errors=errors)


@pytest.fixture
def going(run_of_two, tmp_path):
    """(process, run folder, process ids of the ranks) of a long run that has written a checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(run_of_two.folder, folder)
    process = train(folder, "--total_updates=100000")
    deadline = time.monotonic() + 600
    while not (folder / "checkpoints" / "update_000003").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    yield process, folder, [int(rank) for rank in found.stdout.split()]
    process.kill()
    process.wait()


def check_end(process, folder, ranks, expected):
    """Check the exit status, that the way to resume is printed once, and that no rank is left."""
    status, _, errors = answer(process)
    assert status == expected, errors
    assert len(ranks) == 2 and all(ended(rank) for rank in ranks)
    assert errors.count("resume with: ") == 1 and "Traceback" not in errors, errors
    assert f"resume with: python train.py --resume --out {folder}\n" in errors
    return errors


@pytest.mark.slow
def test_a_run_begins_its_own_ranks(run_of_two):
    lines = run_of_two.out.splitlines()
    assert lines[0] == "household, outcome + grpo, 2 ranks, seed 0; loading torch"
    assert run_of_two.out.count("run folder: ") == 1
    assert run_of_two.errors.count("warning: this run never reads ") == 1
    assert json.loads((run_of_two.folder / "run.json").read_text())["ranks"] == 2
    assert json.loads((run_of_two.folder / "config.json").read_text())["ranks"] == "2"


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_once_how_to_resume_it(sent, going):
    going[0].send_signal(sent)
    assert "stopped; resume with: " in check_end(*going, 128 + sent)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_rank_ends_the_run_which_then_resumes_with_one_rank(number, going):
    process, folder, ranks = going
    os.kill(ranks[number], signal.SIGKILL)
    errors = check_end(process, folder, ranks, 128 + 9)
    assert f"rank {number} of 2 was ended by SIGKILL" in errors and errors.count("error: ") == 1
    done = len(list((folder / "metrics.jsonl").read_text().splitlines()))
    one = train(folder, "--ranks=1", f"--total_updates={done + 100}")
    assert one.stdout.readline().startswith("household, outcome + grpo, 1 rank, seed 0")
    said = [one.stdout.readline() for _ in range(2)]
    assert said[1] == "resumed with 1 ranks in place of 2: results differ by rounding\n", said
    one.send_signal(signal.SIGINT)
    assert answer(one)[0] == 130


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_rank_behind(going):
    process, _, ranks = going
    process.kill()
    assert len(ranks) == 2 and all(ended(rank) for rank in ranks)


@pytest.mark.slow
def test_a_usage_error_is_answered_before_ranks_start(tmp_path):
    status, out, errors = answer(train(tmp_path / "run", "--k=0"))
    assert (status, out, errors) == (2, "", "error: --k 0: must be between 1 and 1000000\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))  # a rank that shuts Python down aborts in one of three
def test_a_usage_error_of_the_ranks_is_printed_once(attempt, tmp_path):
    status, _, errors = answer(train(tmp_path / "run", "--max_prompt_tokens=10"))
    assert status == 2 and errors.count("error: --max_prompt_tokens 10: ") == errors.count("error: ") == 1


@pytest.mark.slow
def test_ctrl_c_while_torch_is_loaded_brings_no_traceback(tmp_path):
    process = train(tmp_path / "run", "--ranks=1")
    assert process.stdout.readline().endswith("loading torch\n")
    process.send_signal(signal.SIGINT)
    status, _, errors = answer(process)
    assert status in (-signal.SIGINT, 130) and "Traceback" not in errors, errors
