"""A strategy's choices for GPUs, tested on a machine that may have none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from cifar_zero import strategies
from cifar_zero.config import command_line
from cifar_zero.strategies import fsdp2
from cifar_zero.strategies.mesh import MeshStrategy
from cifar_zero.training.resolve import of_machine

GPU = torch.device("cuda", 0)
STRATEGIES = [SingleDeviceStrategy(GPU), DDPStrategy(parallel_devices=[GPU])]
PLAIN, BFLOAT16 = Precision(), MixedPrecision("bf16-mixed", "cuda")
SCALED = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["baseline", "ddp"])
@pytest.mark.parametrize(
    ("precision", "clips", "expected"),
    [
        (PLAIN, False, "torch_fused"),
        (PLAIN, True, "torch_fused"),
        (BFLOAT16, False, "torch_fused"),
        (BFLOAT16, True, "torch"),
        (SCALED, False, "torch"),
        (SCALED, True, "torch"),
    ],
)
def test_the_optimizer_is_fused_where_lightning_takes_it(
    strategy: Strategy, precision: Precision, clips: bool, expected: str
):
    strategy.precision_plugin = precision
    assert strategies.optimizer_implementation(strategy, strategy.root_device.type, clips) == expected
    assert strategies.optimizer_implementation(strategy, "cpu", clips) == "torch"


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "pipeline", "deepspeed_stage_2"])
def test_gpus_talk_over_the_backend_that_torch_takes_for_them(name: str):
    flags = ["--strategy", name, "--devices", "2", "--precision", "bf16-mixed"]
    runs = [of_machine(command_line.parse([*flags, "--accelerator", accelerator])) for accelerator in ("gpu", "cpu")]
    made, on_cpu = (strategies.build(run) for run in runs)
    assert [each._process_group_backend for each in (made, on_cpu)] == [None, "gloo"]  # pyright: ignore


def test_fsdp_is_fsdp2():
    """Both names build torch's fully_shard, whose DTensors torch's fused optimizers refuse."""
    flags = ["--accelerator", "gpu", "--devices", "2", "--precision", "bf16-mixed", "--gradient_clip_val", "1"]
    one, other = (of_machine(command_line.parse([*flags, "--strategy", name])) for name in ("fsdp", "fsdp2"))
    assert replace(one.spec, summary="") == replace(other.spec, summary="")
    for made in (strategies.build(run) for run in (one, other)):
        assert isinstance(made, MeshStrategy)
        assert made._shard.func is fsdp2.shard  # pyright: ignore
        assert strategies.optimizer_implementation(made, "cuda", clips=True) == "torch"
