"""Tests --devices auto, which selects as many GPUs as divide the batch, two CPU ranks for a strategy that shards or
splits the model, one CPU rank otherwise, or the ranks that a launcher has started."""

import pytest

from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.planning.estimates import PLANNED
from cifar_zero.training import resolve as resolving

DIGITS = ["--data.source", "digits"]
ONE_RANK = "1 rank: {} shards nothing; --devices 2 shards over two CPU ranks"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that simulates a number of GPUs."""
    resolving._say_once.cache_clear()

    def with_gpus(count: int) -> None:
        monkeypatch.setattr(resolving, "gpu_count", lambda: count)

    return with_gpus


def resolved(*flags: str) -> Run:
    return resolving.resolve(command_line.parse([*DIGITS, *flags]))


@pytest.mark.parametrize(
    ("gpus", "flags", "devices", "said"),
    [
        (1, "", 1, ""),
        (7, "--batch_size 192", 6, "6 of 7 GPUs: --batch_size 192 is not a multiple of 7 ranks x --accumulate 1: "),
        (8, "--batch_size 1024 --accumulate 4", 8, "8 of 8 GPUs\n"),
        (4, "--batch_size 128", 4, "4 of 4 GPUs\n"),  # 32 images on each
        (4, "--batch_size 64", 2, "too small to keep a GPU busy; --devices 4 uses 4 GPUs anyway"),
        (4, "--batch_size 64 --accumulate 2", 1, "1 of 4 GPUs: "),
        (8, "--strategy tensor_parallel --model vit_tiny", 3, "3 of 8 GPUs: "),  # 3 heads
        (8, "--strategy pipeline --model vit_tiny", 8, "8 of 8 GPUs\n"),  # 12 blocks; the batch is not divided
        (
            8,
            "--strategy deepspeed_stage_2 --model net_moe --model.num_experts [3] --model.ep_size 3 --batch_size 192",
            6,
            "6 of 8 GPUs: ",
        ),
        (8, "--accelerator cpu", 1, ""),
        (0, "--batch_size 1 --strategy deepspeed_stage_3", 1, ""),
        (8, "--devices 2", 2, ""),
    ],
)
def test_the_largest_number_of_gpus_on_which_the_run_is_possible(
    gpus: int, flags: str, devices: int, said: str, machine, capsys: pytest.CaptureFixture[str]
):
    machine(gpus)
    assert resolved(*flags.split()).placement.devices == devices
    printed = capsys.readouterr().err
    assert bool(printed) == bool(said)
    assert said in printed


EXPERTS = "--model net_moe --model.num_experts [4] --model.ep_size 2"


@pytest.mark.parametrize(
    ("gpus", "flags", "devices"),
    [
        (8, "--batch_size 256 --zero.reduce_bucket_size 5000000", 8),
        (8, "--batch_size 256 --offload.pin_memory true", 8),
        (7, f"--batch_size 192 {EXPERTS}", 6),
        (0, EXPERTS, 2),
        (0, "", 1),
    ],
)
def test_auto_has_the_devices_of_any_strategy(gpus: int, flags: str, devices: int, machine):
    """Options that plain PyTorch does not have say nothing about the devices of the strategies that have them."""
    machine(gpus)
    settings = command_line.parse([*DIGITS, *flags.split()])
    assert resolving.resolve_devices(settings, PLANNED).placement.devices == devices


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_the_cpu_a_strategy_that_shards_or_splits_the_model_has_two_ranks(strategy: str, machine):
    machine(0)
    settings = command_line.parse(["--strategy", strategy, "--model", "vit_small"])
    holds_everything = strategy in ("baseline", "ddp", "deepspeed_stage_0")
    possible = not STRATEGIES[strategy].super_offload and STRATEGIES[strategy].offload_optimizer != "nvme"
    assert resolving.resolve_devices(settings).placement.devices == (2 if possible and not holds_everything else 1)


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


@pytest.mark.parametrize(
    ("gpus", "flags", "said"),
    [
        (0, "--strategy deepspeed_stage_3 --devices 1", ONE_RANK.format("ZeRO")),
        (0, "--strategy fsdp2 --devices 1", ONE_RANK.format("fsdp2")),
        (0, "--strategy deepspeed_stage_0", ""),
        (1, "--strategy deepspeed_stage_3", ""),
        (0, "--strategy deepspeed_stage_3", "note: with 2 images per micro-batch, ranks mostly exchange"),
        (0, "--strategy deepspeed_stage_3 --batch_size 10", ""),
    ],
)
def test_what_is_said_of_a_strategy_that_has_little_to_shard(
    gpus: int, flags: str, said: str, machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    machine(gpus)
    monkeypatch.setattr(resolving, "core_count", lambda: 2)
    resolving.announce(resolved(*flags.split()))
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("starting: model net, ")
    assert len(others) == (1 if said else 0)
    assert all(line.startswith(said) for line in others)
