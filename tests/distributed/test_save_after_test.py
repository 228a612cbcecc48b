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
    """Fits, saves, tests, validates and saves, twice, as one of the ranks. The second fit continues the first."""
    run = resolve(command_line.parse(flags))
    collectives.init_process_group(run)
    module, datamodule = CIFARModule(run, run.num_classes), CIFARDataModule(run)
    datamodule.prepare_data()
    out, earlier = Path(run.output.out), None
    for steps in (4, 8):
        (out / str(steps)).mkdir(exist_ok=True)
        trainer = build.trainer(
            run.changed(max_steps=steps), out / str(steps) if rank_environment.global_rank() == 0 else None
        )
        trainer.fit(module, datamodule=datamodule, ckpt_path=earlier)
        trainer.save_checkpoint(out / f"fitted-{steps}.ckpt")
        trainer.test(module, datamodule=datamodule, verbose=False)
        trainer.validate(module, datamodule=datamodule, verbose=False)
        earlier = out / f"tested-{steps}.ckpt"
        trainer.save_checkpoint(earlier)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stage", "model"),
    [
        (2, []),
        pytest.param(3, [], marks=of_test_all),
        *(pytest.param(stage, EXPERTS, marks=of_test_all) for stage in (0, 1, 2)),
    ],
)
def test_a_test_changes_no_checkpoint(stage: int, model: list[str], small_data: list[str], tmp_path: Path):
    flags = ["--strategy", f"deepspeed_stage_{stage}", "--devices", "2", "--accelerator", "cpu", *model]
    flags += ["--optimizer", "adam", "--batch_size", "16", "--logger", "none"]
    on_ranks(2, all_phases, [*small_data, *flags, "--out", str(tmp_path)])
    for steps in (4, 8):
        before, after = (read(tmp_path / f"{name}-{steps}.ckpt") for name in ("fitted", "tested"))
        assert before["global_step"] == after["global_step"] == steps
        assert len(before["optimizer_states"][0]["state"]) == len(before["state_dict"])
        torch.testing.assert_close(after["state_dict"], before["state_dict"], rtol=0, atol=0)
        states = (checkpoint["optimizer_states"][0]["state"] for checkpoint in (after, before))
        torch.testing.assert_close(*states, rtol=0, atol=0)
