"""Counts what a training step costs the host. A GPU computes a step only as fast as the host prepares it."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("copy_", "_to_copy", "clone")
"""Operators of aten that only copy a tensor, or convert its dtype or memory format."""


class StepCosts(TorchDispatchMode):
    """Counts, within the context, what torch's dispatcher receives in forward, backward and optimizer step.

    Attributes:
        waits: How often each function made the host wait for a GPU to read a value, as by `item()` and `bool(tensor)`.
            Such reads count on the CPU too, on which the tests run.
        operators: Number of calls of each operator of aten that computes, and so launches at least one kernel on a GPU.
            Views and allocations launch none and are left out.
        collectives: Number of calls of each collective operation of torch.distributed.
        copied_bytes: Bytes of the outputs of COPIES.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = Counter[str]()
        self.operators = Counter[str]()
        self.collectives = Counter[str]()
        self.copied_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if name == "_local_scalar_dense":
            self.waits[caller()] += 1
        elif namespace == "c10d":
            self.collectives[name] += 1
        elif namespace == "aten" and not func.is_view and not name.startswith(("empty", "new_empty")):
            self.operators[name] += 1
        if name in COPIES:
            self.copied_bytes += output.nbytes
        return output

    def totals(self) -> dict[str, int]:
        """Returns the number of waits, operators and collectives, and the bytes copied."""
        return {
            "waits": self.waits.total(),
            "operators": self.operators.total(),
            "collectives": self.collectives.total(),
            "copied_bytes": self.copied_bytes,
        }


def caller() -> str:
    """Returns file and function of the innermost call outside torch and this file."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and "/torch/" not in frame.filename:
            return f"{Path(frame.filename).name} {frame.name}"
    raise AssertionError
