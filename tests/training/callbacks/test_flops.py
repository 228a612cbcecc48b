"""Tests the FLOPs of a training step, and the dense peak of GPUs."""

import pytest
import torch

from cifar_zero.config.recipe import Choice, Recipe
from cifar_zero.training.callbacks.throughput import peak_by_name, training_flops
from tests.support.helpers import parameter_count

TERA = 1e12


@pytest.mark.parametrize(
    ("device_name", "float32", "bfloat16"),
    [
        ("NVIDIA H200", 67, 989.5),
        ("NVIDIA H200 NVL", 60, 835.5),
        ("A100-PCIE-40GB", 19.5, 312),
        ("NVIDIA L4", 30.3, 121),
        ("NVIDIA L40", None, None),
        ("NVIDIA GH200 480GB", None, None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None, None),
        ("NVIDIA GeForce RTX 3090 Ti", None, None),
    ],
)
def test_peaks_by_torchs_device_names(device_name: str, float32: float | None, bfloat16: float | None) -> None:
    for precision, peak in (("32-true", float32), ("bf16-mixed", bfloat16)):
        assert peak_by_name(device_name, precision) == (None if peak is None else pytest.approx(peak * TERA))


def test_tf32_counts_where_torch_may_use_it() -> None:
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_by_name("NVIDIA A100-SXM4-80GB", "32-true") == 156 * TERA
        assert peak_by_name("Tesla T4", "32-true") == 8.1 * TERA
    finally:
        torch.set_float32_matmul_precision("highest")


def test_flops_of_the_net_by_hand() -> None:
    conv1, conv2 = 28 * 28 * 6 * (3 * 5 * 5), 10 * 10 * 16 * (6 * 5 * 5)  # multiply-adds of one image
    linear = 400 * 120 + 120 * 84 + 84 * 10
    forward = conv1 + conv2 + linear
    backward = 2 * forward - conv1  # the gradient of the images is not needed
    random_state = torch.get_rng_state()
    assert training_flops(Recipe(), num_classes=10, batch_size=16) == 2 * 16 * (forward + backward)
    assert parameter_count(Choice("net"), num_classes=10) == 62_006
    assert torch.equal(torch.get_rng_state(), random_state)  # counting must not change the training
