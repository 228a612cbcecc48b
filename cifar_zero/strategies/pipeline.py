"""Pipeline parallelism (GPipe, Huang et al. 2019): each rank holds a contiguous share of a transformer's blocks.

A batch goes through the ranks in chunks, so that the ranks work on different chunks at the same time. In the backward
pass autograd takes the chunks in the opposite order. Every rank holds and computes the layers before and after the
blocks, less than a hundredth of the model, so that a LightningModule can call the model as usual.

torch.distributed.pipelining (2.15) does not fit, because it runs the forward and the backward pass in one call. Between
the two, Lightning (2.6.6) computes the loss, calls hooks and zeroes the gradients.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh

from cifar_zero.config.run import Run
from cifar_zero.launch.collectives import gather
from cifar_zero.strategies.mesh import MeshHooks, MeshStrategy, on_host

CHUNKS_PER_RANK = 4
"""Number of chunks per rank into which a micro-batch is divided, unless it has fewer images. Ranks are idle for
(ranks - 1) / (chunks + ranks - 1) of a step, which is little with four chunks per rank or more (GPipe, section 2.3)."""


def build(run: Run) -> "PipelineStrategy":
    """Returns the strategy in which a group of ranks holds one model, with at least one block on each rank. Other
    groups hold replicas."""
    return PipelineStrategy(run.placement, shard)


def shard(net: nn.Module, mesh: DeviceMesh) -> None:
    """Removes from a model, in place, the weights of all blocks except this rank's share. Ranks that compute different
    images average their gradients, as under DDP."""
    net.blocks = Stage(net.blocks, mesh["tensor_parallel"].get_group())  # pyright: ignore[reportArgumentType]
    if (others := mesh["data_parallel"]).size() > 1:
        replicate(net, mesh=others)  # not per block, because a block computes several chunks


class Stage(nn.Sequential):
    """A model's blocks, of which this rank computes its share. The other blocks are emptied and keep their names.

    A stage takes the input of the first block and returns the output of the last block on every rank. Both are tokens
    (N, tokens, width) of one dtype. The tokens and their gradients are the same on every rank.
    """

    def __init__(self, blocks: nn.Sequential, group: dist.ProcessGroup):
        super().__init__(OrderedDict(blocks.named_children()))
        self.group = group
        self.rank, self.ranks = group.rank(), group.size()
        first, end = (len(blocks) * rank // self.ranks for rank in (self.rank, self.rank + 1))
        self._own_blocks = blocks[first:end].forward
        for block in (*blocks[:first], *blocks[end:]):
            for parameter in block.parameters():
                parameter.data = parameter.data[:0].clone()
        self._sent: list[tuple[Any, Tensor]] = []

    def forward(self, input: Tensor) -> Tensor:
        tokens = input.view_as(input)
        _on_gradient(tokens, lambda gradient: self._broadcast(gradient, 0))
        with self._own_random_numbers(tokens):
            tokens = torch.cat([self._chunk(chunk) for chunk in tokens.chunk(CHUNKS_PER_RANK * self.ranks)])
        return self._broadcast(tokens, self.ranks - 1)  # only the last rank's gradient is used

    @contextmanager
    def _own_random_numbers(self, tokens: Tensor) -> Iterator[None]:
        """Context manager in which each rank has random numbers of its own, for the dropout in its blocks. Their seed
        comes from a number that is the same on all ranks of the model. Afterwards the random states are equal again, as
        the layers outside of the blocks need it."""
        if not self.training:
            yield
            return
        seed = int(torch.randint(2**31, ()))
        with torch.random.fork_rng([tokens.device] if tokens.is_cuda else []):
            torch.manual_seed(seed + self.rank)
            yield

    def _chunk(self, tokens: Tensor) -> Tensor:
        """Computes this rank's blocks for one chunk. Tokens come from the previous rank and go to the next one, and
        their gradients go the opposite way."""
        if self.rank > 0:
            tokens = self._receive(tokens, -1)
            _on_gradient(tokens, lambda gradient: self._send(gradient, -1))
        tokens = self._own_blocks(tokens)
        if self.rank < self.ranks - 1:
            self._send(tokens, 1)
            _on_gradient(tokens, lambda gradient: self._receive(gradient, 1))
        return tokens

    def _send(self, tensor: Tensor, step: int) -> None:
        """Sends a tensor to the next rank (step 1) or the previous one (-1) without waiting."""
        tensor = tensor.detach().contiguous()
        self._sent.append((dist.isend(tensor, group=self.group, group_dst=self.rank + step), tensor))

    def _receive(self, tensor: Tensor, step: int) -> Tensor:
        """Returns a copy of `tensor` with the values that the next rank (step 1) or the previous one (-1) has sent."""
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        dist.recv(tensor.detach(), group=self.group, group_src=self.rank + step)
        return tensor

    def _broadcast(self, tensor: Tensor, rank: int) -> Tensor:
        """Returns a copy of `tensor` with the values of the rank `rank`. Waits first until all tensors that this rank
        sent have arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(tensor.detach(), group=self.group, group_src=rank)
        return tensor


def _on_gradient(tokens: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    if tokens.requires_grad:
        tokens.register_hook(hook)


class PipelineHooks(MeshHooks):
    """Reads the tensors of a block from the rank that computes it. The strategy sets the attribute `stage` of each
    parameter of a block to the process group over which the blocks are distributed."""

    def full_gradient(self, parameter: Any) -> Tensor:
        """Returns the gradient on every rank. For a block's parameter it comes from the rank that has the block, and is
        empty on the other ranks. A parameter outside of the blocks is on every rank."""
        own = super().full_gradient(parameter)
        if not hasattr(parameter, "stage"):
            return own
        return max(gather(own.cpu(), parameter.stage), key=Tensor.numel).to(own.device)

    def ranks_of(self, parameter: Any) -> int:
        if hasattr(parameter, "stage"):
            return parameter.stage.size()
        return super().ranks_of(parameter)


class PipelineStrategy(MeshStrategy):
    """The strategy in which each rank trains its own blocks. A checkpoint is one plain file with all blocks."""

    hooks = PipelineHooks

    def setup(self, trainer: Trainer) -> None:
        """Splits the model, makes a group over which `gathered` sends tensors on the CPU, and marks the parameters of
        the blocks. The marks come last, because moving the model to the device would drop them."""
        super().setup(trainer)
        self._hosts: Any = dist.new_group(backend="gloo")
        for stage in trainer.lightning_module.modules():
            if isinstance(stage, Stage):
                for parameter in stage.parameters():
                    parameter.stage = stage.group  # pyright: ignore[reportAttributeAccessIssue]

    def gathered(self, states: Mapping[Any, Any]) -> dict[Any, Any]:
        parts: list[Any] | None = None
        if self.is_global_zero:
            parts = [None] * self.world_size
        one_of_each_stage = self.distributed_sampler_kwargs["rank"] == 0
        dist.gather_object(on_host(states, keep=one_of_each_stage), parts, 0, self._hosts)
        if parts is None:
            return {}
        full = dict.fromkeys(states)
        for part in parts:
            full |= {key: value for key, value in part.items() if len(value)}
        return full
