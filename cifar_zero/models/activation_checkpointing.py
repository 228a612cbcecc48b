"""Adds activation checkpointing to a model (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). The
forward pass stores only each block's input, and the backward pass recomputes the block's activations."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from cifar_zero.core.errors import UsageError
from cifar_zero.models.moe import gates


def checkpoint_blocks(net: nn.Module) -> None:
    """Changes a model in place so that each block recomputes its activations in the backward pass. Losses and weights
    stay the same bit for bit. Raises UsageError if the model has no blocks.

    The blocks are those children of the model's outermost lists (nn.Sequential, nn.ModuleList) that have children
    themselves. An nn.Sequential of plain layers, such as VGG's, is cut into `_pieces`, because checkpointing single
    layers would save nothing. Only `forward` methods are replaced, so that parameters keep their names, and layers may
    be replaced later, for example by synchronized batch norms.
    """
    has_blocks = False
    for layers in _outermost_lists(net):
        blocks = [child for child in layers if [*child.children()]]
        for block in blocks:
            block.forward = partial(_checkpointed, block, block.forward)
        if not blocks and isinstance(layers, nn.Sequential) and len(pieces := _pieces(layers)) > 1:
            layers.forward = partial(_forward_in_pieces, layers, pieces)  # pyright: ignore[reportAttributeAccessIssue]
            has_blocks = True
        has_blocks = has_blocks or bool(blocks)
    if not has_blocks:
        raise UsageError(f"--activation_checkpointing: {type(net).__name__} has no list of blocks to recompute")


def _outermost_lists(module: nn.Module) -> Iterator[nn.Sequential | nn.ModuleList]:
    if isinstance(module, nn.Sequential | nn.ModuleList):
        yield module
        return
    for child in module.children():
        yield from _outermost_lists(child)


def _pieces(layers: nn.Sequential) -> list[slice]:
    """Cuts a list of layers into pieces of about the square root of its length (Chen et al. 2016, section 4.1). Each
    piece but the first begins with a layer that has parameters, because an in-place activation at the beginning of a
    piece would overwrite the piece's stored input."""
    starts = [0]
    for index, layer in enumerate(layers):
        if index - starts[-1] >= math.isqrt(len(layers)) and [*layer.parameters()]:
            starts.append(index)
    return [slice(*ends) for ends in pairwise([*starts, len(layers)])]


def _forward_in_pieces(layers: nn.Sequential, pieces: Sequence[slice], x: Any) -> Any:
    for piece in pieces:
        x = _checkpointed(layers, partial(_forward, [*layers][piece]), x)
    return x


def _forward(layers: Sequence[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not torch.compiler.is_compiling():  # a compiled graph has no side effects, and accepts no context
        kwargs["context_fn"] = lambda: (nullcontext(), _leaving_no_trace(block))
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextmanager
def _leaving_no_trace(block: nn.Module) -> Generator[None]:
    """Context manager for the forward pass that recomputes a block. Inside, the block's batch norms do not update their
    statistics. At the end, the gates of the block's mixtures of experts get back the routing of the first forward pass,
    whose load-balancing loss is part of the total loss. The loss of the second routing would keep all recomputed
    activations in memory."""
    norms = [module for module in block.modules() if isinstance(module, _NormBase)]
    statistics = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    routings = [(gate, gate.routing) for gate in gates(block)]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, statistics, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches
        for gate, routing in routings:
            gate.routing = routing
