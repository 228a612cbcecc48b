from __future__ import annotations

import pytest

from cifar_zero.config import command_line
from cifar_zero.planning.activations import LinearFit
from cifar_zero.planning.formulas import Network, Weight
from cifar_zero.planning.survey import MemoryBudget, MemoryEstimate, recommended, survey
from cifar_zero.training.resolve import make_run

GB = 10**9


def plan(room: MemoryBudget, *flags: str) -> list[MemoryEstimate]:
    common = "--accelerator gpu --optimizer adam --precision bf16-mixed --batch_size 64 --devices 1"
    run = make_run(command_line.parse([*common.split(), *flags]))
    line = LinearFit(0, GB)
    return survey(run, Network((Weight(10 * GB),), (0,)), room, {"autocast": line, "cast": line})


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
    room = MemoryBudget(round(device * GB), round(host * GB))
    choice, _ = recommended(plan(room, "--devices", "8"), room)
    assert choice is not None
    assert choice.strategy == expected


def test_nothing_fits():
    room = MemoryBudget(5 * GB, None)
    choice, reason = recommended(plan(room, "--devices", "2"), room)
    assert choice is None
    least = "deepspeed_stage_3_offload, which needs the least device memory, needs "
    assert f"{least}33.20 GB of device memory, of which 5.00" in reason
    room = MemoryBudget(20 * GB, 4 * GB)
    _, reason = recommended(plan(room, "--devices", "8"), room)
    assert "GB of host memory, of which 4.00 GB are available" in reason
    assert "GB of device memory" not in reason


def test_the_largest_micro_batch_fits_and_one_image_more_does_not():
    room = MemoryBudget(60 * GB, None)
    needs = {need.strategy: need for need in plan(room, "--devices", "8")}
    most = needs["deepspeed_stage_2"].most_images
    assert most == 22  # (60 - 37.5 - 0.1) GB, one for each image
    batch = {images: str(8 * images) for images in (most, most + 1)}
    fits = [
        need.fits
        for images in batch.values()
        for need in plan(room, "--devices", "8", "--batch_size", images)
        if need.strategy == "deepspeed_stage_2"
    ]
    assert fits == [True, False]
    assert needs["baseline"].most_images == 0


def test_a_strategy_that_cannot_run_is_never_recommended():
    room = MemoryBudget(100 * GB, 1000 * GB)
    needs = plan(room, "--optimizer", "muon")
    refused = {need.strategy for need in needs if "muon needs whole tensors" in need.refused}
    assert "deepspeed_stage_2" in refused
    assert recommended(needs, room)[0] is None
