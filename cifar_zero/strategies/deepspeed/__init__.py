"""DeepSpeed's ZeRO under Lightning: its configuration, engine, checkpoints and mixtures of experts."""

from typing import TYPE_CHECKING, Any

from cifar_zero.strategies.deepspeed.config import build

if TYPE_CHECKING:
    from cifar_zero.strategies.deepspeed.strategy import ZeROStrategy

__all__ = ["ZeROStrategy", "build"]


def __getattr__(name: str) -> Any:
    if name == "ZeROStrategy":  # not before it is asked for: it imports torch and DeepSpeed
        from cifar_zero.strategies.deepspeed.strategy import ZeROStrategy

        return ZeROStrategy
    raise AttributeError(f"module {__name__} has no attribute {name}")
