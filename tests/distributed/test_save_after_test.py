"""A checkpoint saved after a test equals the one saved before it: Lightning issues 15247, 14090 and 18478."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cifar_zero.checkpoints.read import read
from tests.support.helpers import WHOLE, assert_ok, run_folder_of, run_program

pytestmark = pytest.mark.distributed

PROGRAM = """
import sys
from cifar_module import CIFARModule
from cifar_zero.checkpoints import run_folder
from cifar_zero.config import command_line
from cifar_zero.training import build
from cifar_zero.training.resolve import resolve
from datamodule import CIFARDataModule
run_spec = resolve(command_line.parse(sys.argv[1:]))
module, datamodule = CIFARModule(run_spec, run_spec.num_classes), CIFARDataModule(run_spec)
datamodule.prepare_data()
run = run_folder.claim(run_spec.output.out, run_spec.run_name)
trainer = build.trainer(run_spec, run)
trainer.fit(module, datamodule=datamodule)
trainer.test(module, datamodule=datamodule, verbose=False)
trainer.save_checkpoint(run / "after.ckpt")
"""


@pytest.mark.parametrize("stage", [2, 3] if WHOLE else [2])
def test_save_after_test(stage: int, small_data: list[str], tmp_path: Path):
    flags = ["--strategy", f"deepspeed_stage_{stage}", "--accelerator", "cpu", "--batch_size", "16", "--max_steps", "4"]
    assert_ok(run_program("-c", PROGRAM, *small_data, *flags, "--out", str(tmp_path), "--optimizer", "adam"))
    run = run_folder_of(tmp_path)
    before, after = read(run / "checkpoints" / "last.ckpt"), read(run / "after.ckpt")
    for key, value in before["state_dict"].items():
        assert torch.equal(after["state_dict"][key], value)
    (one,), (other,) = before["optimizer_states"], after["optimizer_states"]
    assert len(one["state"]) == 10
    for number, state in one["state"].items():
        assert torch.equal(other["state"][number]["exp_avg"], state["exp_avg"])
        assert state["step"] == other["state"][number]["step"] == 4
