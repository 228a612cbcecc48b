"""Tests --devices auto, which selects as many GPUs as divide the batch, one process on the CPU, or the ranks that a
launcher has started."""

from __future__ import annotations

import pytest

from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.training import resolve as resolving

DIGITS = ["--data.source", "digits"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that simulates a number of GPUs."""
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    resolving._say_once.cache_clear()

    def with_gpus(count: int) -> None:
        monkeypatch.setattr(resolving, "gpu_count", lambda: count)

    return with_gpus


def resolved(*flags: str) -> Run:
    return resolving.resolve(command_line.parse([*DIGITS, *flags]))


@pytest.mark.parametrize(
    ("gpus", "batch_size", "accumulate", "expected"),
    [
        *((1, 128, 1, 1), (7, 192, 1, 6), (8, 1024, 4, 8), (3, 128, 4, 1)),
    ],
)
def test_the_largest_number_of_gpus_that_divides_the_batch(
    gpus: int, batch_size: int, accumulate: int, expected: int, machine, capsys: pytest.CaptureFixture[str]
):
    machine(gpus)
    run = resolved("--batch_size", str(batch_size), "--accumulate", str(accumulate))
    assert run.placement.devices == expected
    assert run.micro_batch * accumulate * expected == batch_size
    said = capsys.readouterr().err.splitlines()
    identity = f": --batch_size {batch_size} = micro-batch x {gpus} ranks x --accumulate {accumulate} "
    if gpus == 1:
        assert not said
    else:
        (line,) = said
        assert line.startswith(f"--devices auto: {expected} of {gpus} GPUs" + (identity if expected < gpus else ""))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--strategy tensor_parallel --model vit_tiny", 3),  # 3 heads
        ("--strategy pipeline --model vit_tiny", 8),  # 12 blocks; the batch is not divided
        ("--strategy deepspeed_stage_2 --model net_moe --model.num_experts [3] --model.ep_size 3 --batch_size 192", 6),
        ("--accelerator cpu", 1),
        ("--devices 2", 2),
    ],
)
def test_other_limits(flags: str, expected: int, machine):
    machine(8)
    assert resolved(*flags.split()).placement.devices == expected


@pytest.mark.parametrize(("batch_size", "accumulate", "expected"), [(64, 1, 2), (128, 1, 4), (64, 2, 1)])
def test_a_second_gpu_needs_a_micro_batch_that_is_worth_it(
    batch_size: int, accumulate: int, expected: int, machine, capsys: pytest.CaptureFixture[str]
):
    machine(4)
    assert resolved("--batch_size", str(batch_size), "--accumulate", str(accumulate)).placement.devices == expected
    said = capsys.readouterr().err
    assert said.startswith(f"--devices auto: {expected} of 4 GPUs")
    assert ("is too small to keep a GPU busy; --devices 4 uses 4 GPUs anyway" in said) == (expected < 4)


@pytest.mark.parametrize(("bfloat16", "precision"), [(True, "bf16-mixed"), (False, "16-mixed")])
def test_auto_precision(bfloat16: bool, precision: str, machine, monkeypatch: pytest.MonkeyPatch):
    machine(4)
    monkeypatch.setattr(resolving, "has_bfloat16", lambda: bfloat16)
    placement = resolved("--precision", "auto").placement
    assert (placement.accelerator, placement.precision) == ("gpu", precision)
    placement = resolved("--precision", "auto", "--accelerator", "cpu").placement
    assert (placement.accelerator, placement.precision) == ("cpu", "32-true")


def test_a_launcher_has_decided(machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    machine(8)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config = resolved()
    assert (config.placement.devices, config.placement.num_nodes) == (2, 2)
    assert not capsys.readouterr().err
