"""Ranks: several processes that train one policy, with torch.distributed.

`--ranks` (scale/launch.py) or torchrun starts the ranks. Ranks split the work, not the data: each plays,
scores and differentiates its share, and the results are gathered on every rank. So every rank holds the same
episodes, advantages, replay buffer and weights, draws the same random numbers and takes the same decisions. A
rank without work still takes part in every collective, so uneven shares cannot hang. Python objects are
exchanged over gloo, gradients on a GPU over the GPU's own backend.

With one process nothing is started, and every function of this module returns its argument or does nothing.

A rank that fails prints its error and ends. This breaks the connections of the others, which raises
`RankLost` there; the launcher ends them too. A rank that hangs breaks no connection: `watch` ends the others
when no rank makes progress. Left out: sharded models, weights that differ between ranks, ranks that rejoin.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import pickle
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch import distributed as dist

from scale import launch

TO_START = datetime.timedelta(minutes=5)  # time for all ranks to find each other
# The other ranks wait while rank 0 writes a checkpoint. They notice a dead rank at once; `watch` ends a run
# in which a rank hangs.
TO_ANSWER = datetime.timedelta(days=2)
TO_PRINT = datetime.timedelta(seconds=10)
BUCKET = 2**26  # gradient elements per all-reduce: 256 MB in fp32

_store = None  # torch's key-value store, shared by the ranks
_waiting = False  # True while this rank is in a collective
_finished = 0  # collectives that this rank has left


class RankLost(RuntimeError):
    """Another rank has ended or broken its connection."""


# --- start and stop ---


def start() -> None:
    """Join the other ranks, as torchrun's environment variables say. With one rank, do nothing.

    Raises ValueError if a variable is missing or malformed.
    """
    global _store
    rank, ranks = launch.rank_of_environment()
    if ranks == 1:
        return
    meeting = f"MASTER_ADDR {os.environ['MASTER_ADDR']}, MASTER_PORT {os.environ['MASTER_PORT']}"
    try:
        _store, *_ = next(dist.rendezvous("env://", timeout=TO_START))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"rank {rank} of {ranks} cannot meet the others at {meeting}: {error}") from None
    dist.init_process_group("gloo", store=_store, rank=rank, world_size=ranks, timeout=TO_ANSWER)
    signal.signal(signal.SIGTERM, _stop)


def _stop(*_) -> None:
    """Treat SIGTERM like Ctrl-C: the launcher sends it to the remaining ranks when one has ended."""
    _stop_once()
    raise KeyboardInterrupt


def _stop_once() -> None:
    """Ignore further SIGTERMs, so that this rank can print its error before it ends."""
    if world_size() > 1 and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def stop() -> None:
    """Leave the group at the end of a successful run. After an error a rank simply exits."""
    if world_size() > 1:
        wait()
        dist.destroy_process_group()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def leave(status: int) -> NoReturn:
    """Exit with a status after an error.

    A member of a group exits without Python's shutdown, in which gloo's threads would often abort the process
    and replace the status by SIGABRT's.
    """
    if not (dist.is_available() and dist.is_initialized()):
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank. Rank 0 prints and writes files."""
    return dist.get_rank() if world_size() > 1 else 0


def local_rank() -> int:
    """Return this process's rank among the ranks on this machine."""
    return int(os.environ["LOCAL_RANK"]) if world_size() > 1 else 0


def local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or world_size()) if world_size() > 1 else 1


def print_once(text: str) -> None:
    """Print an error once, even if several ranks raise it.

    The first rank that calls this prints. The others wait until it has printed, because torchrun ends all
    ranks as soon as one has ended.
    """
    _stop_once()
    if launch.is_launched():  # the launcher ends no rank that is about to print
        if launch.claim():
            print(text, file=sys.stderr, flush=True)
        return
    try:
        first = world_size() == 1 or _store.add("reported", 1) == 1
    except RuntimeError:  # the rank that hosts the store has ended
        first = True
    if first:
        print(text, file=sys.stderr, flush=True)
    if world_size() > 1:
        with contextlib.suppress(RuntimeError):
            if first:
                _store.set("printed", "")
            else:
                _store.wait(["printed"], TO_PRINT)


# --- hanging ranks ---


class Progress:
    """Counts, in the ranks' store, the seconds in which some rank has made progress.

    A rank makes progress when it leaves a collective, and while it is outside of one and its main thread
    moves: its stack differs from that of the last look. So rank 0 may work for hours while the others wait
    for it. A stopped process makes no progress, nor does a call that never returns.
    """

    def __init__(self):
        self.store = _store.clone()  # its own connection: a call may block
        self.finished, self.stack = 0, []  # at the last look
        self.total = 0  # of all ranks

    def moved(self) -> bool:
        """Return whether this rank has made progress since the last look."""
        frame, stack = sys._current_frames()[threading.main_thread().ident], []
        while frame:
            stack.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        moved = _finished != self.finished or (not _waiting and stack != self.stack)
        self.finished, self.stack = _finished, stack
        return moved

    def exchange(self, seconds: float, ended: threading.Event) -> None:
        """Count this rank's progress and read the progress of all ranks, repeatedly, until `ended` is set."""
        with contextlib.suppress(RuntimeError):  # the store has ended, and with it the run
            while not ended.wait(seconds):
                self.total = self.store.add("progress", int(self.moved()))


def watch(minutes: float, end: Callable[[str], None]) -> None:
    """Call `end` with a message if no rank makes progress for so long while this rank waits in a collective.

    `end` is called in a thread and must end the process, as the main thread cannot be reached. Minutes are
    counted in steps of a second at most, so a run that was suspended as a whole goes on.
    """
    if world_size() == 1:
        return
    progress, seconds, ended = Progress(), min(1.0, 6 * minutes), threading.Event()

    def look() -> None:
        seen, quiet = 0, 0.0
        while quiet < 60 * minutes:
            if ended.wait(seconds):
                return
            quiet = quiet + seconds if _waiting and progress.total == seen else 0.0
            seen = progress.total
        end(
            f"--rank_timeout {minutes:g}: rank {rank()} of {world_size()} waits, and no rank has made "
            "progress for so many minutes: one of them hangs or was stopped; raise it if one may need longer"
        )

    counting = threading.Thread(target=progress.exchange, args=[seconds, ended], daemon=True)
    looking = threading.Thread(target=look, daemon=True)
    counting.start()
    looking.start()

    @atexit.register
    def finish() -> None:
        """End the threads. A thread that leaves the store while Python shuts down would abort the process."""
        ended.set()
        counting.join(5)


# --- shares and gathers ---


@contextlib.contextmanager
def _collective() -> Iterator[None]:
    """Mark this rank as waiting for others, and raise RankLost if the connection to one of them breaks."""
    global _waiting, _finished
    _waiting = True
    try:
        yield
    except RuntimeError as error:
        _stop_once()
        why = f"rank {rank()} of {world_size()} has lost another rank, which ended or broke its connection"
        raise RankLost(why) from error
    finally:
        _waiting = False
        _finished += 1


def gather(items: list) -> list:
    """Concatenate the items of all ranks, rank 0's first, on every rank. Other ranks' items are pickled."""
    if world_size() == 1:
        return items
    own = torch.frombuffer(bytearray(pickle.dumps(items)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world_size())]
    with _collective():
        dist.all_gather(sizes, torch.tensor([len(own)]))
        longest = int(max(sizes))
        padded = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(padded, nn.functional.pad(own, (0, longest - len(own))))
    parts = [items if i == rank() else pickle.loads(padded[i].numpy()) for i in range(world_size())]
    return [item for part in parts for item in part]


def wait() -> None:
    """Block until every rank has called this."""
    gather([])


def on_rank_0(call: Callable):
    """Call `call` on rank 0 only and return its result on every rank."""
    return gather([call() if rank() == 0 else None])[0]


def shares(costs: list[float], n: int) -> list[list[int]]:
    """Split the places 0, 1, ... of `costs` into n shares with about equal sums; a share may be empty.

    Greedy: the most expensive place goes first, each to the share with the smallest sum so far.
    """
    dealt: list[list[int]] = [[] for _ in range(n)]
    loads = [0.0] * n
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        least = loads.index(min(loads))
        dealt[least].append(place)
        loads[least] += costs[place]
    return [sorted(share) for share in dealt]


def local_share(costs: list[float]) -> list[int]:
    """Return this rank's share: places in `costs`."""
    return shares(costs, world_size())[rank()]


def map_over_ranks(call: Callable[[list], list], items: list, costs: list[float] | None = None) -> list:
    """Return call(items), a list with one result per item, computed in shares by all ranks.

    Every rank calls `call` with its share of the items; the results are gathered in the items' order. Shares
    are balanced by `costs`; without costs they are runs of neighbours of about equal length.
    """
    if world_size() == 1:
        return call(items)
    if costs is None:
        ends = [len(items) * i // world_size() for i in (rank(), rank() + 1)]
        return gather(call(items[slice(*ends)]))
    places = local_share(costs)
    results = call([items[place] for place in places])
    by_place = dict(gather(list(zip(places, results, strict=True))))
    return [by_place[place] for place in range(len(items))]


class Totals:
    """Means of metrics over a whole update: sums and counts, added over micro-batches, divided at the end."""

    def __init__(self):
        self.sums, self.counts = {}, {}

    def add(self, name: str, total: float | Tensor, count: int | Tensor) -> None:
        """Add a sum over `count` items. Tensors stay on their device, so that a GPU need not synchronise."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0) + count

    def means(self) -> dict[str, float]:
        """Average over all ranks."""
        local = [(name, float(total), int(self.counts[name])) for name, total in self.sums.items()]
        sums, counts = defaultdict(float), defaultdict(int)
        for name, total, count in gather(local):
            sums[name] += total
            counts[name] += count
        return {name: total / counts[name] for name, total in sums.items()}


def sum_tensor(values: Tensor) -> None:
    """Replace a tensor on the CPU by its sum over the ranks. An empty one is left alone."""
    if world_size() > 1 and values.numel():
        with _collective():
            dist.all_reduce(values)


# --- gradients ---


def sum_gradients(parameters: list[Tensor]) -> None:
    """Replace every gradient by its sum over the ranks.

    A rank without rows contributes zeros. A gradient that is None on every rank stays None, so AdamW skips
    that parameter. All parameters have one dtype and one device.
    """
    if world_size() == 1:
        return
    for bucket in _buckets(parameters):
        flat = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in bucket]
        present = bucket[0].new_tensor([p.grad is not None for p in bucket])  # its sum: ranks with a gradient
        summed = torch.cat([*flat, present])
        with _collective():
            dist.all_reduce(summed, group=_group(summed.device.type))
            *sums, present = summed.split([*(p.numel() for p in bucket), len(bucket)])
            present = present.tolist()  # a GPU waits for the other ranks here
        for p, total, ranks in zip(bucket, sums, present, strict=True):
            p.grad = total.view_as(p) if ranks else None


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of parameters with at most BUCKET elements; a larger parameter is its own run."""
    bucket: list[Tensor] = []
    for p in parameters:
        if bucket and sum(other.numel() for other in bucket) + p.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(p)
    if bucket:
        yield bucket


@functools.cache
def _group(device: str):
    """Return the process group for tensors on this kind of device, made on first use."""
    if device == "cpu":
        return None  # gloo, the default
    return dist.new_group(timeout=TO_ANSWER, backend=dist.get_default_backend_for_device(device))


def check_alike(parameters: list[Tensor]) -> None:
    """Raise RuntimeError if the ranks' weights differ, which no metric would show."""
    sums = [float(p.detach().double().sum()) for p in parameters] if world_size() > 1 else []
    if any(other != sums for other in gather([sums])):
        raise RuntimeError(
            f"rank {rank()} has other weights than another rank: the ranks train different "
            "policies; use GPUs of one kind and equal package versions"
        )
