"""Counts the activations of a training step to the byte, without computing them.

They are counted on tensors with shapes and no values (torch's FakeTensorMode), so the model may be larger than any
memory. The kernels are those of the CPU; a GPU's may save less or more.

torch's own MemTracker (torch.distributed._tools, 2.15) counts the same bytes, but goes through all modules after each
operation: 24 seconds for one size of vit_large, where this takes 2.
"""

import textwrap
import weakref
from collections.abc import MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from cifar_zero.checkpoints.finetuning.network import on_meta
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import Spec
from cifar_zero.core.errors import UsageError
from cifar_zero.models import IMAGE_SHAPE
from cifar_zero.models.moe import gates
from cifar_zero.models.recomputation import checkpoint_blocks

Computes = Literal["float32", "autocast", "cast"]
"""The format in which a model computes: float32, bfloat16 where autocast says so, or bfloat16 throughout. float16 takes
as many bytes as bfloat16."""


class Bytes(NamedTuple):
    """Bytes of one micro-batch."""

    saved: int
    """Activations held between the forward and the backward pass."""

    peak: int
    """The peak of everything: parameters, gradients, activations, and what an operation takes."""

    activations: int
    """The peak without parameters and gradients."""


@dataclass(frozen=True)
class Line:
    """Bytes by the number of images: linear, measured at two sizes of the micro-batch."""

    base: float
    per_image: float

    def at(self, images: int) -> int:
        """Returns the bytes of a micro-batch."""
        return max(0, round(self.base + self.per_image * images))


class Held(TorchDispatchMode):
    """Counts the memory that operations allocate, as long as a tensor uses it; the model's own is left out."""

    def __init__(self, net: nn.Module):
        super().__init__()
        own = (tensor.untyped_storage() for tensor in (*net.parameters(), *net.buffers()))
        self._kinds: MutableMapping[UntypedStorage, list[str]] = WeakIdKeyDictionary({storage: [] for storage in own})
        self.now = {"activation": 0, "gradient": 0}
        """Bytes allocated now, by kind."""
        self.peak = self.peak_of_activations = 0
        """The peak so far, in bytes, of both kinds and of activations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and counts what it allocates."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._kinds:
                self._kinds[storage] = kind = ["activation"]
                self.now["activation"] += storage.nbytes()
                weakref.finalize(storage, self._free, kind, storage.nbytes())
        self.peak = max(self.peak, sum(self.now.values()))
        self.peak_of_activations = max(self.peak_of_activations, self.now["activation"])
        return made

    def is_gradient(self, parameter: Tensor) -> None:
        """Recounts a gradient, an activation so far; to be called when a parameter has its gradient."""
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        if self._kinds[storage] == ["activation"]:
            self._kinds[storage][:] = ["gradient"]
            self.now["activation"] -= storage.nbytes()
            self.now["gradient"] += storage.nbytes()

    def _free(self, kind: list[str], size: int) -> None:
        self.now[kind[0]] -= size


def counted(net: nn.Module, images: int, computes: Computes) -> Bytes:
    """Counts the bytes of one forward and one backward pass.

    Args:
        net: on the CPU, built within the FakeTensorMode in which this is called.
        images: of the micro-batch.
        computes: its format; "cast" needs a network that is cast already.
    """
    held = Held(net)
    own = _own_bytes(net)
    hooks = [
        parameter.register_post_accumulate_grad_hook(held.is_gradient)
        for parameter in net.parameters()
        if parameter.requires_grad
    ]
    batch, labels = torch.empty(images, *IMAGE_SHAPE), torch.zeros(images, dtype=torch.int64)
    with held:
        with torch.autocast("cpu", torch.bfloat16) if computes == "autocast" else nullcontext():
            scores = net(batch.bfloat16() if computes == "cast" else batch)
        loss = F.cross_entropy(scores.float(), labels)
        for gate in gates(net):
            assert gate.routing is not None
            loss = loss + gate.routing.load_balance_loss
        saved = held.now["activation"]
        loss.backward()
    for hook in hooks:
        hook.remove()
    net.zero_grad()
    return Bytes(saved, own + held.peak, held.peak_of_activations)


def measure(run: Run, micro_batch: int, computes: Computes) -> Line:
    """Measures the activations of a run, by images.

    Args:
        run: to plan.
        micro_batch: images; measured at this size and at twice as many.
        computes: the format.

    Raises:
        UsageError: activation checkpointing finds no blocks, or a model of another package cannot be counted.
    """
    few = max(2, micro_batch)  # batch normalisation takes no single image
    with FakeTensorMode():
        net = _fake(run, torch.bfloat16 if computes == "cast" else torch.float32)
        if run.config.activation_checkpointing:
            checkpoint_blocks(net)
        try:
            small, large = (_of_all_blocks(net, images, computes) for images in (few, 2 * few))
        except Exception as error:  # any: a model of another package may do anything without values
            if ":" not in run.config.model.name:
                raise
            raise UsageError(
                f"--model {run.config.model.name}: its activations cannot be counted without values "
                f"({textwrap.shorten(str(error), 120, placeholder=' ...')}): name a strategy and train"
            ) from error
    return Line(2 * small.activations - large.activations, (large.activations - small.activations) / few)


def _own_bytes(net: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))


def _fake(run: Run, dtype: torch.dtype) -> nn.Module:
    """Builds the run's model without values on the CPU, in a format; to be called in a FakeTensorMode.

    It is built on the meta device first: some models of other packages read values as they are built, which
    FakeTensorMode refuses (torch 2.15).
    """
    with unset_fake_temporarily():
        net = on_meta(run.config.model, run.num_classes, run.config.trainable, run.config.lora)
    made: dict[int, Tensor] = {}

    def of(tensor: Tensor) -> Tensor:
        """Returns the same tensor for a tensor that layers share."""
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for module in net.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: of(tensor) for name, tensor in tensors.items() if tensor is not None})  # pyright: ignore
    return net


def _of_all_blocks(net: nn.Module, images: int, computes: Computes) -> Bytes:
    """Counts as `counted` does, but of identical blocks only two and three: each further block adds as much (to the
    byte for vit_13b, whose 41 blocks take 15 times as long)."""
    blocks = getattr(net, "blocks", None)
    if not isinstance(blocks, nn.Sequential) or len(blocks) <= 3 or len({*map(_kind, blocks)}) > 1:
        return counted(net, images, computes)
    try:
        net.blocks = blocks[:2]
        two = counted(net, images, computes)
        net.blocks = blocks[:3]
        three = counted(net, images, computes)
    finally:
        net.blocks = blocks
    return Bytes(
        *(at_two + (len(blocks) - 2) * (at_three - at_two) for at_two, at_three in zip(two, three, strict=True))
    )


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What two blocks must have in common to hold the same activations."""
    modules = tuple((type(module), module.extra_repr()) for module in block.modules())
    return modules, tuple((parameter.shape, parameter.requires_grad) for parameter in block.parameters())


def format_of(spec: Spec, precision: str) -> Computes:
    """Returns the format in which a model computes under a strategy."""
    if precision == "32-true":
        return "float32"
    return "cast" if precision == "bf16-true" or spec.casts else "autocast"
