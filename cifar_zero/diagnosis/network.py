"""Whether the ranks of a run find one another."""

import os
import selectors
import socket
import subprocess
import sys
import tempfile
from typing import IO

from cifar_zero.diagnosis import rank as rank_program
from cifar_zero.diagnosis.examination import one_line
from cifar_zero.diagnosis.finding import Finding, Options, failed, ok
from cifar_zero.diagnosis.rank import STEPS
from cifar_zero.diagnosis.resources import ranks_in_memory
from cifar_zero.launch import local_launcher


def port(options: Options) -> Finding:
    """Whether the ranks can meet at MASTER_PORT where it is set, else at a port that is free."""
    named = os.environ.get("MASTER_PORT")
    if named is None:
        return ok(f"MASTER_PORT is not set, {local_launcher.free_port()} is free")
    mend = f"unset MASTER_PORT, or export MASTER_PORT={local_launcher.free_port()}"
    if not named.isdecimal() or not 0 < int(named) < 2**16:
        return failed(f"MASTER_PORT={named} is no port", mend)
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
            listener.bind(("", int(named)))
            listener.listen()
    except OSError as error:
        return failed(f"MASTER_PORT={named}: {error.strerror}", mend)
    return ok(f"MASTER_PORT={named} is free")


def all_reduce(options: Options) -> Finding:
    """Whether real ranks add up a number: over NCCL where there is a GPU for each, else over gloo."""
    from cifar_zero.core.hardware import gpu_count

    if (fit := ranks_in_memory()) < options.ranks:
        return failed(f"not tried: there is no memory for {options.ranks} ranks", f"--ranks {max(1, fit)}")
    backend = "nccl" if options.ranks <= gpu_count() else "gloo"
    master = local_launcher.free_port()
    ranks = [_Rank(rank, options.ranks, master, backend, options.timeout) for rank in range(options.ranks)]
    try:
        trouble = _watch(ranks, options.timeout)
    finally:
        for rank in ranks:
            rank.process.kill()
    if trouble:
        variable = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
        mend = f"let processes of this machine talk to one another, perhaps with export {variable}=lo"
        return failed(f"{backend}: {trouble}", mend)
    return ok(f"{backend}: {options.ranks} rank{'s'[: options.ranks > 1]} added up")


class _Rank:
    """A process that prints a line after each of STEPS."""

    def __init__(self, rank: int, ranks: int, master: int, backend: str, timeout: float):
        self.name = f"rank {rank}"
        self.steps = 0
        self.log: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - read when it has failed
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": master, "RANK": rank, "WORLD_SIZE": ranks}
        self.process = subprocess.Popen(
            [sys.executable, rank_program.__file__, backend, str(timeout)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in places.items()}},
            stdout=subprocess.PIPE,
            stderr=self.log,
        )

    def last_words(self) -> str:
        """The end of what it said on the standard error."""
        self.log.seek(0)
        lines = [line for line in self.log if line.strip()]
        return one_line(lines[-1]) if lines else "it said nothing"


def _watch(ranks: list[_Rank], timeout: float) -> str:
    """Waits until all ranks are through, one has failed, or none has come any further for so many seconds.

    Returns:
        Which ranks failed or did not answer; empty where all is well.
    """
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            assert rank.process.stdout is not None
            selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
        while selector.get_map():
            events = selector.select(timeout)
            if not events:
                behind = min(rank.steps for rank in ranks)
                names = ", ".join(rank.name for rank in ranks if rank.steps == behind)
                return f"{names} did not answer within {timeout:g} s while {STEPS[behind]}"
            for key, _ in events:
                rank: _Rank = key.data
                said = os.read(key.fd, 1024)
                rank.steps += said.count(b"\n")
                if not said:
                    selector.unregister(key.fileobj)
                    if rank.process.wait():
                        return f"{rank.name} failed while {STEPS[rank.steps]} ({rank.last_words()})"
    return ""
