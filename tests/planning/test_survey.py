from __future__ import annotations

import pytest

import cli
from errors import UsageError
from planning import network
from planning.activations import Line, Lines
from planning.machine import size_in_bytes
from planning.recommend import nothing_fits, recommended, why
from planning.survey import Need, Room, survey

GB = 10**9


def plan(room: Room, *flags: str, elements: int = 10 * GB) -> list[Need]:
    config = cli.parse(["--optimizer", "adam", "--precision", "bf16-mixed", "--batch_size", "64", *flags])
    config.accelerator = "gpu"
    lines = Lines(Line(0, GB), Line(0, GB))
    return survey(config, network.of_size(elements), room, {"autocast": lines, "cast": lines})


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        (300, 0, "baseline"),  # 160 GB of model states, 8 images on each of 8 ranks: 168
        (80, 0, "deepspeed_stage_1"),  # 20 + 140/8 = 37.5, and 20.1 of whole gradients
        (50, 0, "deepspeed_stage_2"),  # 37.5, 8.1 of activations and the bucket
        (
            40,
            5,
            "deepspeed_stage_3",
        ),  # 160/8 = 20, 5 for the update or 1.1 of gathered layers with 8.1; 40/8 to begin with
        (20, 30, "deepspeed_stage_3_offload"),  # 9.2, and of the host 20 * 10/8 = 25
    ],
)
def test_the_fewest_numbers_moved_that_fit(device: float, host: float, expected: str) -> None:
    choice = recommended(plan(Room(round(device * GB), round(host * GB)), "--devices", "8"))
    assert choice is not None
    assert choice.strategy == expected


def test_offload_when_the_device_holds_the_parameters() -> None:
    """On one rank nothing is sharded: 160 GB of states. Stage 1 offloaded holds whole gradients too."""
    needs = plan(Room(50 * GB, 300 * GB), "--batch_size", "8")
    choice = recommended(needs)
    assert choice is not None
    assert choice.strategy == "deepspeed_stage_1_offload"
    assert choice.device == pytest.approx(40.1 * GB)
    assert choice.host == (4 + 12 + 2) * 10 * GB
    assert why(choice, needs, Room(50 * GB, None)).startswith("40.1 of the 50.0 GB that a rank may take; faster ones")


def test_nothing_fits() -> None:
    room = Room(5 * GB, None)
    needs = plan(room, "--devices", "2")
    assert recommended(needs) is None
    assert "deepspeed_stage_3_offload, which needs the least, needs 33.2 GB there" in nothing_fits(needs, room)


def test_the_largest_micro_batch_fits_and_one_image_more_does_not() -> None:
    room = Room(60 * GB, None)
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


def test_offloading_on_the_cpu_wins_nothing() -> None:
    """Its memory is one."""
    needs = {need.strategy: need for need in plan(Room(400 * GB, None, shared=True))}
    assert needs["deepspeed_stage_3_offload"].device < 70 * GB
    assert not {name for name, need in needs.items() if need.fits and "_offload" in name and need.host > 336 * GB}
    assert needs["baseline"].fits


def test_accumulation_has_stage_1_hold_whole_gradients_beside_the_activations() -> None:
    one, two = (
        next(need for need in plan(Room(GB, None), "--devices", "2", *more) if need.strategy == "deepspeed_stage_1")
        for more in ([], ["--accumulate", "2"])
    )
    assert two.buckets - one.buckets == 2 * 10 * GB


def test_what_cannot_run_is_never_recommended() -> None:
    needs = plan(Room(100 * GB, 1000 * GB), "--optimizer", "muon")
    refused = {need.strategy for need in needs if "muon needs whole tensors" in need.refused}
    assert "deepspeed_stage_2" in refused
    assert recommended(needs) is None


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(UsageError, match="the nearest that divide: 63 or 66"):
        plan(Room(GB, None), "--devices", "3")


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * GB), ("24GiB", 24 * 2**30), ("80", 80 * GB), ("0.5 tb", 500 * GB), ("512mib", 2**29)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text, "--device_memory") == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "8 0", "80PB", "nan", "1e3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"--device_memory .*give a size such as 80GB"):
        size_in_bytes(text, "--device_memory")
