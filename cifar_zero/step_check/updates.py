"""Compares the updates of the strategy's optimizer with the updates that torch's optimizer makes on copies."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cifar_zero.step_check.findings import Findings, norm_of, off_by
from cifar_zero.strategies.hooks import Hooks, Updated, local_of

UPDATE = 1e-4
"""Relative error that a different order of float32 operations may cause in an update, an optimizer's state or a norm.
Correct engines are off by up to 4e-6. DeepSpeed's Adam on the CPU keeps 1 - beta2 in float32, which is off by up
to 6e-5."""


@dataclass
class Expected:
    """Holds the update that torch's optimizer makes to one tensor."""

    names: list[str]  # the plain model's names of its parameters
    updated: Updated
    before: Tensor
    twin: Tensor  # the copy after the update
    state: Mapping[str, Any]  # state of torch's optimizer after the update
    used: Tensor  # bool; False for padding, which may have any value

    @property
    def name(self) -> str:
        """Returns the parameter's name, or the names of the first and the last of several parameters."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"

    def compare(self, findings: Findings) -> None:
        """Compares each value that the strategy has updated. Must be called after the step."""
        tensors = self.updated.target.detach(), self.before, self.twin
        target, before, twin = (local_of(tensor)[self.used] for tensor in tensors)
        findings.add("update", self.name, *update_error(target, before, twin), target.numel())
        for key, value in self.state.items():
            found, name = self.updated.state.get(key), f"{key} of {self.name}"
            if isinstance(value, Tensor) and value.dim():
                same = isinstance(found, Tensor) and found.shape == value.shape
                off = off_by(local_of(found)[self.used], local_of(value)[self.used]) if same else math.inf
                findings.add("state", name, off, UPDATE, value.numel())
            elif isinstance(value, (Tensor, int, float)):
                same = found is not None and float(found) == float(value)
                findings.add("state", name, 0.0 if same else math.inf, 0.0)


def update_error(found: Tensor, before: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Returns the error of an update and its bound, both as shares of the update's norm. `found` and `wanted` are the
    weights after the update. If they should not have changed, because the learning rate is 0 for example, the bound is
    0."""
    if torch.equal(wanted, before):
        return off_by(found, before), 0.0
    update = (wanted - before).double()
    rounding = torch.finfo(found.dtype).eps * float(before.double().norm() / update.norm())
    return off_by((found - before).double(), update), UPDATE + rounding


def clip_factor(gradients: Mapping[str, Tensor], limit: float) -> float:
    """Returns the factor that clips the gradients to the norm `limit`. A `limit` of 0 means that gradients are not
    clipped, and the factor is 1."""
    return min(1.0, limit / (norm_of(gradients) + 1e-6)) if limit else 1.0


def parameters_of(hooks: Hooks, module: nn.Module) -> dict[str, Any]:
    """Returns this rank's parameters by the plain model's names."""
    parameters = dict(module.named_parameters())
    return {plain: parameters[name] for name, plain in hooks.plain_names(parameters).items()}


def updated_by(
    hooks: Hooks, module: nn.Module, optimizer: Any, at_any_step: bool = False
) -> Iterator[tuple[Updated, list[str]]]:
    """Yields each tensor of `Hooks.updated` with the plain model's names of its parameters."""
    names = {id(parameter): name for name, parameter in parameters_of(hooks, module).items()}
    for updated in hooks.updated(optimizer, at_any_step):
        yield updated, [names[id(each)] for each in updated.parameters]


def expected_updates(
    hooks: Hooks,
    module: nn.Module,
    optimizer: Any,
    gradients: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> Iterator[Expected]:
    """Yields the updates that copies of the optimizer make to this rank's share of the weights.

    Args:
        hooks: Hooks of the strategy.
        module: The module that the strategy trains.
        optimizer: Lightning's optimizer.
        gradients: Unsharded, clipped float32 gradients by name. Frozen weights have none.
        weights: Unsharded weights before the step, by name.
    """
    for updated, own in updated_by(hooks, module, optimizer):
        if not any(name in gradients for name in own):  # frozen
            continue
        before = updated.target.detach().clone()
        twin = nn.Parameter(before.clone())
        # An engine may keep a frozen weight and trained weights in one tensor.
        twin.grad = laid(updated, [gradients.get(name, torch.zeros_like(weights[name])) for name in own])
        used = local_of(laid(updated, [torch.ones_like(weights[name]) for name in own])).bool()
        yield Expected(own, updated, before, twin.detach(), torch_step(updated, twin), used)


def torch_step(updated: Updated, twin: nn.Parameter, state: dict[str, Any] | None = None) -> Mapping[str, Any]:
    """Updates `twin`, a copy of one of the optimizer's tensors, in place with torch's optimizer. Returns the
    optimizer's state of `twin` after the update. `state` replaces the state before the update."""
    optimizer = updated.optimizer_of(twin)
    if state is not None:
        optimizer.state[twin] = state
    kind = type(optimizer)
    with torch.no_grad():
        # The unwrapped step does not run the hooks that torch adds to the class, and a scheduler to the instance.
        getattr(kind.step, "__wrapped__", kind.step)(optimizer)
    return optimizer.state.get(twin, {})


def laid(updated: Updated, wholes: list[Tensor]) -> Tensor:
    """Returns this rank's part of the unsharded tensors of the parameters, in the layout of the optimizer's tensor.
    Padding is 0."""
    part: Any = updated.cut(wholes)
    part = part.to(updated.target.device, updated.target.dtype)
    if part.numel() == updated.target.numel():
        return part.view_as(updated.target)
    flat = torch.zeros_like(updated.target)
    flat[: part.numel()].copy_(part)
    return flat
