"""Exceptions that end a run early with one line and an exit code, and explanations of frequent failures of the
libraries."""

import signal
from typing import NamedTuple

from stepcheck.usage import UsageError as UsageError
from stepcheck.usage import short as short


class RunError(Exception):
    """Raised if the run failed (network, disk, a dead rank). The message is one line with the failure and the fix."""

    exit_code = 1


class FaultFound(Exception):
    """Raised at the end of a run in which a step check found a fault. The run itself has not failed, and has written
    all its results."""

    exit_code = 3


class Stopped(BaseException):
    """Raised when the user or the cluster stops the run. The message may be empty, or one line such as the command that
    resumes the run. The exit code is 128 + the number of the signal, as in a shell. It does not derive from Exception,
    because libraries catch every Exception and continue."""

    def __init__(self, number: int, message: str = ""):
        super().__init__(message)
        self.number = number
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.exit_code = 128 + number


LESS_MEMORY = (
    "in training, double --accumulate (the same batch in smaller parts), then use a higher ZeRO stage, then a strategy "
    "with _offload; cifar-zero plan with the same options lists the strategies that fit"
)
KILLED_WORKER = "a data loader worker was killed, most often because memory or shared memory (/dev/shm) is full"
FEWER_WORKERS = "use fewer --data.workers or --data.loader memory; docker run --shm-size 8g enlarges /dev/shm"


class KnownFailure(NamedTuple):
    """A frequent failure of torch or DeepSpeed. The messages are those of torch 2.15 and DeepSpeed 0.19.8."""

    messages: tuple[str, ...]  # each is part of the "Type: message" line of an exception
    cause: str  # what happened
    fix: str  # what to do


KNOWN_FAILURES = (
    KnownFailure(
        ("CUDA out of memory", "HIP out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
        "the GPU's memory is full",
        LESS_MEMORY,
    ),
    KnownFailure(
        ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "MemoryError"),
        "the machine's memory is full",
        LESS_MEMORY,
    ),
    KnownFailure(
        ("is killed by signal: Bus error", "is killed by signal: Killed", "exited unexpectedly"),
        KILLED_WORKER,
        FEWER_WORKERS,
    ),
    KnownFailure(
        (
            "waiting for clients",
            "trying to connect to",
            "Connection closed by peer",
            "Connection reset by peer",
            "Application timeout caused pair closure",
            "Connection was likely closed",
            "remote process exit",
            "Timed out waiting",
            "wait timeout after",
            "Watchdog caught collective operation timeout",
        ),
        "another rank has ended, hangs or cannot be reached",
        "look for the first error in the lines of the other ranks; all ranks need the same MASTER_ADDR and MASTER_PORT",
    ),
    KnownFailure(
        (
            "Error building extension",
            "ninja not being installed",
            "Ninja is required to load C++ extensions",
            "CUDA_HOME does not exist",
            "CUDA_HOME environment variable is not set",
            "bin/nvcc",
        ),
        "DeepSpeed's code could not be compiled",
        "install g++ and ninja, for CUDA kernels also the CUDA toolkit of torch's version, and set CUDA_HOME to its "
        "directory; --debug shows the compiler's output, and cifar-zero doctor compiler lists what is missing",
    ),
)
"""The failures that users meet most often; docs/troubleshooting.md lists the rarer ones. `explain` takes the first row
that matches, so a failure that causes another one comes before it."""


def explain(error: BaseException) -> str | None:
    """Returns "<cause>; <fix>" if the exception, or one that led to it (a cause or context), is a known failure.
    Otherwise returns None."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:  # a chain may lead back to itself
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    for row in KNOWN_FAILURES:
        if any(message in f"{type(link).__name__}: {link}" for message in row.messages for link in chain):
            return f"{row.cause}; {row.fix}"
    return None
