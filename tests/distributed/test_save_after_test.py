"""A notebook may fit, test, save and fit again. DeepSpeed 0.19.8 alone saves no optimizer state at stage 2 after a test
(Lightning issues 15247, 14090 and 18478), and cannot start a second engine on a model with experts."""

from pathlib import Path

import pytest
import torch

from cifar_module import CIFARModule
from cifar_zero.checkpoints.read import read
from cifar_zero.config import command_line
from cifar_zero.launch import collectives, rank_environment
from cifar_zero.training import build
from cifar_zero.training.resolve import resolve
from datamodule import CIFARDataModule
from tests.support.helpers import of_test_all, on_ranks

EXPERTS = ["--model", "net_moe", "--model.num_experts", "[2,4]", "--model.ep_size", "2"]


def all_phases(flags: list[str]) -> None:
    """Fits, tests, validates, saves, tests what was saved, and fits, tests and saves again, as one of the ranks."""
    run = resolve(command_line.parse(flags))
    collectives.init_process_group(run)
    module, datamodule = CIFARModule(run, run.num_classes), CIFARDataModule(run)
    datamodule.prepare_data()
    out = Path(run.output.out)
    run_dir = out if rank_environment.global_rank() == 0 else None
    trainer = build.trainer(run, run_dir)
    trainer.fit(module, datamodule=datamodule)
    trainer.test(module, datamodule=datamodule, verbose=False)
    trainer.validate(module, datamodule=datamodule, verbose=False)
    loss = module.test_metrics.overall()["loss"]
    trainer.save_checkpoint(out / "after.ckpt")
    trainer.test(module, datamodule=datamodule, verbose=False, ckpt_path=str(out / "after.ckpt"))
    assert module.test_metrics.overall()["loss"] == loss
    (out / "again").mkdir(exist_ok=True)
    again = build.trainer(run.changed(max_steps=8), run_dir and run_dir / "again")
    again.fit(module, datamodule=datamodule, ckpt_path=str(out / "after.ckpt"))
    again.save_checkpoint(out / "refit.ckpt")
    again.test(module, datamodule=datamodule, verbose=False)
    again.save_checkpoint(out / "refit-after.ckpt")


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
    flags += ["--optimizer", "adam", "--batch_size", "16", "--max_steps", "4", "--logger", "none"]
    on_ranks(2, all_phases, [*small_data, *flags, "--out", str(tmp_path)])
    names = ("checkpoints/last.ckpt", "after.ckpt", "refit.ckpt", "refit-after.ckpt")
    fitted, saved, refitted, saved_again = (read(tmp_path / name) for name in names)
    for before, after, steps in ((fitted, saved, 4), (refitted, saved_again, 8)):
        assert before["global_step"] == after["global_step"] == steps
        assert len(before["optimizer_states"][0]["state"]) == len(before["state_dict"])
        torch.testing.assert_close(after["state_dict"], before["state_dict"], rtol=0, atol=0)
        states = (checkpoint["optimizer_states"][0]["state"] for checkpoint in (after, before))
        torch.testing.assert_close(*states, rtol=0, atol=0)
