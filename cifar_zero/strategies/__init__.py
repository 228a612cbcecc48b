"""Builds Lightning's strategy of a run, one file per family; `build` imports only the family that the run needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cifar_zero.config.strategy_specs import STRATEGIES

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    from cifar_zero.config.flags import Config
    from cifar_zero.optimizers import Implementation


def build(config: Config, on_cpu: bool, micro_batch_size: int, num_parameters: int) -> Strategy | str:
    """Lightning's strategy for a run.

    Args:
        config: of the run, its devices a number; its strategy is a key of STRATEGIES, unless ds_config names a raw
            DeepSpeed configuration.
        on_cpu: whether the ranks are CPU processes.
        micro_batch_size: images per rank and micro-batch.
        num_parameters: of the network, in elements.
    """
    family = "deepspeed" if config.ds_config else STRATEGIES[config.strategy].family
    return import_module(f"cifar_zero.strategies.{family}").build(config, on_cpu, micro_batch_size, num_parameters)


def replica(strategy: Strategy) -> tuple[int, int]:
    """How many replicas of the network train on images of their own, and which of them this rank is, or is a part of.

    To be called when the ranks have found each other.
    """
    kwargs = getattr(strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
    return kwargs["num_replicas"], kwargs["rank"]


def data_group(strategy: Strategy) -> ProcessGroup | None:
    """One rank of each replica, this one among them, which together see each image once; None for all ranks."""
    mesh = getattr(strategy, "device_mesh", None)
    return None if mesh is None else mesh["data_parallel"].get_group()


def optimizer_implementation(strategy: Strategy, device_type: str, clips: bool) -> Implementation:
    """The optimizer that a strategy runs: DeepSpeed's CPU optimizer where it is offloaded, DeepSpeed's fused one on
    CUDA where it can be compiled, else torch's.

    torch's fused optimizer updates all parameters in one call. It is used on CUDA: on the CPU it rounds an element at
    the end of a tensor differently from one in its middle (torch 2.15), so that sharding would change the weights.
    Under autocast it is used only without a gradient scaler and without clipping: Lightning (2.6.6) does not clip the
    gradients of a fused optimizer there, in bfloat16 either.

    Args:
        strategy: of the run.
        device_type: of the ranks' devices: cuda or cpu.
        clips: whether gradients are clipped.
    """
    from lightning.pytorch.plugins.precision import MixedPrecision

    own = getattr(strategy, "optimizer_implementation", None)
    if own is not None:
        return own(device_type)
    precision = strategy.precision_plugin
    refused = isinstance(precision, MixedPrecision) and (clips or precision.scaler is not None)
    return "torch_fused" if device_type == "cuda" and not refused else "torch"


def parameter_groups(strategy: Strategy, module: Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An optimizer's groups of a network's parameters, split further where the strategy has to tell them apart."""
    own = getattr(strategy, "parameter_groups", None)
    return own(module, groups) if own is not None else groups


def rewriting(strategy: Strategy) -> AbstractContextManager[None]:
    """Within it the weights that a rank holds may be given other values; to be entered by all ranks."""
    own = getattr(strategy, "rewriting", None)
    return own() if own is not None else nullcontext()
