"""Fixtures and hooks of all tests."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cifar_zero.core import exits

GIVE_WAY = 5
"""Niceness of the tests that run in one process. On two cores with two ranks, a busy process with this niceness made
steps take 1.2 to 1.5 times as long. A busy process with niceness 19 had no effect, and with niceness 0 it doubled the
time. With niceness 19, tests would get a hundredth of a core while other programs run, and exceed any limit. The
scheduler's weight of a process is 15 with niceness 19, 335 with niceness 5, and 1024 with niceness 0 (Linux 6.18,
kernel/sched/core.c, sched_prio_to_weight)."""


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns flags for 640 training and 640 test images, which are decoded once for all tests. Figures are switched
    off, because they take longer than a short run."""
    images = ["--data.source", "synthetic", "--data.synthetic_size", "640"]
    return [*images, "--test_figures", "false", "--data.root", str(tmp_path_factory.mktemp("data"))]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables of a launcher that an earlier test in this process may have left."""
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def own_process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes the process group and the environment variables of a test that is itself a rank. Otherwise later tests
    would inherit them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    environment = dict(os.environ)
    yield
    if dist.is_initialized():
        import deepspeed

        if deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()  # and DeepSpeed's references to it
    if dist.is_initialized():  # by DDP
        dist.destroy_process_group()
    for name in os.environ.keys() - environment.keys():  # the ranks' variables
        del os.environ[name]


PLANTED = "open({!r}, 'w')\ndef act(*_, **__): return act\nclass Act:\n    def __init__(self, *_, **__): act()\n"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the path of a file that the module `planted_code` writes when it is imported."""
    proof = tmp_path / "imported"
    (tmp_path / "planted_code.py").write_text(PLANTED.format(str(proof)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planted_code", raising=False)
    return proof


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Returns a function that runs a command of cifar-zero in this process, and returns its exit code, its output and
    its errors."""

    def run(name: str, *flags: object) -> tuple[int, str, str]:
        from cifar_zero.__main__ import COMMANDS
        from cifar_zero.core import exits

        monkeypatch.setattr("sys.argv", [name, *map(str, flags)])
        code = exits.guarded(import_module(COMMANDS[name]).main)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests of several ranks to the front and runs them one after the other in one worker of pytest-xdist
    (`--dist loadgroup`), because two such tests at the same time on two cores take four times as long. Other tests of
    one file stay together, so that they share their fixtures."""
    items.sort(key=lambda item: not _of_several_ranks(item))
    for item in items:
        item.add_marker(
            pytest.mark.xdist_group("ranks" if _of_several_ranks(item) else item.nodeid.split("::", maxsplit=1)[0])
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Gives tests of one process a lower priority, because each step of the ranks in another worker waits for the
    slowest rank, and one more process on two cores makes the ranks three times as slow. Linux applies niceness only
    within a session (sched(7), autogroup), so programs that these tests start stay in this session. These tests compute
    on one thread. With two threads, one thread would spin while the other thread has no core."""
    if "PYTEST_XDIST_WORKER" in os.environ and not _of_several_ranks(item):
        os.nice(GIVE_WAY - os.nice(0))
        torch.set_num_threads(1)


def _of_several_ranks(item: pytest.Item) -> bool:
    return item.get_closest_marker("distributed") is not None


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """Restores the handlers that a program sets to stop at signals."""
    before = {number: signal.getsignal(number) for number in (*exits.SIGNALS, exits.SLURM_REQUEUE)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
