"""Tests cifar-zero doctor --nodes on two ranks, and its comparison of versions on made-up hosts."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cifar_zero.diagnosis import nodes
from cifar_zero.launch.local_launcher import free_port, variables
from tests.support.helpers import HANG_SECONDS, of_test_all, run_program


@of_test_all
@pytest.mark.distributed
def test_two_ranks_that_do_not_share_a_disk(tmp_path: Path):
    port = free_port()

    def diagnose(rank: int) -> Any:
        folder = tmp_path / str(rank)
        folder.mkdir()
        flags = ["--nodes", "--timeout", str(HANG_SECONDS), "--out", "runs"]
        return run_program("doctor", *flags, cwd=folder, env=variables(rank, 2, port))

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(diagnose, (0, 1))
    assert (first.returncode, other.returncode, other.stdout) == (1, 0, ""), first.stdout  # only rank 0 reports
    assert "1 MiB over gloo, with the correct sum on every rank" in first.stdout
    assert "runs is not the same directory on " in first.stdout
    assert "These nodes are not ready to train together: 1 check failed" in first.stdout
    assert not [*tmp_path.glob("*/*")]


def test_versions_that_differ_fail_and_are_named():
    names = ["gpu0", "gpu1", "gpu2"]
    old, new = {"torch": "2.14.0"}, {"torch": "2.15.0"}
    finding = nodes.check_versions(names, [new, old, new])
    assert finding.status == "failed"
    assert "torch 2.15.0 on gpu0, 2.14.0 on gpu1, 2.15.0 on gpu2" in finding.summary
    assert nodes.check_versions(names, [new] * 3).status == "ok"
    missing = nodes.check_versions(names[:2], [{**new, "nccl": "2.27.3"}, new])
    assert "nccl 2.27.3 on gpu0, none on gpu1" in missing.summary
