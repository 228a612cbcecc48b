"""DeepSpeed's ZeRO under Lightning: its configuration, engine, checkpoints and mixtures of experts."""

from cifar_zero.strategies.deepspeed.config import build

__all__ = ["build"]
