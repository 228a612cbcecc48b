"""DeepSpeed's ZeRO under Lightning: its configuration, engine, checkpoints and mixtures of experts."""

from typing import Any

from cifar_zero.strategies.deepspeed.config import build

__all__ = ["build"]


def __getattr__(name: str) -> Any:
    if name == "ZeROStrategy":  # not before it is asked for: it imports torch and DeepSpeed
        from cifar_zero.strategies.deepspeed.strategy import ZeROStrategy

        return ZeROStrategy
    raise AttributeError(f"module {__name__} has no attribute {name}")
