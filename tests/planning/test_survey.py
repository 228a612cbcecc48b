from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cifar_zero.checkpoints.network import on_meta
from cifar_zero.config import command_line
from cifar_zero.planning import activations, formulas
from cifar_zero.planning.activations import LinearFit
from cifar_zero.planning.formulas import Network, Weight
from cifar_zero.planning.survey import MemoryBudget, MemoryEstimate, recommended, size_in_bytes, survey
from cifar_zero.training.resolve import make_run

GB = 10**9


def plan(room: MemoryBudget, *flags: str, elements: int = 10 * GB) -> list[MemoryEstimate]:
    common = [
        "--accelerator",
        "gpu",
        "--optimizer",
        "adam",
        "--precision",
        "bf16-mixed",
        "--batch_size",
        "64",
        "--devices",
        "1",
    ]
    run = make_run(command_line.parse([*common, *flags]))
    line = LinearFit(0, GB)
    return survey(run, Network((Weight(elements),), 0), room, {"autocast": line, "cast": line})


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
    assert "deepspeed_stage_3_offload, which needs the least, needs 33.20 GB of device memory, of which 5.00" in reason
    room = MemoryBudget(20 * GB, 4 * GB)
    _, reason = recommended(plan(room, "--devices", "8"), room)
    assert "GB of host memory, of which 4.00 GB are available" in reason
    assert "device memory" not in reason


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


def test_offloading_on_the_cpu_saves_nothing():
    """On the CPU, device and host memory are the same."""
    needs = {need.strategy: need for need in plan(MemoryBudget(400 * GB, None, shared=True))}
    assert needs["deepspeed_stage_3_offload"].device < 70 * GB
    assert not {name for name, need in needs.items() if need.fits and "_offload" in name and need.host > 336 * GB}
    assert needs["baseline"].fits


def test_a_strategy_that_cannot_run_is_never_recommended():
    room = MemoryBudget(100 * GB, 1000 * GB)
    needs = plan(room, "--optimizer", "muon")
    refused = {need.strategy for need in needs if "muon needs whole tensors" in need.refused}
    assert "deepspeed_stage_2" in refused
    assert recommended(needs, room)[0] is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * GB), ("24GiB", 24 * 2**30), ("80", 80 * GB), ("0.5 tb", 500 * GB), ("512mib", 2**29)],
)
def test_sizes(text: str, size: int):
    assert size_in_bytes(text, "--device_memory") == size


def named(strategy: str, *flags: str) -> MemoryEstimate:
    return next(need for need in plan(MemoryBudget(GB, None), *flags) if need.strategy == strategy)


@pytest.mark.parametrize(
    ("strategy", "flags", "part", "expected"),
    [
        # The model is float32 until it is cast; stage 3 shards it while building it, on the host if that holds it.
        ("deepspeed_stage_2_offload", "", "built_on_host", 0),
        ("deepspeed_stage_3", "", "built_on_host", 0),
        ("deepspeed_stage_3_offload", "", "built_on_host", 20),
        ("fsdp2", "", "built_on_host", 40),
        ("ddp", "--ema 0.9", "average", 40),
        ("deepspeed_stage_3", "--ema 0.9", "average", 40),
        ("deepspeed_stage_3_offload", "--ema 0.9", "average", 0),
        ("deepspeed_stage_2", "", "update", 30),
        ("deepspeed_stage_2", "--precision 32-true", "update", 20),
        ("deepspeed_stage_0", "", "update", 80),
    ],
)
def test_parts_of_a_ranks_memory(strategy: str, flags: str, part: str, expected: int):
    """Of 10 billion parameters on two ranks, in GB."""
    assert getattr(named(strategy, "--devices", "2", *flags.split()), part) == expected * GB


@pytest.mark.parametrize(
    ("strategy", "flags", "more"),
    [("deepspeed_stage_3_offload", "--ema 0.9", 40), ("deepspeed_stage_2_offload", "--accumulate 2", 10)],
)
def test_what_takes_more_of_the_host(strategy: str, flags: str, more: int):
    """The average of the weights; gradients of several micro-batches."""
    one, two = (named(strategy, "--devices", "2", *extra) for extra in ([], flags.split()))
    assert two.host - one.host == more * GB


def test_fsdp2_reduces_in_float32():
    net = Network((Weight(1_000),), largest_block=100)
    for precision, each in (("bf16-mixed", 10), ("32-true", 12)):
        run = make_run(command_line.parse(["--strategy", "fsdp2", "--precision", precision, "--devices", "2"]))
        assert formulas.buckets(run, net) == each * 100


def test_equal_blocks_are_extrapolated_from_three():
    """The result equals that of counting all blocks, to the byte."""
    run = make_run(command_line.parse(["--model", "vit_tiny", "--activation_checkpointing", "--devices", "1"]))
    net = on_meta(run.recipe, run.num_classes).bfloat16()
    with activations.FAKE():
        net = activations.fake(net)
        whole = activations.counted(net, 4, "cast")
        assert activations._of_all_blocks(net, 4, "cast", 32) == whole
    assert len(net.blocks) == 12  # pyright: ignore[reportArgumentType]


class Tied(nn.Module):
    """A model with one weight under two names, as text models have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3072, 3072), nn.Linear(3072, 3072)
        self.last.weight = self.first.weight

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.first(images.flatten(1)))


def test_a_weight_with_two_names_stays_one():
    """Its gradient of the last layer waits for that of the first: on the CPU the same bytes are counted with values."""
    with torch.device("meta"):
        net = Tied()
    with activations.FAKE():
        fake = activations.fake(net)
        assert len([*fake.parameters()]) == 3
        counted = activations.counted(fake, 2, "float32")
    assert counted == activations.counted(Tied(), 2, "float32")


def test_offloaded_activations_need_room_on_the_host():
    """The device has room for 62 images and the host, with 1 GB per image, for 10."""
    needs = plan(MemoryBudget(100 * GB, 10 * GB), "--devices", "8", "--activation_offload")
    need = next(need for need in needs if need.strategy == "deepspeed_stage_2")
    assert (need.activations, need.host, need.most_images) == (8 * GB, 8 * GB, 10)
