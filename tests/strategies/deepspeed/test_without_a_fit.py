"""A checkpoint of a model with experts is tested under DeepSpeed without a fit."""

from pathlib import Path

import pytest

from cifar_module import CIFARModule
from cifar_zero.config import command_line
from cifar_zero.training import build
from cifar_zero.training.resolve import resolve
from datamodule import CIFARDataModule
from tests.support.helpers import metrics_of, run_folder_of, train_all


@pytest.mark.usefixtures("own_process_group")
def test_a_plain_checkpoint_with_experts_loads(small_data: list[str], tmp_path: Path):
    """DeepSpeed's layers of experts have other names than those in the checkpoint."""
    same = [*small_data, "--model", "net_moe", "--model.num_experts", "[2,4]", "--accelerator", "cpu"]
    train_all({tmp_path: [*same, "--max_steps", "2", "--batch_size", "16"]})
    run = resolve(command_line.parse([*same, "--strategy", "deepspeed_stage_2", "--devices", "1"]))
    module, images = CIFARModule(run, run.num_classes), CIFARDataModule(run)
    checkpoint = run_folder_of(tmp_path) / "checkpoints" / "last.ckpt"
    build.trainer(run, None, callbacks=[]).test(module, images, ckpt_path=str(checkpoint), verbose=False)
    assert module.test_metrics.overall()["loss"] == pytest.approx(metrics_of(tmp_path)["test/loss"], rel=1e-5)
