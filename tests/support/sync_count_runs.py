"""many_runs whose runs count what makes a GPU's host wait for it: DeepSpeed's `synchronize`, and values of tensors.

Rank 0 writes syncs.json into the run folder: for each line of code that waits, how often it did in COUNTED. The model's
tensors are on the CPU here; a value of a tensor that stays on the CPU with a GPU too counts as well.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cifar_zero.core import exits
from cifar_zero.training.fast_loop import EpochLoop
from tests.support.many_runs import main

COUNTED = range(4, 8)
"""Micro-batches that are counted: those after the start of a training."""


class Counting(TorchDispatchMode):
    """Counts `item()`, `bool(tensor)` and their like: each reads a value of a tensor."""

    def __init__(self, found: Counter[str]):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._found[_caller()] += 1
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """Returns file and function of the last line outside torch and this file."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and "/torch/" not in frame.filename:
            return f"{Path(frame.filename).name} {frame.name}"
    raise AssertionError


advance = EpochLoop.advance


def counted_advance(self: EpochLoop, data_fetcher: Any) -> None:
    number = self.total_batch_idx + 1
    found = self.__dict__.setdefault("found", Counter[str]())
    if number not in COUNTED:
        advance(self, data_fetcher)
    else:
        from deepspeed.accelerator import get_accelerator  # here: once the run has chosen the device

        accelerator: Any = get_accelerator()
        accelerator.synchronize = lambda *args: found.update([f"synchronize {_caller()}"])
        with Counting(found):
            advance(self, data_fetcher)
        del accelerator.synchronize
    if number == COUNTED[-1] and self.trainer.is_global_zero:
        Path(self.trainer.default_root_dir, "syncs.json").write_text(json.dumps(found))


EpochLoop.advance = counted_advance

if __name__ == "__main__":
    sys.exit(exits.guarded(main))
