"""What of SuperOffload a CPU can run: its process, which updates sub-groups with DeepSpeed's CPU Adam, and the key that
turns it on. Its optimizer needs the streams of a GPU (tests/gpu)."""

import time
from typing import Any

import pytest
import torch
from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3
from deepspeed.runtime.superoffload.superoffload_utils import EventTypes, ResultKeys, SuperOffloadCPUOptimizer
from lightning.pytorch import Trainer
from torch import Tensor

from cifar_module import CIFARModule
from cifar_zero.config import command_line
from cifar_zero.training.build import strategy_of
from cifar_zero.training.resolve import make_run
from datamodule import CIFARDataModule
from tests.support.helpers import HANG_SECONDS, of_test_all

SIZES = (300, 70)
"""Elements of two sub-groups."""


@of_test_all
def test_its_process_updates_sub_groups_as_adamw_does() -> None:
    group: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}
    process = SuperOffloadCPUOptimizer(group, cpuadam_cores_perc=1.0, max_grad_numel=max(SIZES), pin_memory=False)
    torch.manual_seed(0)
    weights = [torch.randn(size) for size in SIZES]
    expected = [torch.nn.Parameter(weight.clone()) for weight in weights]
    adamw = torch.optim.AdamW(expected, **group)

    def update(number: int, gradient: Tensor, rate: float, rollback: bool = False) -> Tensor:
        process.async_step(0, number, weights[number], gradient, rollback, lr=rate)
        deadline = time.monotonic() + HANG_SECONDS  # it compiles CPU Adam, where that has not been done
        while (result := process.get_result(EventTypes.ROLLBACK if rollback else EventTypes.ADAM_STEP)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return result[ResultKeys.UPDATED_PARAM].clone()

    try:
        for rate in (0.01, 0.003, 0.02):  # of a schedule
            for weight in expected:
                weight.grad = torch.randn_like(weight)
            before = [weight.clone() for weight in weights]
            adamw.param_groups[0]["lr"] = rate
            adamw.step()
            for number, weight in enumerate(expected):
                assert weight.grad is not None
                weights[number] = update(number, weight.grad, rate)
                assert torch.allclose(weights[number], weight, rtol=1e-5, atol=1e-6)
        last = expected[1].grad
        assert last is not None
        assert torch.allclose(update(1, last, rate, rollback=True), before[1], rtol=1e-4, atol=1e-5)
    finally:
        process.close()


@pytest.mark.distributed
@pytest.mark.usefixtures("own_process_group")
def test_the_strategy_turns_it_on(small_data: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
