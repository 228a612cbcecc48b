"""Each option has one owner. The owner decides which runs can be compared, and what a resumed run keeps."""

from pathlib import Path
from typing import Any

import pytest

from cifar_zero.checkpoints.resume import check_same_run
from cifar_zero.comparison import reading
from cifar_zero.comparison.result import FinishedRun, Variant
from cifar_zero.config import command_line
from cifar_zero.config.run import Run, run_of_bytes
from cifar_zero.config.settings import flat, may_change_on_resume, owner_of
from cifar_zero.core.errors import UsageError

EVERY = flat(command_line.parse(["--model", "net_moe"]))
"""Every option of a run, with its default."""


def other(value: Any) -> Any:
    """Returns another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return [*value, "other"] if isinstance(value, list) else f"{value}other"


def finished(**changes: Any) -> FinishedRun:
    """Returns a finished run with these options. Its metrics.json lacks them."""
    metrics = {"dataset": "digits", "num_train": 100, "strategy": "ddp", "world_size": 1, "num_nodes": 1}
    return FinishedRun("runs/x", {**metrics, "accumulate": 1}, {**EVERY, **changes}, {})


def test_runs_of_one_recipe_are_compared_and_of_two_are_not():
    for option, value in EVERY.items():
        runs = {"a": finished(), "b": finished(**{option: other(value)})}
        differences = reading.differences([Variant(name, run=run) for name, run in runs.items()])
        blocking = reading.blocking_settings(differences, "a", "b")
        assert blocking == ([option] if owner_of(option) == "recipe" else []), option


def test_a_resumed_run_keeps_its_recipe():
    for option in ("batch_size", "seed", "optimizer.lr", "lora.rank", "data.val_fraction", "data.normalize"):
        assert not may_change_on_resume(option)
    now = command_line.parse(["--model", "net_moe", "--resume", "last.ckpt"])
    for option, value in EVERY.items():
        before = {**EVERY, option: other(value)}
        if option == "data.source" or may_change_on_resume(option):
            continue
        with pytest.raises(UsageError, match=f"its run has --{option} "):
            check_same_run(now, before)
    changed = {option: other(value) for option, value in EVERY.items() if may_change_on_resume(option)}
    check_same_run(now, {**EVERY, **changed, "data.source": "auto"})


TUPLE_AND_KEYS = """
from torch import nn
class Net(nn.Module):
    def __init__(self, widths: tuple = ((1, 2), 3), names: dict = {1: "a"}): super().__init__()
"""


def test_the_ranks_get_the_same_run(tmp_path: Path):
    (tmp_path / "net_with_a_tuple.py").write_text(TUPLE_AND_KEYS)
    flags = ["--model", f"{tmp_path}/net_with_a_tuple.py:Net", "--optimizer", "adam", "--trust", "--devices", "2"]
    settings = command_line.parse([*flags, "--trainer.callbacks", "a.B", "--trainer.max_time", "10:30:00"])
    run = Run(**vars(settings), num_classes=10)
    got = run_of_bytes(run.to_bytes())
    assert (got, got.consent, got.named) == (run, run.consent, run.named)
    assert got.recipe.model.options == {"widths": ((1, 2), 3), "names": {1: "a"}}
