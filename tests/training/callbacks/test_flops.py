"""Tests the FLOPs of a training step, and the dense peak of GPUs."""

import pytest
import torch

from cifar_zero.config.recipe import Recipe
from cifar_zero.training.callbacks.throughput import peak_flops, training_flops


@pytest.mark.parametrize(
    ("device_name", "precision", "allowed", "teraflops"),
    [
        ("NVIDIA H200 NVL", "bf16-mixed", "highest", 835.5),
        ("A100-PCIE-40GB", "bf16-mixed", "highest", 312),
        ("NVIDIA A100-SXM4-80GB", "32-true", "highest", 19.5),
        ("NVIDIA A100-SXM4-80GB", "32-true", "high", 156),  # TF32, where torch may use it
        ("Tesla T4", "32-true", "high", 8.1),  # which has no TF32
        ("Tesla T4", "bf16-mixed", "high", None),  # and no bfloat16
        ("NVIDIA L40", "bf16-mixed", "highest", None),
        ("NVIDIA GH200 480GB", "bf16-mixed", "highest", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16-mixed", "highest", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16-mixed", "highest", None),
    ],
)
def test_peaks_by_torchs_device_names(
    device_name: str, precision: str, allowed: str, teraflops: float | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: allowed)
    peak = peak_flops(device_name, precision)
    assert (peak and peak / 1e12) == teraflops


def test_flops_of_the_net_by_hand():
    conv1, conv2 = 28 * 28 * 6 * (3 * 5 * 5), 10 * 10 * 16 * (6 * 5 * 5)  # multiply-adds of one image
    linear = 400 * 120 + 120 * 84 + 84 * 10
    forward = conv1 + conv2 + linear
    backward = 2 * forward - conv1  # the gradient of the images is not needed
    assert training_flops(Recipe(), num_classes=10, batch_size=16) == 2 * 16 * (forward + backward)
