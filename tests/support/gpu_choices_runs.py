"""small_vit_runs on CPU ranks, with the optimizers of a GPU: torch's fused ones."""

from __future__ import annotations

import sys
from typing import Any

from cifar_zero.core import exits
from cifar_zero.strategies.deepspeed.hooks import EngineHooks
from cifar_zero.strategies.hooks import Hooks
from cifar_zero.strategies.mesh import MeshHooks
from tests.support.small_vit_runs import main


def on_cuda(chosen: Any) -> Any:
    """Returns the method with the device type cuda."""
    return lambda self, device_type, clips: chosen(self, "cuda", clips)


for hooks in (Hooks, MeshHooks, EngineHooks):
    hooks.optimizer_implementation = on_cuda(hooks.optimizer_implementation)

if __name__ == "__main__":
    sys.exit(exits.guarded(main))
