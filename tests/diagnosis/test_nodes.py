"""Tests cifar-zero doctor --nodes on two simulated hosts, and its comparison of versions on made-up hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cifar_zero.diagnosis import nodes
from tests.support.helpers import HANG_SECONDS, ROOT, of_test_all
from tests.support.namespaces import DEVICE, Host, Hosts, two_hosts

PATIENT = ["--timeout", str(HANG_SECONDS)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as hosts:
        yield hosts


def start(hosts: Hosts, rank: int, *flags: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """Starts one of two ranks, which are on different hosts."""
    host: Host = (hosts.a, hosts.b)[rank]
    place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": hosts.a.address, "MASTER_PORT": "29532", "GLOO_SOCKET_IFNAME": DEVICE}
    return host.start(
        *(sys.executable, "-m", "cifar_zero", "doctor", "--nodes", *flags),
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **place, **meeting},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(rank: subprocess.Popen[str]) -> tuple[list[str], list[str]]:
    """Returns standard output and error, without torch's warning of a name that it cannot resolve."""
    out, errors = rank.communicate(timeout=HANG_SECONDS)
    return out.splitlines(), [line for line in errors.splitlines() if "socket.cpp" not in line]


@of_test_all
def test_two_hosts_that_do_not_share_a_disk(hosts: Hosts, tmp_path: Path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    ranks = [start(hosts, rank, *PATIENT, "--out", "runs", cwd=folder) for rank, folder in enumerate(folders)]
    (out, errors), others = map(lines_of, ranks)
    assert [rank.returncode for rank in ranks] == [1, 0], errors
    assert others == ([], [])  # only rank 0 reports
    found = [" ".join(line.split()) for line in out]
    assert found[0] == f"ok ranks 2 ranks on 2 nodes are connected: {hosts.a.name}, {hosts.b.name}"
    assert found[2] == "ok all-reduce 1 MiB over gloo, with the correct sum on every rank"
    assert found[3].startswith("ok versions the same on all nodes: torch 2")
    apart = f"runs is not the same directory on {hosts.a.name} and {hosts.b.name}"
    assert found[4].startswith(f"failed out {apart}: --out DIR")
    assert found[5].startswith(
        "These nodes are not ready to train together: 1 check failed; warnings: 0. Bandwidth is not measured: run "
        "all_reduce_perf"
    )
    assert not [*tmp_path.glob("*/*")]


def test_versions_that_differ_fail_and_are_named():
    names = ["gpu0", "gpu1", "gpu2"]
    old, new = {"torch": "2.14.0"}, {"torch": "2.15.0"}
    finding = nodes.check_versions(names, [new, old, new])
    assert finding.status == "failed"
    assert "torch 2.15.0 on gpu0, 2.14.0 on gpu1, 2.15.0 on gpu2" in finding.found
    assert nodes.check_versions(names, [new] * 3).status == "ok"
    missing = nodes.check_versions(names[:2], [{**new, "nccl": "2.27.3"}, new])
    assert "nccl 2.27.3 on gpu0, none on gpu1" in missing.found
