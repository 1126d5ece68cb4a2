"""Start the ranks of a run on this machine (`--ranks`), and end them together.

`python train.py` checks the flags and calls `start`. With more than one rank, `start` replaces the process by
this file, run as a program: the launcher. It starts the typed command once per rank, with the environment
variables that torchrun would set, waits, and exits with the status of the first rank that failed. The
launcher imports no torch and holds no GPU. `--ranks 1` starts nothing, so a debugger works.

A pipe leads from the launcher to the ranks. It holds one byte: the rank that reads it prints its error, the
others stay silent. If the launcher ends, the pipe hangs up, and the ranks end. Ranks ignore Ctrl-C. The
launcher passes it on as SIGTERM, which a rank treats like Ctrl-C (scale/distributed.py).

torch.distributed.run is not used, because importing it takes longer than starting the ranks, and because it
wraps each error in a report of its own. torchrun still works: then `--ranks` is not read.

Left out: ranks on several machines (torchrun has them), restarts of failed ranks, Windows.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun
MOST_ON_A_CPU = 4  # a fifth rank of the tiny model gains little
DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")  # NVIDIA, Jetson, WSL, AMD
PIPE = "RSPO_LAUNCHER"  # environment variable of a rank: the file descriptor of its pipe
NOTICE_SECONDS = 5.0  # time for the other ranks to notice that one has failed, and to say so
END_SECONDS = 30.0  # time for a rank to end after SIGTERM


# --- how many ranks -----------------------------------------------------------------------------------------


def by_torchrun() -> bool:
    """Return True if torchrun, or another launcher like it, has started this process."""
    return bool(os.environ.keys() & {"RANK", "WORLD_SIZE"}) and not is_launched()


def rank_of_environment() -> tuple[int, int]:
    """Return (this rank, number of ranks) from the environment variables. Raises ValueError if malformed."""
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if not given.keys() & {"RANK", "WORLD_SIZE"}:
        return 0, 1
    start = "start several processes with torchrun, or unset these variables for one"
    if missing := ", ".join(name for name in VARIABLES if name not in given):
        present = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"torchrun's environment variables {present} are set, but not {missing}; {start}")
    given["LOCAL_WORLD_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE") or given["WORLD_SIZE"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if not (given[name].isascii() and given[name].isdecimal()):
            raise ValueError(f"environment variable {name}={given[name]}: is not a number; {start}")
    if not 0 < int(given["MASTER_PORT"]) < 2**16:
        port = given["MASTER_PORT"]
        raise ValueError(f"environment variable MASTER_PORT={port}: must be between 1 and 65535; {start}")
    rank, ranks = int(given["RANK"]), int(given["WORLD_SIZE"])
    if rank >= ranks:
        raise ValueError(f"environment variable RANK={rank}: must be below WORLD_SIZE={ranks}; {start}")
    here, local = int(given["LOCAL_WORLD_SIZE"]), int(given["LOCAL_RANK"])
    if local >= here:
        raise ValueError(
            f"environment variable LOCAL_RANK={local}: must be below LOCAL_WORLD_SIZE={here}; {start}"
        )
    return rank, ranks


def ranks_to_start(args) -> int:
    """Return the number of ranks that `--ranks` stands for.

    auto: a rank per GPU. Without GPUs, the tiny model gets a rank per core, up to four; one core stays free
    if there are more than two. A larger model gets one rank, as torch's threads use the cores.
    """
    if args.plan or by_torchrun():
        return 1
    if args.ranks != "auto":
        return int(args.ranks)
    kind, _, index = args.device.partition(":")
    if kind == "cuda" and index:
        return 1
    if kind != "cpu" and (found := gpus()):
        return found
    if args.model != "tiny" or args.sampler != "kv" or not hasattr(os, "fork"):
        return 1
    free = cores()
    if free > 2:
        free -= 1
    return max(1, min(MOST_ON_A_CPU, free // (1 + args.env_workers)))


def gpus() -> int:
    """Return the number of GPUs that torch finds. torch is imported only if there is a GPU driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(map(os.path.exists, DRIVERS)):
        return 0

    import torch

    return torch.cuda.device_count()


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    found = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()  # of a container
        return min(found, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no container, or "max": no limit
        return found


# --- in train.py --------------------------------------------------------------------------------------------


def start(args) -> None:
    """Print the run's first line. If the run has several ranks, become their launcher and do not return."""
    ranks = ranks_to_start(args)
    if args.plan:
        return
    count = f"{ranks} ranks" if ranks > 1 else "1 rank"
    what = "evaluation" if args.eval_only else f"{args.method} + {args.algo}"
    print(f"{args.env}, {what}, {count}, seed {args.seed}; loading torch", flush=True)
    if ranks > 1:
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), str(ranks), *sys.orig_argv[1:]])


# --- in a rank ----------------------------------------------------------------------------------------------


def is_launched() -> bool:
    """Return True if the launcher has started this process."""
    return PIPE in os.environ


def join() -> None:
    """Begin as a rank: leave Ctrl-C to the launcher, report an error once, end when the launcher ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = lambda *error: claim() and sys.__excepthook__(*error)
    threading.Thread(target=_end_with_launcher, daemon=True).start()


def claim() -> bool:
    """Claim the right to print an error. Return True only in the first process of the run that calls this."""
    try:
        return os.read(int(os.environ[PIPE]), 1) != b""
    except BlockingIOError:
        return False


def _end_with_launcher() -> None:
    pipe = select.poll()
    pipe.register(int(os.environ[PIPE]), 0)  # wait for a hang-up only
    pipe.poll()
    os._exit(1)


# --- the launcher -------------------------------------------------------------------------------------------


def main(ranks: int, command: list[str]) -> int:
    """Start the command once per rank and wait. Return the exit status of the run."""
    received: list[int] = []  # signals
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: received.append(number))
    pipe, kept = os.pipe()
    os.write(kept, b"1")
    os.set_blocking(pipe, False)
    os.environ[PIPE] = str(pipe)
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        processes = []
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = os.environ | {name: str(value) for name, value in place.items()}
            processes.append(subprocess.Popen(command, env=environment, pass_fds=[pipe]))
        failed = wait_for(processes, received)
    if received:
        if claim():
            print("\nstopped", file=sys.stderr)
        return 128 + received[0]
    if failed is None:
        return 0
    status = processes[failed].returncode
    if status < 0:
        cause = ", as when memory runs out" if status == -signal.SIGKILL else ""
        start = "error: " if claim() else ""
        name = signal.Signals(-status).name
        print(f"{start}rank {failed} of {ranks} was ended by {name}{cause}", file=sys.stderr)
    return status if status > 0 else 128 - status


def reserved_port() -> socket.socket:
    """Return a socket bound to a free port. No other program gets it, but rank 0 can listen on it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
    reserved.bind(("127.0.0.1", 0))
    return reserved


def wait_for(processes: list[subprocess.Popen], received: list[int]) -> int | None:
    """Wait until all processes have ended. Return the rank of the first one that failed, or None.

    If a process fails, or if this process receives a signal, the others get SIGTERM and later SIGKILL.
    """
    failed, began, sent = None, None, None
    while any([process.poll() is None for process in processes]):  # a list, so that all are polled
        time.sleep(0.05)
        if failed is None:
            failed = next((i for i, process in enumerate(processes) if process.returncode), None)
        if began is None and (failed is not None or received):
            began = time.monotonic()
        if began is None:
            continue
        waited = time.monotonic() - began
        if sent is None and (received or waited > NOTICE_SECONDS):
            sent = signal.SIGTERM
        elif sent is signal.SIGTERM and (len(received) > 1 or waited > NOTICE_SECONDS + END_SECONDS):
            sent = signal.SIGKILL
        else:
            continue
        for process in processes:
            process.send_signal(sent)  # nothing happens if the process has ended
    if failed is None:
        failed = next((i for i, process in enumerate(processes) if process.returncode), None)
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), [sys.executable, *sys.argv[2:]]))
