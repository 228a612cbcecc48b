from __future__ import annotations

import pytest

from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.core import hardware
from cifar_zero.sweeping import slots as module
from cifar_zero.sweeping.slots import slots
from cifar_zero.training.resolve import of_machine


def planned(accelerator: str, devices: int, strategy: str = "baseline") -> Run:
    flags = ["--accelerator", accelerator, "--devices", str(devices), "--strategy", strategy, "--batch_size", "12"]
    return of_machine(command_line.parse(flags))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with 8 cores, 20 GB and 4 GPUs."""
    monkeypatch.delenv(module.VISIBLE, raising=False)
    monkeypatch.setattr(hardware, "cores", lambda: [*range(8)])
    monkeypatch.setattr(module, "free_memory_bytes", lambda: 20_000_000_000)
    monkeypatch.setattr(module, "gpu_count", lambda: 4)
    return monkeypatch


def test_cores_are_shared_out(machine: pytest.MonkeyPatch) -> None:
    places = slots([planned("cpu", 1), planned("cpu", 2)], None, runs=100)
    assert [sorted(cores) for _, cores in places] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [len(cores) for _, cores in slots([planned("cpu", 1)], None, runs=2)] == [4, 4]
    assert len(slots([planned("cpu", 1)], 3, runs=100)) == 3


def test_slots_respect_the_memory_of_the_cpu(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(module, "free_memory_bytes", lambda: 3_500_000_000)
    assert len(slots([planned("cpu", 1)], None, runs=100)) == 3


def test_gpus_are_shared_out(machine: pytest.MonkeyPatch) -> None:
    def visible(devices: int, parallel: int | None = None) -> list[str]:
        return [environment[module.VISIBLE] for environment, _ in slots([planned("gpu", devices)], parallel, runs=100)]

    assert visible(1) == ["0", "1", "2", "3"]
    assert visible(2) == ["0,1", "2,3"]
    assert visible(3) == ["0,1,2"]
    assert visible(2, parallel=3) == ["0,1", "2,3", "0,1"]
    machine.setenv(module.VISIBLE, "4,5,6,7")
    assert visible(2) == ["4,5", "6,7"]


def test_runs_that_share_a_disk_for_their_parameters_take_turns(machine: pytest.MonkeyPatch) -> None:
    nvme = planned("cpu", 1, "deepspeed_stage_3_offload_nvme")
    assert len(slots([planned("cpu", 1), nvme], 2, runs=100)) == 1
