"""A notebook may fit, test, save and fit again. DeepSpeed 0.19.8 alone saves no optimizer state at stage 2 after a test
(Lightning issues 15247, 14090 and 18478), and cannot start a second engine on a model with experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.helpers import assert_ok, of_test_all, run_program

ALL_PHASES = """
import sys
from pathlib import Path
import torch
from cifar_module import CIFARModule
from cifar_zero.checkpoints.read import read
from cifar_zero.config import command_line
from cifar_zero.launch import local_launcher, rank_environment
from cifar_zero.training import build
from cifar_zero.training.resolve import resolve
from datamodule import CIFARDataModule

def same(one, other):
    one, other = read(one), read(other)
    assert one["global_step"] == other["global_step"]
    assert all(torch.equal(one["state_dict"][key], other["state_dict"][key]) for key in one["state_dict"])
    states = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (one, other)]
    assert len(states[0]) == len(one["state_dict"])
    assert all(torch.equal(state["exp_avg"], states[1][number]["exp_avg"]) for number, state in states[0].items())

run_spec = resolve(command_line.parse(sys.argv[1:]))
if not rank_environment.is_rank():
    sys.exit(local_launcher.run_ranks(2, on_cpu=True))
module, datamodule = CIFARModule(run_spec, run_spec.num_classes), CIFARDataModule(run_spec)
datamodule.prepare_data()
run = Path(run_spec.output.out)
run_dir = run if rank_environment.global_rank() == 0 else None
trainer = build.trainer(run_spec, run_dir)
trainer.fit(module, datamodule=datamodule)
last = run / "checkpoints" / "last.ckpt"
trainer.test(module, datamodule=datamodule, verbose=False)
trainer.validate(module, datamodule=datamodule, verbose=False)
tested = module.test_metrics.overall()["loss"]
trainer.save_checkpoint(run / "after.ckpt")
if trainer.is_global_zero:
    same(last, run / "after.ckpt")
trainer.strategy.barrier()
trainer.test(module, datamodule=datamodule, verbose=False, ckpt_path=str(run / "after.ckpt"))
assert module.test_metrics.overall()["loss"] == tested
again = build.trainer(run_spec, run_dir)
again.fit_loop.max_epochs, again.fit_loop.epoch_loop.max_steps = -1, 8
again.fit(module, datamodule=datamodule, ckpt_path=str(run / "after.ckpt"))
assert again.global_step == 8
again.save_checkpoint(run / "refit.ckpt")
again.test(module, datamodule=datamodule, verbose=False)
again.save_checkpoint(run / "refit-after.ckpt")
if again.is_global_zero:
    same(run / "refit.ckpt", run / "refit-after.ckpt")
"""
EXPERTS = ["--model", "net_moe", "--model.num_experts", "[2,4]", "--model.ep_size", "2"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stage", "model"),
    [
        (2, []),
        pytest.param(3, [], marks=of_test_all),
        *(pytest.param(stage, EXPERTS, marks=of_test_all) for stage in (0, 1, 2)),
    ],
)
def test_fit_test_validate_save_refit(stage: int, model: list[str], small_data: list[str], tmp_path: Path):
    flags = ["--strategy", f"deepspeed_stage_{stage}", "--devices", "2", "--accelerator", "cpu", *model]
    flags += ["--optimizer", "adam", "--batch_size", "16", "--max_steps", "4", "--out", str(tmp_path)]
    assert_ok(run_program("-c", ALL_PHASES, *small_data, *flags))
