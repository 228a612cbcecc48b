"""Starts the ranks of a run on this machine and watches over them; no torch.

All ranks start at once (Lightning's own launcher starts the second one when the first has imported everything), each
with its share of cores. When one fails the others are ended, and the failed one is named with its last lines.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import IO

from errors import UsageError
from exits import CTRL_C
from hardware import share_of_cores

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: after a fork it is too late

GRACE_SECONDS = 10.0
"""How long the other ranks may take to end by themselves after one has failed."""

TAIL_LINES = 15
"""Lines shown of a failed rank."""


def is_rank() -> bool:
    """Whether this process is one rank, started by our launcher, torchrun or SLURM."""
    by_torchrun = all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    # A shell inside an allocation has SLURM_PROCID too: only srun with several tasks has started ranks.
    by_slurm = "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1
    return by_torchrun or by_slurm


def global_rank() -> int:
    """The rank of this process over all machines, 0 where there is only one."""
    if not is_rank():
        return 0
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def run(ranks: int, on_cpu: bool) -> int:
    """Runs this process's own command line again as so many ranks on this machine.

    Returns:
        The exit code: 0 where all ranks ended well, else that of the first that failed.
    """
    logs: list[IO[str]] = []
    processes: list[subprocess.Popen[str]] = []
    port = _free_port()
    own_share = on_cpu and "OMP_NUM_THREADS" not in os.environ  # who sets it has shared the cores out himself
    for rank in range(ranks):
        log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - read when all ranks have ended
        logs.append(log)
        output = None if rank == 0 else log  # rank 0 speaks for all
        command = [sys.executable, *sys.orig_argv[1:]]
        environment = _environment(rank, ranks, port)
        if own_share:
            # Two ranks that each take all cores were measured 5 times slower than with a share each.
            environment["OMP_NUM_THREADS"] = str(len(share_of_cores(rank, ranks)))
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=output,
                stderr=output,
                text=True,
                preexec_fn=partial(_prepare, share_of_cores(rank, ranks) if own_share else set()),
            )
        )
    return _watch(processes, logs)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """torchrun's variables, which Lightning and DeepSpeed both read."""
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def _prepare(cores: set[int]) -> None:
    """In the new process: on Linux it keeps to its cores, and is killed with its launcher however that ends (prctl's
    PR_SET_PDEATHSIG)."""
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGKILL)
        if cores:
            os.sched_setaffinity(0, cores)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _watch(processes: list[subprocess.Popen[str]], logs: list[IO[str]]) -> int:
    """Waits for all ranks; passes a request to end on to them. Ctrl-C reaches them from the terminal by itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for request in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(request) != signal.SIG_IGN:  # as under nohup, whose run outlives its terminal
            signal.signal(request, lambda *_: [process.terminate() for process in processes])
    failed: int | None = None
    deadline = float("inf")
    while any(process.poll() is None for process in processes):
        if failed is None:
            failed = next((rank for rank, process in enumerate(processes) if process.poll()), None)
            if failed is not None:
                deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.05)
    if failed is None:
        failed = next((rank for rank, process in enumerate(processes) if process.returncode), None)
    if failed is None:
        return 0
    if (
        processes[0].returncode == UsageError.exit_code
    ):  # a mistake of the user's, found by all ranks and said by rank 0
        failed = 0
    code = processes[failed].returncode
    if failed > 0 and code != CTRL_C:
        _report(failed, code, logs[failed])
    return code if code > 0 else 1


def _report(rank: int, code: int, log: IO[str]) -> None:
    log.seek(0)
    tail = [line.rstrip() for line in log if line.strip()][-TAIL_LINES:]
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    print(f"rank {rank} ended with {how}; its last lines:", *tail, sep="\n  ", file=sys.stderr)
