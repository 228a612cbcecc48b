"""A run with offload to a disk trains as a run with offload to CPU memory does. A run with offload to CPU memory can
resume the checkpoint of a run with offload to a disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import get_default_build_root

from cifar_zero.config.rules import check_nvme
from cifar_zero.core.errors import UsageError
from tests.support.helpers import WHOLE, largest_difference, last_weights, train_all


def lacking() -> str:
    """Returns what this machine lacks for offloading to a disk, or an empty string if it lacks nothing."""
    try:
        check_nvme("/tmp")
    except UsageError as error:
        return str(error)
    built = any(Path(get_default_build_root()).rglob("async_io.so"))
    return "" if built else "compiling DeepSpeed's async_io takes minutes"


pytestmark = [pytest.mark.distributed, pytest.mark.skipif(bool(lacking()), reason=lacking() or "there is all")]

STEPS = 6
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[1, *([2] if WHOLE else [])])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small_data: list[str]):
    """Returns the weights of three runs: with offload to disk (nvme), with offload to memory (cpu), and with offload to
    disk in the first half and to memory after a resume."""
    folder, ranks = tmp_path_factory.mktemp("nvme"), request.param
    disk = folder / "disk"
    disk.mkdir()
    # The model has 1.6 million parameters in one matrix, because DeepSpeed leaves tensors smaller than 1 MiB in memory.
    same = [*small_data, "--accelerator", "cpu", "--devices", str(ranks), "--batch_size", "16", "--model", "mlp"]
    same += ["--optimizer", "adamw", "--data.val_fraction", "0", "--trainer.limit_test_batches", "1"]
    nvme = [*same, "--strategy", "deepspeed_stage_3_offload_nvme", "--nvme_path", str(disk)]
    length = ["--max_steps", str(STEPS)]
    half = ["--max_steps", str(STEPS // 2)]
    in_memory = [*same, "--strategy", "deepspeed_stage_3_offload"]
    train_all(
        {folder / "half": [*nvme, *half], folder / "nvme": [*nvme, *length], folder / "cpu": [*in_memory, *length]}
    )
    train_all({folder / "resumed": [*in_memory, *length, "--resume", str(folder / "half")]})
    assert any(disk.rglob("*.swp"))
    return {name: last_weights(folder / name) for name in ("cpu", "nvme", "resumed")}


def test_trains_as_in_the_memory_of_the_cpu(runs: dict[str, Weights]):
    assert largest_difference(runs["nvme"], runs["cpu"]) == 0


def test_resumes_in_the_memory_of_the_cpu(runs: dict[str, Weights]):
    assert largest_difference(runs["resumed"], runs["nvme"]) == 0
