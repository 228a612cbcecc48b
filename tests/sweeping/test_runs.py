from __future__ import annotations

import pytest

from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.core import hardware
from cifar_zero.core.errors import UsageError
from cifar_zero.sweeping import runs
from cifar_zero.sweeping.runs import flags_of, name_of, resolved, slots
from cifar_zero.training.resolve import of_machine

REST = ["--data.source", "synthetic", "--accelerator", "cpu", "--batch_size", "16"]


def test_names_and_flags() -> None:
    options = {"optimizer.lr": 0.0123456789, "model.hidden": "[64,64]", "seed": "3"}
    assert name_of(options) == "optimizer.lr_0.0123457-model.hidden__64_64_-seed_3"
    config = resolved([*REST, "--model", "mlp", *flags_of(options)], "val/acc").config
    assert (config.optimizer.options["lr"], config.model.options["hidden"], config.seed) == (0.0123456789, [64, 64], 3)


def test_long_names_are_cut_and_stay_different() -> None:
    names = {name_of({f"option_{number}": 0.1 for number in range(40)} | {"last": last}) for last in (1, 2)}
    assert len(names) == 2
    assert all(len(name) < 200 for name in names)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optimizer.lrr 0.1", r"did you mean --optimizer.lr\?"),
        ("--accumulate 3", "3"),
        ("--resume last", "--resume cannot be used with sweep.py"),
        ("--bench_steps 5", "--bench_steps cannot be used"),
        ("--strategy auto", "name a strategy for this machine"),
        ("--num_nodes 2", "name a strategy for this machine"),
        ("--data.val_fraction 0", "needs validation images"),
    ],
)
def test_what_cannot_be_trained_is_refused(flags: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolved([*REST, *flags.split()], "val/acc")


def planned(accelerator: str, devices: int, strategy: str = "baseline") -> Run:
    flags = ["--accelerator", accelerator, "--devices", str(devices), "--strategy", strategy, "--batch_size", "12"]
    return of_machine(command_line.parse(flags))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with 8 cores, 20 GB and 4 GPUs."""
    monkeypatch.delenv(runs.VISIBLE, raising=False)
    monkeypatch.setattr(hardware, "cores", lambda: [*range(8)])
    monkeypatch.setattr(runs, "free_memory_bytes", lambda: 20_000_000_000)
    monkeypatch.setattr(runs, "gpu_count", lambda: 4)
    return monkeypatch


def test_cores_are_shared_out(machine: pytest.MonkeyPatch) -> None:
    places = slots([planned("cpu", 1), planned("cpu", 2)], None, runs=100)
    assert [sorted(cores) for _, cores in places] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [len(cores) for _, cores in slots([planned("cpu", 1)], None, runs=2)] == [4, 4]
    assert len(slots([planned("cpu", 1)], 3, runs=100)) == 3


def test_slots_respect_the_memory_of_the_cpu(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(runs, "free_memory_bytes", lambda: 3_500_000_000)
    assert len(slots([planned("cpu", 1)], None, runs=100)) == 3


def test_gpus_are_shared_out(machine: pytest.MonkeyPatch) -> None:
    def visible(devices: int, parallel: int | None = None) -> list[str]:
        return [environment[runs.VISIBLE] for environment, _ in slots([planned("gpu", devices)], parallel, runs=100)]

    assert visible(1) == ["0", "1", "2", "3"]
    assert visible(2) == ["0,1", "2,3"]
    assert visible(3) == ["0,1,2"]
    assert visible(2, parallel=3) == ["0,1", "2,3", "0,1"]
    machine.setenv(runs.VISIBLE, "4,5,6,7")
    assert visible(2) == ["4,5", "6,7"]


def test_runs_that_share_a_disk_for_their_parameters_take_turns(machine: pytest.MonkeyPatch) -> None:
    nvme = planned("cpu", 1, "deepspeed_stage_3_offload_nvme")
    assert len(slots([planned("cpu", 1), nvme], 2, runs=100)) == 1
