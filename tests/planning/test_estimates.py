"""Tests which strategy is recommended, and that --strategy auto makes one choice for all ranks, in one line."""

import pytest

from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from cifar_zero.planning import estimates
from cifar_zero.planning.activations import LinearFit
from cifar_zero.planning.estimates import MemoryBudget, MemoryEstimate, estimate_all, recommended
from cifar_zero.planning.formulas import Network, Weight
from cifar_zero.training.resolve import make_run

GB = 10**9


def plan(budget: MemoryBudget, *flags: str) -> list[MemoryEstimate]:
    common = "--accelerator gpu --optimizer adam --precision bf16-mixed --batch_size 64 --devices 1"
    run = make_run(command_line.parse([*common.split(), *flags]))
    line = LinearFit(0, GB)
    return estimate_all(run, Network((Weight((10 * GB,), states=2),), (0,)), budget, {"autocast": line, "cast": line})


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        (300, 0, "baseline"),  # 160 GB of model states, 8 images on each of 8 ranks: 168
        (80, 0, "deepspeed_stage_1"),  # 20 + 140/8 = 37.5, 20.1 of unsharded gradients, 8 of activations
        (50, 0, "deepspeed_stage_2"),  # 37.5, 8.1 of activations and the bucket
        (40, 5, "deepspeed_stage_3"),  # 160/8 = 20, 8 of activations and 1.1 of gathered layers; 40/8 as it is built
        (20, 30, "deepspeed_stage_3_offload"),  # 9.2 on the device, 20 * 10/8 = 25 on the host
    ],
)
def test_the_first_strategy_that_fits_is_recommended(device: float, host: float, expected: str):
    budget = MemoryBudget(round(device * GB), round(host * GB))
    choice, _ = recommended(plan(budget, "--devices", "8"), budget)
    assert choice is not None
    assert choice.strategy == expected


def test_nothing_fits():
    budget = MemoryBudget(5 * GB, None)
    choice, reason = recommended(plan(budget, "--devices", "2"), budget)
    assert choice is None
    least = "deepspeed_stage_3_offload, which needs the least device memory, needs "
    assert f"{least}33.20 GB of device memory, of which 5.00" in reason
    budget = MemoryBudget(20 * GB, 4 * GB)
    _, reason = recommended(plan(budget, "--devices", "8"), budget)
    assert "GB of host memory, of which 4.00 GB are available" in reason
    assert "GB of device memory" not in reason


def test_the_largest_micro_batch_fits_and_one_image_more_does_not():
    budget = MemoryBudget(60 * GB, None)
    estimates = {estimate.strategy: estimate for estimate in plan(budget, "--devices", "8")}
    most = estimates["deepspeed_stage_2"].most_images
    assert most == 22  # (60 - 37.5 - 0.1) GB, one for each image
    batch = {images: str(8 * images) for images in (most, most + 1)}
    fits = [
        estimate.fits
        for images in batch.values()
        for estimate in plan(budget, "--devices", "8", "--batch_size", images)
        if estimate.strategy == "deepspeed_stage_2"
    ]
    assert fits == [True, False]
    assert estimates["baseline"].most_images == 0


def test_a_strategy_that_cannot_run_is_never_recommended():
    budget = MemoryBudget(100 * GB, 1000 * GB)
    estimates = plan(budget, "--optimizer", "muon")
    refused = {estimate.strategy for estimate in estimates if "muon needs full tensors" in estimate.refused}
    assert "deepspeed_stage_2" in refused
    assert recommended(estimates, budget)[0] is None


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cifar_zero.config.rules.free_memory_bytes", lambda: 10**11)


def settled(*flags: str) -> str:
    return estimates.without_auto(
        command_line.parse(["--strategy", "auto", "--accelerator", "cpu", *flags])
    ).placement.strategy


@pytest.mark.parametrize(
    ("rank_bytes", "strategy"),
    [(10**10, "baseline"), (85_000_000, "fsdp2")],  # fsdp2 shards the 16 bytes per parameter
)
def test_the_first_strategy_that_fits_is_taken_and_printed(
    rank_bytes: int, strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(estimates, "free_memory_bytes", lambda: 2 * (estimates.CPU_RANK_BYTES + rank_bytes))
    taken = settled("--model", "vit_tiny", "--optimizer", "adam", "--devices", "2", "--batch_size", "2")
    assert taken == strategy
    first, line = capsys.readouterr().err.splitlines()
    assert first.startswith("--strategy auto: predicts")  # at once, as it takes seconds
    assert line.startswith(f"--strategy auto: {strategy} needs 0.")
    assert line.endswith("GB available to a rank")


def test_a_run_for_which_no_strategy_can_be_taken_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match="--precision 16-mixed needs a GPU"):
        settled("--precision", "16-mixed")
    monkeypatch.setattr(estimates, "free_memory_bytes", lambda: 10**6)
    with pytest.raises(UsageError, match=r"auto: no strategy fits: .* memory, of which 0\.00 GB are available"):
        settled()
