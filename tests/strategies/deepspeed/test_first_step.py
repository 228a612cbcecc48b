"""Checks that DeepSpeed counts no step of its own before the first step under ZeRO in bfloat16."""

from typing import Any

import pytest
from lightning.pytorch import Trainer

from cifar_module import CIFARModule
from cifar_zero.config import command_line
from cifar_zero.training.build import strategy_of
from cifar_zero.training.resolve import make_run
from datamodule import CIFARDataModule
from tests.support.helpers import of_test_all

RATE = 0.01


@pytest.mark.distributed
@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=of_test_all)])
def test_the_first_step_moves_a_bias_by_the_learning_rate(stage: int, small_data: list[str]) -> None:
    flags = ["--strategy", f"deepspeed_stage_{stage}", "--precision", "bf16-mixed", "--accelerator", "cpu"]
    flags += ["--optimizer", "adamw", "--optimizer.lr", str(RATE), "--init", "he"]  # with biases of 0
    run = make_run(command_line.parse([*small_data, *flags, "--devices", "1"]))
    strategy = strategy_of(run)
    module = CIFARModule(run, 10)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy=strategy, accelerator="cpu", max_steps=1, limit_val_batches=0, **options)
    trainer.fit(module, datamodule=CIFARDataModule(run))
    assert module.net is not None
    moved = module.net.get_parameter("fc3.bias").detach().float().abs()
    assert moved.tolist() == pytest.approx([RATE] * 10, rel=0.01)
