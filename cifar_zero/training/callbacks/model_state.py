"""The bytes that a rank holds for the model, the ZeRO paper's model states: parameters, gradients, optimizer state."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

ZERO_GRADIENTS = (
    # deepspeed/runtime/zero/stage_1_and_2.py: of this rank's part
    "averaged_gradients",
    # deepspeed/runtime/zero/stage3.py: the same
    "grad_partitions_flat_buffer",
    # deepspeed/runtime/bf16_optimizer.py: in float32
    "fp32_groups_gradients_flat",
)
"""Attributes in which DeepSpeed 0.19.8's optimizers keep gradients in addition to the model's own tensors."""

ZERO_MASTER_WEIGHTS = (
    # deepspeed/runtime/zero/stage_1_and_2.py: of this rank, with the gradients of an offloaded optimizer on them
    "single_partition_of_fp32_groups",
    # deepspeed/runtime/zero/stage3.py: the same
    "fp32_partitioned_groups_flat",
    # deepspeed/runtime/bf16_optimizer.py
    "fp32_groups_flat_partition",
    # deepspeed/runtime/fp16/fused_optimizer.py and unfused_optimizer.py (stage 0)
    "fp32_groups_flat",
    "fp32_groups",
)
"""Attributes in which they keep the float32 weights that the optimizer updates."""


class ModelStates(NamedTuple):
    """Bytes on this rank."""

    parameters: int
    """Those that the model computes with."""

    gradients: int
    optimizer: int
    """The optimizer's state, and DeepSpeed's float32 master weights."""


def model_states(module: Module, optimizer: Any) -> ModelStates:
    """Returns the bytes of parameters, gradients and optimizer state of this rank, on its device or in host memory.

    Memory that several tensors share counts once, and padding counts. Communication buckets, activations and what is
    on disk do not count. Call it while the gradients of a step exist.

    Args:
        module: the model.
        optimizer: torch's, or DeepSpeed's that wraps it.
    """
    parameters = [tensor for own in module.parameters() for tensor in (own, *_flat(getattr(own, "ds_tensor", None)))]
    master = [*_of(optimizer, ZERO_MASTER_WEIGHTS)]
    with_gradient = (tensor for tensor in (*parameters, *master) if tensor.is_leaf and tensor.grad is not None)
    gradients = [*(cast(Tensor, tensor.grad) for tensor in with_gradient), *_of(optimizer, ZERO_GRADIENTS)]
    state = [*master, *_flat(getattr(optimizer, "optimizer", optimizer).state)]
    counted: set[tuple[torch.device, int]] = set()
    return ModelStates(*(_bytes(tensors, counted) for tensors in (parameters, gradients, state)))


def _bytes(tensors: Iterable[Tensor], counted: set[tuple[torch.device, int]]) -> int:
    """Returns the bytes behind the tensors that are not yet in `counted`, and adds them to it."""
    total = 0
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = storage.device, storage.data_ptr()
        total += 0 if key in counted else storage.nbytes()
        counted.add(key)
    return total


def _of(optimizer: Any, names: Iterable[str]) -> Iterator[Tensor]:
    for name in names:
        yield from _flat(getattr(optimizer, name, None))


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _flat(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
