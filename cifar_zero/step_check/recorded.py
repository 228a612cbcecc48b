"""Reads the recorded optimizer steps of a training script. A module can then start from the script's weights and train
on the script's batches."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cifar_zero.core.errors import UsageError
from cifar_zero.step_check.replay import MicroBatch, set_random_state
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.hooks import tensors_in

T = TypeVar("T")

OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps", "dampening", "nesterov", "alpha", "rho")
"""Options of torch's optimizers that change an update."""


@dataclass
class ScriptStep:
    """Holds one recorded optimizer step of a script. Tensors are on the CPU. They are keyed by their names in the
    script's model, but in the step that `renamed` returns, by their names in the module."""

    epoch: int  # number of loader iterators that the script made before the iterator of this step
    order_state: Any  # state of all random generators before the iterator of this step was made
    weights: dict[str, Tensor] = field(default_factory=dict)  # before the step
    buffers: dict[str, Tensor] = field(default_factory=dict)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # as passed to backward, but without a loss scale
    random_state_after: Any = None  # torch's random state after the last forward pass
    draws: bool = False  # whether a forward pass drew random numbers
    gradients: dict[str, Tensor] = field(default_factory=dict)  # as the optimizer receives them, averaged and clipped
    options: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)  # OPTIONS of each parameter's group
    state: dict[str, dict[str, Any]] = field(default_factory=dict)  # optimizer state before the step
    weights_after: dict[str, Tensor] = field(default_factory=dict)
    buffers_after: dict[str, Tensor] = field(default_factory=dict)

    def renamed(self, module: nn.Module, renames: Mapping[str, str]) -> "ScriptStep":
        """Returns the step with its tensors keyed by their names in `module`, which must be plain, not changed by a
        strategy. Raises UsageError if the script's tensors do not match the module's tensors.

        Args:
            module: The plain module.
            renames: See `matched`.
        """
        names = matched(self.weights, dict(module.named_parameters()), renames)
        names |= matched(self.buffers, dict(module.named_buffers()), renames)

        def rename(values: dict[str, T]) -> dict[str, T]:
            return {names[name]: value for name, value in values.items()}

        return replace(
            self,
            weights=rename(self.weights),
            buffers=rename(self.buffers),
            gradients=rename(self.gradients),
            options=rename(self.options),
            state=rename(self.state),
            weights_after=rename(self.weights_after),
            buffers_after=rename(self.buffers_after),
        )


def step_file(folder: Path, number: int) -> Path:
    """Returns the path of the file in `folder` that holds the recorded step `number`."""
    return folder / f"step-{number:04d}.pt"


def matched(script: Mapping[str, Tensor], module: Mapping[str, Tensor], renames: Mapping[str, str]) -> dict[str, str]:
    """Maps the name of each tensor of the script to the name of the matching tensor of the module.

    A name in the script matches a name in the module if the two are equal after prefixes have been replaced. If
    necessary, one common prefix is then added to all names. If the names do not match, all tensors are matched by order
    and shape instead. Raises UsageError if no match is found, or if tensors with matching names differ in shape. The
    message lists tensors that do not match.

    Args:
        script: The script's tensors by name.
        module: The module's tensors by name.
        renames: Maps a prefix of the script's names to the prefix that replaces it.
    """
    renamed = {}
    for name in script:
        beginning = next((old for old in renames if name.startswith(old)), "")
        renamed[name] = renames.get(beginning, "") + name.removeprefix(beginning)
    first = next(iter(renamed.values()), "")
    for prefix in (name.removesuffix(first) for name in module if name.endswith(first)):
        names = {name: prefix + new for name, new in renamed.items()}
        if {*names.values()} == {*module}:
            for name, ours in names.items():
                if script[name].shape != module[ours].shape:
                    shapes = f"{tuple(script[name].shape)} in the script and {tuple(module[ours].shape)} in the module"
                    raise UsageError(f"--script: {name} is {shapes}: use the same model in both")
            return names
    if [tensor.shape for tensor in script.values()] == [tensor.shape for tensor in module.values()]:
        return dict(zip(script, module, strict=True))
    theirs = [f"{name} {tuple(script[name].shape)}" for name, new in renamed.items() if new not in module]
    ours = [f"{name} {tuple(module[name].shape)}" for name in module if name not in renamed.values()]
    raise UsageError(
        f"--script: the script's model has {', '.join(theirs[:3]) or 'no other weight'}, but the module has "
        f"{', '.join(ours[:3]) or 'no other weight'}: map prefixes of names with --rename OLD=NEW"
    )


@dataclass(frozen=True)
class Recorded:
    """Gives access to the recorded optimizer steps of a script, and to their weights, batches and sample order."""

    folder: Path
    count: int  # number of steps
    renames: Mapping[str, str]  # see `matched`
    own_data: bool = False  # the module trains on its own loader, and its batches are compared with the script's

    def step(self, number: int) -> ScriptStep:
        """Reads and returns the recorded step `number`, counted from 1. The file may contain objects of any class.
        Loading them is safe, because the script itself has run on this machine."""
        return torch.load(step_file(self.folder, number), weights_only=False)

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the script's weights before its first step, keyed by their names in `module`, which must be plain,
        not changed by a strategy. Raises UsageError if the script's tensors do not match the module's tensors; see
        `matched`."""
        return self.step(1).renamed(module, self.renames).weights

    def give_weights(self, module: nn.Module) -> None:
        """Overwrites the weights and buffers of `module` with the script's values before its first step. The module
        must be plain, not changed by a strategy. Raises UsageError if the script's tensors do not match the module's
        tensors; see `matched`."""
        first = self.step(1).renamed(module, self.renames)
        module.load_state_dict({**first.weights, **first.buffers}, strict=False)

    def loader(self, strategy: Strategy) -> Iterable[Any]:
        """Returns a loader that yields this rank's part of each of the script's micro-batches."""
        return _Batches(self, strategy)

    def order_like_script(self, source: Any) -> None:
        """Wraps the method `train_dataloader` of `source`, a module or data module. The wrapper sets the random state
        from which the script's loader drew its sample order, so that the module's loader draws the same order."""
        load, state = source.train_dataloader, self.step(1).order_state

        def train_dataloader() -> Any:
            loader = load()
            set_random_state(state)
            return loader

        source.train_dataloader = train_dataloader


class _Batches:
    """Yields this rank's part of each micro-batch of the script. Each iteration over an instance yields the
    micro-batches of the script's next epoch."""

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
    """Returns the part of a batch for the rank with index `rank` of `ranks`. Each tensor is cut along its first
    dimension. Raises UsageError if `ranks` does not divide the length of this dimension."""
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
    """Returns the options of a parameter group that OPTIONS lists and that are set, each as a tuple of numbers."""
    return {key: tuple(np.atleast_1d(group[key]).astype(float)) for key in OPTIONS if group.get(key) is not None}


def samples_in(batch: Any) -> int:
    """Returns the number of samples in a batch, which is the length of its longest tensor."""
    return max((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), default=1)
