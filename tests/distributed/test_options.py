"""Tests options that must not change the maths, on two real ranks: ZeRO's buckets, activation checkpointing, curves of
gradients, the training of adapters and of a part of the model, and offload to a disk. `make test-all` adds strategies
and resumes."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import get_default_build_root

from cifar_zero import models
from cifar_zero.config.rules import check_nvme
from cifar_zero.core.errors import UsageError
from tests.distributed.changes import small_vit
from tests.support.helpers import (
    WHOLE,
    curve,
    largest_difference,
    last_weights,
    losses,
    metrics_of,
    of_test_all,
    train_all,
)

pytestmark = pytest.mark.distributed

SMALL = ["--zero.reduce_bucket_size", "1000"]
STAGE_2 = [*SMALL, "--zero.round_robin_gradients", "true"]
STAGE_3 = [*SMALL, "--zero.prefetch_bucket_size", "0", "--zero.max_live_parameters", "0"]
STAGE_3 += ["--zero.param_persistence_threshold", "0"]


def test_buckets_prefetching_and_the_order_of_the_gradients(small_data: list[str], tmp_path: Path):
    """A run is also resumed with, with and without the options, because round_robin_gradients changes which part of the
    model a rank has."""
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "16", "--model", "mlp"]
    same += ["--optimizer", "adam", "--data.val_fraction", "0", "--trainer.limit_test_batches", "1"]
    two, three = (["--strategy", f"deepspeed_stage_{stage}", "--max_steps"] for stage in (2, 3))
    train_all(
        {
            tmp_path / "plain": [*same, *two, "6"],
            tmp_path / "stage 3": [*same, *three, "6", *STAGE_3],
            tmp_path / "before": [*same, *two, "2"],
            tmp_path / "on": [*same, *two, "3", *STAGE_2, "--resume", str(tmp_path / "before")],
            tmp_path / "still on": [*same, *two, "4", *STAGE_2, "--resume", str(tmp_path / "on")],
            tmp_path / "off": [*same, *two, "6", "--resume", str(tmp_path / "still on")],
        }
    )
    plain = last_weights(tmp_path / "plain")
    for name in ("stage 3", "off"):
        assert largest_difference(last_weights(tmp_path / name), plain) == 0, name


RECOMPUTING = ("ddp", "deepspeed_stage_0", "deepspeed_stage_2", "deepspeed_stage_3_offload")
RECOMPUTED = {name: f"--strategy {name} --model vit_tiny --batch_size 8 --max_steps 20" for name in RECOMPUTING}
RECOMPUTED |= {
    "every layer sharded": "--ds_config {everything} --model vit_tiny --batch_size 8 --accumulate 2 --max_steps 10",
    "experts spread": "--strategy deepspeed_stage_2 --model vit_moe --model.ep_size 2 --batch_size 4 --max_steps 4",
}


@pytest.mark.parametrize("name", RECOMPUTED if WHOLE else ["every layer sharded"])
def test_activation_checkpointing_changes_nothing(name: str, tmp_path: Path):
    everything = tmp_path / "everything.json"
    everything.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    flags = "--data.source synthetic --data.synthetic_size 160 --data.val_fraction 0 --accelerator cpu --devices 2"
    flags += f" --log_interval 1 --optimizer.lr 0.01 --data.root {tmp_path} {RECOMPUTED[name]}"
    same, plain, checkpointed = flags.format(everything=everything).split(), tmp_path / "plain", tmp_path / "checked"
    train_all({plain: same, checkpointed: [*same, "--activation_checkpointing"]}, small_vit)
    assert len(losses(plain)) > 1
    assert losses(checkpointed) == losses(plain)
    assert largest_difference(last_weights(checkpointed), last_weights(plain)) == 0


LOGGING = ["ddp", "deepspeed_stage_3", *(["deepspeed_stage_1", "fsdp2"] if WHOLE else [])]


def test_curves_of_gradients_are_equal_under_every_strategy(tmp_path: Path, small_data: list[str]):
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "32", "--accumulate", "2"]
    same += ["--log_gradients", "--log_interval", "3", "--gradient_clip_val", "0.05", "--max_steps", "6"]
    # The learning rate is so small that float32 rounds every update to 0, so all strategies have the same weights.
    same += ["--optimizer.lr", "1e-12", "--trainer.limit_test_batches", "1"]
    train_all({tmp_path / name: [*same, "--strategy", name] for name in LOGGING})
    norms = [f"grad_norm/{name}" for name, _ in models.build("net", 10).named_parameters()]
    expected = {tag: curve(tmp_path / "ddp", tag) for tag in norms}
    columns = zip(*(expected[tag].values() for tag in norms), strict=True)
    for norm, of_parameters in zip(curve(tmp_path / "ddp", "train/grad_norm").values(), columns, strict=True):
        assert math.hypot(*of_parameters) == pytest.approx(norm, rel=1e-4)
    for name in LOGGING:
        for tag, values in expected.items():
            assert curve(tmp_path / name, tag) == pytest.approx(values, rel=1e-3, abs=0), f"{name}, {tag}"


TUNING = ["--lora.rank", "2", "--lora.target", "fc1", "fc2", "--trainable", "fc3.*"]
TRAINED = {"fc1.lora_a", "fc1.lora_b", "fc2.lora_a", "fc2.lora_b", "fc3.weight", "fc3.bias"}

TUNED = ["ddp", "deepspeed_stage_3"]
RESUMES = [("deepspeed_stage_3", "ddp")]
"""The strategy of a run that is resumed, and the strategy that resumes it."""
if WHOLE:
    STAGES = [f"deepspeed_stage_{stage}" for stage in range(4)]
    TUNED = ["ddp", *STAGES, "deepspeed_stage_3_offload"]
    RESUMES += [("deepspeed_stage_1", "deepspeed_stage_3")]
    RESUMES += [(start, stage) for stage in STAGES for start in ("ddp", stage)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file with the starting weights of all runs. They are of seed 1, so that no run draws them itself."""
    file = tmp_path_factory.mktemp("base") / "net.pt"
    torch.manual_seed(1)
    torch.save(models.build("net", 10).state_dict(), file)
    return file


@pytest.fixture(scope="module")
def out(base: Path, small_data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of all runs. Their names are `STRATEGY`, `uninterrupted`, and `STRATEGY to STRATEGY`."""
    out = tmp_path_factory.mktemp("runs")
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "16", "--logger", "none"]
    same += ["--optimizer", "adam", "--log_interval", "4", "--trainer.limit_test_batches", "1"]
    same += [*TUNING, "--max_steps"]
    flags = {out / name: [*same, "8", "--weights", str(base), "--strategy", name] for name in TUNED}
    flags[out / "uninterrupted"] = [*same, "14", "--weights", str(base), "--strategy", "ddp"]
    for start, name in RESUMES:
        flags[out / f"{start} to {name}"] = [*same, "14", "--resume", str(out / start), "--strategy", name]
    train_all(flags)
    return out


@pytest.mark.parametrize("strategy", TUNED[1:])
def test_fine_tuning_ends_with_the_weights_of_ddp(strategy: str, out: Path):
    """The weights agree bit for bit, except with DeepSpeed's own Adam."""
    difference = largest_difference(last_weights(out / strategy), last_weights(out / "ddp"))
    assert difference <= (1e-4 if strategy.endswith("offload") else 0)


@pytest.mark.parametrize("strategy", TUNED)
def test_trains_only_the_named_parameters(strategy: str, base: Path, out: Path):
    start, end = torch.load(base), last_weights(out / strategy)
    assert end.keys() == start.keys() | TRAINED
    for key, value in end.items():
        assert (key in TRAINED) == (key not in start or not torch.equal(value, start[key])), key
    assert all(bool(end[key].any()) for key in TRAINED)  # B too is no longer zero
    metrics = metrics_of(out / strategy)
    assert metrics["trained_parameters"] == sum(end[key].numel() for key in TRAINED)
    assert metrics["parameters"] == sum(value.numel() for value in end.values())


@pytest.mark.parametrize(("start", "strategy"), RESUMES)
def test_fine_tuning_resumes_in_any_shape(start: str, strategy: str, out: Path):
    actual, expected = last_weights(out / f"{start} to {strategy}"), last_weights(out / "uninterrupted")
    assert largest_difference(actual, expected) < 1e-6


def missing_requirement() -> str:
    """Returns what this machine lacks for offloading to a disk, or an empty string if it lacks nothing."""
    try:
        check_nvme("/tmp")
    except UsageError as error:
        return str(error)
    built = any(Path(get_default_build_root()).rglob("async_io.so"))
    return "" if built else "compiling DeepSpeed's async_io takes minutes"


@pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement() or "there is all")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=of_test_all)])
def test_offload_to_a_disk_is_as_offload_to_the_memory_of_the_cpu(ranks: int, tmp_path: Path, small_data: list[str]):
    disk = tmp_path / "disk"
    disk.mkdir()
    # The model has 1.6 million parameters in one matrix, because DeepSpeed leaves tensors smaller than 1 MiB in memory.
    same = [*small_data, "--accelerator", "cpu", "--devices", str(ranks), "--batch_size", "16", "--model", "mlp"]
    same += ["--optimizer", "adamw", "--data.val_fraction", "0", "--trainer.limit_test_batches", "1"]
    nvme = [*same, "--strategy", "deepspeed_stage_3_offload_nvme", "--nvme_path", str(disk), "--max_steps"]
    in_memory = [*same, "--strategy", "deepspeed_stage_3_offload", "--max_steps", "6"]
    train_all(
        {
            tmp_path / "cpu": in_memory,
            tmp_path / "nvme": [*nvme, "6"],
            tmp_path / "half": [*nvme, "3"],
            tmp_path / "resumed": [*in_memory, "--resume", str(tmp_path / "half")],
        }
    )
    assert any(disk.rglob("*.swp"))
    expected = last_weights(tmp_path / "cpu")
    for name in ("nvme", "resumed"):
        assert largest_difference(last_weights(tmp_path / name), expected) == 0, name
