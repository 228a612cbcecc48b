"""Failures of torch, Lightning and DeepSpeed that users meet again and again: what each means and what mends it.

Plain Python: the libraries' exceptions are known by their names and messages (torch 2.15, Lightning 2.6.6 and DeepSpeed
0.19.8), so that explaining one imports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from errors import RunError, Stopped, UsageError
from strategies import STRATEGIES, replicas

if TYPE_CHECKING:
    from config import Config

DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed/issues"
LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning/issues"
PYTORCH = "https://github.com/pytorch/pytorch/issues"


def less_memory(config: Config | None) -> str:
    """What to try against a full memory, the cheapest first.

    Args:
        config: of the run, settled by `checks.settle`; None where there is none to go by.
    """
    if config is None or config.devices == "auto":
        return (
            "make the micro-batch smaller (double --accumulate, or halve --batch_size), then take a higher ZeRO stage, "
            "then one with _offload"
        )
    steps = [*_smaller_micro_batch(config), *_less_on_a_rank(config)]
    return f"try in this order: {', '.join(steps)}" if steps else "it takes a smaller network or more memory"


def _smaller_micro_batch(config: Config) -> Iterator[str]:
    """The same global batch in more and smaller parts; usually twice as many."""
    micro_batch = config.batch_size // (replicas(config) * config.accumulate)
    if micro_batch > 1 and not config.cuda_graphs:  # which cannot accumulate
        parts = next(number for number in range(2, micro_batch + 1) if micro_batch % number == 0)
        yield f"--accumulate {config.accumulate * parts} (a micro-batch of {micro_batch // parts}, not {micro_batch})"


def _less_on_a_rank(config: Config) -> Iterator[str]:
    """The next ZeRO stage, which saves nothing on a single rank, then offload, which saves nothing where all is on the
    CPU anyway."""
    if config.ds_config:
        yield f"a higher stage or offload in {config.ds_config}"
        return
    spec, on_gpu = STRATEGIES[config.strategy], config.accelerator == "gpu"
    if spec.one_replica:
        if on_gpu:
            yield "more --devices, among which the network is shared out"
        return
    stage = 3 if spec.family == "fsdp2" else spec.stage
    offload = "_offload" if spec.offload_optimizer else ""
    experts = "ep_size" in config.model.options
    highest = 2 if experts else 3  # DeepSpeed knows no mixtures of experts at stage 3
    if experts and spec.family == "deepspeed" and config.model.options["ep_size"] < config.world_size:
        yield f"a larger --model.ep_size (it is {config.model.options['ep_size']})"
    if stage < highest and (config.world_size > 1 or (offload and on_gpu)):
        yield f"--strategy deepspeed_stage_{stage + 1}{offload}"
    if on_gpu and not offload:
        yield f"--strategy deepspeed_stage_{min(stage + 1, highest)}_offload"
    if spec.super_offload:
        yield "--strategy deepspeed_stage_3_offload"
    if spec.offload_parameters == "cpu":
        yield "--strategy deepspeed_stage_3_offload_nvme --nvme_path DIRECTORY"
    if not on_gpu and config.world_size > 1:
        yield "fewer --devices"


@dataclass(frozen=True)
class KnownFailure:
    """One row of the table.

    Attributes:
        kind: matches the whole name of the exception's class, or of one that it derives from.
        message: is searched for in the exception's message; what its named groups find goes into `cause` and `mend`.
        cause: what happened, in the user's terms.
        mend: what to do about it, or a function that says so for the run's configuration.
        link: where it is discussed upstream.
    """

    kind: str
    message: str
    cause: str
    mend: str | Callable[[Config | None], str]
    link: str

    def line(self, error: BaseException, config: Config | None) -> str | None:
        """`<cause>; <mend> (<link>)`, or None where it is another failure."""
        if not any(re.fullmatch(self.kind, known.__name__) for known in type(error).__mro__):
            return None
        found = re.search(self.message, str(error), re.DOTALL)
        if found is None:
            return None
        mend = self.mend(config) if callable(self.mend) else self.mend.format(**found.groupdict())
        return f"{self.cause.format(**found.groupdict())}; {mend} ({self.link})"


TABLE = (
    # Memory
    KnownFailure(
        r"RuntimeError",  # torch.OutOfMemoryError is one
        r"(CUDA|HIP) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU's memory is full",
        less_memory,
        f"{DEEPSPEED}/192",
    ),
    KnownFailure(
        r"RuntimeError",
        r"DefaultCPUAllocator: (can't allocate|not enough) memory",
        "the machine's memory is full",
        less_memory,
        f"{PYTORCH}/20618",
    ),
    KnownFailure(r"MemoryError", r"", "the machine's memory is full", less_memory, f"{PYTORCH}/20618"),
    # Workers of the torch loader
    KnownFailure(
        r"RuntimeError",
        r"DataLoader worker .* is killed by signal: Bus error",
        "the loader's workers have filled the shared memory, /dev/shm",
        "enlarge it (docker run --shm-size 8g), take fewer --data.workers, or --data.loader memory",
        f"{PYTORCH}/5040",
    ),
    KnownFailure(
        r"RuntimeError",
        r"DataLoader worker .* is killed by signal: Killed",
        "the system killed a worker of the loader, most often for want of memory",
        "take fewer --data.workers, or --data.loader memory",
        f"{PYTORCH}/5040",
    ),
    KnownFailure(  # torch is told of the signal once a process: Lightning takes its handler away at the end of `fit`
        r"RuntimeError",
        r"DataLoader worker .* exited unexpectedly",
        "a worker of the loader has ended, most often for want of memory or of shared memory, /dev/shm",
        "take fewer --data.workers, or --data.loader memory",
        f"{PYTORCH}/5040",
    ),
    KnownFailure(
        r"OSError|RuntimeError",
        r"Too many open files|received 0 items of ancdata",
        "too many files are open at once",
        "raise the limit (ulimit -n 65536), take fewer --data.workers, or --data.loader memory",
        f"{PYTORCH}/11201",
    ),
    # The ranks
    KnownFailure(
        r"RuntimeError",
        r"port: (?P<port>\d+).*EADDRINUSE",
        "another program uses port {port}, at which the ranks are to meet",
        "set MASTER_PORT to a free one, or unset it: train.py finds one by itself",
        f"{DEEPSPEED}/3878",
    ),
    KnownFailure(
        r"RuntimeError",
        r"waiting for clients|timed out .* trying to connect to",
        "the ranks did not all come together",
        "start every one of them, with the same MASTER_ADDR and MASTER_PORT, which no firewall may block",
        f"{LIGHTNING}/20434",
    ),
    KnownFailure(
        r"RuntimeError",
        r"Connection (closed|reset) by peer|Application timeout caused pair closure|"
        r"Connection was likely closed|remote process exit",
        "another rank has ended, and this one lost its connection",
        "look for the first error in the other ranks' lines",
        f"{PYTORCH}/75512",
    ),
    KnownFailure(
        r"RuntimeError",
        r"Timed out waiting \d+ms|wait timeout after \d+ms|Watchdog caught collective operation timeout",
        "this rank has waited for the others in vain: one of them hangs, has ended or cannot be reached",
        "look for the first error in the other ranks' lines",
        f"{LIGHTNING}/19487",
    ),
    KnownFailure(
        r"ModuleNotFoundError",
        r"No module named 'mpi4py'",
        "DeepSpeed looks for MPI, as RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set",
        "set them as torchrun does, or set none and let train.py --devices start the ranks",
        f"{DEEPSPEED}/8444",
    ),
    # What DeepSpeed compiles
    KnownFailure(
        r"MissingCUDAException|OSError",
        r"CUDA_HOME does not exist|Unable to run \S*nvcc|CUDA_HOME environment variable is not set",
        "DeepSpeed finds no nvcc to compile its CUDA kernels with",
        "install the CUDA toolkit of torch's version, and set CUDA_HOME to its directory",
        f"{DEEPSPEED}/2772",
    ),
    KnownFailure(
        r"CUDAMismatchException",
        r"Installed CUDA version (?P<nvcc>\S+) does not match .* compiled with (?P<torch>[^\s,]+)",
        "nvcc is of CUDA {nvcc} and torch of CUDA {torch}",
        "install the CUDA toolkit {torch} or a torch for CUDA {nvcc}, or try the pair with DS_SKIP_CUDA_CHECK=1",
        f"{DEEPSPEED}/3223",
    ),
    KnownFailure(
        r"RuntimeError",
        r"Unable to JIT load the async_io op due to it not being compatible",
        "offload to NVMe needs libaio, 0.3.112 or newer, with its headers",
        "apt-get install libaio-dev (Fedora: libaio-devel), or take --strategy deepspeed_stage_3_offload",
        f"{DEEPSPEED}/7346",
    ),
    KnownFailure(
        r"RuntimeError",
        r"due to ninja not being installed|Ninja is required to load C\+\+ extensions",
        "DeepSpeed cannot compile its kernels without ninja",
        "pip install ninja, and have its directory in PATH",
        f"{DEEPSPEED}/1687",
    ),
    KnownFailure(
        r"RuntimeError",
        r"Error building extension '(?P<op>\w+)'.*[cg]\+\+: (command )?not found",
        "no C++ compiler is there to build DeepSpeed's {op} with",
        "apt-get install g++, or set CXX to the compiler there is",
        f"{DEEPSPEED}/889",
    ),
    KnownFailure(
        r"RuntimeError",
        r"Error building extension '(?P<op>\w+)'",
        "the compiler fails at DeepSpeed's {op}",
        "apt-get install g++ python3-dev where they are missing; --debug shows what the compiler said",
        f"{DEEPSPEED}/889",
    ),
    # Numbers and checkpoints
    KnownFailure(
        r"Exception",
        r"Current loss scale already at minimum",
        "the gradients overflow float16 at every loss scale",
        "take --precision bf16-mixed, or a smaller --optimizer.lr",
        f"{DEEPSPEED}/4017",
    ),
    KnownFailure(
        r"ZeRORuntimeException",
        r"DP world size of (?P<saved>\d+) but the current world size is (?P<now>\d+)",
        "the checkpoint is cut into the shards of {saved} ranks, and this run has {now}",
        "go on with --devices {saved}",
        f"{DEEPSPEED}/2898",
    ),
    KnownFailure(
        r"AttributeError",
        r"'NoneType' object has no attribute 'makedirs'",
        "DeepSpeed's engine for testing at stage 3 cannot save a checkpoint",
        "save before Trainer.test, or take the engine that was trained, as train.py does",
        f"{LIGHTNING}/15247",
    ),
    KnownFailure(
        r"UnpicklingError",
        r"Weights only load failed",
        "the file holds more than tensors and plain values, and loading it could run any code",
        "add --trust where you know who wrote it",
        "https://docs.pytorch.org/docs/stable/notes/serialization.html#weights-only",
    ),
    # The installation
    KnownFailure(
        r"RuntimeError",
        r"The NVIDIA driver on your system is too old",
        "the NVIDIA driver is too old for this torch",
        "update the driver or install a torch for an older CUDA, or take --accelerator cpu",
        f"{PYTORCH}/4546",
    ),
    KnownFailure(
        r"RuntimeError",
        r"operator torchvision::\w+ does not exist",
        "torchvision was built for another torch, most often one for CUDA and the other for the CPU",
        "install both anew in one command, from one index: pip install --force-reinstall torch torchvision",
        f"{PYTORCH}/157648",
    ),
)
"""All known failures; the first row that matches is taken, so that causes stand above what follows from them."""


def explain(error: BaseException, config: Config | None = None) -> str | None:
    """One line, `<cause>; <mend> (<link>)`, for a failure that is known; None for any other, and for errors of ours.

    The exceptions that led to it are looked through as well: the first row that matches any of them is taken.

    Args:
        error: as it was caught.
        config: of the run, settled; it makes the advice about memory definite.
    """
    if isinstance(error, (UsageError, RunError, Stopped)):
        return None
    chain = list(_chain(error))
    lines = (known.line(link, config) for known in TABLE for link in chain)
    return next(filter(None, lines), None)


@contextmanager
def explained(config: Config) -> Generator[None, None, None]:
    """Turns a known failure within into a RunError whose message is its line; `--debug` shows both.

    Args:
        config: of the run, settled by `checks.settle`.
    """
    try:
        yield
    except Exception as error:
        if line := explain(error, config):
            raise RunError(line) from error
        raise


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and those that Python would print before it."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        yield link
        seen.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
