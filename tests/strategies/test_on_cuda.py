"""A strategy's choices for GPUs, tested on a machine that may have none."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.deepspeed import ZeROStrategy

GPU = torch.device("cuda", 0)
STRATEGIES = [SingleDeviceStrategy(GPU), DDPStrategy(parallel_devices=[GPU])]
PLAIN, BFLOAT16 = Precision(), MixedPrecision("bf16-mixed", "cuda")
SCALED = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("made", STRATEGIES, ids=["baseline", "ddp"])
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
    made: Strategy, precision: Precision, clips: bool, expected: str
):
    made.precision_plugin = precision
    assert hooks_of(made).optimizer_implementation(made.root_device.type, clips) == expected
    assert hooks_of(made).optimizer_implementation("cpu", clips) == "torch"


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_zero_on_a_gpu_needs_no_compiler(name: str):
    """DeepSpeed's own Adam for a GPU is compiled at its first use, which fails on many machines."""
    implementation = hooks_of(ZeROStrategy()).optimizer_implementation("cuda", clips=True)
    made = OPTIMIZERS[name]().build([torch.nn.Parameter(torch.ones(2))], implementation)
    assert type(made).__module__.startswith("torch.optim.")
    assert made.defaults["fused"]
