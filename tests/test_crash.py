"""Kills, full disks: a run that is killed at random moments and resumed equals one that was left alone.

The runs are real ones of the tiny model, in processes forked from one that has already imported everything,
so that a start takes a fraction of a second. They are killed with SIGKILL after seeded random times.
"""

import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from record import checkpoint
from record.log import read_lines

pytestmark = pytest.mark.slow

RUN = {
    "method": "rspo_o",  # all parts of RSPO but the fit of a step reward model
    "total_updates": 8,
    "k": 1,
    "tasks_per_update": 4,
    "group_size": 2,
    "off_policy_fraction": 0.25,
    "buffer_tasks": 2,
    "eval_games": 4,
    "eval_every": 2,
    "max_turns": 4,
    "max_prompt_tokens": 128,
    "threads": 1,
    "tiny_width": 16,
    "tiny_layers": 1,
    "tiny_heads": 2,
    "learning_rate": 0.01,
    "warm_start": 20,
    "warm_start_episodes": 30,
    "warm_start_turns": 32,
    "warm_start_lr": 0.01,
}
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["train", "peft", "transformers.models.qwen2.modeling_qwen2"])


def be(argv, environment, file_limit, output):
    """Run train.py in a process of its own, with all that it prints in a file."""
    os.environ.update(environment)
    sys.stdout = sys.stderr = open(output, "a", buffering=1)  # noqa: SIM115
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    import dataclasses

    import train

    train.main(argv, pieces=dataclasses.replace(train.PIECES, draw_curves=lambda lines, path, title: None))


def start(folder, ranks=1, file_limit=None, **options):
    """Start the run or resume it, as one process or as two ranks."""
    if (folder / "config.json").exists():
        argv = ["--resume", f"--out={folder}"]
    else:
        argv = [f"--{name}={value}" for name, value in {**RUN, **options, "out": folder}.items()]
    environments = [{}]
    if ranks > 1:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        environments = [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            for rank in range(ranks)
        ]
    output = folder.with_suffix(".txt")
    processes = [FORKS.Process(target=be, args=(argv, one, file_limit, output)) for one in environments]
    for process in processes:
        process.start()
    return processes


def wait_for(process, folder, *statuses):
    """Wait until the process ends, with one of these exit statuses."""
    process.join(600)
    ended = process.exitcode
    process.kill()
    assert ended in statuses, (ended, said(folder))


def said(folder):
    """Return the end of what the processes of this run have printed."""
    return folder.with_suffix(".txt").read_text()[-2000:]


def finish(folder, **options):
    """Run to the end."""
    for process in start(folder, **options):
        wait_for(process, folder, 0)


def story(folder):
    """Return all that a run did, except times: its log, its transcripts and its trained numbers."""
    lines = []
    for line in read_lines(folder / "metrics.jsonl"):
        lines.append({key: value for key, value in line.items() if not key.startswith("seconds")})
    newest = checkpoint.listed(folder)[-1]
    weights = (newest / "policy.safetensors").read_bytes()
    state = checkpoint.read_state(newest)
    parts = state["world"], state["replay"], state["identity"]
    return lines, read_lines(folder / "transcripts.jsonl"), weights, parts


def updates_of(folder):
    """Return the updates of the newest checkpoint, 0 without one."""
    paths = checkpoint.listed(folder)
    return checkpoint.updates_of(paths[-1]) if paths else 0


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(run folder, seconds) of a run that was left alone, by number of ranks."""
    found = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp("runs") / f"straight{ranks}"
        finish(folder, ranks=ranks)  # the first one also starts the server of forks
        shutil.rmtree(folder)
        began = time.perf_counter()
        finish(folder, ranks=ranks)
        found[ranks] = folder, time.perf_counter() - began
    return found


def test_a_run_that_is_killed_twenty_times_equals_a_straight_one(straight, tmp_path):
    whole, seconds = straight[1]
    rng, folder = random.Random(0), tmp_path / "killed"
    moments = []  # the updates of the newest checkpoint at each kill
    while len(moments) < 20:
        (process,) = start(folder)
        process.join(rng.uniform(0.1, 0.5) * seconds)
        process.kill()
        process.join()
        if process.exitcode == -signal.SIGKILL:
            moments.append(updates_of(folder))
            continue
        assert process.exitcode == 0, said(folder)
        assert story(folder) == story(whole)
        shutil.rmtree(folder)  # it had ended: begin again
    finish(folder)
    assert story(folder) == story(whole)
    assert not [path for path in folder.rglob("*") if path.name.startswith(checkpoint.ASIDE)]
    assert len(set(moments)) > 3, moments


def test_a_run_of_two_ranks_of_which_one_is_killed_equals_a_straight_one(straight, tmp_path):
    whole, seconds = straight[2]
    rng, folder = random.Random(0), tmp_path / "killed"
    for number in (1, 0, 1, 0):
        processes = start(folder, ranks=2)
        deadline = time.monotonic() + 600
        while not (folder / "run.json").exists():  # the ranks have met
            assert time.monotonic() < deadline
            time.sleep(0.02)
        processes[number].join(rng.uniform(0.3, 0.8) * seconds)
        processes[number].kill()
        wait_for(processes[1 - number], folder, 0, 1)
    finish(folder, ranks=2)
    assert story(folder) == story(whole)


def test_a_limit_on_file_sizes_loses_at_most_one_loop(straight, tmp_path):
    whole, _ = straight[1]
    sizes = sorted({path.stat().st_size for path in whole.rglob("*") if path.is_file()})
    folder = tmp_path / "full"
    done = 0
    for limit in [size - 1 for size in sizes if size > 1000]:
        (process,) = start(folder, file_limit=limit)
        wait_for(process, folder, 0, 1)
        if process.exitcode == 1:
            line = said(folder).splitlines()[-1]
            assert line.startswith("error: ") and "free some disk space" in line, line
        assert updates_of(folder) >= done
        done = updates_of(folder)
    finish(folder)
    assert story(folder) == story(whole)


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_a_disk_that_is_full_at_a_file_of_a_checkpoint_loses_at_most_one_loop(name, straight, tmp_path):
    folder = tmp_path / "full"
    shutil.copytree(straight[1][0], folder)
    checkpoint.remove(folder / "checkpoints" / "update_000008")
    process = FORKS.Process(target=be_full, args=(name, folder))
    process.start()
    wait_for(process, folder, 1)
    line = said(folder).splitlines()[-1]
    assert line.startswith("error: ") and "No space left on device" in line, line
    assert "free some disk space; resume with: python train.py --resume" in line
    assert updates_of(folder) == 7
    finish(folder)
    assert story(folder) == story(straight[1][0])


def be_full(name, folder):
    """Resume the run on a disk that is full when it writes this file: every write to /dev/full fails."""
    write_text = Path.write_text

    def write_full(path, *args, **kwargs):
        return write_text(Path("/dev/full") if path.name == name else path, *args, **kwargs)

    Path.write_text = write_full
    be(["--resume", f"--out={folder}"], {}, None, folder.with_suffix(".txt"))
