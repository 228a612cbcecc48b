"""Reads where a DeepSpeed engine keeps its parameters and master weights, and how they are sharded."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any

import deepspeed.comm
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import pad

from cifar_zero.checkpoints.zero_folder import plain_names
from cifar_zero.strategies.deepspeed.experts import ep_size

Cut = Callable[[Sequence[Tensor]], Tensor]
"""Function that returns this rank's flat part of an optimizer's tensor, given the whole tensors of its parameters."""


def optimizer_groups(engine: Any) -> Iterator[tuple[list[Parameter], Tensor, Cut]]:
    """Yields a tuple (parameters, tensor, cut) for each float32 tensor that the optimizer updates. `parameters` are the
    module's parameters that the tensor covers, in order. `cut` returns this rank's part of the tensor, given the whole
    tensors of these parameters."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        for group, target in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            yield group, target, partial(_flat_shards, group)
    elif stage:
        # With grad_accum_dtype fp32, ZeRO 1 uses another optimizer class, deepspeed/runtime/bf16_optimizer.py.
        if hasattr(optimizer, "fp32_groups_flat_partition"):
            groups, targets = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
        else:
            groups, targets = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
        # Zeros after each parameter, with parameter_alignment.
        paddings_of_groups = getattr(optimizer, "round_robin_bit16_padding", [None] * len(groups))
        flat = zip(groups, targets, paddings_of_groups, strict=True)
        for number, (group, target, paddings) in enumerate(flat):
            start = deepspeed.comm.get_rank(group=optimizer.real_dp_process_group[number]) * target.numel()
            yield group, target, partial(_flat, paddings=paddings, part=slice(start, start + target.numel()))
    elif optimizer is engine.basic_optimizer:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield [parameter], parameter, _flat
    elif hasattr(optimizer, "fp32_groups_flat"):
        for group, target in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            yield group, target, _flat
    else:
        for group, targets in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, target in zip(group, targets, strict=True):
                yield [parameter], target, _flat


def _flat(wholes: Sequence[Tensor], paddings: Sequence[int] | None = None, part: slice = slice(None)) -> Tensor:
    """Returns a part of the concatenation of all tensors. `paddings` are the numbers of zeros after each tensor."""
    flat: list[Tensor] = []
    for whole, padding in zip(wholes, paddings or repeat(0), strict=False):
        flat.append(pad(whole.flatten(), (0, padding)))
    return torch.cat(flat)[part]


def _flat_shards(parameters: Sequence[Parameter], wholes: Sequence[Tensor]) -> Tensor:
    return torch.cat([*map(cut_parameter, wholes, parameters)])


def cut_parameter(whole: Tensor, parameter: Any) -> Tensor:
    """Returns this rank's flat part of a parameter at ZeRO 3. The last rank's part is padded with zeros."""
    size = parameter.ds_tensor.ds_numel
    rank = deepspeed.comm.get_rank(group=parameter.ds_process_group)
    part = whole.flatten()[rank * size : (rank + 1) * size]
    return pad(part, (0, size - part.numel()))


def plain_names_of(engine: Any, names: Iterable[str]) -> dict[str, str]:
    """Maps the name of each weight on this rank to its name in the plain model. The rank may have only some of all
    experts."""
    return plain_names(names, engine.global_rank % ep_size(engine.module))


def names_of_parameters(engine: Any) -> dict[Parameter, str]:
    """Maps each parameter on this rank to its name in the plain model."""
    own = dict(engine.module.named_parameters())
    plain = plain_names_of(engine, own)
    return {parameter: plain[name] for name, parameter in own.items()}


@contextmanager
def rewriting(engine: Any) -> Generator[None, None, None]:
    """Returns a context manager. On entry, it makes ZeRO 3 shard the parameters that ZeRO 3 otherwise keeps whole. On
    exit, it makes ZeRO 3 gather them again."""
    shards = engine.zero_optimization_partition_weights()
    if shards:
        engine.optimizer.checkpoint_event_prologue()
    yield
    if shards:
        engine.optimizer.checkpoint_event_epilogue()
        forget_second_copies(engine.module)


def forget_second_copies(module: Module) -> None:
    """Drops the secondary copies of the parameters, which ZeRO 3 keeps with zero_hpz_partition_size. It is called after
    the parameters were overwritten. Otherwise the old copies would be gathered until the next step (DeepSpeed 0.19.8,
    partition_parameters.py)."""
    for parameter in module.parameters():
        parameter.ds_secondary_tensor = None  # pyright: ignore[reportAttributeAccessIssue]
