"""Counts the bytes of a training step's activations exactly, without computing their values.

The step runs on tensors that have shapes but no values (torch's FakeTensorMode), so the model may be larger than any
memory. The kernels are those of the CPU. GPU kernels may need more or less memory. torch's own MemTracker
(torch.distributed._tools, 2.15) counts the same bytes, but takes 12 times as long for vit_large, because it visits all
modules after each operation.
"""

import weakref
from collections.abc import MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from cifar_zero.build_model import create_meta_model
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import Spec
from cifar_zero.core.errors import UsageError
from cifar_zero.models import IMAGE_SHAPE, MODELS, ThirdParty
from cifar_zero.models.activation_checkpointing import checkpoint_blocks
from cifar_zero.models.moe import gates

Computes = Literal["float32", "autocast", "cast"]
"""The format in which a model computes: float32, bfloat16 under autocast, or bfloat16 with the model cast to it.
float16 takes as much memory as bfloat16."""


FAKE = partial(FakeTensorMode, allow_non_fake_inputs=True)
"""torch's mode in which operations make tensors without values, configured to accept a model on the meta device."""


@dataclass(frozen=True)
class LinearFit:
    """The peak bytes of activations as a linear function of the number of images in a micro-batch. `measure` fits it to
    two sizes of the micro-batch."""

    base: float
    per_image: float

    def at(self, images: int) -> int:
        return max(0, round(self.base + self.per_image * images))


class ActivationTracker(TorchDispatchMode):
    """Counts the bytes that operations have allocated and not yet freed while the mode is on, without the model and its
    gradients. The constructor sets the gradient of each trained parameter to zeros."""

    def __init__(self, net: nn.Module):
        super().__init__()
        tensors = [*net.parameters(), *net.buffers()]
        for parameter in net.parameters():
            if parameter.requires_grad:  # the backward pass then adds to it, and what it adds is temporary
                parameter.grad = torch.zeros_like(parameter)
                tensors.append(parameter.grad)
        self._known: MutableMapping[UntypedStorage, None] = WeakIdKeyDictionary()
        for tensor in tensors:
            self._known[tensor.untyped_storage()] = None
        self.now = self.peak = 0  # bytes of activations that are allocated now, and their peak so far

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known[storage] = None
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def _free(self, size: int) -> None:
        self.now -= size


def count_activations(net: nn.Module, images: int, computes: Computes, side: int = IMAGE_SHAPE[1]) -> int:
    """Returns the peak bytes of one forward and backward pass of a micro-batch of images of side x side pixels, without
    parameters and gradients. `net` must be built in the FakeTensorMode in which this function is called, and already
    cast if `computes` is "cast". At the end its gradients are None."""
    tracker = ActivationTracker(net)
    batch, labels = torch.empty(images, IMAGE_SHAPE[0], side, side), torch.zeros(images, dtype=torch.int64)
    if computes == "cast":
        batch = batch.bfloat16()
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=computes == "autocast"):
            scores = net(batch)
        loss = F.cross_entropy(scores.float(), labels)
        for gate in gates(net):
            assert gate.routing is not None
            loss = loss + gate.routing.load_balance_loss
        loss.backward()
    net.zero_grad()
    return tracker.peak


def measure(run: Run, computes: Computes) -> LinearFit:
    """Returns the peak bytes of a run's activations as a function of the images in a micro-batch. It is fitted to the
    run's micro-batch, of two images at least, and to one of twice the size. Raises UsageError if activation
    checkpointing finds no blocks, or if the values of a tensor decide what the model computes."""
    few = max(2, run.micro_batch)  # batch normalisation cannot take a single image
    # The blocks of another model may differ in more than their tensors, or not be called one after the other.
    count = count_activations if issubclass(MODELS[run.recipe.model.name], ThirdParty) else _of_all_blocks
    # Some models of other packages read values while they are built, which FakeTensorMode refuses (torch 2.15).
    net = create_meta_model(run.recipe, run.num_classes)
    if computes == "cast":
        net.bfloat16()
    with FAKE():
        net = fake(net)
        if run.placement.activation_checkpointing:
            checkpoint_blocks(net)
        try:
            small, large = (count(net, images, computes, run.data.image_size) for images in (few, 2 * few))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UsageError(
                f"--model {run.recipe.model.name}: what it computes depends on values ({error}), which a plan does not "
                "have: measure its memory with train --bench_steps"
            ) from error
    return LinearFit(2 * small - large, (large - small) / few)


def fake(net: nn.Module) -> nn.Module:
    """Returns a copy of `net`, a model on the meta device. torch treats the copy's tensors as CPU tensors, but they
    have no values. Must be called in the mode FAKE. Tied weights stay tied, whereas `to_empty` would separate them."""
    tensors = (*net.parameters(), *net.buffers())
    return deepcopy(net, {id(t): torch.empty_like(t, device="cpu", requires_grad=t.requires_grad) for t in tensors})


def _of_all_blocks(net: nn.Module, images: int, computes: Computes, side: int) -> int:
    """Returns what `count_activations` returns for one of the project's models. If it has more than three blocks and
    all are identical, only two and then three blocks are counted, because each further block adds the same bytes. This
    is exact to the byte for vit_13b, and counting all 41 of its blocks would take 15 times as long."""
    blocks = getattr(net, "blocks", None)
    if not isinstance(blocks, nn.Sequential) or len(blocks) <= 3 or len({*map(_kind, blocks)}) > 1:
        return count_activations(net, images, computes, side)
    net.blocks = blocks[:2]
    two = count_activations(net, images, computes, side)
    net.blocks = blocks[:3]
    three = count_activations(net, images, computes, side)
    net.blocks = blocks
    return two + (len(blocks) - 2) * (three - two)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Returns a key that is equal for two blocks with the same modules and parameters, which are taken to hold the same
    activations."""
    modules = tuple((type(module), module.extra_repr()) for module in block.modules())
    return modules, tuple((parameter.shape, parameter.requires_grad) for parameter in block.parameters())


def format_of(spec: Spec, precision: str) -> Computes:
    if precision == "32-true":
        return "float32"
    if precision == "bf16-true" or spec.casts:
        return "cast"
    return "autocast"
