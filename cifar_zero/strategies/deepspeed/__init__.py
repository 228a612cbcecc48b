"""DeepSpeed's ZeRO under Lightning: its configuration, engine, checkpoints and mixtures of experts."""

from cifar_zero.strategies.deepspeed.config import build
from cifar_zero.strategies.deepspeed.strategy import ZeROStrategy

__all__ = ["ZeROStrategy", "build"]
