"""Checks a LightningModule in your own tests."""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from stepcheck.lightning.module import cases_of, train


def assert_agrees(
    module: type,
    datamodule: type | None = None,
    *,
    strategies: Sequence[str] = (),
    devices: int = 1,
    steps: int = 20,
    accumulate: int | None = None,
    precision: str | None = None,
    gradient_clip_val: float | None = None,
    module_options: Mapping[str, Any] | None = None,
    datamodule_options: Mapping[str, Any] | None = None,
) -> None:
    """Trains a LightningModule under each strategy in new processes, and compares each step with plain PyTorch.

    Args:
        module: A LightningModule class at the top level of a file or of an importable module.
        datamodule: A LightningDataModule class. Without it, the module needs a `train_dataloader`.
        strategies: Strategies of `stepcheck module`, or DeepSpeed configuration files (.json). The default is each ZeRO
            stage, also with offload, or ddp if DeepSpeed is not installed.
        devices: Number of ranks. They use GPUs if there are enough.
        accumulate: Number of micro-batches per step. The default is that of a configuration file, or 1.
        precision: By Lightning's names. The default is that of a configuration file, or "32-true".
        gradient_clip_val: Largest norm of the gradients. The default is that of a configuration file, or no clipping.

    Raises:
        AssertionError: If a strategy differs from plain PyTorch, fails, or could not be judged. The message has a line
            for each such strategy, with its first difference.
        UsageError: If a strategy or the module cannot be trained.
    """
    options = {"module": _name_of(module)}
    if datamodule is not None:
        options["datamodule"] = _name_of(datamodule)
    for part, given in (("module", module_options), ("datamodule", datamodule_options)):
        for name, value in (given or {}).items():
            options[f"{part}.{name}"] = value if isinstance(value, str) else json.dumps(value)
    given = {"precision": precision, "clip": gradient_clip_val}
    maths = {name: value for name, value in given.items() if value is not None}
    cases = cases_of(options, strategies, [accumulate] if accumulate else [], maths, ranks=devices, steps=steps)
    results = train(cases)
    failed = [f"{each['engine']}: {each['outcome']}: {each['summary']}" for each in results if not each["passed"]]
    assert not failed, "\n".join(failed)


def _name_of(user_class: type) -> str:
    module = user_class.__module__
    return f"{module if '.' in module else inspect.getfile(user_class)}:{user_class.__qualname__}"
