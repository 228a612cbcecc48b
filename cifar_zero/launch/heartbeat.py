"""Detects hanging ranks by the heartbeats that they write into shared memory; no torch.

The other ranks wait for a hanging rank in a collective: for 30 minutes under gloo, for ever in DeepSpeed's own
all-reduce on the CPU (Lightning issues 16518 and 18878).
"""

import faulthandler
import mmap
import os
import signal
import struct
import tempfile
import time
from collections.abc import Collection, Sequence
from typing import IO, NamedTuple

VARIABLE = "CIFAR_ZERO_HEARTBEAT"
"""Environment variable of a rank: its slot, and the file descriptors of the shared memory and of its stack file."""

STACK_SIGNAL = signal.SIGUSR2  # makes a rank write its Python stack, even while it waits in a library
SILENT_SECONDS = 45.0  # minimum silence of all ranks that counts as a hang, so that the run ends within a minute
SILENT_STEPS = 10  # the same, in units of the longest time between two batches so far
STOPPED_SECONDS = 20.0  # how long a rank may be stopped by a signal before it counts as hanging

ABSENT, WAITING, RUNNING = range(3)
"""States of a rank: not started yet (the content of new memory); busy with what may take minutes (compiling, decoding,
writing a checkpoint); going from batch to batch."""

_SLOT = struct.Struct("qqd")  # native and aligned: each number is written as a whole


class Beat(NamedTuple):
    """The latest heartbeat of a rank."""

    state: int  # ABSENT, WAITING or RUNNING
    batches: int  # micro-batches so far, of training, validation and test
    time: float  # in seconds, on the clock of `time.monotonic`, which all processes of a computer share


class Board:
    """The launcher's side of the shared memory: one slot for each rank. It has no name that could be left behind."""

    def __init__(self, ranks: int):
        self._ranks = ranks
        # In memory if possible: writing to a page that is being flushed to a disk waits.
        self._file = tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)  # noqa: SIM115
        self._file.truncate(ranks * _SLOT.size)
        self._memory = mmap.mmap(self._file.fileno(), ranks * _SLOT.size)

    def ticket(self, rank: int, stack: IO[bytes]) -> tuple[str, tuple[int, int]]:
        """Returns a rank's value of VARIABLE, and the file descriptors that it must inherit."""
        descriptors = (self._file.fileno(), stack.fileno())
        return f"{rank},{descriptors[0]},{descriptors[1]}", descriptors

    def read(self) -> list[Beat]:
        return [Beat(*_SLOT.unpack_from(self._memory, rank * _SLOT.size)) for rank in range(self._ranks)]


class Pulse:
    """A rank's side of the shared memory, and its handler of STACK_SIGNAL; without our launcher nobody reads it."""

    def __init__(self) -> None:
        self._batches = 0
        self._offset = 0
        self._memory: mmap.mmap | bytearray = bytearray(_SLOT.size)
        if VARIABLE in os.environ:
            rank, board, stack = map(int, os.environ[VARIABLE].split(","))
            self._offset = rank * _SLOT.size
            self._memory = mmap.mmap(board, 0)
            faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)
        self.wait()

    def beat(self) -> None:
        """Notes that a batch is done; from now on silence counts. Takes about 0.3 us."""
        self._batches += 1
        _SLOT.pack_into(self._memory, self._offset, RUNNING, self._batches, time.monotonic())
        if self._batches == 1:  # from now on the launcher leaves Ctrl-C to the ranks
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one that has come meanwhile arrives now

    def wait(self) -> None:
        """Notes that what follows may take minutes; until the next beat silence does not count."""
        _SLOT.pack_into(self._memory, self._offset, WAITING, self._batches, time.monotonic())


class Watch:
    """Decides from heartbeats whether ranks hang."""

    def __init__(self) -> None:
        self._looked = float("-inf")
        self._since = 0.0
        self._beats: Sequence[Beat] = ()
        self._stopped: dict[int, float] = {}
        self._longest = 0.0

    def look(self, beats: Sequence[Beat], stopped: Collection[int], now: float) -> str:
        """Returns in one line which ranks hang and why; empty if none does. Called about once a second. `stopped` are
        the ranks that a signal has stopped, `now` is in seconds on the clock of the beats."""
        if now - self._looked > 5.0:  # normally a second: the first look, or Ctrl-Z and fg; time counts from now on
            self._since, self._beats, self._stopped = now, beats, {}
        self._looked = now
        for beat, before in zip(beats, self._beats, strict=True):
            if beat.state == before.state == RUNNING:
                self._longest = max(self._longest, beat.time - max(before.time, self._since))
        self._beats = beats
        self._stopped = {rank: self._stopped.get(rank, now) for rank in stopped}
        hanging = [rank for rank, since in self._stopped.items() if now - since > STOPPED_SECONDS]
        if hanging:
            return f"{_names(hanging)}: stopped by a signal for more than {STOPPED_SECONDS:.0f} s"
        silence = now - max(self._since, *(beat.time for beat in beats))
        patience = max(SILENT_SECONDS, SILENT_STEPS * self._longest)
        if any(beat.state != RUNNING for beat in beats) or silence <= patience:
            return ""
        # In a collective the others wait for the ranks with the fewest batches.
        least = min(beat.batches for beat in beats)
        behind = [rank for rank, beat in enumerate(beats) if beat.batches == least]
        so_far = f"{least} batches so far, nothing for {silence:.0f} s"
        if len(behind) == len(beats):
            return f"all ranks hang: {so_far}"
        return f"{_names(behind)}: {so_far}, and the others are further"


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} hangs" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hang"
