"""A run whose ranks do not all come says which ones are missing."""

import threading
from contextlib import nullcontext
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, HashStore  # pyright: ignore[reportPrivateImportUsage]

from cifar_zero.core.errors import RunError
from cifar_zero.launch import arrivals, collectives
from cifar_zero.launch.arrivals import await_ranks, open_store
from cifar_zero.launch.local_launcher import free_port, variables
from tests.support.helpers import refused

LONG = timedelta(minutes=30)


@pytest.mark.parametrize("numbers", [(1, 1, 2, 2), (2, 2, 2, 2)])
def test_nodes_with_different_numbers_of_ranks_are_refused(numbers: tuple[int, ...]):
    """4 is divisible by 1 and by 2, so that no rank can see it alone."""
    of_ranks = [collectives.RankInfo(f"node{number}", "cpu", 1, number, "", "") for number in numbers]
    with refused("(1 on node1, 2 on node2): start the same number") if len({*numbers}) > 1 else nullcontext():
        collectives.check_ranks_per_node(of_ranks)


def test_missing_ranks_are_named_while_rank_0_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(arrivals, "FIRST_NOTE_SECONDS", 0.0)
    store, said = HashStore(), threading.Event()

    def say(line: str) -> None:
        print(line)
        said.set()

    monkeypatch.setattr(arrivals, "say", say)

    def come_late() -> None:
        said.wait()
        for rank in (1, 3):
            await_ranks(store, rank, 4, LONG)

    await_ranks(store, 2, 4, LONG)
    late = threading.Thread(target=come_late)
    late.start()
    await_ranks(store, 0, 4, LONG)
    late.join()
    assert capsys.readouterr().out.startswith("waiting for ranks 1, 3 of 4 ranks, not connected after 0 s\n")


def test_the_others_say_that_rank_0_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(arrivals, "FIRST_NOTE_SECONDS", 0.0)
    port = free_port()
    for name, value in variables(1, 2, port).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistNetworkError):
        open_store(timedelta(seconds=1))
    assert capsys.readouterr().err == f"rank 1 waits for rank 0, not connected after 0 s (127.0.0.1:{port})\n"


def test_a_rank_that_never_comes_is_named():
    with pytest.raises(RunError, match="ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more did not connect within 0 s"):
        await_ranks(HashStore(), 0, 12, timedelta(0))


def test_ranks_meet_in_rank_0s_store_although_their_nodes_have_counted_restarts_differently(
    monkeypatch: pytest.MonkeyPatch,
):
    """torchrun does not count a restart that another node has caused. The store is new in each start."""
    stores, port = [], free_port()
    for rank, restarts in ((0, "1"), (1, "0")):
        for name, value in {**variables(rank, 2, port), "TORCHELASTIC_RESTART_COUNT": restarts}.items():
            monkeypatch.setenv(name, value)
        stores.append(open_store(timedelta(seconds=60)))
    for rank in (1, 0):
        await_ranks(stores[rank], rank, 2, timedelta(0))
