"""Computes steps on a plain, unsharded copy of a module, which was made before an engine changed the module."""

import copy
import gc
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from stepcheck.engines.adapter import hookable_parts, plain_name, same_values, tensors_in
from stepcheck.replay.exact import Exact, to_float64
from stepcheck.replay.random_state import set_random_state

PLAIN = (int, float, complex, str, bytes, NoneType, Enum, torch.dtype, torch.device)

FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)

NO_DATA = (nn.Module, Dataset, DataLoader, ModuleType, type, *FUNCTIONS)
"""Types of attributes that have no data, or data sets, which are too large to copy in each micro-batch."""

LARGEST = 2**26
"""An attribute with a tensor or array of more bytes, such as a data set, is not copied in each micro-batch."""

State = dict[str, dict[str, Any]]
"""Attributes of modules that are data (see `_data_in`), by the module's name."""


class Computed:
    """The values that this rank computes in one or more micro-batches of a step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}  # added up, in float32 or wider
        self.summands: dict[str, Tensor] = {}  # norms of the gradients of all micro-batches, added up
        self.buffers: dict[str, Tensor] = {}  # after the step
        self.outputs: list[tuple[str, Tensor]] = []  # of the submodules, in the order of their calls

    def add(self, name: str, gradient: Tensor) -> None:
        value = gradient.detach()
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        if name in self.gradients:
            self.gradients[name] += value
            self.summands[name] += value.norm()
        else:
            self.gradients[name], self.summands[name] = value.clone(), value.norm()


@dataclass
class MicroBatch:
    """A micro-batch, and what its forward pass begins with."""

    compute: Callable[..., Tensor]  # takes the module and `arguments`, and returns the loss
    arguments: tuple[Any, ...]
    random_state: dict[str, Any]
    state: State
    changed: dict[str, Tensor] | None = None
    """The weights and buffers that differ from those that `PlainCopy.keep` has saved. None: the copy keeps its own."""
    synced: dict[str, Tensor] = field(default_factory=dict)
    """The buffers that the forward pass has got from another rank."""


class PlainCopy:
    """Computes micro-batches again. Between two replays its weights keep their shapes but use no memory."""

    def __init__(self, module: nn.Module, internal: Collection[str] = ()):
        """Takes a deep copy of a module, made before an engine or wrapper is built of the module. Frees the memory of
        the copy's weights.

        Args:
            internal: Names of attributes of the outermost module that a replay must not restore.
        """
        self.module: Any = module
        self.internal = {*vars(nn.Module()), *internal} - {"training"}
        for part in self.module.modules():
            part._compiled_call_impl = None
        for _, part in hookable_parts(self.module):
            part.register_forward_pre_hook(self._note_autocast)
        self._autocast: set[torch.dtype] = set()
        self._weights: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._dtypes: set[torch.dtype] = {torch.float32}
        self.trained: set[str] = set()
        self.compared: set[str] = set()
        for parameter in self.module.parameters():
            if not parameter.is_leaf:  # a deep copy of a part in TorchScript (torch 2.15)
                parameter.detach_()
        drop_weights(self.module)

    def keep(
        self,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        trained: Collection[str],
        compared: Collection[str] | None = None,
    ) -> None:
        """Saves the weights and buffers with which a step begins. The weights are unsharded, and in the dtype of the
        forward pass.

        Args:
            trained: Names of the weights that require gradients.
            compared: Names of the trained weights whose gradients a replay returns. The default is all of them.
        """
        self._weights, self._buffers = dict(weights), dict(buffers)
        self.trained, self.compared = {*trained}, {*(trained if compared is None else compared)}
        self._dtypes = {each.dtype for each in weights.values() if each.is_floating_point()} or {torch.float32}

    def state_of(self, module: nn.Module) -> State:
        """Returns copies of the attributes of a module and its submodules that are data, such as counters and modes.
        Leaves out the names in `internal`, and what refuses to be copied."""
        states: State = {}
        copies: dict[int, Any] = {}  # by id, so that parts share what they shared
        for name, part in module.named_modules():
            own = states[plain_name(module, name)] = {}
            for key, value in vars(part).items():
                data = None if key in self.internal else _data_in(value)
                if data is None or _is_large(data):
                    continue
                for each in data:
                    if isinstance(each, Tensor) and id(each) not in copies:
                        copies[id(each)] = each.detach().clone()
                complete = {*copies}
                try:
                    own[key] = copy.deepcopy(value, copies)
                except Exception:  # an object may refuse to be copied
                    for number in copies.keys() - complete:
                        del copies[number]
        return states

    def check_large(self, module: nn.Module) -> None:
        """Raises ValueError if an attribute of a module is too large for `state_of`, and differs from the copy's. If
        the copy does not have it yet, as a cache that the first forward pass builds, it is accepted."""
        copied = dict(self.module.named_modules())
        for name, part in module.named_modules():
            own = vars(copied[plain_name(module, name)])
            for key, value in vars(part).items():
                data = None if key in self.internal or key not in own else _data_in(value)
                if data and _is_large(data) and not _equal(data, _data_in(own[key]) or []):
                    label = f"{plain_name(module, name)}.{key}".lstrip(".")
                    raise ValueError(f"the attribute {label} changes, and is too large to be copied")

    def differs(self, name: str, part: Tensor, start: int) -> bool:
        """Returns whether a part of a weight, which begins at the element `start`, differs from the saved weight."""
        if name not in self._weights:
            return False
        saved = self._weights[name].reshape(-1)[start : start + part.numel()]
        return not same_values(part.reshape(-1).to(saved), saved)

    def changed(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Returns those of the named weights and buffers that differ from the saved ones."""
        saved = self._weights | self._buffers
        return {name: each for name, each in tensors if name in saved and not same_values(each, saved[name])}

    def compute(
        self,
        micro_batches: Iterable[MicroBatch],
        divisor: float = 1.0,
        scale: float = 1.0,
        watch: Callable[[nn.Module, Computed], list[Any]] | None = None,
        exact: bool = False,
        then: Callable[[Any], None] | None = None,
    ) -> Computed:
        """Returns what plain PyTorch computes for the micro-batches of a step, from the values that `keep` has saved.

        The replay has all buffers if it is exact, and otherwise those that its own forward passes have changed.

        Args:
            divisor: The number by which the engine divides each loss before its backward pass.
            scale: The loss scale, by which the engine multiplies each loss.
            watch: Registers hooks that keep outputs of submodules, and returns their handles.
            then: Called at the end with the copy, which has the gradients of the step, in float32 or wider and without
                the loss scale.
        """
        computed = Computed()
        self._restore(exact)
        handles = watch(self.module, computed) if watch else []
        given = dict(self._buffers)  # as the copy has got them from the training
        for name, parameter in self.module.named_parameters():
            if name in self.compared:
                handles.append(parameter.register_hook(partial(computed.add, name)))
            if name in self.trained:
                handles.append(parameter.register_post_accumulate_grad_hook(_drop_gradient))
        try:
            for each in micro_batches:
                if each.changed is not None:
                    self._set_weights(exact, each.changed)
                self._update_buffers(given, each)
                state = copy.deepcopy(each.state)
                for name, part in self.module.named_modules():
                    vars(part).update(state.get(name, {}))
                set_random_state(each.random_state)
                arguments = cloned(each.arguments)
                with torch.enable_grad(), Exact(self.lowest, self._dtype) if exact else nullcontext():
                    loss = each.compute(self.module, *arguments)
                    _backward(loss / divisor * scale)
                computed.losses.append(loss.detach())
            if then:
                for name, parameter in self.module.named_parameters():
                    if name in computed.gradients:
                        parameter.data = parameter.data.to(computed.gradients[name].dtype)
                        parameter.grad = computed.gradients[name] / scale
                then(self.module)
            buffers = buffers_of(self.module)
            own = {name for name, each in buffers.items() if name not in given or not same_values(each, given[name])}
            computed.buffers = buffers if exact else {name: buffers[name] for name in own}
        finally:
            for handle in handles:
                handle.remove()
            drop_weights(self.module)
        return computed

    @property
    def lowest(self) -> torch.dtype:
        """The dtype with the fewest bits in which the last step was computed."""
        return min(self._dtypes | self._autocast, key=lambda dtype: torch.finfo(dtype).bits)

    @property
    def autocasts(self) -> bool:
        return bool(self._autocast)

    def drop_saved(self) -> None:
        self._weights, self._buffers = {}, {}

    def _restore(self, exact: bool) -> None:
        self._autocast = self._autocast if exact else set()
        self._set_weights(exact, {})
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in self.trained)
        for part_name, part in self.module.named_modules():
            for name, _ in [*part.named_buffers(recurse=False)]:
                value = self._buffers.get(f"{part_name}.{name}" if part_name else name)
                if value is not None:
                    part._buffers[name] = _copied(value, exact)
        cast_batch_norm_weights(self.module)

    def _set_weights(self, exact: bool, changed: Mapping[str, Tensor]) -> None:
        for name, parameter in self.module.named_parameters():
            value = changed.get(name, self._weights[name])
            parameter.data = _copied(value, exact)

    def _update_buffers(self, given: dict[str, Tensor], batch: MicroBatch) -> None:
        """Gives the copy the buffers that the training has got from another rank, or that only other code than the
        forward pass has changed."""
        for name, buffer in self.module.named_buffers():
            new = batch.synced.get(name)
            if new is None and batch.changed is not None and name in given and same_values(buffer, given[name]):
                new = batch.changed.get(name, self._buffers.get(name))
            if new is not None:
                given[name] = buffer.copy_(new).clone()

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if torch.float32 in self._dtypes else self.lowest

    def _note_autocast(self, part: nn.Module, inputs: Any) -> None:
        device = next((each.device.type for each in tensors_in(inputs)), "cpu")
        if torch.is_autocast_enabled(device):
            self._autocast.add(torch.get_autocast_dtype(device))


def _copied(value: Tensor, exact: bool) -> Tensor:
    return to_float64(value).clone() if exact else value.clone()


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the buffers of a module, by their names in the plain module."""
    return {plain_name(module, name): each.detach().clone() for name, each in module.named_buffers()}


def drop_weights(module: nn.Module, device: torch.device | None = None) -> None:
    """Frees the memory of a module's weights and gradients. The weights keep their shapes, and move to `device` if it
    is given."""
    for parameter in module.parameters():
        parameter.data = parameter.new_empty((), device=device).expand(parameter.shape)
        parameter.grad = None


def cast_batch_norm_weights(module: nn.Module) -> None:
    """Makes each batch norm cast its weights to the dtype of its running statistics during its forward pass. torch
    (2.15) accepts float32 statistics only with float32 weights."""
    for norm in module.modules():
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None and "forward" not in vars(norm):
            vars(norm)["forward"] = partial(_forward, norm, norm.forward)


def _forward(norm: Any, forward: Callable[..., Tensor], *args: Any) -> Tensor:
    own, dtype = norm._parameters, norm.running_mean.dtype
    norm._parameters = {name: None if value is None else value.to(dtype) for name, value in own.items()}
    try:
        return forward(*args)
    finally:
        norm._parameters = own


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _backward(loss: Tensor) -> None:
    """Does what `loss.backward()` does, which would leave the context of `Exact` during recomputation (torch 2.15)."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def cloned(nested: Any) -> Any:
    """Returns a deep copy of the arguments of a forward pass. Raises TypeError if one of them is an iterator."""
    return tree_map(_clone, nested)


def _clone(leaf: Any) -> Any:
    if isinstance(leaf, Iterator):
        raise TypeError("training_step takes its batches from an iterator")
    return leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _data_in(value: Any) -> list[Any] | None:
    """Returns the plain values, tensors, random generators and NumPy objects in a value, its containers and objects.
    Returns None if there is something else too, such as a Parameter or a function."""
    data: list[Any] = []
    return data if _is_data(value, data, {}) else None


def _is_data(value: Any, data: list[Any], seen: dict[int, Any]) -> bool:
    if isinstance(value, PLAIN):
        data.append(value)
        return True
    if id(value) in seen:
        return True
    seen[id(value)] = value
    if isinstance(value, (Tensor, torch.Generator)) or type(value).__module__.partition(".")[0] == "numpy":
        data.append(value)
        return not isinstance(value, nn.Parameter)
    if isinstance(value, NO_DATA):
        return False
    own = [*getattr(value, "__dict__", {}).values()]
    if isinstance(value, Mapping):
        own += [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        own += value
    elif not hasattr(value, "__dict__"):
        return False
    return all(_is_data(each, data, seen) for each in own)


def _is_large(data: Iterable[Any]) -> bool:
    return any(getattr(each, "nbytes", 0) > LARGEST for each in data)


def _equal(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) == len(others) and all(map(_is_equal, some, others))


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return same_values(one, other)
    if hasattr(one, "nbytes"):  # of NumPy
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())  # NaN too
    return one == other or (one != one and other != other)


def function_of(module: nn.Module, copied: nn.Module) -> str | None:
    """Returns the name of an attribute of a copy with a function that refers to the copied module itself or to one of
    its parts, or None. A deep copy has the functions of the original, apart from bound methods."""
    parts = {id(each) for each in module.modules()}
    for name, part in copied.named_modules():
        for key, value in vars(part).items():
            if any(id(each) in parts for each in _referents(value)):
                return f"{name}.{key}".lstrip(".")
    return None


def _referents(value: Any) -> Iterator[Any]:
    """Yields a value, and what it refers to through containers and functions, apart from global variables."""
    seen, left = set(), [value]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, (dict, list, tuple, set, CellType, *FUNCTIONS)):
            variables = getattr(each, "__globals__", None), getattr(each, "__builtins__", None)
            left += [other for other in gc.get_referents(each) if not any(other is known for known in variables)]
