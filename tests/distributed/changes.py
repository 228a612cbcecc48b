"""Changes to this program during runs of `train_all`."""

from typing import Any

import pytest
import torch

from cifar_zero.launch.collectives import gather
from cifar_zero.models import LAYOUTS, Layout
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.deepspeed.hooks import EngineHooks
from cifar_zero.strategies.hooks import Hooks
from cifar_zero.strategies.mesh import MeshHooks
from cifar_zero.training.callbacks.checkpoint import RunState


def small_vit(patch: pytest.MonkeyPatch) -> None:
    """Makes vit_tiny so small that a step takes milliseconds. Its four heads can be split between two ranks."""
    patch.setitem(LAYOUTS, "tiny", Layout(width=64, depth=4, heads=4))


def equal_ranks_of_a_model(patch: pytest.MonkeyPatch) -> None:
    """Makes a run end with AssertionError if, at a checkpoint, the two ranks of one small vit_tiny have different
    random states or weights outside of the blocks."""
    small_vit(patch)
    save = RunState.on_save_checkpoint

    def checked(self: Any, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        save(self, trainer, pl_module, checkpoint)
        hooks, net = hooks_of(trainer.strategy), pl_module.net
        if hooks.replica()[0] == 1:
            weights = [hooks.local(parameter).detach() for parameter in (net.positions, net.patches.weight)]
            one, other = gather([torch.get_rng_state(), *weights])
            assert all(map(torch.equal, one, other))

    patch.setattr(RunState, "on_save_checkpoint", checked)


def optimizers_of_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Makes ranks on the CPU use torch's fused optimizers wherever ranks with GPUs do. vit_tiny is small."""
    small_vit(patch)
    for hooks in (Hooks, MeshHooks, EngineHooks):
        patch.setattr(hooks, "optimizer_implementation", _on_cuda(hooks.optimizer_implementation))


def _on_cuda(chosen: Any) -> Any:
    return lambda self, device_type, clips=False: chosen(self, "cuda", clips)
