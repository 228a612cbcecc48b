from __future__ import annotations

from collections.abc import Callable
from typing import Any

from callbacks.effective import Effective
from config import Config

Fit = Callable[..., Any]


def test_plain_torch(fit: Fit) -> None:
    run = fit(Config(epochs=1, batch_size=8), 40)
    totals = run.observer(Effective).totals
    assert totals == {
        "compute_dtype": "float32",
        "parameter_dtype": "float32",
        "skipped_steps": 0,
        "reduce_bucket_size": None,
        "allgather_bucket_size": None,
    }
    assert not (run.folder / "deepspeed.json").exists()


def test_autocast_computes_in_another_type_than_the_parameters(fit: Fit) -> None:
    totals = fit(Config(epochs=1, batch_size=8), 40, precision="bf16-mixed").observer(Effective).totals
    assert (totals["compute_dtype"], totals["parameter_dtype"]) == ("bfloat16", "float32")
