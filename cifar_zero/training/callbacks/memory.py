"""The memory of a run: the peak of each rank, and its model states (the ZeRO paper's term): the bytes that it holds for
parameters, gradients and optimizer state."""

import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from cifar_zero.launch.collectives import gather
from cifar_zero.training.callbacks.curves import AtPoints, log_scalars

PARTS = ("mem/parameter_rank_bytes", "mem/gradient_rank_bytes", "mem/optimizer_rank_bytes")
"""The summands of mem/model_state_rank_bytes."""

ZERO_GRADIENTS = (
    "averaged_gradients",  # deepspeed/runtime/zero/stage_1_and_2.py: of this rank's part
    "grad_partitions_flat_buffer",  # deepspeed/runtime/zero/stage3.py: the same
    "fp32_groups_gradients_flat",  # deepspeed/runtime/bf16_optimizer.py: in float32
)
"""Attributes in which DeepSpeed 0.19.8's optimizers keep gradients in addition to the model's own tensors."""

ZERO_MASTER_WEIGHTS = (
    "single_partition_of_fp32_groups",  # zero/stage_1_and_2.py: of this rank; an offloaded optimizer's have gradients
    "fp32_partitioned_groups_flat",  # zero/stage3.py: the same
    "fp32_groups_flat_partition",  # bf16_optimizer.py
    "fp32_groups_flat",  # fp16/fused_optimizer.py (stage 0)
    "fp32_groups",  # fp16/unfused_optimizer.py (stage 0)
)
"""Attributes in which they keep the float32 weights that the optimizer updates."""


class Memory(AtPoints):
    """Writes the curve mem/peak_gb (10^9 bytes, of the rank with the most) and keeps the totals of the run."""

    def __init__(self) -> None:
        self._state_step = 0
        self._states = (0, 0, 0)
        keys = ("mem/peak_rank_bytes", "mem/model_state_rank_bytes", *PARTS)
        # mem/* of metrics.json, one value per rank, after the fit
        self.totals: dict[str, list[int]] = {key: [] for key in keys}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # The optimizer has its state from the second step on; a run of one step is measured in that step.
        self._state_step = trainer.global_step + (trainer.estimated_stepping_batches != trainer.global_step + 1)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer.global_step == self._state_step:
            self._states = model_states(pl_module, trainer.optimizers[0])

    def _log(self, trainer: Trainer) -> None:
        device = trainer.strategy.root_device
        highest = trainer.strategy.reduce(torch.tensor(peak_bytes(device), device=device), reduce_op="max")
        log_scalars(trainer, {"mem/peak_gb": int(highest) / 1e9})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.totals = {
            "mem/peak_rank_bytes": gather(peak_bytes(pl_module.device)),
            "mem/model_state_rank_bytes": gather(sum(self._states)),
            **{key: gather(part) for key, part in zip(PARTS, self._states, strict=True)},
        }


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory of this rank so far: of tensors on its GPU; on the CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        # Not getrusage, in which a process starts with its parent's peak.
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def model_states(module: Module, optimizer: Any) -> tuple[int, int, int]:
    """Returns the bytes of parameters, gradients and optimizer state of this rank, on its device or in host memory.

    DeepSpeed's float32 master weights are optimizer state. Memory that several tensors share counts once, and padding
    counts; communication buckets, activations and what is on disk do not. Call it while the gradients of a step exist.
    The optimizer is torch's, or DeepSpeed's that wraps it.
    """
    parameters = [tensor for own in module.parameters() for tensor in (own, *_flat(getattr(own, "ds_tensor", None)))]
    master = _flat([getattr(optimizer, name, None) for name in ZERO_MASTER_WEIGHTS])
    with_gradient = (tensor for tensor in (*parameters, *master) if tensor.is_leaf and tensor.grad is not None)
    gradients = [cast(Tensor, tensor.grad) for tensor in with_gradient]
    gradients += _flat([getattr(optimizer, name, None) for name in ZERO_GRADIENTS])
    state = [*master, *_flat(getattr(optimizer, "optimizer", optimizer).state)]
    counted: set[tuple[torch.device, int]] = set()
    return _bytes(parameters, counted), _bytes(gradients, counted), _bytes(state, counted)


def _bytes(tensors: Iterable[Tensor], counted: set[tuple[torch.device, int]]) -> int:
    """Returns the bytes behind the tensors that are not yet in `counted`, and adds them to it."""
    total = 0
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = storage.device, storage.data_ptr()
        total += 0 if key in counted else storage.nbytes()
        counted.add(key)
    return total


def _flat(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
