"""Trains cases as the ranks of `compare --acceptance` do, and counts how often each training calls the functions of
test_acceptance.CODE. Rank 0 appends a line of JSON for each training to calls.jsonl in the folder of the comparison."""

from __future__ import annotations

import json
from collections import Counter
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from cifar_zero.comparison import jobs
from cifar_zero.launch import rank_environment
from cifar_zero.step_check.callback import StepCheck
from tests.comparison.test_acceptance import CODE

CALLS: Counter[str] = Counter()


def count_calls(name: str) -> None:
    """Replaces a function by one that counts its calls in CALLS."""
    place, _, attribute = name.replace(":", ".", 1).rpartition(".")
    owner: Any = resolve_name(place)
    function = getattr(owner, attribute)

    @wraps(function)
    def counting(*arguments: Any, **options: Any) -> Any:
        CALLS[name] += 1
        return function(*arguments, **options)

    setattr(owner, attribute, counting)


for function in {name for _, name, _ in CODE.values()}:
    count_calls(function)


def train(flags: list[str], folder: Path, check: StepCheck) -> None:
    """Trains a job as the acceptance does, and appends its counts to calls.jsonl."""
    rank = rank_environment.global_rank()  # Lightning removes it from the environment at the end of a training
    CALLS.clear()
    jobs.train_recipe(flags, folder, check)
    if rank == 0:
        with (folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps(CALLS) + "\n")
