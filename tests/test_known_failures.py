"""Known failures of the libraries, provoked for real wherever a machine without a GPU can, and the line of each."""

# pyright: reportPrivateImportUsage=false
# torch.distributed does not list its stores as exports, although they are documented.

from __future__ import annotations

import errno
import fractions
import importlib.util
import mmap
import os
import re
import resource
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import cli
import exits
from batch import micro_batch_size
from config import Choice, Config
from errors import RunError, UsageError
from known_failures import TABLE, explain, explained
from strategies import STRATEGIES, replicas
from tests.helpers import run_program

Patch = pytest.MonkeyPatch

SHORT = timedelta(milliseconds=200)
HOST = "127.0.0.1"

NO_HEADERS = "case $* in *.cpp*) echo Python.h: No such file >&2; exit 1;; esac; echo 13.0.0"
"""A C++ compiler that tells its version and compiles nothing."""


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port at which another program listens."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        yield listener.getsockname()[1]


class Dying(Dataset[int]):
    """Images whose worker is ended by a signal, as by a full /dev/shm (SIGBUS) or a full memory (SIGKILL)."""

    def __init__(self, number: signal.Signals):
        self.number = number

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), self.number)
        return index


def of_dying_worker(number: signal.Signals, told: bool = True) -> Callable[[Path, Patch], object]:
    """Loads a batch from such a worker; `told`: torch hears of its end by a signal, as in a process's first run."""

    def load(path: Path, patch: Patch) -> None:
        patch.setattr("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", not told)
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            list(DataLoader(Dying(number), num_workers=1))
        finally:
            signal.signal(signal.SIGCHLD, before)

    return load


def two_ranks() -> list[Any]:
    """Gloo's process groups of two ranks, in this process."""
    store = dist.HashStore()
    groups: list[Any] = [None, None]

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, SHORT)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def lost_rank(path: Path, patch: Patch) -> None:
    """Gloo's answer where a rank ends within a collective."""
    groups = two_ranks()
    work = groups[0].allreduce([torch.ones(1)])
    groups.pop()
    work.wait()


def absent_rank(path: Path, patch: Patch) -> None:
    """Gloo's answer where a rank never comes to a collective."""
    groups = two_ranks()
    groups[0].allreduce([torch.ones(1)]).wait()


def lost_store(path: Path, patch: Patch) -> None:
    """The answer of torch's store where rank 0, which keeps it, ends."""
    server = dist.TCPStore(HOST, 0, 1, True, SHORT)
    client = dist.TCPStore(HOST, server.port, 1, False, SHORT)
    del server
    client.get("key")


def many_files(path: Path, patch: Patch) -> None:
    """Opens more files than the process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 1  # no descriptor may have this number; lower ones may be free
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with ExitStack() as files:
            for _ in range(limit + 1):
                files.enter_context(open(os.devnull))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def untrusted_file(path: Path, patch: Patch) -> None:
    """Loads an object that is neither a tensor nor plain."""
    torch.save(fractions.Fraction(1, 2), path / "file.pt")
    torch.load(path / "file.pt", weights_only=True)


def nvcc(release: str) -> Callable[[Path, Patch], None]:
    """DeepSpeed's comparison of torch, of CUDA 13.2, with an nvcc of a release; empty: there is none."""

    def compare(path: Path, patch: Patch) -> None:
        from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch

        if release:
            compiler = path / "bin" / "nvcc"
            compiler.parent.mkdir()
            compiler.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.1\n")
            compiler.chmod(0o755)
        patch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(path))
        patch.setattr("torch.version.cuda", "13.2")
        assert_no_cuda_mismatch()

    return compare


def no_cuda_home(path: Path, patch: Patch) -> None:
    """DeepSpeed's question for nvcc's version, without a CUDA toolkit."""
    from deepspeed.ops.op_builder.builder import installed_cuda_version

    patch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    installed_cuda_version()


def no_cuda_home_for_torch(path: Path, patch: Patch) -> None:
    """torch's own answer to the same."""
    from torch.utils.cpp_extension import CUDAExtension

    patch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    CUDAExtension("kernels", ["kernels.cu"])


def no_libaio(path: Path, patch: Patch) -> None:
    """Builds DeepSpeed's asynchronous I/O where nothing can be linked with libaio."""
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    patch.setenv("CC", "false")
    AsyncIOBuilder().jit_load(verbose=False)


def no_mpi(path: Path, patch: Patch) -> None:
    """DeepSpeed's search for the ranks where the environment names none."""
    from deepspeed.comm.comm import mpi_discovery

    if importlib.util.find_spec("mpi4py"):
        pytest.skip("mpi4py is installed")
    mpi_discovery()


def cpu_adam(ninja: bool, compiler: str = "") -> Callable[[Path, Patch], None]:
    """Builds DeepSpeed's CPU Adam with nothing in PATH but, where given, ninja and a compiler (a shell script)."""

    def build(path: Path, patch: Patch) -> None:
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

        if ninja:
            found = shutil.which("ninja")
            assert found is not None  # DeepSpeed requires it
            (path / "ninja").symlink_to(found)
        if compiler:
            (path / "c++").write_text(f"#!/bin/sh\n{compiler}\n")
            (path / "c++").chmod(0o755)
        patch.setenv("PATH", str(path))
        patch.setenv("TORCH_EXTENSIONS_DIR", str(path))
        patch.delenv("CXX", raising=False)
        CPUAdamBuilder().jit_load(verbose=False)

    return build


def smallest_loss_scale(path: Path, patch: Patch) -> None:
    """An overflow at DeepSpeed's smallest loss scale."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    DynamicLossScaler(1, 1000, 1, 1, False).update_scale(overflow=True)


def shards_of_four(path: Path, patch: Patch) -> None:
    """What of DeepSpeed's engine loads shards, given those of 4 ranks on 2."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    zero = SimpleNamespace(pipeline_loading_checkpoint=False)
    engine: Any = SimpleNamespace(
        _config=SimpleNamespace(zero_config=zero),
        load_universal_checkpoint=lambda: False,
        loaded_checkpoint_dp_world_size=4,
        seq_dp_world_size=2,
    )
    DeepSpeedEngine._load_zero_checkpoint(engine, str(path), "tag")


PROVOKED: dict[str, tuple[Callable[[Path, Patch], object], str]] = {
    "cpu memory": (lambda path, patch: torch.empty(1 << 60), "the machine's memory is full"),
    "python memory": (lambda path, patch: bytearray(1 << 60), "the machine's memory is full"),
    "shared memory": (of_dying_worker(signal.SIGBUS), "the loader's workers have filled the shared memory"),
    "killed worker": (of_dying_worker(signal.SIGKILL), "the system killed a worker"),
    "ended worker": (of_dying_worker(signal.SIGKILL, told=False), "a worker of the loader has ended"),
    "many files": (many_files, "too many files are open"),
    "no rank 0": (lambda path, patch: dist.TCPStore(HOST, 1, 1, False, SHORT), "the ranks did not all come together"),
    "no rank 1": (lambda path, patch: dist.TCPStore(HOST, 0, 2, True, SHORT), "the ranks did not all come together"),
    "lost rank": (lost_rank, "another rank has ended"),
    "lost store": (lost_store, "another rank has ended"),
    "absent rank": (absent_rank, "this rank has waited for the others in vain"),
    "store": (
        lambda path, patch: dist.TCPStore(HOST, 0, 1, True, SHORT).get("key"),
        "this rank has waited for the others in vain",
    ),
    "mpi": (no_mpi, "DeepSpeed looks for MPI"),
    "no CUDA_HOME": (no_cuda_home, "DeepSpeed finds no nvcc"),
    "no CUDA_HOME, torch": (no_cuda_home_for_torch, "DeepSpeed finds no nvcc"),
    "no nvcc": (nvcc(""), "DeepSpeed finds no nvcc"),
    "other nvcc": (nvcc("8.0"), "nvcc is of CUDA 8.0 and torch of CUDA 13.2"),
    "libaio": (no_libaio, "offload to NVMe needs libaio"),
    "ninja": (cpu_adam(ninja=False), "DeepSpeed cannot compile its kernels without ninja"),
    "no compiler": (cpu_adam(ninja=True), "no C++ compiler is there to build DeepSpeed's cpu_adam"),
    "bad compiler": (cpu_adam(ninja=True, compiler=NO_HEADERS), "the compiler fails at DeepSpeed's cpu_adam"),
    "loss scale": (smallest_loss_scale, "the gradients overflow float16"),
    "shards": (shards_of_four, "the checkpoint is cut into the shards of 4 ranks, and this run has 2"),
    "untrusted": (untrusted_file, "the file holds more than tensors"),
    "torchvision": (
        lambda path, patch: torch.library.register_fake("torchvision::absent")(lambda: None),
        "torchvision was built for another torch",
    ),
}
"""What is done, and how its line begins."""


@pytest.mark.parametrize("name", PROVOKED)
def test_provoked(name: str, tmp_path: Path, monkeypatch: Patch):
    provoke, says = PROVOKED[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of many kinds
        provoke(tmp_path, monkeypatch)
    line = str(explain(caught.value))
    assert line.startswith(says), repr(caught.value)
    assert re.fullmatch(r"[^\n]+; [^\n]+ \(https://\S+\)", line)


@pytest.mark.parametrize(
    ("library", "text", "says"),
    [
        ("libc10_cuda.so", "CUDA out of memory. Tried to allocate ", "the GPU's memory is full"),
        ("libc10_cuda.so", "The NVIDIA driver on your system is too old ", "the NVIDIA driver is too old"),
        (
            "libtorch_cuda.so",
            "Watchdog caught collective operation timeout: ",
            "this rank has waited for the others in vain",
        ),
        ("libtorch_cuda.so", "a remote process exiting prematurely", "another rank has ended"),
    ],
)
def test_what_takes_a_gpu(library: str, text: str, says: str):
    """The libraries still say it in these words."""
    file = Path(torch.__file__).parent / "lib" / library
    if not file.exists():
        pytest.skip(f"a torch without CUDA: no {library}")
    with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        assert memory.find(text.encode()) >= 0
    assert str(explain(torch.OutOfMemoryError(text) if "memory" in text else RuntimeError(text))).startswith(says)


SAVE_AFTER_TEST = """
import sys
import deepspeed, torch
import exits
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
def main():
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    # As Lightning's DeepSpeedStrategy makes its engine for trainer.test.
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(1, 1), config=config, model_parameters=[])
    engine.save_checkpoint(sys.argv[1])
sys.exit(exits.guarded(main))
"""


def as_rank(port: int, ranks: int = 1) -> dict[str, str]:
    """torchrun's variables of rank 0."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return {**rank, "MASTER_ADDR": HOST, "MASTER_PORT": str(port), "LOCAL_SIZE": str(ranks)}


def test_save_after_test(tmp_path: Path):
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port = listener.getsockname()[1]
    done = run_program("-c", SAVE_AFTER_TEST, str(tmp_path), env={**as_rank(port), "DS_ACCELERATOR": "cpu"})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: DeepSpeed's engine for testing at stage 3 cannot save")


def test_taken_port_in_train(taken_port: int, small_data: list[str], tmp_path: Path):
    flags = ["--accelerator", "cpu", "--strategy", "ddp", "--out", str(tmp_path)]
    done = run_program("train.py", *small_data, *flags, env=as_rank(taken_port, ranks=2))
    assert done.returncode == 1
    assert f"error: another program uses port {taken_port}, at which the ranks are to meet; " in done.stderr
    assert "Traceback" not in done.stderr


def test_guarded(taken_port: int, capsys: pytest.CaptureFixture[str], monkeypatch: Patch):
    def main() -> int:
        dist.TCPStore(HOST, taken_port, 1, True, SHORT)
        return 0

    monkeypatch.setattr("sys.argv", ["train.py"])
    assert exits.guarded(main) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: another program uses port {taken_port}")
    monkeypatch.setattr("sys.argv", ["train.py", "--debug"])
    with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
        exits.guarded(main)


def test_unknown_failures_keep_their_line(capsys: pytest.CaptureFixture[str], monkeypatch: Patch):
    monkeypatch.setattr("sys.argv", ["train.py"])

    def fail_with(error: Exception) -> str:
        def main() -> int:
            raise error

        assert exits.guarded(main) == 1
        return capsys.readouterr().err

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "last.ckpt")
    assert fail_with(full) == "error: No space left on device (last.ckpt)\n"
    assert fail_with(KeyError("step")) == "error: KeyError: 'step' (--debug shows where)\n"


def test_every_row_is_met():
    met = [says for _, says in PROVOKED.values()]
    met += ["the GPU's memory", "the NVIDIA driver", "DeepSpeed's engine for testing", "another program uses port "]
    for row in TABLE:
        fixed = row.cause.split("{")[0]
        assert any(says.startswith(fixed) or fixed.startswith(says) for says in met), row.cause


def test_what_led_to_it_counts():
    known = torch.OutOfMemoryError("CUDA out of memory.")
    handled, caused, hidden = ValueError("while handling it"), ValueError("from it"), ValueError("from None")
    handled.__context__ = caused.__cause__ = hidden.__context__ = known
    hidden.__suppress_context__ = True
    assert explain(handled) == explain(caused) == explain(known)
    assert explain(hidden) is None


def test_explained():
    with pytest.raises(RunError, match="--accumulate 2") as caught, explained(run("ddp")):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    with pytest.raises(UsageError, match="ours"), explained(run("ddp")):
        raise UsageError("ours") from MemoryError()
    with pytest.raises(KeyError), explained(run("ddp")):
        raise KeyError


def run(strategy: str, devices: int = 2, accelerator: str = "gpu", **options: Any) -> Config:
    """A settled configuration."""
    config = cli.parse(["--strategy", strategy, "--batch_size", "64", "--devices", str(devices)])
    for name, value in {"accelerator": accelerator, **options}.items():
        setattr(config, name, value)
    return config


def advice(config: Config) -> str:
    """What is to be tried against a full memory."""
    line = explain(MemoryError(), config)
    assert line is not None
    return line.split("; ")[1].split(" (https")[0]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            run("ddp"),
            "try in this order: --accumulate 2 (a micro-batch of 16, not 32), --strategy deepspeed_stage_1, "
            "--strategy deepspeed_stage_1_offload",
        ),
        (
            run("baseline", devices=1, batch_size=9, accumulate=3),
            "try in this order: --accumulate 9 (a micro-batch of 1, not 3), --strategy deepspeed_stage_1_offload",
        ),
        (
            run("deepspeed_stage_2", accelerator="cpu", accumulate=32),
            "try in this order: --strategy deepspeed_stage_3, fewer --devices",
        ),
        (run("baseline", devices=1, accelerator="cpu", batch_size=1), "it takes a smaller network or more memory"),
        (
            run("deepspeed_stage_2", accumulate=32, model=Choice("vit_moe", {"ep_size": 1})),
            "try in this order: a larger --model.ep_size (it is 1), --strategy deepspeed_stage_2_offload",
        ),
    ],
    ids=["two GPUs", "one GPU", "two CPUs", "one CPU", "experts, which stage 3 does not know"],
)
def test_advice(config: Config, says: str):
    assert advice(config) == says


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_advice_can_be_followed(strategy: str):
    config, tried = run(strategy), [strategy]
    while found := re.search(r"--accumulate (\d+)", advice(config)):
        config.accumulate = int(found[1])
        micro_batch_size(config.batch_size, replicas(config), config.accumulate)  # it divides
    while names := re.findall(r"--strategy (\w+)", advice(config)):
        assert {*names} <= {*STRATEGIES}
        config.strategy = names[0]
        assert config.strategy not in tried
        tried.append(config.strategy)
    if STRATEGIES[strategy].one_replica:
        assert (config.accumulate, config.strategy) == (64, strategy)
        assert "more --devices" in advice(config)
    else:
        assert (config.accumulate, config.strategy) == (32, "deepspeed_stage_3_offload_nvme")
