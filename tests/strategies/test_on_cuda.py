"""Tests a strategy's choices for GPUs on a machine that may have no GPU."""

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from cifar_zero.strategies import hooks_of

PLAIN, BFLOAT16 = Precision(), MixedPrecision("bf16-mixed", "cuda")
SCALED = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("precision", "clips", "expected"),
    [
        (PLAIN, True, "torch_fused"),
        (BFLOAT16, False, "torch_fused"),
        (BFLOAT16, True, "torch"),
        (SCALED, False, "torch"),
    ],
)
def test_the_optimizer_is_fused_where_lightning_accepts_it(precision: Precision, clips: bool, expected: str):
    hooks = hooks_of(SingleDeviceStrategy(torch.device("cuda", 0), precision_plugin=precision))
    assert hooks.optimizer_implementation("cuda", clips) == expected
    assert hooks.optimizer_implementation("cpu", clips) == "torch"
