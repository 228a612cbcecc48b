"""Pipeline parallelism (GPipe, Huang et al. 2019): each rank holds a share of a transformer's blocks, neighbours.

A batch goes through the ranks in chunks, so that they work at the same time, each on another chunk; going back,
autograd takes the chunks in the opposite order. What is before and after the blocks, less than a hundredth of the
network, every rank has and computes, so that the module's steps stay as they are: it sees one network that takes images
and gives scores. torch.distributed.pipelining (2.15) runs forward and backward in one call, between which Lightning
(2.6.6) has its loss, its hooks and the zeroing of gradients.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from cifar_zero.launch.collectives import gather
from cifar_zero.optimizers.state import numbers_by_name
from cifar_zero.strategies.mesh import MeshStrategy, on_host, unwrapped

if TYPE_CHECKING:
    from cifar_zero.config.run import Run

CHUNKS_PER_RANK = 4
"""Of a micro-batch, where it has as many images: ranks wait for each other for (ranks - 1) / (chunks + ranks - 1) of a
step, which is little from four chunks a rank on (GPipe, section 2.3)."""


def build(run: Run, num_parameters: int) -> PipelineStrategy:
    """All ranks together hold one network; `checks` has seen that it has a block for each."""
    return PipelineStrategy(
        shard,
        data_parallel_size=1,
        tensor_parallel_size=run.world_size,  # Lightning has no other name for the ranks of one network
        process_group_backend="gloo" if run.on_cpu else None,
    )


def shard(net: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves this rank its share of the blocks, neighbours in the network, under their names."""
    ranks = mesh["tensor_parallel"].get_group()
    net.blocks = Stage(net.blocks, ranks)  # pyright: ignore[reportArgumentType]


class Stage(nn.Sequential):
    """This rank's share of a network's blocks, which takes the input of the first and gives the output of the last of
    all blocks, on every rank.

    Args:
        blocks: all of them, in their order; tokens (N, tokens, width) in and out, of one type.
        group: the ranks, in the order of their shares.
    """

    def __init__(self, blocks: nn.Sequential, group: dist.ProcessGroup):
        ranks = group.size()
        first, end = (len(blocks) * rank // ranks for rank in (group.rank(), group.rank() + 1))
        super().__init__(OrderedDict([*blocks.named_children()][first:end]))
        self.line = Line(group)
        for parameter in self.parameters():
            parameter.norm_group = group  # pyright: ignore[reportAttributeAccessIssue] - for strategies/norm.py

    def forward(self, input: Tensor) -> Tensor:
        """Tokens (N, tokens, width), the same on every rank, in and out."""
        line = self.line
        done: list[Tensor] = []
        for chunk in SameGradient.apply(input, line).chunk(CHUNKS_PER_RANK * line.ranks):  # pyright: ignore
            done.append(ToNext.apply(super().forward(FromPrevious.apply(chunk, line)), line))  # pyright: ignore
        return OfLast.apply(torch.cat(done), line)  # pyright: ignore


class Line:
    """What the ranks of a pipeline send each other."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.is_first, self.is_last = self.rank == 0, self.rank == self.ranks - 1
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, tensor: Tensor, step: int) -> None:
        """To the next rank (step 1) or the one before (-1), without waiting for it."""
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, group=self.group, group_dst=self.rank + step), tensor))

    def receive(self, like: Tensor, step: int) -> Tensor:
        """What the next rank (step 1) or the one before (-1) has sent, of the shape and type of `like`."""
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(tensor, group=self.group, group_src=self.rank + step)
        return tensor

    def of(self, rank: int, tensor: Tensor) -> Tensor:
        """One rank's tensor on every rank, when all that was sent has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.group, group_src=rank)
        return tensor


class SameGradient(Function):
    """The input of the pipeline; every rank gets the gradient that has come back to the first."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.line.of(0, gradient), None


class FromPrevious(Function):
    """The tokens of a chunk as the rank before gives them, to which their gradient goes back."""

    @staticmethod
    def forward(ctx: Any, chunk: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return chunk.view_as(chunk) if line.is_first else line.receive(chunk, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not ctx.line.is_first:
            ctx.line.send(gradient, -1)
        return gradient, None  # of the right shape; only the first rank's is used


class ToNext(Function):
    """The tokens of a chunk for the next rank, from which their gradient comes back."""

    @staticmethod
    def forward(ctx: Any, chunk: Tensor, line: Line) -> Tensor:
        ctx.line = line
        if not line.is_last:
            line.send(chunk, 1)
        return chunk.view_as(chunk)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient if ctx.line.is_last else ctx.line.receive(gradient, 1), None


class OfLast(Function):
    """The last rank's tokens on every rank: each computes the same loss, and the last one's gradient is used."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, line: Line) -> Tensor:
        ctx.mark_dirty(tokens)
        return line.of(line.ranks - 1, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


class PipelineStrategy(MeshStrategy):
    """Each rank trains its own blocks; a checkpoint is one plain file of all of them."""

    _names: list[str]
    """Of all weights, in the order of the whole network."""

    _on_host: Any = None
    """The ranks once more, for exchanging objects from host to host."""

    def setup(self, trainer: Trainer) -> None:
        """Cuts the network, once for the fit and the test after it."""
        assert self.model is not None
        if not self._sharded:
            self._names = [*self.model.state_dict()]
            self._on_host = dist.new_group(backend="gloo")
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of all ranks, on rank 0; every rank takes part."""
        assert self.model is not None
        parts = self._gather(on_host(self.model.state_dict()))
        weights = {name: value for part in reversed(parts) for name, value in part.items()}
        return {name: weights[name] for name in self._names} if parts else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Keeps this rank's blocks of the whole weights."""
        assert self.lightning_module is not None
        own, whole = self.lightning_module.state_dict(), checkpoint["state_dict"]
        self.lightning_module.load_state_dict({name: whole[name] for name in own if name in whole}, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state of all ranks in torch's own form, on rank 0; every rank takes part."""
        own = unwrapped(optimizer)
        state = own.state_dict()
        names = [name for group in self._own_names(own) for name in group]
        parts = self._gather({names[number]: on_host(entry) for number, entry in state["state"].items()})
        entries = {name: entry for part in reversed(parts) for name, entry in part.items()}
        numbers, groups = self._numbers(own), []
        for group, numbered in zip(state["param_groups"], numbers, strict=True):
            told = {"param_names": [*numbered]} if "param_names" in group else {}
            groups.append({**group, "params": [*numbered.values()], **told})
        by_name = {name: number for numbered in numbers for name, number in numbered.items()}
        return {"state": {by_name[name]: entries[name] for name in by_name if name in entries}, "param_groups": groups}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Keeps the optimizer's state of this rank's blocks."""
        for optimizer, whole in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            state: dict[int, Any] = {}
            groups: list[dict[str, Any]] = []
            number = 0
            saved = numbers_by_name(whole["param_groups"], self._names)
            rates = {key: value for key, value in whole["param_groups"][0].items() if key in ("lr", "initial_lr")}
            for names, group in zip(self._own_names(optimizer), optimizer.param_groups, strict=True):
                groups.append({**group, **rates, "params": [*range(number, number + len(names))]})
                for name in names:
                    if saved[name] in whole["state"]:
                        state[number] = whole["state"][saved[name]]
                    number += 1
            optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _own_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Of this rank's parameters, for each group of the optimizer."""
        assert self.model is not None
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]

    def _numbers(self, optimizer: Optimizer) -> list[dict[str, int]]:
        """For each group of the optimizer the names of all ranks' parameters, and their numbers in the whole."""
        of_ranks = gather(self._own_names(optimizer), self._on_host)
        places = {name: place for place, name in enumerate(self._names)}
        numbers: list[dict[str, int]] = []
        first = 0
        for groups in zip(*of_ranks, strict=True):
            names = sorted({name for group in groups for name in group}, key=places.__getitem__)
            numbers.append({name: first + number for number, name in enumerate(names)})
            first += len(names)
        return numbers

    def _gather(self, part: Any) -> list[Any]:
        """What each rank has, on rank 0; nothing on the others."""
        parts: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(part, parts, 0, self._on_host)
        return parts or []
