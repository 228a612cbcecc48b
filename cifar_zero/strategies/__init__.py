"""Builds Lightning's strategy for a run: those of plain PyTorch in this file, each other family in a file or folder of
this package, which is imported only if a run needs it. hooks.py defines what other packages read from a strategy."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cifar_zero.config.placement import Placement

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

    from cifar_zero.config.run import Run
    from cifar_zero.strategies.hooks import Hooks


def build(run: Run) -> Strategy | str:
    """Returns the strategy with which Lightning's Trainer trains a run, or Lightning's name for it. Clipping and
    accumulation are left to the Trainer."""
    if run.spec.family == "baseline":
        return _plain(run.placement)
    return import_module(f"cifar_zero.strategies.{run.spec.family}").build(run)


def _plain(placement: Placement) -> Strategy | str:
    if placement.strategy == "baseline" and placement.world_size == 1:
        return "auto"
    from lightning.pytorch.strategies import DDPStrategy
    from torch.nn.parallel import DistributedDataParallel

    # DDP does not broadcast buffers, because only the buffers of batch norms change, and callbacks/averaging.py
    # averages them under every strategy.
    known = inspect.signature(DistributedDataParallel).parameters  # torch 2.15 renamed broadcast_buffers
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {sync_buffers: False}
    return DDPStrategy(gradient_as_bucket_view=True, **options)


def hooks_of(strategy: Strategy | None) -> Hooks:
    """Returns the hooks of a strategy: EngineHooks for DeepSpeed, otherwise an instance of the class in its attribute
    `hooks`. Without this attribute, or without a strategy, it is `Hooks`."""
    # Imported here, because the doctor imports this package without torch, and only runs under DeepSpeed need
    # DeepSpeed.
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from cifar_zero.strategies.hooks import Hooks

    if isinstance(strategy, DeepSpeedStrategy):
        from cifar_zero.strategies.deepspeed.hooks import EngineHooks

        return EngineHooks(strategy)
    return getattr(strategy, "hooks", Hooks)(strategy)
