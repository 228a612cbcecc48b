"""The recorded optimizer steps of a training script, and how a module is trained on them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.strategies import Strategy
from torch import Size, Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from cifar_zero.core.errors import UsageError
from cifar_zero.step_check.replay import MicroBatch, set_random_state
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.hooks import tensors_in

OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps", "dampening", "nesterov", "alpha", "rho")
"""Options of torch's optimizers that change an update."""


@dataclass
class ScriptStep:
    """One optimizer step of a script; tensors are on the CPU, by the names of the script's model."""

    epoch: int  # the script has made this many iterators of loaders before
    order_state: Any  # of all random generators, before it made the epoch's
    weights: dict[str, Tensor] = field(default_factory=dict)  # before the step
    buffers: dict[str, Tensor] = field(default_factory=dict)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # as passed to backward, without a loss scale
    random_state_after: Any = None  # torch's, after the last forward pass
    draws: bool = False  # a forward pass has drawn random numbers
    gradients: dict[str, Tensor] = field(default_factory=dict)  # as the optimizer receives them: averaged, clipped
    options: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)  # OPTIONS of each parameter's group
    state: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the optimizer, before the step
    weights_after: dict[str, Tensor] = field(default_factory=dict)
    buffers_after: dict[str, Tensor] = field(default_factory=dict)


def step_file(folder: Path, number: int) -> Path:
    """Returns the file of a step."""
    return folder / f"step-{number:04d}.pt"


def matched(script: Mapping[str, Tensor], module: Mapping[str, Size], renames: Mapping[str, str]) -> dict[str, str]:
    """Returns the module's name of each of the script's tensors: the same name after `renames` of beginnings, with a
    common prefix if need be, or else by order and shape. Raises UsageError with the first ones that do not match."""
    renamed = {}
    for name in script:
        beginning = next((old for old in renames if name.startswith(old)), "")
        renamed[name] = renames.get(beginning, "") + name.removeprefix(beginning)
    first = next(iter(renamed.values()), "")
    for prefix in (name.removesuffix(first) for name in module if name.endswith(first)):
        names = {name: prefix + new for name, new in renamed.items()}
        if {*names.values()} == {*module}:
            return _same_shapes(names, script, module)
    if [tensor.shape for tensor in script.values()] == [*module.values()]:
        return dict(zip(script, module, strict=True))
    theirs = [f"{name} {tuple(script[name].shape)}" for name, new in renamed.items() if new not in module]
    ours = [f"{name} {tuple(module[name])}" for name in module if name not in renamed.values()]
    raise UsageError(
        f"--script: its model has {', '.join(theirs[:3]) or 'no other weight'}, and the module "
        f"{', '.join(ours[:3]) or 'no other weight'}: pass --rename OLD=NEW, beginnings of names"
    )


def shapes_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Size]:
    """Returns the shapes of named tensors."""
    return {name: tensor.shape for name, tensor in tensors}


def _same_shapes(names: dict[str, str], script: Mapping[str, Tensor], module: Mapping[str, Size]) -> dict[str, str]:
    for name, ours in names.items():
        if script[name].shape != module[ours]:
            shapes = f"{tuple(script[name].shape)} in the script and {tuple(module[ours])} in the module"
            raise UsageError(f"--script: {name} is {shapes}: both need the same model")
    return names


@dataclass(frozen=True)
class Recorded:
    """The recorded steps of a script."""

    folder: Path
    count: int  # of steps
    renames: Mapping[str, str]  # see `matched`
    own_data: bool = False  # the module trains on its own loader, and its batches are compared with the script's

    def step(self, number: int) -> ScriptStep:
        """Returns a step, counted from 1. Its batches may be of any class: the script has run on this machine."""
        return torch.load(step_file(self.folder, number), weights_only=False)

    def weights(self, module: Any) -> dict[str, Tensor]:
        """Returns the script's first weights by the names of a module's. Raises UsageError as `matched` does."""
        first = self.step(1).weights
        names = matched(first, shapes_of(module.named_parameters()), self.renames)
        return {names[name]: value for name, value in first.items()}

    def give_weights(self, module: Any) -> None:
        """Overwrites the weights and buffers of a plain module. Raises UsageError as `matched` does."""
        buffers = self.step(1).buffers
        names = matched(buffers, shapes_of(module.named_buffers()), self.renames)
        renamed = {names[name]: value for name, value in buffers.items()}
        module.load_state_dict({**self.weights(module), **renamed}, strict=False)

    def loader(self, strategy: Strategy) -> DataLoader[Any]:
        """Returns a loader of the script's micro-batches, of which each rank has its part."""
        return DataLoader(_Batches(self, strategy), batch_size=None)

    def order_like_script(self, source: Any) -> None:
        """Lets the `train_dataloader` of a module or data module draw the order that the script's loader has drawn."""
        load, state = source.train_dataloader, self.step(1).order_state

        def train_dataloader() -> Any:
            loader = load()
            set_random_state(state)
            return loader

        source.train_dataloader = train_dataloader


class _Batches(IterableDataset[Any]):
    """The script's micro-batches; each time those of its next epoch."""

    def __init__(self, recorded: Recorded, strategy: Strategy):
        self._recorded, self._strategy = recorded, strategy
        self._next = 1  # the next step

    def __iter__(self) -> Iterator[Any]:
        ranks, rank = hooks_of(self._strategy).replica()
        epoch = None
        while self._next <= self._recorded.count:
            step = self._recorded.step(self._next)
            epoch = step.epoch if epoch is None else epoch
            if step.epoch != epoch:
                return
            self._next += 1
            for each in step.micro_batches:
                yield part_of(each.batch, rank, ranks)


def part_of(batch: Any, rank: int, ranks: int) -> Any:
    """Returns a rank's part of a batch, cut along the first dimension of its tensors. Raises UsageError: the ranks do
    not divide it."""
    if ranks == 1:
        return batch

    def part(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        if len(tensor) % ranks:
            raise UsageError(f"--devices {ranks} does not divide the {len(tensor)} samples of the script's batches")
        return tensor.chunk(ranks)[rank]

    return tree_map_only(Tensor, part, batch)


def options_of(group: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Returns the numbers of a parameter group's OPTIONS."""
    return {key: tuple(np.atleast_1d(group[key]).astype(float)) for key in OPTIONS if group.get(key) is not None}


def samples_in(batch: Any) -> int:
    """Returns the number of samples in a batch: the length of its longest tensor."""
    return max((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), default=1)
