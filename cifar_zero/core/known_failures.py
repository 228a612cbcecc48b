"""Frequent failures of torch and DeepSpeed: how each one is recognised, what it means and what to do.

Plain data: the messages are those of torch 2.15 and DeepSpeed 0.19.8, and explaining one imports neither. Rarer
failures are in docs/troubleshooting.md.
"""

import re
import sys
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

LESS_MEMORY = (
    "double --accumulate (the same batch in smaller parts), then take a higher ZeRO stage, then one with _offload; "
    "plan.py with the same options shows which strategies fit"
)
OF_ONE_MODEL = "the model is too large for this machine: use one with more memory"
"""Fix of a full memory in programs that only run a model, whose memory no option of the training lowers."""

KILLED_WORKER = "a worker of the loader was killed, most often because memory or shared memory (/dev/shm) is full"
FEWER_WORKERS = "take fewer --data.workers, or --data.loader memory"
OTHER_RANKS = "look for the first error in the other ranks' lines"


class KnownFailure(NamedTuple):
    """One row of the table."""

    message: str  # regular expression that the exception's message contains; `cause` may use its named groups
    cause: str  # what happened
    fix: str  # what to do
    kind: type[Exception] = RuntimeError  # most of torch's own derive from it


TABLE = (
    KnownFailure(
        r"(CUDA|HIP) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU's memory is full",
        LESS_MEMORY,
    ),
    KnownFailure(
        r"DefaultCPUAllocator: (can't allocate|not enough) memory", "the machine's memory is full", LESS_MEMORY
    ),
    KnownFailure(r"", "the machine's memory is full", LESS_MEMORY, MemoryError),
    KnownFailure(
        r"DataLoader worker .* is killed by signal: Bus error",
        "the loader's workers have filled the shared memory, /dev/shm",
        f"enlarge it (docker run --shm-size 8g), or {FEWER_WORKERS}",
    ),
    KnownFailure(
        r"DataLoader worker .* (is killed by signal: Killed|exited unexpectedly)",
        KILLED_WORKER,
        FEWER_WORKERS,
    ),
    KnownFailure(
        r"port: (?P<port>\d+).*EADDRINUSE",
        "another program uses port {port}, at which the ranks meet",
        "set MASTER_PORT to a free port, or unset it: train.py then finds one",
    ),
    KnownFailure(
        r"waiting for clients|timed out .* trying to connect to",
        "not all ranks have met",
        "start every rank with the same MASTER_ADDR and MASTER_PORT, and let the firewall pass that port",
    ),
    KnownFailure(
        r"Connection (closed|reset) by peer|Application timeout caused pair closure|"
        r"Connection was likely closed|remote process exit",
        "another rank has ended, and this one lost its connection",
        OTHER_RANKS,
    ),
    KnownFailure(
        r"Timed out waiting \d+ms|wait timeout after \d+ms|Watchdog caught collective operation timeout",
        "this rank waited for the others too long: one of them hangs, has ended or cannot be reached",
        OTHER_RANKS,
    ),
    KnownFailure(
        r"Error building extension|ninja not being installed|Ninja is required to load C\+\+ extensions",
        "DeepSpeed's C++ code could not be compiled",
        "apt-get install g++ python3-dev, pip install ninja, have both in PATH; --debug shows the compiler's output",
    ),
    KnownFailure(
        r"CUDA_HOME does not exist|Unable to run \S*nvcc|CUDA_HOME environment variable is not set",
        "DeepSpeed finds no nvcc to compile its CUDA kernels with",
        "install the CUDA toolkit of torch's version, and set CUDA_HOME to its directory",
        Exception,  # OSError, or a class of DeepSpeed
    ),
    KnownFailure(
        r"PytorchStreamWriter failed writing|inline_container.*unexpected pos",
        "a file could not be written completely, most often because the disk is full: No space left on device",
        "free some space, or name a directory on another disk with --out",
    ),
    KnownFailure(
        r"No module named '(?P<name>optuna|onnx\w*)'",
        "the package {name} is not installed, which only searches and exports need",
        "pip install optuna onnx onnxruntime onnxscript",
        ModuleNotFoundError,
    ),
    KnownFailure(
        r"more details about this graph break",
        "torch cannot compile this training step as one graph",
        "use --compile, which compiles the model alone",
    ),
    KnownFailure(
        r"Weights only load failed",
        "the file holds more than tensors and plain values, and loading it could run code",
        "add --trust if you know who wrote it",
        UnpicklingError,
    ),
)
"""All known failures. The first row that matches is taken, so causes come before their consequences."""


def explain(error: BaseException) -> str | None:
    """Returns `<cause>; <fix>` if the exception or one that Python would print before it is known; else None."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:  # a chain may lead back to itself
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    for row in TABLE:
        for link in chain:
            if isinstance(link, row.kind) and (found := re.search(row.message, str(link), re.DOTALL)):
                only_runs = Path(sys.argv[0]).stem in ("predict", "export", "evaluate")
                fix = OF_ONE_MODEL if row.fix is LESS_MEMORY and only_runs else row.fix
                return f"{row.cause.format(**found.groupdict())}; {fix}"
    return None
