"""Tests the FLOPs of a training step, and the dense peak of GPUs."""

import pytest
import torch

from cifar_zero.config.recipe import Recipe
from cifar_zero.training.callbacks.throughput import peak_by_name, training_flops

TERA = 1e12


@pytest.mark.parametrize(
    ("device_name", "bfloat16"),
    [
        ("NVIDIA H200 NVL", 835.5 * TERA),
        ("A100-PCIE-40GB", 312 * TERA),
        ("Tesla T4", None),  # which has no bfloat16
        ("NVIDIA L40", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
    ],
)
def test_peaks_by_torchs_device_names(device_name: str, bfloat16: float | None) -> None:
    assert peak_by_name(device_name, "bf16-mixed") == bfloat16


@pytest.mark.parametrize(
    ("device_name", "allowed", "peak"),
    [("NVIDIA A100-SXM4-80GB", "highest", 19.5), ("NVIDIA A100-SXM4-80GB", "high", 156), ("Tesla T4", "high", 8.1)],
)
def test_tf32_counts_where_torch_may_use_it(
    device_name: str, allowed: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: allowed)
    assert peak_by_name(device_name, "32-true") == peak * TERA


def test_flops_of_the_net_by_hand() -> None:
    conv1, conv2 = 28 * 28 * 6 * (3 * 5 * 5), 10 * 10 * 16 * (6 * 5 * 5)  # multiply-adds of one image
    linear = 400 * 120 + 120 * 84 + 84 * 10
    forward = conv1 + conv2 + linear
    backward = 2 * forward - conv1  # the gradient of the images is not needed
    assert training_flops(Recipe(), num_classes=10, batch_size=16) == 2 * 16 * (forward + backward)
