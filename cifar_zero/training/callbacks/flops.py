"""The work of a training step and what a GPU can do: a model's parameters and FLOPs, and the dense peak of NVIDIA GPUs.

Parameters and FLOPs are counted on a copy with shapes and no values (torch's meta device), so that it does not matter
whether the strategy shards, casts or offloads the model. The peak is the denominator of the model FLOPs utilisation
(MFU). Lightning's table (2.6.6, lightning/fabric/utilities/throughput.py) does not serve: for the H100 NVL and the H200
it has figures with sparsity, twice what a dense model can reach (issue 21677), and it knows neither the name "NVIDIA
H200" nor the tensor cores of GeForce cards.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from lightning.fabric.utilities.throughput import measure_flops

from cifar_zero.checkpoints.finetuning.network import NO_LORA, build
from cifar_zero.config.recipe import Choice, LoRAConfig
from cifar_zero.models import IMAGE_SHAPE, MODELS, UserModel


def training_flops(
    model: Choice,
    num_classes: int,
    batch_size: int,
    trainable: Sequence[str] = (),
    lora: LoRAConfig = NO_LORA,
    side: int = IMAGE_SHAPE[1],
) -> int:
    """Returns the FLOPs of a forward and backward pass of images of `side` pixels, two for each multiply-add. Counts
    matrix products and convolutions, as torch's FlopCounterMode does. What activation checkpointing
    recomputes is not included."""

    def count() -> int:
        net = build(model, num_classes, trainable, lora)
        images = torch.zeros(batch_size, IMAGE_SHAPE[0], side, side)
        return measure_flops(net, lambda: net(images), torch.Tensor.sum)

    with torch.autograd.set_detect_anomaly(False):  # it would check values, which do not exist
        try:
            with torch.device("meta"):
                return count()
        except (RuntimeError, NotImplementedError):
            if not issubclass(MODELS[model.name], UserModel):
                raise
            return count()  # what a user's model computes may depend on values


class Peak(NamedTuple):
    """FLOP/s of one GPU without sparsity, two for each multiply-add; None for a type that its tensor cores lack."""

    float32: float  # outside the tensor cores
    tfloat32: float | None
    bfloat16: float | None
    float16: float | None  # with accumulation in float32, which torch uses


# Half of the figure if a data sheet only gives it with sparsity. Patterns are searched in the name that
# torch.cuda.get_device_name returns; \b keeps the A10 from the A100, the L4 from the L40S and the H200 from the GH200.
PEAKS = {
    # NVIDIA V100 data sheet (nvidia.com/content/dam/en-zz/Solutions/Data-Center/v100/pdf, January 2020)
    r"\bV100-SXM": Peak(15.7e12, None, None, 125e12),
    r"\bV100-PCIE": Peak(14e12, None, None, 112e12),
    r"\bV100S-PCIE": Peak(16.4e12, None, None, 130e12),
    # NVIDIA T4 data sheet (t4-tensor-core-datasheet-951643)
    r"\bT4$": Peak(8.1e12, None, None, 65e12),
    # NVIDIA A10 data sheet (a10-datasheet)
    r"\bA10$": Peak(31.2e12, 62.5e12, 125e12, 125e12),
    # NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4-web); SXM and PCIe alike
    r"\bA100\b": Peak(19.5e12, 156e12, 312e12, 312e12),
    # NVIDIA Ampere GA102 architecture white paper, version 2, RTX 3090 next to the Titan RTX
    r"\bGeForce RTX 3090$": Peak(35.6e12, 35.6e12, 71e12, 71e12),
    # NVIDIA Ada architecture white paper, version 2.1, appendix A
    r"\bGeForce RTX 4090$": Peak(82.6e12, 82.6e12, 165.2e12, 165.2e12),
    # NVIDIA L4 data sheet: 120, 242 and 242 with sparsity
    r"\bL4$": Peak(30.3e12, 60e12, 121e12, 121e12),
    # NVIDIA L40S data sheet (l40s-datasheet)
    r"\bL40S$": Peak(91.6e12, 183e12, 362.05e12, 362.05e12),
    # NVIDIA H100 data sheet (h100-datasheet-24306): SXM 989, 1,979 and 1,979 with sparsity; NVL 835, 1,671 and 1,671.
    # PCIe, in an earlier edition: 756, 1,513 and 1,513
    r"\bH100\b.* HBM3$": Peak(67e12, 494.5e12, 989.5e12, 989.5e12),
    r"\bH100 PCIe$": Peak(51e12, 378e12, 756.5e12, 756.5e12),
    r"\bH100 NVL$": Peak(60e12, 417.5e12, 835.5e12, 835.5e12),
    # NVIDIA H200 data sheet (hpc-datasheet-sc23-h200-datasheet-3002446): SXM and NVL as the H100's
    r"\bH200$": Peak(67e12, 494.5e12, 989.5e12, 989.5e12),
    r"\bH200 NVL$": Peak(60e12, 417.5e12, 835.5e12, 835.5e12),
    # NVIDIA Blackwell data sheet, a GPU of the HGX B200: 2,200, 4,500 and 4,500 with sparsity
    r"\bB200$": Peak(75e12, 1100e12, 2250e12, 2250e12),
}
"""Peaks by a pattern of the device's name. A slice of a GPU (MIG) and other GPUs have no known peak."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the dense peak of a device, in FLOP/s; None for a CPU or if unknown. `precision`: of the run."""
    return peak_by_name(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def peak_by_name(device_name: str, precision: str) -> float | None:
    """Returns the dense peak of one GPU, named as torch.cuda.get_device_name does, in FLOP/s; None if unknown. The
    precision 32-true counts as TF32 where torch.get_float32_matmul_precision() allows that; cuDNN uses TF32 for
    convolutions whatever it says, unless torch.backends.cudnn.allow_tf32 is off."""
    peak = next((peak for pattern, peak in PEAKS.items() if re.search(pattern, device_name)), None)
    if peak is None or " MIG " in device_name:
        return None
    if precision.startswith("bf16"):
        return peak.bfloat16
    if precision.startswith("16"):
        return peak.float16
    tensor_cores = torch.get_float32_matmul_precision() != "highest"
    return peak.tfloat32 if tensor_cores and peak.tfloat32 else peak.float32
