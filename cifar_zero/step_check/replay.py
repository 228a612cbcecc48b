"""Replays micro-batches on a plain, unsharded copy of a module, in the training's precision and in float64."""

import copy
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from cifar_zero.launch.collectives import average_over_ranks
from cifar_zero.models.cast import keep_batch_norm_float32

LOW = (torch.float16, torch.bfloat16, torch.float32)

WIDER: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (Tensor.half, Tensor.bfloat16, Tensor.float), lambda tensor, *args, **kwargs: tensor.double()
)
"""Casts to a low precision, each with the cast that the exact replay makes instead."""

DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}

DRAWS = {torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli, torch.normal, torch.multinomial}

DRAWS_IN_PLACE = {Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.bernoulli_}

Plain = (bool, int, float, str, NoneType)

INTERNAL = vars(LightningModule()).keys() - {"training"}
"""Attributes of every LightningModule, which the copy does not take over before a step. It takes over the user's own
attributes, such as counters, modes and hidden states."""


@dataclass
class MicroBatch:
    """Holds what a replay needs of a micro-batch."""

    batch: Any
    index: int  # batch_idx
    random_state: tuple[Any, ...]


@dataclass
class Replay:
    """Holds what the copy computed in a step."""

    losses: list[float]  # of each micro-batch on this rank
    gradients: dict[str, Tensor]  # float64, this rank's until `average`; zeros for a weight that was not used
    buffers: dict[str, Tensor]  # after the step, on this rank
    unused: set[str]  # weights that no micro-batch of this rank used
    random_state: Tensor  # torch's random state after the last forward pass

    def average(self) -> None:
        """Replaces the gradients by their mean over the ranks, on the CPU. Collective."""
        average_over_ranks([*self.gradients.values()])
        self.gradients = {name: gradient.cpu() for name, gradient in self.gradients.items()}


class Replica:
    """Replays steps on a copy of a module, which is made before a strategy shards the module. The copy's weights are
    set for each replay and freed after it."""

    def __init__(self, module: LightningModule):
        """Copies the module. Raises what `copy.deepcopy` raises if an attribute cannot be copied."""
        with _detached(module), random_state_kept():
            self.module: Any = copy.deepcopy(module)
        self.shapes: dict[str, torch.Size] = {}  # of the weights, by name
        self._attributes: dict[str, dict[str, Any]] = {}  # by the name of the submodule
        self._buffers: dict[str, Tensor] = {}
        self._trained: dict[str, bool] = {}
        self._takes_index = len(inspect.signature(self.module.training_step).parameters) > 1

    def build(self, trainer: Trainer) -> None:
        """Runs `setup` and `configure_model` of the copy. From then on, the copy logs nothing."""
        plain = self.module
        plain._trainer = trainer
        plain.log = plain.log_dict = _nothing
        with random_state_kept():
            plain.setup("fit")
            plain.configure_model()
        for part in plain.modules():
            part._compiled_call_impl = None
        plain.to(trainer.strategy.root_device)
        self.shapes = {name: parameter.shape for name, parameter in plain.named_parameters()}
        self._free()

    def remember(self, module: LightningModule) -> None:
        """Keeps the module's buffers, and the state in its attributes, as they are before a step."""
        self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        for name, part in module.named_modules():
            own = {key: value for key, value in vars(part).items() if key not in INTERNAL and _is_state(value)}
            self._attributes[name] = _copied(own)

    def buffers_from_rank_0(self) -> None:
        """Replaces the remembered buffers by rank 0's, as DDP does before a step by default. Collective."""
        for buffer in self._buffers.values():
            dist.broadcast(buffer, 0)

    def replay(
        self,
        trainer: Trainer,
        micro_batches: Sequence[MicroBatch],
        weights: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        *,
        scale: float = 1.0,
        exact: bool = False,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Replay:
        """Computes the losses of the micro-batches and their gradient. Each micro-batch has its own random state.

        Args:
            trainer: Trainer of the training.
            micro_batches: The micro-batches of a step on this rank.
            weights: Unsharded float32 weights before the step, by name.
            dtypes: The dtype in which the strategy computes with each weight, by name.
            scale: Scale of the loss in float16, by which the gradients are divided again.
            exact: Whether to compute in float64, with the same weights and random numbers.
            buffers: Buffers before the step, by name. The default is those that `remember` kept.
        """
        plain, device = self.module, trainer.strategy.root_device
        self._restore(weights, self._buffers if buffers is None else buffers, dtypes, device, exact)
        losses, random_state_after = [], torch.get_rng_state()
        for each in micro_batches:
            batch = tree_map_only(Tensor, lambda value: _wide(value.clone()) if exact else value.clone(), each.batch)
            set_random_state(each.random_state)
            with Exact(lowest(dtypes.values())) if exact else trainer.precision_plugin.train_step_context():
                outputs = plain.training_step(*((batch, each.index) if self._takes_index else (batch,)))
                loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
                loss = loss / trainer.accumulate_grad_batches
                random_state_after = torch.get_rng_state()
                (loss * scale).backward()
            losses.append(float(loss.detach()))
        gradients, unused = {}, set()
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    unused.add(name)
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients[name] = gradient.double() / scale
        buffers = {name: buffer.detach().clone() for name, buffer in plain.named_buffers()}
        self._free()
        return Replay(losses, gradients, buffers, unused, random_state_after)

    def _restore(
        self,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        exact: bool,
    ) -> None:
        for name, part in self.module.named_modules():
            vars(part).update(_copied(self._attributes.get(name, {})))
        for name, parameter in self.module.named_parameters():
            value = weights[name].to(dtypes[name])
            parameter.data = (value.double() if exact else value).to(device, copy=True)
            parameter.grad = None
            parameter.requires_grad_(self._trained.get(name, parameter.requires_grad))
        for name, buffer in self.module.named_buffers():
            if name in buffers:
                value = buffers[name].to(device, copy=True)
                buffer.data = _wide(value) if exact else value
        keep_batch_norm_float32(self.module)

    def _free(self) -> None:
        for parameter in self.module.parameters():
            parameter.data = torch.empty(0, device=parameter.device)
            parameter.grad = None


class Exact(TorchFunctionMode):
    """Computes everything that is called within it in float64, whatever precision the code requests, with the same
    random numbers.

    Random numbers are drawn in the dtype in which the training draws them, because generators draw different numbers in
    float64. Numbers that a compiled function draws internally, as attention with dropout does, are not replaced.
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


def lowest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Returns the dtype with the fewest bits."""
    return min(dtypes, key=lambda dtype: torch.finfo(dtype).bits)


def _wide(value: Any) -> Any:
    """Converts a tensor of a low precision to float64, replaces such a dtype by float64, and returns anything else as
    it is."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype in LOW else value
    return torch.float64 if isinstance(value, torch.dtype) and value in LOW else value


def _narrow(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float64 else value


def _is_state(value: Any) -> bool:
    """Returns whether a value is plain data, a tensor that is not a Parameter, or lists, dictionaries and tuples of
    these."""
    leaves = tree_leaves(value)
    return all(type(leaf) in Plain or (isinstance(leaf, Tensor) and not isinstance(leaf, Parameter)) for leaf in leaves)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)


def random_state() -> tuple[Any, ...]:
    """Returns the state of all random generators that a training step may use."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def set_random_state(state: tuple[Any, ...]) -> None:
    """Restores what `random_state` returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
    random.setstate(state[2])
    np.random.set_state(state[3])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restores the states of all random generators at the end of the context."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


@contextmanager
def _detached(module: Any) -> Iterator[None]:
    """Removes the trainer from a module within the context, because it would be copied with the module."""
    trainer, module._trainer = module._trainer, None
    try:
        yield
    finally:
        module._trainer = trainer


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces `self.log` in a replay, and does nothing."""
