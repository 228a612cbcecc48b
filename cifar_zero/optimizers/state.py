"""Fits the optimizer state of a checkpoint to the optimizer that continues with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer


def keep_own_options(optimizer: Optimizer, state: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Returns the state of another implementation, device or grouping with this optimizer's options and groups.

    Only the learning rate, which a schedule has moved, is the checkpoint's.

    Args:
        optimizer: that continues.
        state: as torch's `Optimizer.state_dict` has it.
        order: names of the parameters in the model's order, in which those of a single group are numbered.
    """
    if _names(state["param_groups"]) != _names(optimizer.param_groups):
        state = _regrouped(state, [group.get("param_names", order) for group in optimizer.param_groups], order)
    groups = [
        {**own, **{key: saved[key] for key in ("lr", "initial_lr", "params") if key in saved}}
        for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    return {**state, "param_groups": groups}


def lay_like_parameters(optimizer: Optimizer) -> None:
    """Gives a loaded state the strides of its parameters: torch's fused updates walk through both in memory order."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if getattr(value, "shape", None) == parameter.shape and value.stride() != parameter.stride():
                state[key] = value.new_empty(value.shape).as_strided(value.shape, parameter.stride()).copy_(value)


def numbers_by_name(groups: Sequence[dict[str, Any]], order: Sequence[str]) -> dict[str, int]:
    """Returns the number that each parameter has in the groups of a checkpoint's optimizer; see `keep_own_options`."""
    numbers = chain(*(group["params"] for group in groups))
    return dict(zip(chain(*(group.get("param_names", order) for group in groups)), numbers, strict=True))


def groups_by_name(groups: Sequence[dict[str, Any]], order: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the group of each parameter: some have a learning rate of their own; see `keep_own_options`."""
    return {name: group for group in groups for name in group.get("param_names", order)}


def _names(groups: Sequence[dict[str, Any]]) -> list[Any]:
    return [group.get("param_names") for group in groups]


def _regrouped(state: dict[str, Any], wanted: list[Sequence[str]], order: Sequence[str]) -> dict[str, Any]:
    before, saved = numbers_by_name(state["param_groups"], order), state["state"]
    now = {name: number for number, name in enumerate(chain(*wanted))}
    groups_before = groups_by_name(state["param_groups"], order)
    first: dict[str, Any] = state["param_groups"][0]
    groups = [
        {**groups_before.get(next(iter(names), ""), first), "params": [now[name] for name in names]} for names in wanted
    ]
    known = {number: saved[before[name]] for name, number in now.items() if before.get(name) in saved}
    return {**state, "state": known, "param_groups": groups}
