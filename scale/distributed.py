"""Several processes ("ranks") that work as one: data parallelism with torch.distributed, small and explicit.

`torchrun --nproc_per_node=8 train.py ...` starts the ranks. They share out work, never knowledge: each plays
some of the episodes, scores some of the rows and computes the gradient of some of them, and then all are told
all of it. So every rank holds the same episodes, advantages, replay buffer and weights, draws the same random
numbers, and takes the same decisions; a rank that gets no work takes part in every exchange all the same, so
uneven shares cannot hang. Python objects travel over gloo, gradients of a GPU over its own backend.

With one process nothing is started, and every function here does nothing or gives back what it was given.

A rank that fails says why and ends; the connections of the others break, which raises `RankLost` in them, and
torchrun ends them too. Left out: shards of a model, weights that are not on every rank, ranks that come back.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch import distributed as dist

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
TO_START = datetime.timedelta(minutes=5)  # for all ranks to find each other
TO_ANSWER = datetime.timedelta(days=2)  # rank 0 may fit a model meanwhile; one that ends is noticed at once
TO_PRINT = datetime.timedelta(seconds=10)
BUCKET = 2**26  # elements of gradients that are sent together: 256 MB in fp32

_store = None  # where the ranks met


class RankLost(RuntimeError):
    """Another rank has ended."""


# --- who is there -------------------------------------------------------------------------------------------


def start() -> None:
    """Join the ranks that the environment variables of torchrun tell of; without any, or with one, nothing.

    Raises ValueError if the variables make no sense.
    """
    global _store
    rank, ranks = rank_of_environment()
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
    """torchrun ends the ranks that are left, often before they notice that one is gone: that is as Ctrl-C."""
    _stop_once()
    raise KeyboardInterrupt


def _stop_once() -> None:
    """This rank is about to end: nothing shall come between it and what it has to say."""
    if world_size() > 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def rank_of_environment() -> tuple[int, int]:
    """(this rank, how many there are) as the environment variables say. Raises ValueError."""
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if not given.keys() & {"RANK", "WORLD_SIZE"}:
        return 0, 1
    start = "start several processes with torchrun, or unset these variables for one"
    if missing := ", ".join(name for name in VARIABLES if name not in given):
        there = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"of torchrun's environment variables {there} are set, but not {missing}; {start}")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not given[name].isdecimal():
            raise ValueError(f"environment variable {name}={given[name]}: is no number; {start}")
    rank, ranks = int(given["RANK"]), int(given["WORLD_SIZE"])
    if rank >= ranks:
        raise ValueError(f"environment variable RANK={rank}: must be below WORLD_SIZE={ranks}; {start}")
    return rank, ranks


def stop() -> None:
    """The end of a run that went well. After an error a rank just ends."""
    if world_size() > 1:
        wait()
        dist.destroy_process_group()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is: 0 is the one that prints and writes files."""
    return dist.get_rank() if world_size() > 1 else 0


def local_rank() -> int:
    """Which of those on this machine this is."""
    return int(os.environ["LOCAL_RANK"]) if world_size() > 1 else 0


def local_world_size() -> int:
    """How many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or world_size()) if world_size() > 1 else 1


def print_once(text: str) -> None:
    """Print an error that other ranks may have seen too: the first to get here does, the others wait for it,
    since torchrun ends all of them as soon as one has ended."""
    _stop_once()
    try:
        first = world_size() == 1 or _store.add("reported", 1) == 1
    except RuntimeError:  # the rank that kept the store has ended
        first = True
    if first:
        print(text, file=sys.stderr, flush=True)
    if world_size() > 1:
        with contextlib.suppress(RuntimeError):
            _store.set("printed", "") if first else _store.wait(["printed"], TO_PRINT)


# --- exchange -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _rank_lost_on_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        _stop_once()
        why = f"rank {rank()} of {world_size()} has lost another rank, which ended or broke its connection"
        raise RankLost(why) from error


def gather(items: list) -> list:
    """The items of all ranks, rank 0's first, on every rank. They are pickled, so others are copies."""
    if world_size() == 1:
        return items
    parts: list = [None] * world_size()
    with _rank_lost_on_error():
        dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def wait() -> None:
    """Until all ranks are here."""
    gather([])


def on_rank_0(call: Callable):
    """What `call` returns on rank 0, where alone it is called. The others wait for it."""
    return gather([call() if rank() == 0 else None])[0]


def shares(costs: list[float], n: int) -> list[list[int]]:
    """The places 0, 1, ... of the costs dealt out to n, for sums that are about equal; some may get none.

    The dearest is dealt first, each to whoever has least by then.
    """
    dealt: list[list[int]] = [[] for _ in range(n)]
    loads = [0.0] * n
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        least = loads.index(min(loads))
        dealt[least].append(place)
        loads[least] += costs[place]
    return [sorted(share) for share in dealt]


def local_share(costs: list[float]) -> list[int]:
    """This rank's share: places in `costs`."""
    return shares(costs, world_size())[rank()]


def map_over_ranks(call: Callable[[list], list], items: list, costs: list[float] | None = None) -> list:
    """call(items), one result for each: every rank calls it with its share, then all have all, in order.

    Shares are balanced by `costs`; without, they are runs of neighbours, equally many.
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


# --- gradients ----------------------------------------------------------------------------------------------


def sum_gradients(parameters: list[Tensor]) -> None:
    """Replace every gradient by its sum over the ranks; a rank that has none, having had no rows, adds 0.

    One that no rank has stays None, so that AdamW passes it by. The parameters have one dtype and device.
    """
    if world_size() == 1:
        return
    for bucket in _buckets(parameters):
        flat = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in bucket]
        there = bucket[0].new_tensor([p.grad is not None for p in bucket])  # summed too: who has one
        summed = torch.cat([*flat, there])
        with _rank_lost_on_error():
            dist.all_reduce(summed, group=_group(summed.device.type))
        *sums, there = summed.split([*(p.numel() for p in bucket), len(bucket)])
        for p, total, ranks in zip(bucket, sums, there.tolist(), strict=True):
            p.grad = total.view_as(p) if ranks else None


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of parameters with at most BUCKET elements; a larger one goes alone."""
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
    """The ranks' connection for tensors of that kind of device, made when it is first used."""
    if device == "cpu":
        return None  # gloo, the default
    return dist.new_group(timeout=TO_ANSWER, backend=dist.get_default_backend_for_device(device))


def check_alike(parameters: list[Tensor]) -> None:
    """Raises RuntimeError if the ranks' weights have drifted apart, which no metric would show."""
    sums = [float(p.detach().double().sum()) for p in parameters] if world_size() > 1 else []
    if any(other != sums for other in gather([sums])):
        raise RuntimeError(
            f"the weights of rank {rank()} are not those of the others: the ranks train different policies; "
            "let them be GPUs of one kind, with one version of everything"
        )
