"""Counts what a training step costs the host. A GPU computes a step only as fast as the host
prepares it."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from cifar_zero.data.loaders import BLOCK_IMAGES
from cifar_zero.training.fast_loop import EpochLoop
from tests.distributed.changes import optimizers_of_a_gpu

COUNTED = range(4, 8)
"""Micro-batches of a run in which costs are counted. The first micro-batches belong to the start of a training and are
left out."""

COSTS_FILE = "costs.json"

COPIES = ("copy_", "_to_copy", "clone")
"""Operators of aten that only copy a tensor, or convert its dtype or memory format."""


class StepCosts(TorchDispatchMode):
    """Counts, within the context, what torch's dispatcher receives in forward, backward and optimizer step.

    Attributes:
        waits: How often the host waited for a GPU. The host waits when it reads a value, with `item()` or
            `bool(tensor)` for example, and in DeepSpeed's `synchronize`. Reading a value is counted on the CPU too.
        operators: Number of calls of operators of aten that compute, and so launch at least one kernel on a GPU. Views
            and allocations launch none and are left out.
        collectives: Number of collective operations of torch.distributed.
        copied_bytes: Bytes of the outputs of COPIES.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.operators = self.collectives = self.copied_bytes = 0

    def __enter__(self) -> Any:
        from deepspeed.accelerator import get_accelerator  # imported here, once the run has chosen the device

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(get_accelerator(), "synchronize", self._wait)
        return super().__enter__()

    def _wait(self, *_: Any) -> None:
        self.waits += 1

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if name == "_local_scalar_dense":
            self.waits += 1
        elif namespace == "c10d":
            self.collectives += 1
        elif namespace == "aten" and not func.is_view and not name.startswith(("empty", "new_empty")):
            self.operators += 1
        if name in COPIES:
            self.copied_bytes += output.nbytes
        return output

    def totals(self) -> dict[str, int]:
        """Returns the number of waits, operators and collectives, and the bytes copied."""
        return {
            "waits": self.waits,
            "operators": self.operators,
            "collectives": self.collectives,
            "copied_bytes": self.copied_bytes,
        }


def counted_costs(patch: pytest.MonkeyPatch) -> None:
    """Makes rank 0 write the totals of StepCosts in all COUNTED micro-batches into COSTS_FILE of the run folder. Ranks
    use the optimizers that they would use on a GPU. A block of images is one micro-batch, so that every step has the
    loader's whole cost."""
    optimizers_of_a_gpu(patch)
    patch.setitem(BLOCK_IMAGES, "cpu", 1)
    advance = EpochLoop.advance

    def counted_advance(self: EpochLoop, data_fetcher: Any) -> None:
        number = self.total_batch_idx + 1
        mode = self.__dict__.setdefault("mode", StepCosts())
        with mode if number in COUNTED else nullcontext():
            advance(self, data_fetcher)
        if number == COUNTED[-1] and self.trainer.is_global_zero:
            Path(self.trainer.default_root_dir, COSTS_FILE).write_text(json.dumps(mode.totals()))

    patch.setattr(EpochLoop, "advance", counted_advance)
