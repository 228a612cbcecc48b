"""Compares the updates that the strategy's optimizer makes in a step with those that torch's optimizer makes on
copies."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cifar_zero.step_check.verdict import Kind
from cifar_zero.strategies.hooks import Hooks, Updated, local_of

UPDATE = 1e-4
"""Relative error that another order of the same float32 arithmetic may cause in an update, an optimizer's state or a
norm. Correct engines are off by up to 4e-6. DeepSpeed's Adam on the CPU keeps 1 - beta2 in float32, which is off by up
to 6e-5."""


@dataclass
class Expected:
    """The update that torch's optimizer makes to one tensor."""

    names: list[str]  # the plain model's names of its parameters
    updated: Updated
    before: Tensor
    twin: Tensor  # the copy after the update
    state: Mapping[str, Any]  # state of torch's optimizer after the update
    used: Tensor  # bool; False for padding, which may have any value

    @property
    def name(self) -> str:
        """The names of the first and the last parameter."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"

    def compared(self) -> Iterator[tuple[Kind, str, float, float, int]]:
        """Yields kind, name, error, bound and number of elements of each value that the strategy updated. To be called
        after the step."""
        tensors = self.updated.target.detach(), self.before, self.twin
        target, before, twin = (local_of(tensor)[self.used] for tensor in tensors)
        wanted = (twin - before).double()
        if not wanted.any():  # a rate of 0, for example
            yield "update", self.name, off_by(target, before), 0.0, target.numel()
            return
        size = float(wanted.norm())
        off = float(((target - before).double() - wanted).norm()) / size
        rounding = torch.finfo(target.dtype).eps * float(before.double().norm()) / size
        yield "update", self.name, off, UPDATE + rounding, target.numel()
        for key, value in self.state.items():
            found, name = self.updated.state.get(key), f"{key} of {self.name}"
            if isinstance(value, Tensor) and value.dim():
                same = isinstance(found, Tensor) and found.shape == value.shape
                off = off_by(local_of(found)[self.used], local_of(value)[self.used]) if same else math.inf
                yield "state", name, off, UPDATE, value.numel()
            elif isinstance(value, (Tensor, int, float)):
                same = found is not None and float(found) == float(value)
                yield "state", name, 0.0 if same else math.inf, 0.0, 1


def expected_updates(
    hooks: Hooks,
    optimizer: Any,
    names: Mapping[int, str],
    gradients: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> Iterator[Expected]:
    """Yields the updates that copies of the optimizer make to this rank's share of the weights.

    Args:
        hooks: Hooks of the strategy.
        optimizer: Lightning's optimizer.
        names: The plain model's name of each parameter, by its id.
        gradients: Unsharded, clipped float32 gradients by name. Frozen weights have none.
        weights: Unsharded weights before the step, by name.
    """
    for updated in hooks.updated(optimizer):
        own = [names[id(each)] for each in updated.parameters]
        if not any(name in gradients for name in own):  # frozen
            continue
        before = updated.target.detach().clone()
        twin = torch.nn.Parameter(before.clone())
        # An engine may keep a frozen weight next to trained ones.
        twin.grad = laid(updated, [gradients.get(name, torch.zeros_like(weights[name])) for name in own])
        used = local_of(laid(updated, [torch.ones_like(weights[name]) for name in own])).bool()
        yield Expected(own, updated, before, twin.detach(), torch_step(updated, twin), used)


def torch_step(updated: Updated, twin: torch.nn.Parameter, state: dict[str, Any] | None = None) -> Mapping[str, Any]:
    """Updates `twin`, a copy of one of the optimizer's tensors, in place with torch's optimizer, and returns the
    optimizer's state of it afterwards. `state` replaces the state from which the update starts."""
    optimizer = updated.optimizer_of(twin)
    if state is not None:
        optimizer.state[twin] = state
    kind = type(optimizer)
    with torch.no_grad():
        # Without the hooks that torch wraps around the class's step, and a scheduler around the instance's step.
        getattr(kind.step, "__wrapped__", kind.step)(optimizer)
    return optimizer.state.get(twin, {})


def laid(updated: Updated, wholes: list[Tensor]) -> Tensor:
    """Returns this rank's part of unsharded tensors of the parameters, laid out as the optimizer's tensor, with 0 as
    padding."""
    part: Any = updated.cut(wholes)
    part = part.to(updated.target.device, updated.target.dtype)
    if part.numel() == updated.target.numel():
        return part.view_as(updated.target)
    flat = torch.zeros_like(updated.target)
    flat[: part.numel()].copy_(part)
    return flat


def off_by(found: Tensor, wanted: Tensor) -> float:
    """Returns the norm of the difference of two tensors, divided by the norm of `wanted`, or 0 if they are equal bit by
    bit."""
    if torch.equal(found, wanted):
        return 0.0
    wanted = wanted.double()
    return float((found.double() - wanted).norm()) / max(float(wanted.norm()), 1e-30)
