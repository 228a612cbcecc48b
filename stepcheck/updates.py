"""Repeats slices of the optimizer's updates with torch's optimizer."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stepcheck.bounds import UPDATE
from stepcheck.engines.plain import fused_scale, overflows
from stepcheck.sketch import dense
from stepcheck.verdict import Kind

SLICE = 1024
"""The most elements of a tensor of the optimizer whose update is repeated in a step. Slices lie at random positions, so
that over many steps they cover every element."""

ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adamax", "Adadelta", "Rprop", "ASGD")
"""Classes of torch.optim whose update of an element depends on no other element."""


def _own_step(optimizer_class: Any) -> Callable[[Any], Any]:
    """Returns the step of a class of torch.optim without the hooks that torch adds when an optimizer is built."""
    step = optimizer_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


TORCH_STEPS = {name: _own_step(getattr(torch.optim, name)) for name in ELEMENTWISE}
"""The steps of torch's classes as they are when this module is imported, before a script or an engine replaces them."""

Report = Callable[[Kind, Tensor, Callable[[], str]], None]
"""Takes a kind, error / tolerance of each compared value, and a function that returns what is wrong with the worst."""

Pair = tuple[str, Tensor | None, Tensor]
"""The name of a value, the actual value or None if it is missing, and the expected value."""


@dataclass(frozen=True)
class Slice:
    """A slice of a tensor that the optimizer updates, and a copy of the slice, which torch's optimizer updates."""

    target: Tensor
    name: str  # of the parameter
    part: slice  # of this rank's flattened part of the tensor, in real numbers
    before: Tensor  # the slice before the update
    copy: nn.Parameter


def torch_class(optimizer: Any) -> Any:
    """Returns the class of torch.optim that computes the same updates as an optimizer, each element on its own, or None
    if none is known."""
    own = type(optimizer)
    if not all(group.get("bias_correction", True) for group in optimizer.param_groups):  # an option of DeepSpeed's Adam
        return None
    if own.__name__ in ("DeepSpeedCPUAdam", "FusedAdam"):
        return torch.optim.AdamW if optimizer.adam_w_mode else torch.optim.Adam
    known = own.__module__.startswith("torch.optim") and own.__name__ in ELEMENTWISE
    return getattr(torch.optim, own.__name__) if known else None


class UpdateCheck:
    """Checks the updates of an optimizer: copies a random slice of each tensor before an update, lets torch's optimizer
    update the copies, and compares them with the slices after the update."""

    def __init__(self, adapter: Any):
        self.adapter = adapter
        self.optimizer_class = torch_class(adapter.optimizer)
        self.known = {*self.optimizer_class([torch.zeros(1)]).defaults} - {"foreach"} if self.optimizer_class else set()
        self.rng = random.Random(0)
        self.slices: list[Slice] = []  # of the running update
        self.expected_state: Any = {}  # of torch's optimizer after the update, by copy
        self.kept: dict[int, tuple[Slice, dict[str, Tensor]]] = {}  # what the last update left, by id of the target

    def reset(self) -> None:
        """Drops what the last update left. It is out of date once a checkpoint is loaded, or after steps that are not
        audited."""
        self.kept = {}

    def begin(self, optimizer: Any, report: Report) -> None:
        """Compares weights and state with what the last update has left, and updates copies of slices, before the
        optimizer updates its tensors. Does nothing if `torch_class` does not know the updates, or if the step will be
        left out because of an overflow."""
        self.slices = []
        if self.optimizer_class is None or overflows(optimizer):
            return
        scale = fused_scale(optimizer)
        self._compare_kept(optimizer, report)
        groups, states = [], {}
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key in self.known}
            for target in group["params"]:
                chosen = self._choose(target)
                if target.grad is None or chosen is None:
                    continue
                name, part = chosen
                copy = nn.Parameter(self._slice_of(target, part))
                copy.grad = self._slice_of(target.grad, part).to(copy.dtype) / scale
                self.slices.append(Slice(target, name, part, copy.detach().clone(), copy))
                groups.append({**options, "params": [copy]})
                state = optimizer.state.get(target, {})
                own = {key: self._slice_of(value, part) for key, value in state.items() if value is not None}
                if "step" in own and self.optimizer_class is not type(optimizer):
                    # FusedAdam counts steps only in the state of a group's last tensor (0.16 to 0.19.8).
                    own["step"] = torch.tensor(max(_steps(optimizer, group)), dtype=torch.float32, device="cpu")
                on_device = "step" in own and own["step"].device.type != "cpu"
                if on_device and "capturable" in self.known and not options.get("fused"):
                    groups[-1]["capturable"] = True  # otherwise torch would wait for the device to read the step
                if own:
                    states[copy] = own
        if groups:
            copied = self.optimizer_class(groups)
            copied.state.update(states)
            with torch.no_grad():
                TORCH_STEPS[self.optimizer_class.__name__](copied)
            self.expected_state = copied.state

    def end(self, optimizer: Any, report: Report) -> None:
        """Compares slices of the optimizer's tensors and state, after its update, with the copies that torch's
        optimizer has updated. Keeps these slices for the next `begin`."""
        if not self.slices:
            return
        actual = [self._slice_of(each.target, each.part) for each in self.slices]
        expected, before = [each.copy.detach() for each in self.slices], [each.before for each in self.slices]
        errors, shares = update_errors(actual, expected, before)
        names = [each.name for each in self.slices]
        report("update", shares, lambda: _wrong_update(names, errors))
        pairs: list[Pair] = []
        for each, weight in zip(self.slices, actual, strict=True):
            state = optimizer.state.get(each.target, {})
            left = {key: self._slice_of(value, each.part) for key, value in state.items() if _is_vector(value)}
            for key, value in self.expected_state.get(each.copy, {}).items():
                if _is_vector(value):
                    pairs.append((f"{key} of {each.name}", left.get(key), value))
            self.kept[id(each.target)] = each, {"weight": weight, **left}
        compare_pairs(pairs, report, "state", UPDATE, "is wrong after the update")
        self.slices, self.expected_state = [], {}

    def _compare_kept(self, optimizer: Any, report: Report) -> None:
        """Compares weights and state with their values after the last update. A difference is a fault, but only a note
        in what the script may change: the module's own weights, which it may clip, and all weights and states if it
        calls the optimizer itself."""
        engines: list[Pair] = []  # that only the engine may change
        scripts: list[Pair] = []  # that the script may change
        for target in (each for group in optimizer.param_groups for each in group["params"]):
            if target.grad is None or id(target) not in self.kept:
                continue
            last, left = self.kept.pop(id(target))
            now = {**optimizer.state.get(target, {}), "weight": target}
            own_weight = id(target) in self.adapter.index_of
            for key, value in left.items():
                actual = None if now.get(key) is None else self._slice_of(now[key], last.part)
                may_change = not self.adapter.owns_step or (key == "weight" and own_weight)
                (scripts if may_change else engines).append((f"{key} of {last.name}", actual, value))
        changed = "has changed since the last update"
        compare_pairs(engines, report, "state", 0.0, changed)
        compare_pairs(scripts, report, "note", 0.0, changed)

    def _choose(self, target: Tensor) -> tuple[str, slice] | None:
        """Returns the name of one parameter of which a target holds a part, and a random slice of the target within
        this part. The slice has at most SLICE elements and counts real numbers, of which a complex element has two.
        Padding is left out, because it may hold anything. Returns None for a target without parameters."""
        known = self.adapter.targets.get(id(target))
        parts = [part for part in known.parts if part.length] if known else []
        if not parts:
            return None
        part = self.rng.choices(parts, [each.length for each in parts])[0]
        first = part.offset + self.rng.randrange(max(1, part.length - SLICE + 1))
        last = min(first + SLICE, part.offset + part.length)
        numbers = 2 if target.is_complex() else 1  # in an element
        return self.adapter.names[part.index], slice(numbers * first, numbers * last)

    def _slice_of(self, value: Any, part: slice) -> Tensor:
        """Returns a copy of a slice of this rank's part of a tensor, flattened and as real numbers. A tensor without
        dimensions is copied whole, and a number is converted to a tensor."""
        if not isinstance(value, Tensor):
            return torch.as_tensor(value, device="cpu")
        local = dense(self.adapter.local(value).detach())
        return local.reshape(-1)[part].clone() if local.dim() else local.clone()


def compare_pairs(pairs: Sequence[Pair], report: Report, kind: Kind, tolerance: float, how: str) -> None:
    """Passes error / tolerance of each pair of tensors to `report`, with the name of the worst pair and `how`. The
    tolerance is relative to the norm of the expected tensor. A missing tensor has an infinite error."""
    if not pairs:
        return
    expected = [each for _, _, each in pairs]
    errors = distances([torch.full_like(each, torch.inf) if own is None else own for _, own, each in pairs], expected)
    shares = errors / (tolerance * norms(expected) + 1e-30)
    report(kind, shares, lambda: f"{pairs[_largest(shares)][0]} {how}")


def update_errors(actual: list[Tensor], expected: list[Tensor], before: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the error of each updated tensor relative to the norm of its update, and relative to its tolerance, each
    float64 (tensors,)."""
    errors, moved = distances(actual, expected), distances(expected, before)
    rounding = norms([torch.finfo(each.dtype).eps * each.float() for each in before])
    return errors / moved.clamp(min=1e-30), errors / (UPDATE * moved + rounding + 1e-30)


def _wrong_update(names: list[str], errors: Tensor) -> str:
    worst = _largest(errors)
    return f"the update of {names[worst]} is off by {float(errors[worst]):.2g} of its norm"


def _largest(values: Tensor) -> int:
    return int(values.nan_to_num(nan=torch.inf).argmax())


def _steps(optimizer: Any, group: dict[str, Any]) -> Iterator[float]:
    states = (optimizer.state.get(each, {}) for each in group["params"])
    return (float(state["step"]) for state in states if "step" in state)


def _is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def norms(tensors: list[Tensor]) -> Tensor:
    """Returns the norm of each tensor, float64, on the device of the first. Elements that are not finite count as 0."""
    finite = [each.float().nan_to_num(0, 0, 0) for each in tensors]
    return torch.stack([torch.linalg.vector_norm(each).to(tensors[0].device) for each in finite]).double()


def distances(some: list[Tensor], others: list[Tensor]) -> Tensor:
    """Returns the norm of the difference of each pair of tensors, float64. Two non-finite elements count as equal. If
    only one is not finite, the difference is the other element."""
    return norms([a.nan_to_num(0, 0, 0) - b.nan_to_num(0, 0, 0) for a, b in zip(some, others, strict=True)])
