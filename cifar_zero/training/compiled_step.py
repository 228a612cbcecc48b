"""`--compile step`: the whole training step, from the images to the new weights, as one graph of torch.compile.

A step of a small model is some hundred calls of operators, each of which does less than its call costs. The graph has
the forward pass, the backward pass, the mean over the ranks, clipping and the optimizer's update.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import (
    Tensor,
    _foreach_copy_,  # pyright: ignore[reportPrivateImportUsage]
)

SAME_RANDOM_NUMBERS = {"fallback_random": True}  # as in an uncompiled step, for dropout
ON_CPU: dict[str, Any] = {
    "cpp_wrapper": True,  # a step of Net for 4 images calls the kernels from C++ in 0.05 ms less
    # Otherwise the convolutions take images and filters in the channels_last format, for which torch's own ones, used
    # for the smallest batches, take twice as long (data/augment.py, memory_format).
    "layout_optimization": False,
}
"""Options of inductor, torch.compile's code generator (torch 2.15)."""


def compiled_step(trainer: Trainer, cuda_graph: bool = False) -> Callable[[Any, int], Tensor]:
    """Returns a function that takes a batch and its index, trains and returns the loss, detached. It compiles in the
    first call. With `cuda_graph` a GPU replays the whole step as one CUDA graph. The optimizer must have its state: a
    graph would make it in memory that its next replay overwrites.

    After a call each parameter's `grad` is its gradient before clipping. The learning rates of the optimizer become
    tensors, which a schedule can change without another compilation.
    """
    module, optimizer, clip = trainer.lightning_module, trainer.optimizers[0], trainer.gradient_clip_val
    device, mixed = trainer.strategy.root_device, isinstance(trainer.precision_plugin, MixedPrecision)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float64, device=device)
    optimizer.register_state_dict_post_hook(_with_plain_rates)
    gradients = [parameter.grad for parameter in parameters]
    for tensor in (*gradients, *(value for state in optimizer.state.values() for value in state.values())):
        if isinstance(tensor, Tensor):  # otherwise torch leaves the CUDA graph out, as the step changes an input of it
            torch._dynamo.mark_static_address(tensor)
    update: Any = inspect.unwrap(type(optimizer).step)  # without the profiler, at which a graph ends

    def step(batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed, cache_enabled=False):
            loss: Any = module.training_step(batch, batch_idx)
        new = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            if trainer.world_size > 1:
                flat = torch.cat([gradient.flatten() for gradient in new]) / trainer.world_size
                dist.all_reduce(flat)
                parts = flat.split([gradient.numel() for gradient in new])
                new = [part.view_as(gradient) for part, gradient in zip(parts, new, strict=True)]
            _foreach_copy_(gradients, new)
            if clip:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            update(optimizer)
            if clip:
                _foreach_copy_(gradients, new)
        return loss.detach()

    torch._dynamo.config.trace_autograd_ops = True  # lets torch.autograd.grad be part of a graph
    options = ON_CPU if device.type == "cpu" else {"triton.cudagraphs": cuda_graph}
    compiled = torch.compile(step, fullgraph=True, dynamic=False, options={**options, **SAME_RANDOM_NUMBERS})
    # The next replay overwrites what a CUDA graph returns.
    return (lambda *batch: compiled(*batch).clone()) if cuda_graph else compiled


def _with_plain_rates(optimizer: Any, state: dict[str, Any]) -> None:
    """Makes the learning rates in a checkpoint numbers, as every other run writes them."""
    for group in state["param_groups"]:
        group["lr"] = float(group["lr"])
