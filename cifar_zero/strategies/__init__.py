"""Builds Lightning's strategy: plain PyTorch here, one file or folder for each other family, of which only the one that
a run needs is imported. What else a strategy decides or knows, and other packages read, is in hooks.py."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cifar_zero.config import ds_config
from cifar_zero.config.placement import Placement

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

    from cifar_zero.strategies.hooks import Hooks


def build(placement: Placement, num_parameters: int, largest_parameter: int = 0) -> Strategy | str:
    """Returns the strategy for Lightning's Trainer and any LightningModule with so many parameters.

    Nothing of the placement may be open: devices is a number, accelerator cpu or gpu, precision a format. Clipping and
    accumulation are the Trainer's.

    Args:
        placement: Where and how to train.
        num_parameters: Elements of all parameters; DeepSpeed's communication buckets are no larger.
        largest_parameter: Elements of the largest parameter, for NVMe offload's buffers; 0: unknown.

    Raises:
        UsageError: The ranks cannot be divided as the placement says, or its DeepSpeed configuration cannot be used.
    """
    spec = ds_config.spec_of(placement)
    if spec.family == "baseline":
        return _plain(placement)
    family = import_module(f"cifar_zero.strategies.{spec.family}")
    if spec.family == "deepspeed":
        return family.build(placement, spec, num_parameters, largest_parameter)
    return family.build(placement)


def _plain(placement: Placement) -> Strategy | str:
    """Returns Lightning's DDP for several ranks or if it is named, else its strategy for a single device."""
    if placement.strategy == "baseline" and placement.world_size == 1:
        return "auto"
    from lightning.pytorch.strategies import DDPStrategy
    from torch.nn.parallel import DistributedDataParallel

    # callbacks/averaging.py averages the only buffers that change, batch normalisation's, under every strategy.
    known = inspect.signature(DistributedDataParallel).parameters  # torch 2.15 has renamed it
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {sync_buffers: False}
    return DDPStrategy(gradient_as_bucket_view=True, **options)


def hooks_of(strategy: Strategy | None) -> Hooks:
    """Returns the hooks of a strategy's family: DeepSpeed's engine under Lightning's own strategy too, `hooks` of a
    strategy that names them, and the defaults for any other."""
    # Imported here, because the doctor imports this package without torch, and a training without DeepSpeed has none.
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from cifar_zero.strategies.hooks import Hooks

    if isinstance(strategy, DeepSpeedStrategy):
        from cifar_zero.strategies.deepspeed.hooks import EngineHooks

        return EngineHooks(strategy)
    return getattr(strategy, "hooks", Hooks)(strategy)
