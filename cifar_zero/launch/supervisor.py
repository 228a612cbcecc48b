"""Watches the ranks of a run; if one fails or hangs, ends all, names it and shows its last lines; no torch."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import IO

import psutil

from cifar_zero.core.console import say
from cifar_zero.core.errors import Stopped, UsageError
from cifar_zero.launch import heartbeat

GRACE_SECONDS = 10.0  # time for the other ranks to end on their own after one has failed

SAVING_SECONDS = 30.0
"""The same after a rank has ended on request: the others may still write a checkpoint (SLURM's KillWait)."""

POLL_SECONDS, LOOK_SECONDS = 0.05, 1.0  # time between two looks for ended ranks, and for hanging ranks
STACK_SECONDS = 10.0  # how long ranks may take to write their stacks: one that waits in the kernel never does
TAIL_LINES, TAIL_BYTES = 15, 2**16  # lines shown of a rank's output, and the bytes of it that are read at most

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run on purpose: Ctrl-C, a supervisor, a closed terminal, SLURM before the job's time is over."""

ON_REQUEST = frozenset(128 + number for number in REQUESTS)  # exit codes of ranks that ended on request


@dataclass
class Rank:
    """A rank's process, and the files for its output (rank 0's goes to the terminal) and its stack."""

    number: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    stack: IO[bytes]


def supervise(ranks: Sequence[Rank], board: heartbeat.Board, received: Sequence[int]) -> int:
    """Waits until all ranks have ended, and ends them if one fails or hangs; `received`: see `pass_requests_on`.
    Returns the exit code: 0 if all ranks succeeded, else that of the first one that failed; 1 after a hang. Raises
    Stopped: Ctrl-C came before the first batch of a rank, or twice and rank 0 did not end."""
    failed: Rank | None = None
    hang = ""
    kill_at, look_at, watch = math.inf, 0.0, heartbeat.Watch()
    killed: list[Rank] = []
    while True:
        running = [rank for rank in ranks if rank.process.poll() is None]
        if not killed and failed is None:  # of several a killed one, because the others failed as a consequence
            # Twice: a rank that was killed before another failed may have ended after its first look.
            broken = _broken(ranks, received) and _broken(ranks, received)
            failed = min(broken, key=lambda rank: rank.process.returncode > 0, default=None)
        if not running:
            break
        if signal.SIGINT in received and not all(beat.batches for beat in board.read()):  # nothing can be saved
            raise Stopped(signal.SIGINT)
        now = time.monotonic()
        if now >= kill_at:
            killed = killed or running
            for rank in running:
                rank.process.kill()
        elif failed or received.count(signal.SIGINT) > 1:
            kill_at = min(kill_at, now + GRACE_SECONDS)
        elif any(_code(rank, received) in ON_REQUEST for rank in ranks):
            kill_at = min(kill_at, now + SAVING_SECONDS)
        elif now >= look_at and not hang:
            look_at = now + LOOK_SECONDS
            stopped = {rank.number for rank in running if _is_stopped(rank)}
            if hang := watch.look(board.read(), stopped, now):
                _report_hang(hang, running, board, stopped)
                for rank in running:
                    rank.process.terminate()
                    rank.process.send_signal(signal.SIGCONT)
                kill_at = time.monotonic() + 5.0  # seconds for the others after a hang
        time.sleep(POLL_SECONDS)
    if hang:
        return 1
    if ranks[0].process.returncode == UsageError.exit_code:  # all ranks have found it, rank 0 has reported it
        return UsageError.exit_code
    if failed is not None:
        return _report_failure(failed)
    if ranks[0] in killed and received.count(signal.SIGINT) > 1:
        raise Stopped(signal.SIGINT, "the second one ended the ranks before they saved a checkpoint")
    if killed:
        names = ", ".join(f"rank {rank.number}" for rank in killed)
        say(f"error: {names} did not end on request and had to be killed")
        return 1
    return next((code for rank in ranks if (code := _code(rank, received))), 0)


def pass_requests_on(ranks: Sequence[Rank]) -> list[int]:
    """Passes requests to end on to the ranks that are in this list then; returns the list in which they are noted."""
    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        # A closed terminal reaches the ranks directly; if only the launcher gets SIGHUP, they can still save.
        sent = signal.SIGTERM if number == signal.SIGHUP else number
        received.extend({number, sent})
        if number != signal.SIGINT:  # the terminal sends that to the ranks directly
            for rank in ranks:
                rank.process.send_signal(sent)

    for number in REQUESTS:
        ignored = signal.getsignal(number) == signal.SIG_IGN  # as under nohup, whose run outlives its terminal
        if not ignored and (number != signal.SIGUSR1 or "SLURM_JOB_ID" in os.environ):
            signal.signal(number, pass_on)
    return received


def _broken(ranks: Sequence[Rank], received: Collection[int]) -> list[Rank]:
    return [rank for rank in ranks if _code(rank, received) not in (None, 0, *ON_REQUEST)]


def _code(rank: Rank, received: Collection[int]) -> int | None:
    """Returns the exit code so far; for a rank that a request ended before it could answer, the shell's."""
    code = rank.process.poll()
    if code is not None and (-code == signal.SIGINT or -code in received):
        return 128 - code
    return code


def _is_stopped(rank: Rank) -> bool:
    """Returns whether a signal has stopped a rank; a debugger does not count."""
    try:
        return psutil.Process(rank.process.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _report_failure(rank: Rank) -> int:
    """Names a failed rank with its last lines, unless it was rank 0's own error; returns the exit code."""
    code = rank.process.returncode
    if rank.number > 0 or code < 0:
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        tail = _tail(rank)
        say(f"error: rank {rank.number} ended with {how}" + "; its last lines:" * bool(tail), *tail)
    return code if code > 0 else 1


def _report_hang(hang: str, ranks: Sequence[Rank], board: heartbeat.Board, stopped: Collection[int]) -> None:
    """Prints which ranks hang, and the stack and the last lines of every rank."""
    beats = board.read()
    asked = [
        rank
        for rank in ranks  # one that is absent has no handler: it would die
        if rank.number not in stopped and beats[rank.number].state != heartbeat.ABSENT
    ]
    for rank in asked:
        rank.process.send_signal(heartbeat.STACK_SIGNAL)
    until = time.monotonic() + STACK_SECONDS
    while not all(os.fstat(rank.stack.fileno()).st_size for rank in asked) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    time.sleep(0.5)  # to write the rest, once a rank has begun
    say(f"error: {hang}")
    for rank in ranks:
        say(f"rank {rank.number}: {beats[rank.number].batches} batches done")
        if stack := _lines(rank.stack)[:17]:  # a title and 16 lines, the innermost call first
            say(*stack)
        if tail := _tail(rank):
            say(f"rank {rank.number}'s last lines:", *tail)


def _tail(rank: Rank) -> list[str]:
    """Returns a rank's last lines, with --debug all that are read; none of rank 0, whose output has been shown."""
    return [] if rank.number == 0 else _lines(rank.log)[0 if "--debug" in sys.argv else -TAIL_LINES :]


def _lines(file: IO[bytes]) -> list[str]:
    """Returns the last non-empty lines that a rank has written; the rank's position in the file stays."""
    start = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
    text = os.pread(file.fileno(), TAIL_BYTES, start).decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()]
