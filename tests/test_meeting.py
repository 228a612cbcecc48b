"""How ranks of torchrun agree on a name for this start, in a store that has the keys of an earlier one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import meeting
from errors import RunError

PATIENCE = timedelta(seconds=60)


def test_each_start_has_keys_of_its_own():
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE)
    clients = [TCPStore("127.0.0.1", store.port, is_master=False, timeout=PATIENCE) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:

        def start(order: list[int]) -> set[str]:
            ranks = [threads.submit(meeting.agree, clients[rank], rank, 3, PATIENCE) for rank in order]
            return {rank.result() for rank in ranks}

        (first,) = start([0, 1, 2])
        (second,) = start([2, 1, 0])
    assert first != second


def test_who_has_not_come_is_named():
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE)
    with pytest.raises(RunError, match=r"^rank 1, 2 did not come within"):
        meeting.agree(store, 0, 3, timedelta(seconds=0.1))
