"""doctor.py --nodes on two hosts of this machine, and what it makes of figures that no such hosts have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path

import pytest

from diagnosis import nodes
from diagnosis.links import Pair, rounds
from diagnosis.machines import Machine
from planning import link
from tests.helpers import ROOT, run_program
from tests.namespaces import DEVICE, Host, Hosts, two_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as hosts:
        yield hosts


def start(hosts: Hosts, rank: int, *flags: str) -> subprocess.Popen[str]:
    """One rank of two, one on each host."""
    host: Host = (hosts.a, hosts.b)[rank]
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": rank}
    meeting = {"MASTER_ADDR": hosts.a.address, "MASTER_PORT": "29532", "GLOO_SOCKET_IFNAME": DEVICE}
    return host.start(
        *(sys.executable, "doctor.py", "--nodes", *flags),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in place.items()}, **meeting},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.distributed
def test_two_hosts_over_a_slow_link(hosts: Hosts, tmp_path: Path) -> None:
    """What is measured of 100 Mbit/s, and what plan.py reads of it."""
    hosts.slow("100mbit")
    file = tmp_path / "network.json"
    flags = ["--out", str(tmp_path), "--data.root", str(tmp_path / "data"), "--save", str(file)]
    ranks = [start(hosts, rank, *flags) for rank in range(2)]
    out, errors = ranks[0].communicate(timeout=100)
    assert ranks[0].returncode == 0, errors
    assert ranks[1].communicate(timeout=20)[0] == ""  # rank 0 speaks
    assert ranks[1].returncode == 0
    for host in (hosts.a, hosts.b):
        assert host.name in out
    for line in ("ok       versions ", "ok       clock ", "ok       links ", "ok       out ", "warning  data "):
        assert f"\n{line}" in out
    assert "Nothing failed, 1 warning." in out
    measured = link.read(file)
    assert 0.5 * 12.5e6 < measured.bytes_per_second < 1.1 * 12.5e6
    assert 0 < measured.latency_seconds < 0.1
    hosts.mend()


@pytest.mark.distributed
def test_a_machine_that_does_not_answer_is_named_in_time(hosts: Hosts) -> None:
    alone = start(hosts, 0, "--timeout", "2")
    out, errors = alone.communicate(timeout=60)
    assert alone.returncode == 1
    assert out == ""
    lines = [line for line in errors.splitlines() if "socket.cpp" not in line]  # torch's warning of a name
    assert lines == ["error: rank 1 did not answer within 2 s while meeting the others"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nodes"], "start it on each machine with torchrun --nnodes N --nproc_per_node M --rdzv_backend c10d"),
        (["--nodes", "port"], "--nodes measures between machines: leave the names of checks"),
        (["--save", "network.json"], "--save is of what --nodes measures"),
    ],
)
def test_wrong_usage_is_one_line(flags: list[str], said: str) -> None:
    done = run_program("doctor.py", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_every_pair_meets_once_and_nobody_twice_in_a_round(count: int) -> None:
    tables = rounds(count)
    assert sorted(chain(*tables)) == [*combinations(range(count), 2)]
    for table in tables:
        assert len({*chain(*table)}) == 2 * len(table)
    assert len(tables) <= count


def machine(node: int, clock: float = 0.0, has_images: bool = True, **versions: str) -> Machine:
    return Machine(node, node, f"gpu{node}", "cuda:0", versions or {"torch": "2.15.0"}, "", has_images, clock)


def test_versions_that_differ_fail_and_are_named() -> None:
    three = [machine(0), machine(1, torch="2.14.0"), machine(2)]
    finding = nodes.versions(three)
    assert finding.status == "failed"
    assert "torch 2.15.0 on gpu0, gpu2; 2.14.0 on gpu1" in finding.found
    assert nodes.versions([machine(0), machine(1)]).status == "ok"
    missing = nodes.versions([machine(0, torch="1", nccl="2.27.3"), machine(1, torch="1")])
    assert "nccl 2.27.3 on gpu0; none on gpu1" in missing.found


def test_the_slow_link_is_named() -> None:
    three = [machine(node) for node in range(3)]
    pairs = [Pair((0, 1), 1e-5, 12e9), Pair((0, 2), 1e-5, 1e9), Pair((1, 2), 1e-5, 11e9)]
    finding = nodes.slow_links(pairs, three)
    assert finding.status == "warning"
    assert finding.found == "gpu0 - gpu2 1 GB/s, where the middle pair of machines has 11 GB/s"
    assert nodes.slow_links(pairs[::2], three).status == "ok"


def test_clocks_and_disks() -> None:
    assert nodes.clock([machine(0, 100.0), machine(1, 100.5)]).status == "ok"
    assert nodes.clock([machine(0, 103.0), machine(1, 100.5)]).found == "that of gpu1 is 2.5 s behind that of gpu0"
    two = [machine(0), machine(1, has_images=False)]
    assert nodes.on_one_disk(Path("runs"), [True, True], two).status == "ok"
    apart = nodes.on_one_disk(Path("runs"), [True, False], two)
    assert (apart.status, apart.found.split(":")[0]) == ("warning", "runs of gpu0 is not what gpu1 has there")
    assert "no images on gpu1" in nodes.images(Path("data"), [True, False], two).found
