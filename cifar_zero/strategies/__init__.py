"""Builds Lightning's strategy of a run, one file per family; `build` imports only the family that the run needs.

The other functions take any of Lightning's strategies, so that the modules work with a plain Trainer too. `own` returns
what this project's strategies decide themselves, and the defaults for other strategies.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    from cifar_zero.config.run import Run
    from cifar_zero.optimizers import Implementation


class OwnStrategy:
    """What a strategy of this project decides in addition to Lightning's interface; here the defaults."""

    def optimizer_implementation(self, device_type: str) -> Implementation:
        """Returns which implementation of the optimizer runs on devices of a type, cuda or cpu."""
        raise NotImplementedError

    def parameter_groups(self, module: Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns an optimizer's parameter groups, split further where the strategy must tell parameters apart."""
        return groups

    def rewriting(self) -> AbstractContextManager[None]:
        """Returns a context in which the weights that a rank holds may be overwritten; all ranks enter it."""
        return nullcontext()

    def plain_names(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the plain model's name for each name of a weight."""
        return {name: name for name in names}


def build(run: Run, elements: int = 0) -> Strategy | str:
    """Returns Lightning's strategy for a run with CIFARModule, or for another module of so many `elements`."""
    family = import_module(f"cifar_zero.strategies.{run.spec.family}")
    return family.build(run, elements) if run.spec.family == "deepspeed" else family.build(run)


def own(strategy: Strategy) -> OwnStrategy:
    """Returns a strategy of this project itself, and the defaults for any other."""
    return strategy if isinstance(strategy, OwnStrategy) else OwnStrategy()


def replica(strategy: Strategy) -> tuple[int, int]:
    """Returns the number of replicas that train on different images, and the number of this rank's replica. To be
    called after the rendezvous of the ranks."""
    from lightning.pytorch.strategies import ParallelStrategy

    if not isinstance(strategy, ParallelStrategy):
        return 1, 0
    kwargs = strategy.distributed_sampler_kwargs
    return kwargs["num_replicas"], kwargs["rank"]


def data_group(strategy: Strategy) -> ProcessGroup | None:
    """Returns the ranks, one of each replica, that with this one see each image once; None for all ranks."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    mesh = strategy.device_mesh if isinstance(strategy, ModelParallelStrategy) else None
    return None if mesh is None else mesh["data_parallel"].get_group()


def optimizer_implementation(strategy: Strategy, device: str, clips: bool, in_graph: bool = False) -> Implementation:
    """Returns the implementation that a strategy runs: DeepSpeed's CPU optimizer where it is offloaded, else
    torch's.

    torch's fused optimizer updates all parameters in one call. It is used on CUDA: on the CPU it rounds an element at
    the end of a tensor differently from one in its middle (torch 2.15), so that sharding would change the weights.
    Under autocast it is used only without a gradient scaler and without clipping: Lightning (2.6.6) does not clip the
    gradients of a fused optimizer there, in bfloat16 either. A graph of --compile step cannot have it (torch 2.15).
    """
    from lightning.pytorch.plugins.precision import MixedPrecision

    if isinstance(strategy, OwnStrategy):
        return strategy.optimizer_implementation(device)
    precision = strategy.precision_plugin
    refused = in_graph or (isinstance(precision, MixedPrecision) and (clips or precision.scaler is not None))
    return "torch_fused" if device == "cuda" and not refused else "torch"
