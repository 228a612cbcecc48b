"""Replays micro-batches on a plain, unsharded copy of a module, in the training's precision and in float64."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from cifar_zero.launch.collectives import average_over_ranks
from cifar_zero.models.cast import keep_batch_norm_float32
from cifar_zero.step_check.guard import exchange

LOW = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that a replay in float64 replaces by float64."""

WIDER: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (Tensor.half, Tensor.bfloat16, Tensor.float), lambda tensor, *args, **kwargs: tensor.double()
)
"""Maps each function that casts to a low precision to the function that a replay in float64 calls instead."""

DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}

DRAWS = {torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli, torch.normal, torch.multinomial}

DRAWS_IN_PLACE = {Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.bernoulli_}

Plain = (bool, int, float, str, NoneType)

INTERNAL = vars(LightningModule()).keys() - {"training"}
"""Names of the attributes that every LightningModule has, except `training`. They are not copied from the trained
module before a step. The user's own attributes, such as counters, modes and hidden states, are copied."""


@dataclass
class MicroBatch:
    """Holds a micro-batch, with its index and random state, for a replay."""

    batch: Any
    index: int  # batch_idx
    random_state: dict[str, Any]  # before the forward pass, see `random_state`
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)  # before it, see `PlainCopy.attributes_of`


@dataclass
class Replay:
    """Holds the values that the plain copy of a module computed in the replay of a step on this rank."""

    losses: Tensor  # float64 (micro-batches,), on the CPU
    gradients: dict[str, Tensor]  # float64; zeros for an unused weight
    summed: dict[str, Tensor]
    """The largest norm of each gradient while the micro-batches were added up, float64. It is larger than the norm of
    the final gradient if the micro-batches cancel."""
    buffers: dict[str, Tensor]  # after the step, on the CPU
    unused: set[str]  # names of the weights that no micro-batch used
    random_state: Tensor  # torch's random state after the last forward pass
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The weights that `training_step` itself changes, such as a momentum encoder, after the step, on the CPU."""

    def average(self) -> None:
        """Replaces the gradients, and the norms in `summed`, by their means over the ranks, on the CPU. Every rank must
        call it."""
        average_over_ranks([*self.gradients.values(), *self.summed.values()])
        self.gradients = {name: gradient.cpu() for name, gradient in self.gradients.items()}
        self.summed = {name: norm.cpu() for name, norm in self.summed.items()}


class PlainCopy:
    """Replays steps on a plain copy of a module. The copy is made before a strategy shards the module. The copy's
    weights are set before each replay and freed after it."""

    def __init__(self, module: LightningModule):
        """Copies the module. If an attribute cannot be copied, raises the exception of `copy.deepcopy`."""
        self.original = module
        self.module: Any = copy.deepcopy(module)  # Lightning leaves the trainer out
        self._trained: dict[str, bool] = {}
        self.after_backward: Callable[[bool], None] | None = None
        """Runs the user's hooks after the backward pass of each micro-batch but the last. The last one's hooks run on
        gradients that are averaged over the ranks, see `GradientHooks`."""

    def build(self, trainer: Trainer) -> None:
        """Runs `setup` and `configure_model` of the copy, moves it to the device of the strategy, and turns off its
        logging and compilation. Raises TypeError if `configure_model` shards the copy."""
        plain = self.module
        plain.trainer = trainer
        plain.log = plain.log_dict = _nothing
        with random_state_kept():
            plain.setup("fit")
            plain.configure_model()
        if any(isinstance(each, DTensor) for each in plain.parameters()):
            raise TypeError("configure_model shards the plain copy of the module too")
        for part in plain.modules():
            part._compiled_call_impl = None
        plain.to(trainer.strategy.root_device)
        self._free()

    def remember(self, module: LightningModule) -> None:
        """Records which weights of the trained module are trained."""
        self._trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}

    def attributes_of(self, module: LightningModule) -> dict[str, dict[str, Any]]:
        """Returns copies of the state that the attributes of a module hold, keyed by the names of its submodules."""
        found = {}
        for name, part in module.named_modules():
            own = {key: value for key, value in vars(part).items() if key not in INTERNAL and _is_state(value)}
            found[name] = _copied(own)
        return found

    def replay(
        self,
        micro_batches: Sequence[MicroBatch],
        tensors: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        scale: float = 1.0,
        exact: bool = False,
    ) -> Replay:
        """Replays a step: computes the loss of each micro-batch, starting from its recorded random state, and the
        gradients of the sum of these losses. As in training, each loss is divided by the number of accumulated
        micro-batches.

        Args:
            micro_batches: The micro-batches of a step on this rank.
            tensors: Unsharded float32 weights and buffers before the step, by name.
            dtypes: The dtype in which the strategy computes with each weight, by name.
            scale: Loss scale of float16. The loss is multiplied by it before backward, and the gradients are divided by
                it.
            exact: Whether to compute in float64, with the same weights and random numbers.
        """
        try:
            self._restore(tensors, dtypes, exact)
            replay = self._replay(micro_batches, lowest(dtypes.values()), scale, exact)
            for name, parameter in self.module.named_parameters():
                before = tensors[name].to(dtypes[name]).to(parameter)
                if not torch.equal(parameter, before):
                    replay.weights[name] = parameter.detach().cpu()
            return replay
        finally:
            self._free()

    def _replay(self, micro_batches: Sequence[MicroBatch], dtype: torch.dtype, scale: float, exact: bool) -> Replay:
        plain, trainer = self.module, self.module.trainer
        arguments = len(inspect.signature(plain.training_step).parameters)
        losses, random_state_after = [], torch.get_rng_state()
        summed: dict[str, Tensor] = {}
        for each in micro_batches:
            batch = tree_map_only(Tensor, lambda value: _wide(value.clone()) if exact else value.clone(), each.batch)
            for name, part in plain.named_modules():
                vars(part).update(_copied(each.attributes.get(name, {})))
            set_random_state(each.random_state)
            with Exact(dtype) if exact else trainer.precision_plugin.train_step_context():
                outputs = plain.training_step(*(batch, each.index)[:arguments])
                loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
                loss = loss / trainer.accumulate_grad_batches
                random_state_after = torch.get_rng_state()
                (loss * scale).backward()
            losses.append(float(loss.detach()))
            if self.after_backward is not None and len(losses) < len(micro_batches):
                self.after_backward(exact)
            for name, parameter in plain.named_parameters():
                if parameter.grad is not None:
                    norm: Tensor = parameter.grad.norm().double() / scale
                    summed[name] = torch.maximum(summed.get(name, norm), norm)
        gradients, unused = {}, set()
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    unused.add(name)
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients[name] = gradient.double() / scale
                summed.setdefault(name, gradients[name].new_zeros(()))
        buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in plain.named_buffers()}
        return Replay(torch.tensor(losses, dtype=torch.float64), gradients, summed, buffers, unused, random_state_after)

    @contextmanager
    def holding(
        self, gradients: Mapping[str, Tensor], tensors: Mapping[str, Tensor], exact: bool
    ) -> Iterator[dict[str, Parameter]]:
        """Gives the copy weights, buffers and gradients in the context, in float32, or in float64 with `exact`. Yields
        the parameters that have one of the gradients, by name. `tensors` is described in `replay`."""
        self._restore(tensors, dict.fromkeys(tensors, torch.float32), exact)
        found = {name: each for name, each in self.module.named_parameters() if name in gradients}
        for name, parameter in found.items():
            parameter.grad = gradients[name].to(parameter, copy=True)
        try:
            yield found
        finally:
            self._free()

    def _restore(self, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], exact: bool) -> None:
        device = self.module.trainer.strategy.root_device
        for name, parameter in self.module.named_parameters():
            value = tensors[name].to(dtypes[name])
            parameter.data = (value.double() if exact else value).to(device, copy=True)
            parameter.grad = None
            parameter.requires_grad_(self._trained.get(name, parameter.requires_grad))
        for name, buffer in self.module.named_buffers():
            if name in tensors:
                value = tensors[name].to(device, copy=True)
                buffer.data = _wide(value) if exact else value
        keep_batch_norm_float32(self.module)

    def _free(self) -> None:
        for parameter in self.module.parameters():
            parameter.data = parameter.new_empty(()).expand(parameter.shape)  # keeps the shape without the memory
            parameter.grad = None


class Exact(TorchFunctionMode):
    """Context manager in which torch computes in float64, whatever precision the code requests. Random numbers are the
    same as in the training.

    Random numbers are drawn in the dtype in which the training draws them, because generators draw different numbers in
    float64. Random numbers that a function in C++ or CUDA draws internally, as attention with dropout does, are not
    handled.
    """

    def __init__(self, lowest: torch.dtype):
        super().__init__()
        self._lowest = lowest

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            mask = func(torch.ones_like(args[0], dtype=self._lowest, requires_grad=False), *args[1:], **kwargs)
            return args[0] * mask.double()
        if func in DRAWS_IN_PLACE:
            drawn = func(torch.empty_like(args[0], dtype=torch.float32), *args[1:], **kwargs)
            return args[0].copy_(drawn)
        if func in DRAWS:
            args, kwargs = tree_map(_narrow, (args, kwargs))
        else:
            args, kwargs = tree_map(_wide, (args, kwargs))
            func = WIDER.get(func, func)
        return tree_map(_wide, func(*args, **kwargs))


def gathered_losses(low: Replay, exact: Replay) -> Tensor:
    """Returns the losses of the two replays of a step from all ranks, as one tensor, float64 (ranks, 2, micro-batches).
    Every rank must call it."""
    return torch.stack(exchange(torch.stack([low.losses, exact.losses])))


def lowest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Returns the dtype with the fewest bits."""
    return min(dtypes, key=lambda dtype: torch.finfo(dtype).bits)


def _wide(value: Any) -> Any:
    """Converts a tensor whose dtype is in LOW to float64, replaces a dtype in LOW by float64, and returns any other
    value unchanged."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype in LOW else value
    return torch.float64 if isinstance(value, torch.dtype) and value in LOW else value


def _narrow(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float64 else value


def _is_state(value: Any) -> bool:
    """Returns whether a value is plain data, a tensor that is not a Parameter, or lists, dictionaries and tuples of
    such values."""
    leaves = tree_leaves(value)
    return all(type(leaf) in Plain or (isinstance(leaf, Tensor) and not isinstance(leaf, Parameter)) for leaf in leaves)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)


def random_state() -> dict[str, Any]:
    """Returns the states of all random generators that a training step may use. Only the generator of the rank's own
    GPU is read, because Lightning's `include_cuda` would initialize every GPU in each rank."""
    state = _collect_rng_states(include_cuda=False)
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restores the states that `random_state` returned."""
    _set_rng_states(state)
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restores the states of all random generators at the end of the context."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing, in place of `self.log` in a replay."""
