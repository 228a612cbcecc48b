"""FLOPs of a training step, and the dense peak of GPUs."""

import re

import pytest
import torch

from cifar_zero.config.recipe import Choice
from cifar_zero.training.callbacks.throughput import PEAKS, peak_by_name, peak_flops, training_flops
from tests.support.helpers import parameter_count

TERA = 1e12


@pytest.mark.parametrize(
    ("device_name", "float32", "bfloat16", "float16"),
    [
        ("NVIDIA H200", 67, 989.5, 989.5),
        ("NVIDIA H200 NVL", 60, 835.5, 835.5),
        ("NVIDIA H100 80GB HBM3", 67, 989.5, 989.5),
        ("NVIDIA H100 PCIe", 51, 756.5, 756.5),
        ("NVIDIA H100 NVL", 60, 835.5, 835.5),
        ("NVIDIA B200", 75, 2250, 2250),
        ("NVIDIA A100-SXM4-80GB", 19.5, 312, 312),
        ("NVIDIA A100 80GB PCIe", 19.5, 312, 312),
        ("A100-PCIE-40GB", 19.5, 312, 312),
        ("NVIDIA A10", 31.2, 125, 125),
        ("NVIDIA L4", 30.3, 121, 121),
        ("NVIDIA L40S", 91.6, 362.05, 362.05),
        ("Tesla T4", 8.1, None, 65),
        ("Tesla V100-SXM2-16GB", 15.7, None, 125),
        ("Tesla V100-PCIE-32GB", 14, None, 112),
        ("Tesla V100S-PCIE-32GB", 16.4, None, 130),
        ("NVIDIA GeForce RTX 3090", 35.6, 71, 71),
        ("NVIDIA GeForce RTX 4090", 82.6, 165.2, 165.2),
    ],
)
def test_peaks_by_torchs_device_names(device_name: str, float32: float, bfloat16: float | None, float16: float) -> None:
    assert sum(re.search(pattern, device_name) is not None for pattern in PEAKS) == 1
    expected = {"32-true": float32, "bf16-mixed": bfloat16, "bf16-true": bfloat16, "16-mixed": float16}
    for precision, peak in expected.items():
        assert peak_by_name(device_name, precision) == (None if peak is None else pytest.approx(peak * TERA)), precision


@pytest.mark.parametrize(
    "device_name",
    [
        *("NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA A10G", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA L40"),
        *("NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU", "Quadro T400", "AMD Instinct MI300X"),
    ],
)
def test_a_device_that_is_not_in_the_table_has_no_peak(device_name: str) -> None:
    assert peak_by_name(device_name, "32-true") is None


def test_tf32_counts_where_torch_may_use_it() -> None:
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_by_name("NVIDIA A100-SXM4-80GB", "32-true") == 156 * TERA
        assert peak_by_name("Tesla T4", "32-true") == 8.1 * TERA
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(torch.device("cpu"), "32-true") is None


def test_flops_of_the_net_by_hand() -> None:
    conv1, conv2 = 28 * 28 * 6 * (3 * 5 * 5), 10 * 10 * 16 * (6 * 5 * 5)  # multiply-adds of one image
    linear = 400 * 120 + 120 * 84 + 84 * 10
    forward = conv1 + conv2 + linear
    backward = 2 * forward - conv1  # the gradient of the images is not needed
    random_state = torch.get_rng_state()
    assert training_flops(Choice("net"), num_classes=10, batch_size=16) == 2 * 16 * (forward + backward)
    assert parameter_count(Choice("net"), num_classes=10) == 62_006
    assert torch.equal(torch.get_rng_state(), random_state)  # counting must not change the training
