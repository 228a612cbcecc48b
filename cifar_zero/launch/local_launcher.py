"""Starts the ranks of a run on this computer, watches them, and ends all of them when one fails. Does not import torch.

torch's elastic launcher is not used. It takes 3 s and 500 MB to import (torch 2.15) while the ranks need the cores, and
Ctrl-C does not reach its ranks, because it starts them in separate sessions.
"""

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from cifar_zero.core import exits
from cifar_zero.core.console import RESUME_WITH, say
from cifar_zero.core.errors import RunError, Stopped, UsageError
from cifar_zero.core.hardware import share_of_cores
from cifar_zero.launch.rank_environment import ADDRESS, FOLDER_FILE, RUN_FILE, content_of

_LIBC = ctypes.CDLL(None)  # loaded here, because it is too late after a fork

PR_SET_PDEATHSIG = 1  # option of Linux's prctl that kills a process with its parent (linux/prctl.h)

LOOPBACK = "GLOO_SOCKET_IFNAME"
"""Environment variable that names the network interface of gloo. By default, gloo listens on the address that belongs
to this computer's name, which other computers may reach."""

POLL_SECONDS = 0.05  # time between two checks for ended ranks
GRACE_SECONDS = 10.0  # time for the other ranks to end on their own after one has failed
SAVING_SECONDS = 30.0  # time for the other ranks to save and end after one has ended on request (SLURM's KillWait)
TAIL_LINES = 15  # lines of a failed rank's output that are printed; --debug prints all

# Exit codes of ranks that ended on request.
ON_REQUEST = frozenset(128 + number for number in (*exits.SIGNALS, exits.SLURM_REQUEUE))


@dataclass
class Rank:
    """The process of a rank, and the file that receives its output. The file of rank 0 stays empty, because rank 0
    writes to the launcher's own output."""

    number: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]


def run_ranks(ranks: int, on_cpu: bool, run: bytes = b"", how_to_resume: Callable[[Path], str] = lambda _: "") -> int:
    """Runs this process's command line again as several ranks on this computer, and waits for them. Ranks that do not
    end soon after another one has failed or ended on request are killed. Prints how the first failed rank ended.

    Returns 0 if all ranks succeeded. Otherwise returns the exit code of the first rank that failed, or 1 if a signal
    killed it. If no rank failed, returns 128 + the number of the signal on which the ranks ended, or 1 if some had to
    be killed. Raises Stopped if a signal of `exits.requests` comes while ranks are being started, or if Ctrl-C comes
    twice and rank 0 does not end.

    Args:
        on_cpu: Whether the ranks train on the CPU. If so, each gets its share of the cores, unless OMP_NUM_THREADS is
            set.
        run: The resolved run, which the ranks read from RUN_FILE.
        how_to_resume: Returns the command that resumes a run from its folder, or an empty string if there is no
            checkpoint. The command is printed if rank 0 was killed. Otherwise rank 0 prints it itself.
    """
    started: list[Rank] = []
    received = _pass_requests_on(started)
    divides_cores = on_cpu and "OMP_NUM_THREADS" not in os.environ  # otherwise the user has divided them
    port = free_port()
    with ExitStack() as stack:
        # Files without a name, which a killed launcher does not leave behind.
        run_file, folder_file, *logs = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(ranks + 2))
        run_file.write(run)
        run_file.flush()
        files = {RUN_FILE: run_file.fileno(), FOLDER_FILE: folder_file.fileno()}
        try:
            for number, log in enumerate(logs):
                cores = share_of_cores(number, ranks) if divides_cores else set()
                started.append(_start(number, variables(number, ranks, port), cores, log, files))
                if received:  # the handler did not pass it on to the rank that was being started
                    raise Stopped(received[0])
            code = _supervise(started, received)
        finally:
            for rank in started:
                rank.process.kill()  # no effect on an ended process
                rank.process.wait()
        run_folder = _text(folder_file)
        was_killed = started[0].process.returncode < 0  # from outside, or because it hung
        if was_killed and code == RunError.exit_code and run_folder and (command := how_to_resume(Path(run_folder))):
            say(f"{RESUME_WITH} {command}")
        return code


def _text(file: IO[bytes]) -> str:
    return content_of(file.fileno()).decode(errors="replace")


def _start(
    number: int, environment: Mapping[str, str], cores: set[int], log: IO[bytes], files: Mapping[str, int]
) -> Rank:
    descriptors = {name: str(descriptor) for name, descriptor in files.items()}
    environment = {LOOPBACK: "lo", **os.environ, **environment, **descriptors}
    if cores:
        # Two ranks that each use all cores were measured 5 times slower than two ranks with a share each.
        environment["OMP_NUM_THREADS"] = str(len(cores))
    output = log if number else None  # only rank 0 prints
    process = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env=environment,
        stdout=output,
        stderr=output,
        preexec_fn=partial(prepare, cores, blocks_ctrl_c=True),
        pass_fds=[*files.values()],
    )
    return Rank(number, process, log)


def prepare(cores: Collection[int], blocks_ctrl_c: bool = False) -> None:
    """Prepares a new process between fork and exec. Linux will kill it when its parent ends. It is bound to `cores`,
    unless empty. With `blocks_ctrl_c`, Ctrl-C is blocked until `exits.install` handles it. Otherwise it has its default
    effect."""
    if blocks_ctrl_c:  # blocked, not ignored, so that the kernel keeps a signal that comes early
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if cores:
        os.sched_setaffinity(0, cores)


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Returns the environment variables of a rank on this computer under torchrun's names, for Lightning and DeepSpeed.
    `port` is the port of rank 0."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    numbers |= {"NODE_RANK": 0, "MASTER_PORT": port}
    return {"MASTER_ADDR": ADDRESS, **{name: str(number) for name, number in numbers.items()}}


def free_port() -> int:
    """Returns a port on this computer that no process uses at the moment."""
    with socket.socket() as listener:
        listener.bind((ADDRESS, 0))
        return listener.getsockname()[1]


def _pass_requests_on(ranks: Sequence[Rank]) -> list[int]:
    """Installs a handler for each signal of `exits.requests`. The handler appends the signal to the returned list and
    forwards it to the ranks that `ranks` holds at that time. Ctrl-C is not forwarded, because the terminal sends it to
    the ranks too."""
    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        if number != signal.SIGINT:
            for rank in ranks:
                rank.process.send_signal(number)

    for number in exits.requests():
        signal.signal(number, pass_on)
    return received


def _supervise(ranks: Sequence[Rank], received: Sequence[int]) -> int:
    """Waits until all ranks have ended, and kills those that do not end soon after one has failed or ended on request.
    Returns and raises what `run_ranks` does. `received` holds the signals that the handlers have recorded."""
    failed: Rank | None = None
    killed: list[Rank] = []
    kill_at = math.inf
    while True:
        running = [rank for rank in ranks if rank.process.poll() is None]
        if not killed and failed is None:
            # Polled twice, because a rank that was killed before another rank failed may have ended after its poll.
            broken = _broken(ranks, received) and _broken(ranks, received)
            # If several ranks broke, a killed rank is reported, because the others failed as a consequence.
            failed = min(broken, key=lambda rank: rank.process.returncode > 0, default=None)
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
        time.sleep(POLL_SECONDS)
    codes = [_code(rank, received) or 0 for rank in ranks]
    if codes[0] == UsageError.exit_code:  # all ranks have raised the error, and rank 0 has printed it
        return UsageError.exit_code
    names = ", ".join(f"rank {rank.number}" for rank in killed)
    if failed is not None and not (received and codes[0] in ON_REQUEST):  # else a rank failed only because rank 0 ended
        _report(failed)
        if killed:
            say(f"{names} did not end within {GRACE_SECONDS:g} s after this error, and had to be killed")
        return max(failed.process.returncode, 1)
    if ranks[0] in killed and received.count(signal.SIGINT) > 1:
        raise Stopped(signal.SIGINT, "the second Ctrl-C ended the ranks before they saved a checkpoint")
    if killed:
        say(f"error: {names} did not end on request and had to be killed")
        return RunError.exit_code
    return next(filter(None, codes), 0)


def _broken(ranks: Sequence[Rank], received: Collection[int]) -> list[Rank]:
    return [rank for rank in ranks if _code(rank, received) not in (None, 0, *ON_REQUEST)]


def _code(rank: Rank, received: Collection[int]) -> int | None:
    """Returns the exit code of a rank, or None while the rank runs. The code of a rank that a signal killed is minus
    the signal's number. If this signal is Ctrl-C or in `received`, the rank was asked to end but could not handle the
    signal yet. Its code is then 128 + the number, as in a shell."""
    code = rank.process.poll()
    if code is not None and (-code == signal.SIGINT or -code in received):
        return 128 - code
    return code


def how_ended(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _report(rank: Rank) -> None:
    """Prints how a rank failed, with the last lines of its output, or all lines with --debug. Prints nothing for rank 0
    if it exited with an error, because it has printed that itself."""
    code = rank.process.returncode
    if rank.number == 0 and code > 0:
        return
    lines = [line.rstrip() for line in _text(rank.log).splitlines() if line.strip()]
    if not exits.wants_traceback():
        lines = lines[-TAIL_LINES:]
    what = f"error: rank {rank.number} ended with {how_ended(code)}"
    if lines:
        what += "; its last lines:"
    say(what, *lines)
