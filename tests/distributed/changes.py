"""Changes to this program during runs of `train_all`."""

from typing import Any

import pytest

from cifar_zero.models import LAYOUTS, Layout
from cifar_zero.strategies.deepspeed.hooks import EngineHooks
from cifar_zero.strategies.hooks import Hooks
from cifar_zero.strategies.mesh import MeshHooks


def small_vit(patch: pytest.MonkeyPatch) -> None:
    """Makes vit_tiny so small that a step takes milliseconds. Its four heads can be split between two ranks."""
    patch.setitem(LAYOUTS, "tiny", Layout(width=64, depth=4, heads=4))


def optimizers_of_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Makes ranks on the CPU use torch's fused optimizers wherever ranks with GPUs do. vit_tiny is small."""
    small_vit(patch)
    for hooks in (Hooks, MeshHooks, EngineHooks):
        patch.setattr(hooks, "optimizer_implementation", _on_cuda(hooks.optimizer_implementation))


def _on_cuda(chosen: Any) -> Any:
    return lambda self, device_type, clips=False: chosen(self, "cuda", clips)
