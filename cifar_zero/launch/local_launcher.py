"""Starts the ranks of a run on this computer and watches them; no torch.

All ranks start at once (Lightning's own launcher starts the second one when the first has imported everything), each
with its share of cores. When the run ends, no process, port or shared memory of it remains.
"""

import ctypes
import getpass
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from cifar_zero.core.console import say
from cifar_zero.core.errors import RunError, Stopped
from cifar_zero.core.hardware import share_of_cores
from cifar_zero.launch import heartbeat, rank_environment, temporary
from cifar_zero.launch.supervisor import Rank, pass_requests_on, supervise

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: after a fork it is too late

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Linux's prctl: be killed with the parent; adopt all descendants whose parent has died (linux/prctl.h)."""

ADDRESS = "127.0.0.1"

ORPHAN_SECONDS = 8.0
"""Time for processes that a rank has left (loaders, compilers) to end on their own: a DataLoader's worker looks for its
parent every 5 s (torch 2.15, torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL)."""

SHARED_MEMORY = Path("/dev/shm")  # named shared memory on Linux


def run(
    ranks: int, on_cpu: bool, flags: Sequence[str] = (), how_to_resume: Callable[[Path], str] = lambda _: ""
) -> int:
    """Runs this process's own command line again as several ranks on this computer, and waits for them. Ranks `on_cpu`
    share its cores; `flags` are added; `how_to_resume` returns the command that resumes a run from its folder, empty
    without a checkpoint. Returns the exit code, see `supervisor.supervise`. Raises Stopped: there, and if a request to
    end comes while ranks are started."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    port = free_port()
    board = heartbeat.Board(ranks)
    started: list[Rank] = []
    with temporary.folder() as temporary_files:
        # A killed process leaves its temporary files. torch's compilation cache (2.15, cache_dir_utils.py) is to stay.
        default = os.path.join(tempfile.gettempdir(), f"torchinductor_{_user()}")
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", default)
        run_file = Path(temporary_files, "run-folder")
        environment = {
            **os.environ,  # and torchrun's variables, which Lightning and DeepSpeed read
            **{"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(port), "NODE_RANK": "0"},
            **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
            **{"TORCHINDUCTOR_CACHE_DIR": cache, "TMPDIR": temporary_files},
            rank_environment.RUN_FILE: str(run_file),
        }
        received = pass_requests_on(started)
        try:
            for number in range(ranks):
                cores = share_of_cores(number, ranks) if on_cpu else set()
                started.append(_start(number, environment, cores, board, flags))
                if received:  # it was not passed on to a rank that was being started
                    raise Stopped(received[0])
            code = supervise(started, board, received)
            was_killed = any(rank.process.returncode < 0 for rank in started)  # from outside, or because it hung
            lost = code == RunError.exit_code and was_killed and run_file.exists()
            if lost and (command := how_to_resume(Path(run_file.read_text()))):
                say(f"resume with: {command}")
            return code
        finally:
            _clean_up(started, port, 0.0 if sys.exception() else ORPHAN_SECONDS)


def _user() -> str:
    """Returns the user's name as torch does, also where a container's user has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"


def _start(
    number: int, environment: Mapping[str, str], cores: set[int], board: heartbeat.Board, flags: Sequence[str]
) -> Rank:
    log, stack = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - until _clean_up
    ticket, descriptors = board.ticket(number, stack)
    environment = {**environment, "RANK": str(number), "LOCAL_RANK": str(number), heartbeat.VARIABLE: ticket}
    if "OMP_NUM_THREADS" in os.environ:  # the user has shared the cores out
        cores = set()
    elif cores:
        # Two ranks that each use all cores were measured 5 times slower than two with a share each.
        environment["OMP_NUM_THREADS"] = str(len(cores))
    output = None if number == 0 else log  # only rank 0 prints
    process = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:], *flags],
        env=environment,
        stdout=output,
        stderr=output,
        pass_fds=descriptors,
        preexec_fn=partial(prepare, cores, held=True),  # until its first batch, see heartbeat.Pulse.beat
    )
    return Rank(number, process, log, stack)


def prepare(cores: Collection[int], held: bool = False) -> None:
    """Prepares a new process for Ctrl-C: `held` back until it asks for it, or handled as Python does. Linux binds the
    process to its cores, if any, and kills it with its parent."""
    if held:  # blocked, not ignored: the kernel keeps a signal that comes before the process asks for it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if cores:
            os.sched_setaffinity(0, cores)


def free_port() -> int:
    """Returns a TCP port of this computer that is free now."""
    with socket.socket() as listener:
        listener.bind((ADDRESS, 0))
        return listener.getsockname()[1]


def _clean_up(ranks: Sequence[Rank], port: int, patience: float) -> None:
    """Ends whatever is left of the run; what the ranks have started has so many seconds to end by itself."""
    for rank in ranks:
        rank.process.kill()  # no effect on an ended process
        rank.process.wait()
        rank.log.close()
        rank.stack.close()
    _, orphans = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=patience)
    for orphan in orphans:
        with suppress(psutil.NoSuchProcess):
            orphan.kill()
    psutil.wait_procs(orphans, timeout=ORPHAN_SECONDS)
    # DeepSpeed (0.19.8) never removes the buffers of its all-reduce on the CPU (csrc/cpu/comm/shm.cpp).
    for buffer in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_{ADDRESS}_{port}_*"):
        buffer.unlink(missing_ok=True)
