"""Whoever has started a rank, it is told in torchrun's variables."""

from __future__ import annotations

import pytest

import launchers
from errors import UsageError

SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def test_of_torchrun():
    set_by_it = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert launchers.variables({**set_by_it, "HOME": "/", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) == set_by_it


def test_of_deepspeed(monkeypatch: pytest.MonkeyPatch):
    set_by_it = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "CROSS_RANK": "1"}
    found = launchers.variables({**set_by_it, "CROSS_SIZE": "2"})
    assert (found["RANK"], found["LOCAL_WORLD_SIZE"], found["NODE_RANK"]) == ("3", "2", "1")
    given = ["--local_rank=1", "--epochs", "1"]
    assert launchers.arguments(given) == given
    monkeypatch.setenv("CROSS_RANK", "1")
    assert launchers.arguments(given) == ["--epochs", "1"]


def test_of_slurm():
    assert launchers.variables(SRUN) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "NODE_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "19567",
    }
    there = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert launchers.variables({**SRUN, **there}).items() >= there.items()
    # Round the machines: task 1 is the first of the second one, whose ranks are neighbours here.
    assert launchers.variables({**SRUN, "SLURM_PROCID": "1", "SLURM_LOCALID": "0"})["RANK"] == "2"


@pytest.mark.parametrize("tasks", ["3", "4"])
def test_slurm_with_another_number_on_each_machine_is_refused(tasks: str):
    with pytest.raises(UsageError, match="--ntasks-per-node"):
        launchers.variables({**SRUN, "SLURM_NTASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": f"{int(tasks) - 1},1"})


def test_a_shell_in_an_allocation_is_no_rank():
    assert launchers.variables({**SRUN, "SLURM_NTASKS": "1"}) == {}
    assert launchers.variables({"RANK": "0", "WORLD_SIZE": "2"}) == {}  # of a Kubernetes pod, for torchrun


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu[03-07,12],login1", "gpu03"), ("a,b", "a"), ("r[1-2]n[1,3]", "r1n1"), ("alone", "alone"), ("n[5]", "n5")],
)
def test_the_first_host_of_slurms_list(hosts: str, first: str):
    assert launchers.first_host(hosts) == first
