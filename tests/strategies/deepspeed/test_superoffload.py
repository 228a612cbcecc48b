"""Checks on any machine that SuperOffload is turned on. Its optimizer needs the streams of a GPU (tests/gpu)."""

import pytest
from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3
from lightning.pytorch import Trainer

from cifar_module import CIFARModule
from cifar_zero.config import command_line
from cifar_zero.training.build import strategy_of
from cifar_zero.training.resolve import make_run
from datamodule import CIFARDataModule


@pytest.mark.distributed
@pytest.mark.usefixtures("own_process_group")
def test_the_strategy_turns_superoffload_on(small_data: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []

    class Reached(Exception):
        pass

    def init(self: object, *args: object, cpuadam_cores_perc: float = 0.0, **kwargs: object) -> None:
        made.append(cpuadam_cores_perc)
        raise Reached

    monkeypatch.setattr(SuperOffloadOptimizer_Stage3, "__init__", init)
    flags = ["--strategy", "deepspeed_stage_3_superoffload", "--optimizer", "adamw", "--accelerator", "cpu"]
    run = make_run(command_line.parse([*small_data, *flags, "--devices", "1", "--offload.cpuadam_cores_perc", "0.5"]))
    trainer = Trainer(strategy=strategy_of(run), accelerator="cpu", logger=False)
    with pytest.raises(Reached):
        trainer.fit(CIFARModule(run, 10), datamodule=CIFARDataModule(run))
    assert made == [0.5]
