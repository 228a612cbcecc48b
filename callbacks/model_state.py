"""The bytes that a rank holds for the model, the ZeRO paper's model states: parameters, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.nn import Module

ZERO_TENSORS = (
    # deepspeed/runtime/zero/stage_1_and_2.py: float32 master weights of this rank, with the gradients of an offloaded
    # optimizer on them; gradients of this rank's part
    "single_partition_of_fp32_groups",
    "averaged_gradients",
    # deepspeed/runtime/zero/stage3.py: the same
    "fp32_partitioned_groups_flat",
    "grad_partitions_flat_buffer",
    # deepspeed/runtime/bf16_optimizer.py (stage 0): master weights and float32 gradients
    "fp32_groups_flat_partition",
    "fp32_groups_gradients_flat",
    # deepspeed/runtime/fp16/fused_optimizer.py and unfused_optimizer.py (stage 0): master weights
    "fp32_groups_flat",
    "fp32_groups",
)
"""Where DeepSpeed 0.19.8's optimizers keep what they hold beside the network's own tensors."""


def model_state_bytes(module: Module, optimizer: Any) -> int:
    """Bytes of parameters, gradients and optimizer state on this rank, on its device or offloaded to host memory.

    Measured from the tensors, memory that several share counted once, padding included. Not counted: communication
    buckets, activations, and what lies on disk. To be called while the gradients of a step are there.

    Args:
        module: the network.
        optimizer: torch's, or the one of DeepSpeed that wraps it.
    """
    storages = {}
    for tensor in _tensors(module, optimizer):
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(module: Module, optimizer: Any) -> Iterator[Tensor]:
    for parameter in module.parameters():
        yield from _with_gradient(parameter)
        # ZeRO-3: this rank's part; the parameter itself is empty while it rests.
        yield from _flat(getattr(parameter, "ds_tensor", None))
    for name in ZERO_TENSORS:
        for tensor in _flat(getattr(optimizer, name, None)):
            yield from _with_gradient(tensor)
    wrapped = getattr(optimizer, "optimizer", optimizer)
    yield from _flat(wrapped.state)


def _with_gradient(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor
    if tensor.is_leaf and tensor.grad is not None:
        yield tensor.grad


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _flat(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
