"""How fast ranks talk to each other: all-reduces of all ranks and of each machine's, and pairs of machines.

Terms of NVIDIA's nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): algorithm bandwidth is the size of the
data by the time; bus bandwidth is what the slowest link carries in each direction, for an all-reduce of n ranks
2 (n - 1)/n times the former, and for two ranks that send to each other the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

SIZES = (4, 2**16, 2**20, 2**24, 2**26)
"""Bytes: of the latency, and up to where a link is busy with nothing but the data."""

SECONDS = 1.0
"""For the repetitions of one size."""

LONGEST_SECONDS = 3.0
"""A size that is likely to take longer for one repetition is left out, and all larger ones."""

REPETITIONS = 20
"""Most of one size."""

PAIR_SECONDS = 0.2
"""For the data of a pair of machines."""

ROUNDS = 16
"""Of pairs, half a second each, in which a machine meets so many others, or one fewer: of 16 machines all."""


@dataclass(frozen=True)
class Measured:
    """One collective.

    Attributes:
        size: bytes of the tensor.
        seconds: median of some repetitions.
        bus: bytes a second, in nccl-tests' sense.
    """

    size: int
    seconds: float
    bus: float

    @property
    def algorithm(self) -> float:
        """Bytes a second of the data itself."""
        return self.size / self.seconds


@dataclass(frozen=True)
class Pair:
    """What two machines send to each other at a time, one rank each, while others do the same.

    Attributes:
        nodes: both, the smaller first.
        seconds: of one byte there and back, halved.
        bus: bytes a second in each direction.
    """

    nodes: tuple[int, int]
    seconds: float
    bus: float


@dataclass(frozen=True)
class Progress:
    """How a rank shows that it has not been forgotten by the others.

    Attributes:
        step: begins another step, of which the other ranks hear.
        again: the step has come further.
        longest: seconds that one collective may be expected to take.
    """

    step: Callable[[str], None]
    again: Callable[[], None]
    longest: float


def together(device: torch.device) -> None:
    """Returns on all ranks at the same time, but for the latency of a collective."""
    for _ in range(2):  # the first one connects
        dist.all_reduce(torch.zeros(1, device=device))
        _synchronize(device)


def ladder(
    device: torch.device,
    whose: str,
    progress: Progress,
    group: dist.ProcessGroup | None = None,
    sizes: Sequence[int] = SIZES,
) -> list[Measured]:
    """All-reduces of growing sizes within a group of at least two ranks, in about a second each.

    Stops before a size that would take too long; the ranks agree on that, and on how often each is repeated.

    Args:
        device: of this rank.
        whose: the group, in words.
        progress: told of each size and each repetition.
        group: of the ranks, all by default.
        sizes: in bytes.
    """
    found: list[Measured] = []
    ranks = dist.get_world_size(group)
    for size in sizes:
        if found and found[-1].seconds * size / max(found[-1].size, 2**16) > progress.longest:
            break
        progress.step(f"measuring all-reduces of {size:,} bytes of {whose}")
        data = torch.ones(max(1, size // 4), device=device)
        times = _repeated(lambda data=data: dist.all_reduce(data, group=group), device, group, progress)
        seconds = statistics.median(times)
        found.append(Measured(size, seconds, size / seconds * 2 * (ranks - 1) / ranks))
    return found


def pairs(device: torch.device, node: int, leaders: Sequence[int], size: int, progress: Progress) -> list[Pair]:
    """Latency and bandwidth between machines, each in one pair in each of `ROUNDS` rounds; of few machines any two.

    Args:
        device: of this rank.
        node: its machine.
        leaders: the rank of each machine that takes part; others only wait.
        size: bytes that are sent in each direction.
        progress: told of each round.

    Returns:
        What this rank measured, as a member of each pair.
    """
    found: list[Pair] = []
    tables = rounds(len(leaders))[:ROUNDS]
    for number, matches in enumerate(tables, 1):
        progress.step(f"measuring between pairs of machines, round {number} of {len(tables)}")
        dist.barrier()
        progress.again()
        for match in matches:
            if node in match and dist.get_rank() == leaders[node]:
                other = leaders[match[0] if node == match[1] else match[1]]
                first = node == match[0]
                small, large = torch.ones(1, device=device), torch.ones(size // 4, device=device)
                _exchange(small, other, first, device)  # connects
                latency = min(_exchange(small, other, first, device) for _ in range(5)) / 2
                progress.again()
                seconds = min(_both_ways(large, other, device) for _ in range(2))
                found.append(Pair(match, latency, size / seconds))
    return found


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of so many, in rounds in which nobody is in two of them (the circle method of tournaments)."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    tables: list[list[tuple[int, int]]] = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        table = zip(players[:half], reversed(players[half:]), strict=True)
        tables.append([(min(one, two), max(one, two)) for one, two in table if one is not None and two is not None])
        players.insert(1, players.pop())
    return tables


def _repeated(
    call: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None, progress: Progress
) -> list[float]:
    """Seconds of each repetition, on the slowest rank, after one that connects and one that tells how often."""

    def once() -> float:
        seconds = _slowest(_timed(call, device), device, group)
        progress.again()
        return seconds

    once()
    count = max(1, min(REPETITIONS, int(SECONDS / max(once(), 1e-9))))
    return [once() for _ in range(count)]


def _timed(call: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - began


def _slowest(seconds: float, device: torch.device, group: dist.ProcessGroup | None) -> float:
    most = torch.tensor(seconds, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return most.item()


def _exchange(data: Tensor, other: int, first: bool, device: torch.device) -> float:
    """Seconds of a message there and its answer back."""

    def there_and_back() -> None:
        for sends in (first, not first):
            dist.send(data, other) if sends else dist.recv(data, other)

    return _timed(there_and_back, device)


def _both_ways(data: Tensor, other: int, device: torch.device) -> float:
    """Seconds in which both send as much to each other at once."""
    received = torch.empty_like(data)

    def at_once() -> None:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, data, other), dist.P2POp(dist.irecv, received, other)])
        for work in works:
            work.wait()

    return _timed(at_once, device)


def _synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize(device)  # nothing to wait for on the CPU
