"""Tests the messages for known failures of the libraries. The tests cause each failure that is possible without a
GPU."""

# pyright: reportPrivateImportUsage=false
# torch.distributed does not list its stores as exports, although they are documented.

import os
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from cifar_zero.core import exits
from cifar_zero.core.errors import explain
from tests.support.helpers import HANG_SECONDS

Patch = pytest.MonkeyPatch

SHORT = timedelta(milliseconds=200)  # time limit of a wait that must time out
LONG = timedelta(seconds=HANG_SECONDS)  # time limit of a wait that succeeds
HOST = "127.0.0.1"


class Dying(Dataset[int]):
    """A dataset that kills its worker with a signal. A full /dev/shm sends SIGBUS, a full memory SIGKILL."""

    def __init__(self, number: signal.Signals):
        self.number = number

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), self.number)
        return index


def load_with_a_dying_worker(number: signal.Signals, path: Path, patch: Patch) -> None:
    """Loads a batch with a worker that dies. SIGCHLD tells torch that the worker has ended."""
    patch.setattr("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", False)
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        list(DataLoader(Dying(number), num_workers=1))
    finally:
        signal.signal(signal.SIGCHLD, before)


def lost_rank(path: Path, patch: Patch) -> None:
    """Starts a collective of two ranks in this process, and ends one of the ranks."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups: list[Any] = [*pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, LONG), (0, 1))]
    work = groups[0].allreduce([torch.ones(1)])
    groups.pop()
    work.wait()


def no_cuda_home(path: Path, patch: Patch) -> None:
    """Lets DeepSpeed read the version of nvcc without a CUDA toolkit."""
    from deepspeed.ops.op_builder.builder import installed_cuda_version

    patch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    installed_cuda_version()


def build_with(programs: list[str], path: Path, patch: Patch) -> None:
    """Builds DeepSpeed's CPU Adam with only these programs in PATH."""
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    for program in programs:
        path_of_program = shutil.which(program)
        assert path_of_program is not None
        (path / program).symlink_to(path_of_program)
    for name in ("PATH", "TORCH_EXTENSIONS_DIR"):
        patch.setenv(name, str(path))
    patch.delenv("CXX", raising=False)
    CPUAdamBuilder().jit_load(verbose=False)


FULL = "the machine's memory is full"
KILLED = "a data loader worker was killed"
ENDED = "another rank has ended"
NOT_COMPILED = "DeepSpeed's code could not be compiled"

PROVOKED: dict[str, tuple[Callable[[Path, Patch], object], str]] = {
    "python memory": (lambda path, patch: bytearray(1 << 60), FULL),
    "shared memory": (partial(load_with_a_dying_worker, signal.SIGBUS), KILLED),
    "killed worker": (partial(load_with_a_dying_worker, signal.SIGKILL), KILLED),
    "no rank 0": (lambda path, patch: dist.TCPStore(HOST, 1, 1, False, SHORT), ENDED),
    "no rank 1": (lambda path, patch: dist.TCPStore(HOST, 0, 2, True, SHORT), ENDED),
    "lost rank": (lost_rank, ENDED),
    "no CUDA_HOME": (no_cuda_home, NOT_COMPILED),
    "no ninja": (partial(build_with, []), NOT_COMPILED),
    "no compiler": (partial(build_with, ["ninja"]), NOT_COMPILED),
}
"""The function that causes each failure, and the beginning of the message."""


@pytest.mark.parametrize("name", PROVOKED)
def test_a_known_failure_is_explained_in_one_line(name: str, tmp_path: Path, monkeypatch: Patch):
    provoke, says = PROVOKED[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the types differ
        provoke(tmp_path, monkeypatch)
    assert str(explain(caught.value)).startswith(says), repr(caught.value)


def test_an_explanation_is_one_line_and_debug_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch
):
    def main() -> int:
        torch.empty(1 << 60)
        return 0

    for flags in ([], ["--debug", "false"], ["--debug=False", "--seed", "1"], ["--script", "old.py --debug"]):
        monkeypatch.setattr("sys.argv", ["train.py", *flags])
        assert exits.guarded(main) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: the machine's memory is full; in training, double --accumulate")
    for flags in (["--debug"], ["--debug", "--seed", "1"], ["--debug=true"]):
        monkeypatch.setattr("sys.argv", ["train.py", *flags])
        assert exits.guarded(main) == 1
        assert re.search("Traceback.*RuntimeError.*DefaultCPUAllocator", capsys.readouterr().err, re.DOTALL)
