"""Watches over the ranks of a run: one that fails or hangs ends them all and is named with its last lines; no torch."""

from __future__ import annotations

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

from cifar_zero.core.errors import UsageError
from cifar_zero.launch import heartbeat

GRACE_SECONDS = 10.0
"""How long the other ranks may take to end by themselves after one has failed."""

SAVING_SECONDS = 30.0
"""The same after one has ended on request: they may be writing a checkpoint still. SLURM gives them as long
(KillWait)."""

HANGING_SECONDS = 5.0
"""The same after a hang; what still can be stopped and saved is."""

STACK_SECONDS = 0.5
"""How long ranks may take to write their stacks."""

POLL_SECONDS, LOOK_SECONDS = 0.05, 1.0
"""Between two looks for ranks that have ended, and for ranks that hang."""

TAIL_LINES = 15
"""Lines shown of a failed rank."""

TAIL_BYTES = 2**16
"""Read of a rank's output at most."""

STACK_LINES = 16
"""Lines shown of a stack, the innermost first."""

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""With these a run is ended on purpose: by Ctrl-C, a supervisor, a closed terminal, SLURM before its time is over."""

ON_REQUEST = frozenset(128 + number for number in REQUESTS)
"""Exit codes of ranks that have done what they were asked to."""


@dataclass
class Rank:
    """A rank's process, and the files for its output (rank 0's goes to the terminal) and its stack."""

    number: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    stack: IO[bytes]

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None


def supervise(ranks: Sequence[Rank], board: heartbeat.Board, watch: heartbeat.Watch) -> int:
    """Waits until all ranks have ended, and ends them where one has failed or hangs.

    Requests to end that come meanwhile are passed on to them.

    Args:
        ranks: of this machine, just started.
        board: with their signs of life.
        watch: decides when they hang.

    Returns:
        The exit code: 0 where all ranks ended well, else that of the first that failed; 1 where they hung.
    """
    received = _pass_requests_on(ranks)
    failed: Rank | None = None
    hang = ""
    kill_at, look_at = math.inf, 0.0
    killed: list[Rank] = []
    while True:
        running = [rank for rank in ranks if rank.runs]
        if not killed:
            failed = failed or _first_failed(ranks, received)
        if not running:
            break
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
                _ask_to_end(running)
                kill_at = time.monotonic() + HANGING_SECONDS
        time.sleep(POLL_SECONDS)
    if hang:
        return 1
    if ranks[0].process.returncode == UsageError.exit_code:  # a mistake of the user's, found by all, said by rank 0
        return UsageError.exit_code
    if failed is not None:
        return _report_failure(failed)
    if killed:
        names = ", ".join(f"rank {rank.number}" for rank in killed)
        _say(f"error: {names} did not end on request and had to be killed")
        return 1
    return next((code for rank in ranks if (code := _code(rank, received))), 0)


def _pass_requests_on(ranks: Sequence[Rank]) -> list[int]:
    """From now on requests to end go to the ranks; returns the list in which they are noted."""
    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        # A terminal that is closed tells the ranks by itself; where only the launcher is told they can still save.
        sent = signal.SIGTERM if number == signal.SIGHUP else number
        received.extend({number, sent})
        if number != signal.SIGINT:  # that reaches them from the terminal by itself
            for rank in ranks:
                rank.process.send_signal(sent)

    for number in REQUESTS:
        ignored = signal.getsignal(number) == signal.SIG_IGN  # as under nohup, whose run outlives its terminal
        if not ignored and (number != signal.SIGUSR1 or "SLURM_JOB_ID" in os.environ):
            signal.signal(number, pass_on)
    return received


def _code(rank: Rank, received: Collection[int]) -> int | None:
    """The exit code so far; that of a rank which a request has ended before it could answer is as shells have it."""
    code = rank.process.returncode
    if code is not None and (-code == signal.SIGINT or -code in received):
        return 128 - code
    return code


def _first_failed(ranks: Sequence[Rank], received: Collection[int]) -> Rank | None:
    """Of several at once, one that was killed: the others failed because of it."""
    failed = [rank for rank in ranks if _code(rank, received) not in (None, 0, *ON_REQUEST)]
    return min(failed, key=lambda rank: rank.process.returncode > 0, default=None)


def _is_stopped(rank: Rank) -> bool:
    """By a signal; a debugger that holds it does not count."""
    try:
        return psutil.Process(rank.process.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _ask_to_end(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.process.terminate()
        rank.process.send_signal(signal.SIGCONT)


def _report_failure(rank: Rank) -> int:
    """Names a rank that failed, with its last lines, unless it has told the terminal itself; returns the exit code."""
    code = rank.process.returncode
    if rank.number > 0 or code < 0:
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        tail = [] if rank.number == 0 else _lines(rank.log)[-TAIL_LINES:]
        _say(f"error: rank {rank.number} ended with {how}" + "; its last lines:" * bool(tail), *tail)
    return code if code > 0 else 1


def _report_hang(hang: str, ranks: Sequence[Rank], board: heartbeat.Board, stopped: Collection[int]) -> None:
    """Says who hangs, where every rank is and what it said last."""
    beats = board.read()
    for rank in ranks:
        if rank.number not in stopped and beats[rank.number].state != heartbeat.ABSENT:  # else it would die of it
            rank.process.send_signal(heartbeat.STACK_SIGNAL)
    time.sleep(STACK_SECONDS)
    _say(f"error: {hang}")
    for rank in ranks:
        _say(f"rank {rank.number}: {beats[rank.number].batches} batches done")
        stack = _lines(rank.stack)[: STACK_LINES + 1]  # its title says that the innermost call comes first
        tail = [] if rank.number == 0 else _lines(rank.log)[-TAIL_LINES:]
        if stack:
            _say(*stack)
        if tail:
            _say(f"rank {rank.number}'s last lines:", *tail)


def _lines(file: IO[bytes]) -> list[str]:
    """The end of what a rank has written, less empty lines; the rank's own place in the file stays."""
    start = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
    text = os.pread(file.fileno(), TAIL_BYTES, start).decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _say(title: str, *lines: str) -> None:
    print(title, *lines, sep="\n  ", file=sys.stderr, flush=True)
