"""Repeats slices of the optimizer's updates with torch's optimizer."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepcheck.bounds import UPDATE

SLICE = 1024
"""Elements of each tensor of the optimizer whose update is repeated in a step. Slices lie at random positions, so that
they cover every element in time."""

ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adamax", "Adadelta", "Rprop", "ASGD")
"""Classes of torch.optim whose update of an element depends on no other element."""

Report = Callable[[str, Tensor, Callable[[], str]], None]
"""Takes the kind of a value, the shares of its tolerance that errors use, one for each tensor, and what words them."""


def torch_class(optimizer: Any) -> Any:
    """Returns the class of torch.optim that computes the updates of an optimizer element by element, or None."""
    kind = type(optimizer)
    if kind.__name__ in ("DeepSpeedCPUAdam", "FusedAdam"):
        return torch.optim.AdamW if optimizer.adam_w_mode else torch.optim.Adam
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
    return getattr(torch.optim, kind.__name__) if known else None


class UpdateCheck:
    """Compares each update of an optimizer with the update that torch's optimizer makes to copies of slices."""

    def __init__(self, view: Any, name: Callable[[Tensor], str]):
        self.view, self.name = view, name
        self.kind = torch_class(view.optimizer)
        self.coin = random.Random(0)
        self.known = self.kind([torch.zeros(1)]).defaults.keys() if self.kind else ()
        self.targets: list[Tensor] = []  # of the running update
        self.slices: list[slice] = []
        self.before: list[Tensor] = []
        self.copies: list[nn.Parameter] = []
        self.copied: Any = None  # torch's optimizer of the copies, after the update
        self.kept: dict[int, tuple[slice, dict[str, Tensor]]] = {}  # what the last update left, by id of the tensor

    def forget(self) -> None:
        """Forgets what the last update left, before a checkpoint is loaded."""
        self.kept = {}

    def begin(self, optimizer: Any, report: Report) -> None:
        """Updates copies of slices, before the optimizer updates its tensors. Compares weights and state with what the
        last update left."""
        self.targets, self.slices, self.copies = [], [], []
        if not self.kind:
            return
        groups, states = [], []
        names, found, left = [], [], []
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key in self.known and key not in ("fused", "foreach")}
            steps = [float(optimizer.state[each]["step"]) for each in group["params"] if "step" in optimizer.state.get(each, {})]
            for target in group["params"]:
                if target.grad is None:
                    continue
                state = {key: value for key, value in optimizer.state.get(target, {}).items() if value is not None}
                if id(target) in self.kept:
                    part, kept = self.kept.pop(id(target))
                    for key, value in kept.items():
                        now = target if key == "weight" else state.get(key)
                        names.append((key, target))
                        left.append(value)
                        found.append(self._slice(now, part) if now is not None else torch.full_like(value, torch.inf))
                part = self._choose(target)
                copy = nn.Parameter(self._slice(target, part))
                copy.grad = self._slice(target.grad, part).to(copy.dtype)
                own = {key: self._slice(value, part) for key, value in state.items()}
                if "step" in own:  # FusedAdam counts only in the state of a group's last tensor
                    own["step"] = torch.tensor(max(steps))
                groups.append({**options, "params": [copy]})
                states.append(own)
                self.targets.append(target)
                self.slices.append(part)
                self.copies.append(copy)
        if left:
            errors = distances(found, left).nan_to_num(nan=torch.inf)
            report("state", 2.0 * (errors > 0), lambda: self._changed(names, errors))
        if not groups:
            return
        self.before = [copy.detach().clone() for copy in self.copies]
        self.copied = self.kind(groups)
        for copy, state in zip(self.copies, states, strict=True):
            if state:
                self.copied.state[copy] = state
        with torch.no_grad():
            # The unwrapped step calls no hooks, neither of the class nor of an audit.
            getattr(self.kind.step, "__wrapped__", self.kind.step)(self.copied)

    def end(self, optimizer: Any, report: Report) -> None:
        """Compares the optimizer's tensors and state with the copies, after its update."""
        if not self.targets:
            return
        new = [self._slice(target, part) for target, part in zip(self.targets, self.slices, strict=True)]
        expected = [copy.detach() for copy in self.copies]
        errors, moved = distances(new, expected), distances(expected, self.before)
        size = torch.stack(torch._foreach_norm(self.before)).double().nan_to_num(0)
        rounding = torch.finfo(new[0].dtype).eps * size.to(errors.device)
        targets = self.targets
        report("update", errors / (UPDATE * moved + rounding + 1e-30), lambda: self._wrong(targets, errors, moved))
        states = [optimizer.state.get(target, {}) for target in targets]
        for key in {key for state in self.copied.state.values() for key, value in state.items() if _is_vector(value)}:
            pairs = [
                (self._slice(state[key], part) if key in state else torch.full_like(own[key], torch.inf), own[key])
                for state, part, copy in zip(states, self.slices, self.copies, strict=True)
                if _is_vector((own := self.copied.state.get(copy, {})).get(key))
            ]
            names = [(key, target) for target, copy in zip(targets, self.copies, strict=True)
                     if _is_vector(self.copied.state.get(copy, {}).get(key))]
            errors_of_state = distances([a for a, _ in pairs], [b for _, b in pairs])
            sizes = torch.stack(torch._foreach_norm([b.nan_to_num(0) for _, b in pairs])).double()
            report("state", errors_of_state / (UPDATE * sizes.to(errors_of_state.device) + 1e-30),
                   lambda names=names, errors=errors_of_state: self._changed(names, errors, "wrong after the update"))
        for target, part, weight, state in zip(targets, self.slices, new, states, strict=True):
            self.kept[id(target)] = part, {"weight": weight, **{
                key: self._slice(value, part) for key, value in state.items() if _is_vector(value)
            }}
        self.targets, self.copied = [], None

    def _choose(self, target: Tensor) -> slice:
        size = self.view.local(target).numel()
        first = self.coin.randrange(max(1, size - SLICE + 1))
        return slice(first, min(first + SLICE, size))

    def _slice(self, value: Any, part: slice) -> Tensor:
        """Returns a copy of a part of a tensor; of a number, the number."""
        if not isinstance(value, Tensor):
            return torch.as_tensor(value)
        local = self.view.local(value).detach()
        return local.reshape(-1)[part].clone() if local.dim() else local.clone()

    def _changed(self, names: list[tuple[str, Tensor]], errors: Tensor, how: str = "not what the last update left") -> str:
        key, target = names[int(errors.nan_to_num(nan=torch.inf).argmax())]
        return f"{key} of {self.name(target)} is {how}"

    def _wrong(self, targets: list[Tensor], errors: Tensor, moved: Tensor) -> str:
        shares = errors / moved.clamp(min=1e-30)
        worst = int(shares.nan_to_num(nan=torch.inf).argmax())
        return f"the update of {self.name(targets[worst])} is off by {float(shares[worst]):.2g} of its norm"


def _is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def distances(some: list[Tensor], others: list[Tensor]) -> Tensor:
    """Returns the norm of the difference of each pair of tensors, float64. Equal values that are not finite differ by
    0, because padding may be NaN."""
    some, others = ([each.nan_to_num(0, 0, 0) if each.is_floating_point() else each for each in one] for one in (some, others))
    return torch.stack([each.double() for each in torch._foreach_norm(torch._foreach_sub(some, others))])
