from __future__ import annotations

import pytest

import hardware
from config import Config
from errors import UsageError
from sweeping import slots as module
from sweeping.slots import slots


def config(accelerator: str, devices: int) -> Config:
    return Config(accelerator=accelerator, devices=devices)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Of 8 cores, 20 GB and 4 GPUs."""
    for name in (module.THREADS, module.VISIBLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "cores", lambda: [*range(8)])
    monkeypatch.setattr(module, "free_memory_bytes", lambda: 20_000_000_000)
    monkeypatch.setattr(module, "gpu_count", lambda: 4)
    return monkeypatch


def test_cores_are_shared_out(machine: pytest.MonkeyPatch) -> None:
    places = slots([config("cpu", 1), config("cpu", 2)], None, runs=100)
    assert [sorted(place.cores) for place in places] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [len(place.cores) for place in slots([config("cpu", 1)], None, runs=2)] == [4, 4]
    assert len(slots([config("cpu", 1)], 3, runs=100)) == 3


def test_who_sets_the_threads_shares_the_cores_out(machine: pytest.MonkeyPatch) -> None:
    machine.setenv(module.THREADS, "4")
    assert [place.cores for place in slots([config("cpu", 1)], None, runs=100)] == [frozenset()] * 2


@pytest.mark.parametrize("threads", ["0", "x", "", "1,4"])
def test_threads_that_are_no_number_are_one(machine: pytest.MonkeyPatch, threads: str) -> None:
    machine.setenv(module.THREADS, threads)
    assert len(slots([config("cpu", 1)], None, runs=100)) == 8


def test_the_memory_of_the_cpu_is_heeded(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(module, "free_memory_bytes", lambda: 3_500_000_000)
    assert len(slots([config("cpu", 1)], None, runs=100)) == 3
    with pytest.raises(UsageError, match="there is room for 3 runs"):
        slots([config("cpu", 1)], 4, runs=100)


def test_gpus_are_shared_out(machine: pytest.MonkeyPatch) -> None:
    def told(devices: int, parallel: int | None = None) -> list[str]:
        return [place.told[module.VISIBLE] for place in slots([config("gpu", devices)], parallel, runs=100)]

    assert told(1) == ["0", "1", "2", "3"]
    assert told(2) == ["0,1", "2,3"]
    assert told(3) == ["0,1,2"]
    assert told(2, parallel=3) == ["0,1", "2,3", "0,1"]
    machine.setenv(module.VISIBLE, "4,5,6,7")
    assert told(2) == ["4,5", "6,7"]


def test_runs_that_share_a_disk_for_their_parameters_take_turns(machine: pytest.MonkeyPatch) -> None:
    nvme = config("cpu", 1)
    nvme.strategy = "deepspeed_stage_3_offload_nvme"
    assert len(slots([config("cpu", 1), nvme], None, runs=100)) == 1
    with pytest.raises(UsageError, match="take turns"):
        slots([nvme], 2, runs=100)
