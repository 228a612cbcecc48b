"""Compares the updates of the strategy's optimizer with the updates that torch's optimizer makes on copies."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cifar_zero.step_check.findings import Findings, norm_of, off_by
from cifar_zero.strategies.hooks import Hooks, Updated, local_of

UPDATE = 1e-4
"""Relative error that a different order of float32 operations may cause in an update, in an optimizer's state or in the
gradient norm. Correct engines have errors of up to 4e-6. DeepSpeed's Adam on the CPU has errors of up to 6e-5, because
it keeps 1 - beta2 in float32."""


@dataclass
class Expected:
    """Holds the update that torch's optimizer makes to one tensor."""

    names: list[str]  # the plain model's names of its parameters
    updated: Updated
    before: Tensor
    twin: Tensor  # the copy after the update
    state: Mapping[str, Any]  # state of torch's optimizer after the update
    used: Tensor  # bool; False for padding, which may have any value
    why: str = ""  # why a strategy may make another update
    not_judged: str = ""  # why the update cannot be judged

    @property
    def name(self) -> str:
        """Returns the parameter's name, or the names of the first and the last of several parameters."""
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"

    def compare(self, findings: Findings) -> None:
        """Compares the strategy's update and optimizer state with the update and state of torch's optimizer, and adds
        the results to `findings`. Must be called after the step."""
        tensors = self.updated.target.detach(), self.before, self.twin
        target, before, twin = (local_of(tensor)[self.used] for tensor in tensors)
        if self.not_judged:
            findings.verdict.note(self.not_judged)
            findings.add("update", self.name, 0.0, math.inf, target.numel())
            return
        off, allowed = update_error(target, before, twin)
        findings.add("update", self.name, off, allowed, target.numel(), self.why if off > allowed else "")
        for key, value in self.state.items():
            found, name = self.updated.state.get(key), f"{key} of {self.name}"
            if isinstance(value, Tensor) and value.dim():
                same = isinstance(found, Tensor) and found.shape == value.shape
                # A factored optimizer, such as Adafactor, keeps state in other shapes than the tensor's.
                used = self.used if local_of(value).shape == self.used.shape else ...
                off = off_by(local_of(found)[used], local_of(value)[used]) if same else math.inf
                findings.add("state", name, off, UPDATE, value.numel())
            elif isinstance(value, (Tensor, int, float)):
                same = found is not None and float(found) == float(value)
                findings.add("state", name, 0.0 if same else math.inf, 0.0)


def update_error(found: Tensor, before: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Returns the error of an update and the bound of this error, both as shares of the update's norm. If the weights
    should not have changed, for example because the learning rate is 0, the bound is 0.

    Args:
        found: The weights after the update to check.
        before: The weights before the update.
        wanted: The weights after the correct update.
    """
    if torch.equal(wanted, before):
        return off_by(found, before), 0.0
    update = (wanted - before).double()
    rounding = torch.finfo(found.dtype).eps * float(before.double().norm() / update.norm())
    return off_by((found - before).double(), update), UPDATE + rounding


def clip_factor(gradients: Mapping[str, Tensor], limit: float) -> float:
    """Returns the factor by which the gradients must be multiplied to clip their norm to `limit`. A `limit` of 0 means
    that gradients are not clipped, and the factor is 1."""
    return min(1.0, limit / (norm_of(gradients) + 1e-6)) if limit else 1.0


def parameters_of(hooks: Hooks, module: nn.Module) -> dict[str, Any]:
    """Returns this rank's parameters, keyed by their names in the plain model."""
    parameters = dict(module.named_parameters())
    return {plain: parameters[name] for name, plain in hooks.plain_names(parameters).items()}


def updated_by(
    hooks: Hooks, module: nn.Module, optimizer: Any, at_any_step: bool = False
) -> Iterator[tuple[Updated, list[str]]]:
    """Yields each tensor that `Hooks.updated` yields, with the names of its parameters in the plain model."""
    names = {id(parameter): name for name, parameter in parameters_of(hooks, module).items()}
    for updated in hooks.updated(optimizer, at_any_step):
        yield updated, [names[id(each)] for each in updated.parameters]


def expected_updates(
    hooks: Hooks,
    module: nn.Module,
    optimizer: Any,
    gradients: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    options: Mapping[str, Mapping[str, Any]],
    why: str = "",
) -> Iterator[Expected]:
    """Yields the updates that torch's optimizer makes to copies of this rank's share of the weights.

    Args:
        hooks: Hooks of the strategy.
        module: The module that the strategy trains.
        optimizer: Lightning's optimizer.
        gradients: Unsharded, clipped float32 gradients by name. Frozen weights have none.
        weights: Unsharded weights before the step, by name.
        options: The options that the optimizer must have, by the name of the weight. Options that are missing are taken
            from the strategy's optimizer.
        why: See `Expected`.
    """
    for updated, own in updated_by(hooks, module, optimizer):
        if not any(name in gradients for name in own):  # frozen
            continue
        group = {key: options.get(own[0], {}).get(key, value) for key, value in updated.group.items()}
        updated = replace(updated, group=group)
        before = updated.target.detach().clone()
        used = local_of(laid(updated, [torch.ones_like(weights[name]) for name in own])).bool()
        # An engine may keep a frozen weight and trained weights in one tensor.
        wholes = [gradients.get(name, torch.zeros_like(weights[name])) for name in own]
        is_whole = len(own) == 1 and updated.target.shape == hooks.shape(updated.parameters[0])
        if is_whole or is_elementwise(updated):
            twin = nn.Parameter(before.clone())
            twin.grad = laid(updated, wholes)
            yield Expected(own, updated, before, twin.detach(), torch_step(updated, twin), used, why)
            continue
        kind = type(updated.optimizer).__name__
        if updated.state:  # the state of a flat part says nothing about the state of whole tensors
            reason = f"the update of {kind}, which is not known to be elementwise"
            yield Expected(own, updated, before, before, {}, used, not_judged=reason)
            continue
        after: list[Tensor] = []
        for name, gradient in zip(own, wholes, strict=True):
            whole = nn.Parameter(weights[name].to(before.device, before.dtype, copy=True))
            whole.grad = gradient.to(whole)
            if name in gradients:
                torch_step(updated, whole)
            after.append(whole.detach())
        why = why or f"{kind} needs whole tensors, and gets flat parts of them"
        yield Expected(own, updated, before, laid(updated, after), {}, used, why)


def is_elementwise(updated: Updated) -> bool:
    """Returns whether the optimizer updates each element of a tensor without looking at the other elements, so that the
    update of a flat part is that part of the whole update. Two steps on a small matrix, and on flat parts of it, tell.
    """
    if type(updated.optimizer) is torch.optim.Adagrad:  # makes its state in its constructor, and cannot be tried
        return True
    generator = torch.Generator(updated.target.device).manual_seed(0)
    like = {"generator": generator, "device": updated.target.device}
    sizes = 1 + torch.arange(48, device=updated.target.device)  # so that the norms of the parts differ
    weights, *gradients = (sizes * torch.randn(48, **like) for _ in range(3))

    def update(*shape: int, part: slice) -> Tensor:
        twin = nn.Parameter(weights[part].reshape(shape).clone())
        group = {**updated.group, "lr": 0.1}  # the rate may be 0
        state: dict[str, Any] = {}
        for gradient in gradients:
            twin.grad = gradient[part].reshape(shape).clone()
            torch_step(replace(updated, target=twin, group=group), twin, state)
        return twin.detach().flatten() - weights[part]

    try:
        flat = torch.cat([update(-1, part=slice(20)), update(-1, part=slice(20, 48))])
        return off_by(flat, update(6, 8, part=slice(48))) < UPDATE
    except Exception:  # the optimizer may be a user's, with any requirements
        return False


def torch_step(updated: Updated, twin: nn.Parameter, state: dict[str, Any] | None = None) -> Mapping[str, Any]:
    """Updates a copy of one of the strategy's tensors in place, with torch's optimizer, and returns the optimizer state
    of the copy after the update.

    Args:
        updated: The tensor, as the strategy's optimizer updates it.
        twin: The copy, with its gradient.
        state: Optimizer state before the update, which replaces the strategy's state.
    """
    optimizer = updated.optimizer_of(twin)
    if state is not None:
        optimizer.state[twin] = state
    kind = type(optimizer)
    with torch.no_grad():
        # The unwrapped step does not run the hooks that torch adds to the class, and a scheduler to the instance.
        getattr(kind.step, "__wrapped__", kind.step)(optimizer)
    return optimizer.state.get(twin, {})


def laid(updated: Updated, wholes: list[Tensor]) -> Tensor:
    """Returns this rank's part of unsharded tensors, in the layout of the optimizer's tensor `updated.target`. Padding
    is 0.

    Args:
        updated: The optimizer's tensor, which holds this rank's part of one or more parameters.
        wholes: An unsharded tensor for each of these parameters.
    """
    part: Any = updated.cut(wholes)
    part = part.to(updated.target.device, updated.target.dtype)
    if part.numel() == updated.target.numel():
        return part.view_as(updated.target)
    flat = torch.zeros_like(updated.target)
    flat[: part.numel()].copy_(part)
    return flat
