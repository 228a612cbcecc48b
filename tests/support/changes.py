"""Changes to this program that tests make before ranks train. many_runs calls one of these functions for the runs of a
request, and undoes the change after them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cifar_zero.data.loaders import BLOCK_IMAGES
from cifar_zero.models import LAYOUTS, Layout
from cifar_zero.strategies.deepspeed.hooks import EngineHooks
from cifar_zero.strategies.hooks import Hooks
from cifar_zero.strategies.mesh import MeshHooks
from cifar_zero.training.fast_loop import EpochLoop
from tests.support.step_costs import StepCosts, caller

COUNTED = range(4, 8)
"""Micro-batches in which `counted_costs` counts. The first ones belong to the start of a training and are left out."""


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


def counted_costs(patch: pytest.MonkeyPatch) -> None:
    """Makes rank 0 write costs.json, the StepCosts of all COUNTED micro-batches, into the run folder. DeepSpeed's
    `synchronize` counts as a wait. Optimizers are those of a GPU. A block of images is one micro-batch, so that every
    step has the loader's whole cost."""
    optimizers_of_a_gpu(patch)
    patch.setitem(BLOCK_IMAGES, "cpu", 1)
    _count(patch, EngineCosts, "costs.json")


def counted_collectives(patch: pytest.MonkeyPatch) -> None:
    """Makes rank 0 write collectives.json into the run folder. It lists the kind and the bytes of each collective in
    COUNTED. vit_tiny is small."""
    small_vit(patch)
    _count(patch, Collectives, "collectives.json")


def _count(patch: pytest.MonkeyPatch, mode_type: type[EngineCosts] | type[Collectives], file: str) -> None:
    """Makes rank 0 write the totals of a mode that is on in all COUNTED micro-batches into a file of the run folder."""
    advance = EpochLoop.advance

    def counted_advance(self: EpochLoop, data_fetcher: Any) -> None:
        number = self.total_batch_idx + 1
        mode = self.__dict__.setdefault("mode", mode_type())
        with mode if number in COUNTED else nullcontext():
            advance(self, data_fetcher)
        if number == COUNTED[-1] and self.trainer.is_global_zero:
            Path(self.trainer.default_root_dir, file).write_text(json.dumps(mode.totals()))

    patch.setattr(EpochLoop, "advance", counted_advance)


class EngineCosts(StepCosts):
    """StepCosts that counts DeepSpeed's `synchronize` as a wait."""

    def __enter__(self) -> Any:
        from deepspeed.accelerator import get_accelerator  # imported here, once the run has chosen the device

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(get_accelerator(), "synchronize", lambda *_: self.waits.update([caller()]))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()


class Collectives(TorchDispatchMode):
    """Lists the name and the bytes of each collective. A collective of DDP's C++ code is an operator too."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[str, int]] = []

    def totals(self) -> list[tuple[str, int]]:
        """Returns the name and the bytes of each collective."""
        return self._found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [tensor.nbytes for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)]
            self._found.append((func._schema.name.split("::")[1], max(sizes, default=0)))
        return func(*args, **(kwargs or {}))
