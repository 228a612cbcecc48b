"""A run with offload to a disk trains as a run with offload to CPU memory does. A run with offload to CPU memory can
resume the checkpoint of a run with offload to a disk."""

from pathlib import Path

import pytest
from torch.utils.cpp_extension import get_default_build_root

from cifar_zero.config.rules import check_nvme
from cifar_zero.core.errors import UsageError
from tests.support.helpers import largest_difference, last_weights, of_test_all, train_all


def missing_requirement() -> str:
    """Returns what this machine lacks for offloading to a disk, or an empty string if it lacks nothing."""
    try:
        check_nvme("/tmp")
    except UsageError as error:
        return str(error)
    built = any(Path(get_default_build_root()).rglob("async_io.so"))
    return "" if built else "compiling DeepSpeed's async_io takes minutes"


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement() or "there is all"),
]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=of_test_all)])
def test_trains_and_resumes_as_in_the_memory_of_the_cpu(ranks: int, tmp_path: Path, small_data: list[str]):
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
