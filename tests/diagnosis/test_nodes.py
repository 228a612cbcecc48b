"""Tests cifar-zero doctor --nodes on two simulated hosts, and its comparison of versions on made-up hosts."""

import os
import subprocess
import sys
from pathlib import Path

from cifar_zero.diagnosis import nodes
from tests.support.helpers import HANG_SECONDS, of_test_all
from tests.support.namespaces import DEVICE, two_hosts


@of_test_all
def test_two_hosts_that_do_not_share_a_disk(tmp_path: Path):
    flags = ["--nodes", "--timeout", str(HANG_SECONDS), "--out", "runs"]
    with two_hosts() as hosts:
        variables = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": DEVICE}
        variables |= {"MASTER_ADDR": hosts.a.address, "MASTER_PORT": "29532", "OMP_NUM_THREADS": "1"}
        ranks: list[subprocess.Popen[str]] = []
        for rank, host in enumerate((hosts.a, hosts.b)):
            (tmp_path / host.name).mkdir()
            ranks.append(
                host.start(
                    *(sys.executable, "-m", "cifar_zero", "doctor", *flags),
                    cwd=tmp_path / host.name,
                    env={**os.environ, **variables, "RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        out, other = (rank.communicate(timeout=HANG_SECONDS)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 0], out
    assert other == ""  # only rank 0 reports
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"ok ranks 2 ranks on 2 nodes are connected: {hosts.a.name}, {hosts.b.name}"
    assert lines[2] == "ok all-reduce 1 MiB over gloo, with the correct sum on every rank"
    assert lines[3].startswith("ok versions the same on all nodes: torch 2")
    apart = f"runs is not the same directory on {hosts.a.name} and {hosts.b.name}"
    assert lines[4].startswith(f"failed out {apart}: --out DIR")
    assert lines[5].startswith("These nodes are not ready to train together: 1 check failed; warnings: 0. Bandwidth ")
    assert not [*tmp_path.glob("*/*")]


def test_versions_that_differ_fail_and_are_named():
    names = ["gpu0", "gpu1", "gpu2"]
    old, new = {"torch": "2.14.0"}, {"torch": "2.15.0"}
    finding = nodes.check_versions(names, [new, old, new])
    assert finding.status == "failed"
    assert "torch 2.15.0 on gpu0, 2.14.0 on gpu1, 2.15.0 on gpu2" in finding.summary
    assert nodes.check_versions(names, [new] * 3).status == "ok"
    assert nodes.check_versions(["ubuntu"] * 2, [old, new]).status == "failed"  # cloned machines
    missing = nodes.check_versions(names[:2], [{**new, "nccl": "2.27.3"}, new])
    assert "nccl 2.27.3 on gpu0, none on gpu1" in missing.summary
