from __future__ import annotations

import pytest

from cifar_zero.core.errors import UsageError
from cifar_zero.sweeping.runs import flags_of, name_of, resolved

REST = ["--data.source", "synthetic", "--accelerator", "cpu", "--batch_size", "16"]


def test_names_and_flags() -> None:
    options = {"optimizer.lr": 0.0123456789, "model.hidden": "[64,64]", "seed": "3"}
    assert name_of(options) == "optimizer.lr_0.0123457-model.hidden__64_64_-seed_3"
    config = resolved([*REST, "--model", "mlp", *flags_of(options)], "val/acc").config
    assert (config.optimizer.options["lr"], config.model.options["hidden"], config.seed) == (0.0123456789, [64, 64], 3)


def test_long_names_are_cut_and_stay_different() -> None:
    names = {name_of({f"option_{number}": 0.1 for number in range(40)} | {"last": last}) for last in (1, 2)}
    assert len(names) == 2
    assert all(len(name) < 200 for name in names)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optimizer.lrr 0.1", r"did you mean --optimizer.lr\?"),
        ("--accumulate 3", "3"),
        ("--resume last", "--resume cannot be used with sweep.py"),
        ("--bench_steps 5", "--bench_steps cannot be used"),
        ("--strategy auto", "name a strategy for this machine"),
        ("--num_nodes 2", "name a strategy for this machine"),
        ("--data.val_fraction 0", "needs validation images"),
    ],
)
def test_what_cannot_be_trained_is_refused(flags: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolved([*REST, *flags.split()], "val/acc")
