"""One rank on each of two hosts, and the bytes sent over the link between them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.helpers import HANG_SECONDS, ROOT
from tests.support.namespaces import DEVICE, Host, Hosts, two_hosts

PORT = "29531"
"""Port of the rendezvous; no other program runs in the hosts."""

COUNTER = f"/sys/class/net/{DEVICE}/statistics/tx_bytes"


class TwoRanks:
    """Ranks that train one run after the other (tests/support/many_runs.py)."""

    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts, self._folder, self._count = hosts, folder, 0
        self._ranks = [self._start(rank, host) for rank, host in enumerate((hosts.a, hosts.b))]

    def train(self, flags: Sequence[str], timeout: float = HANG_SECONDS) -> None:
        """Trains a command line; shows the end of the output if it fails."""
        for rank in range(2):
            request = self._folder / str(rank) / f"{self._count}.json"
            request.with_suffix(".part").write_text(json.dumps([[*flags, "--num_nodes", "2"]]))
            request.with_suffix(".part").rename(request)
        done, over = self._folder / "0" / f"{self._count}.done", time.monotonic() + timeout
        while not done.exists():
            if any(rank.poll() is not None for rank in self._ranks) or time.monotonic() > over:
                logs = [(self._folder / f"{rank}.log").read_text()[-3000:] for rank in range(2)]
                raise AssertionError("\n".join(logs))
            time.sleep(0.02)
        self._count += 1

    def sent(self) -> int:
        """Returns the bytes that the first host has sent so far, including headers."""
        return int(self.hosts.a.run("cat", COUNTER, check=True).stdout)

    def _start(self, rank: int, host: Host):
        (self._folder / str(rank)).mkdir()
        place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": rank}
        meeting = {"MASTER_ADDR": self.hosts.a.address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": DEVICE}
        log = (self._folder / f"{rank}.log").open("w")
        return host.start(
            *(sys.executable, "-m", "tests.support.many_runs", str(self._folder / str(rank)), "2"),
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **{name: str(value) for name, value in place.items()},
                **meeting,
            },
            stdout=log,
            stderr=log,
        )


@contextmanager
def two_ranks(folder: Path) -> Iterator[TwoRanks]:
    """Two ranks for the block; skips the test if two hosts cannot be made."""
    with two_hosts() as hosts:  # removing the hosts ends the ranks
        yield TwoRanks(hosts, folder)
