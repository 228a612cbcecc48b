"""Pipeline parallelism (GPipe, Huang et al. 2019): each rank holds a share of a transformer's blocks, neighbours.

A batch goes through the ranks in chunks, so that they work at the same time on different chunks; in the backward pass
autograd takes the chunks in the opposite order. Every rank has and computes what comes before and after the blocks,
less than a hundredth of the model, so the module sees one model that takes images and returns scores.
torch.distributed.pipelining (2.15) does not fit: it runs forward and backward in one call, between which Lightning
(2.6.6) has its loss, its hooks and the zeroing of gradients.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from cifar_zero.config.run import Run
from cifar_zero.optimizers.groups import by_name
from cifar_zero.strategies.mesh import MeshStrategy, on_host, unwrapped

CHUNKS_PER_RANK = 4
"""Chunks of a micro-batch, if it has as many images: ranks wait for (ranks - 1) / (chunks + ranks - 1) of a step, which
is little from four chunks per rank on (GPipe, section 2.3)."""


def build(run: Run, num_parameters: int) -> PipelineStrategy:
    """Returns the strategy in which all ranks together hold one model, each at least one block."""
    return PipelineStrategy(run, shard, together=True)


def shard(net: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves this rank its share of the blocks, under their names."""
    net.blocks = Stage(net.blocks, mesh["tensor_parallel"].get_group())  # pyright: ignore[reportArgumentType]


class Stage(nn.Sequential):
    """This rank's share of a model's blocks; takes the input of the first and returns the output of the last of all
    blocks, on every rank. Tokens (N, tokens, width) in and out of each block, of one dtype."""

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
        chunks = line.enter(input).chunk(CHUNKS_PER_RANK * line.ranks)
        return line.leave(torch.cat([line.to_next(super(Stage, self).forward(line.from_previous(c))) for c in chunks]))


class Line:
    """Passes tokens from rank to rank, and their gradients back."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self._sent: list[tuple[Any, Tensor]] = []

    def enter(self, tokens: Tensor) -> Tensor:
        """Returns the input of the pipeline; every rank gets the gradient that has come back to the first one."""
        return _exchange(tokens, _same, lambda gradient: self._broadcast(gradient, 0))

    def from_previous(self, chunk: Tensor) -> Tensor:
        """Returns the tokens of a chunk from the previous rank, to which their gradient goes back."""
        if self.rank == 0:
            return chunk
        return _exchange(chunk, lambda like: self._receive(like, -1), lambda gradient: self._send(gradient, -1))

    def to_next(self, chunk: Tensor) -> Tensor:
        """Sends the tokens of a chunk to the next rank, from which their gradient comes back."""
        if self.rank == self.ranks - 1:
            return chunk
        return _exchange(chunk, lambda tokens: self._send(tokens, 1), lambda like: self._receive(like, 1))

    def leave(self, tokens: Tensor) -> Tensor:
        """Returns the last rank's tokens on every rank; only the gradient of the last rank is used."""
        return _exchange(tokens, lambda own: self._broadcast(own.clone(), self.ranks - 1), _same)

    def _send(self, tensor: Tensor, step: int) -> Tensor:
        """Sends to the next rank (step 1) or the previous one (-1) without waiting; returns a view of the tensor."""
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, group=self.group, group_dst=self.rank + step), tensor))
        return _same(tensor)

    def _receive(self, like: Tensor, step: int) -> Tensor:
        """Returns what the next rank (step 1) or the previous one (-1) has sent, of the shape and dtype of `like`."""
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(tensor, group=self.group, group_src=self.rank + step)
        return tensor

    def _broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        """Returns one rank's tensor on every rank, after all that was sent has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.group, group_src=rank)
        return tensor


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, ahead: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return ahead(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.back(gradient), None, None


def _exchange(tokens: Tensor, ahead: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies one function to tokens in the forward pass, and another one to their gradient in the backward pass."""
    return _Exchange.apply(tokens, ahead, back)  # pyright: ignore[reportReturnType]


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


class PipelineStrategy(MeshStrategy):
    """Each rank trains its own blocks; a checkpoint is one plain file with all of them."""

    _names: list[str]
    """Names of all weights in the order of the whole model."""

    _on_host: Any = None
    """The ranks again, for exchanging objects between hosts."""

    def setup(self, trainer: Trainer) -> None:
        """Cuts the model, once for the fit and the test after it."""
        assert self.model is not None
        if not self._sharded:
            self._names = [*self.model.state_dict()]
            self._on_host = dist.new_group(backend="gloo")
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the weights of all ranks, on rank 0; every rank takes part."""
        assert self.model is not None
        parts = self._gather(on_host(self.model.state_dict()))
        weights = {name: value for part in reversed(parts) for name, value in part.items()}
        return {name: weights[name] for name in self._names} if parts else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state of all ranks in torch's form, on rank 0; every rank takes part."""
        state = unwrapped(optimizer).state_dict()
        own = {name: on_host(entry) for name, (_, entry) in by_name(state).items()}
        parts = self._gather(([group["param_names"] for group in state["param_groups"]], own))
        entries = {name: entry for _, part in reversed(parts) for name, entry in part.items()}
        groups: list[dict[str, Any]] = []
        whole: list[dict[str, Any]] = []
        for group, *of_ranks in zip(state["param_groups"], *(names for names, _ in parts), strict=True):
            names = [*dict.fromkeys(chain(*of_ranks))]
            groups.append({**group, "params": [*range(len(whole), len(whole) + len(names))], "param_names": names})
            whole += [entries[name] for name in names]
        return {"state": dict(enumerate(whole)), "param_groups": groups}

    def _gather(self, part: Any) -> list[Any]:
        """Returns what each rank has, on rank 0; nothing on the others."""
        parts: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(part, parts, 0, self._on_host)
        return parts or []
