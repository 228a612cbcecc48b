"""A rank gets torchrun's variables, whichever launcher has started it."""

import pytest

from cifar_zero.core.errors import UsageError
from cifar_zero.launch import rank_environment

SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


LAUNCHED = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    "more",
    [
        {"LOCAL_WORLD_SIZE": "2", "HOME": "/", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},  # of torchrun
        {"LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"},  # of DeepSpeed's launcher
    ],
)
def test_each_launcher_gives_the_same_variables(more: dict[str, str]):
    """Lightning takes NODE_RANK for 0 where neither this nor GROUP_RANK is set."""
    expected = {**LAUNCHED, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
    assert rank_environment.variables({**LAUNCHED, **more}) == expected


def test_the_variables_of_slurm_are_converted():
    assert rank_environment.variables(SRUN) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "NODE_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "19567",
    }
    there = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert rank_environment.variables({**SRUN, **there}).items() >= there.items()
    # With cyclic distribution, task 1 is the first task of the second node.
    assert rank_environment.variables({**SRUN, "SLURM_PROCID": "1", "SLURM_LOCALID": "0"})["RANK"] == "2"


@pytest.mark.parametrize(
    "more",
    [
        {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"},
        {"SLURM_LOCALID": "2"},
    ],
)
def test_slurm_nodes_with_different_numbers_of_tasks_are_refused(more: dict[str, str]):
    with pytest.raises(UsageError, match="--ntasks-per-node"):
        rank_environment.variables({**SRUN, **more})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"RANK": "x"}, "RANK is 'x': set it to a number of at least 0, or unset it"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0': set it to a number of at least 1"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999': set it to a number of at least 0 and at most 65535"),
        ({"RANK": "5"}, "RANK is 5, and WORLD_SIZE 2: ranks count from 0"),
        ({**SRUN, "RANK": None, "MASTER_PORT": "x"}, "MASTER_PORT is 'x': set it to a number"),
        ({**SRUN, "RANK": None, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is 'x': set it to a number"),
    ],
)
def test_variables_that_are_not_the_place_of_a_rank_are_refused(wrong: dict[str, str | None], message: str):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **wrong}
    with pytest.raises(UsageError, match=message):
        rank_environment.variables({name: value for name, value in variables.items() if value is not None})


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_launcher_that_leaves_a_variable_out_is_refused_at_the_start(missing: str, monkeypatch: pytest.MonkeyPatch):
    """Each process would train alone. In a fit of Lightning's DeepSpeedStrategy, LOCAL_WORLD_SIZE may be missing."""
    for name in rank_environment.TORCHRUN:
        monkeypatch.setenv(name, "2" if "SIZE" in name else "0")
    monkeypatch.delenv(missing)
    assert rank_environment.local_rank() == 0
    with pytest.raises(UsageError, match=f"{missing} is not set, but RANK, .* are: set it on each rank"):
        rank_environment.set_torchrun_variables()


def test_a_process_without_a_launcher_is_not_a_rank():
    shell_of_sbatch = {name: value for name, value in SRUN.items() if "STEP" not in name}
    shell_of_salloc = {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}
    pod_of_kubernetes = {"RANK": "0", "WORLD_SIZE": "2"}
    in_a_fit_of_lightning = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for environment in (shell_of_sbatch, shell_of_salloc, pod_of_kubernetes, in_a_fit_of_lightning):
        assert rank_environment.variables(environment) == {}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu[03-07,12],login1", "gpu03"), ("a,b", "a"), ("r[1-2]n[1,3]", "r1n1")],
)
def test_the_first_host_of_slurms_list(hosts: str, first: str):
    assert rank_environment.first_host(hosts) == first
