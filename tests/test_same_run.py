"""What a run can be continued with."""

from __future__ import annotations

from dataclasses import asdict

import pytest

import cli
from errors import UsageError
from resume import check_same_run


def test_a_run_of_before_there_was_weight_decay_on():
    """All parameters decayed; without a weight decay that is all the same."""
    adam = ["--resume", "last", "--optimizer", "adam", "--optimizer.weight_decay"]
    recipe = asdict(cli.parse([*adam, "0.1"]))
    del recipe["optimizer"]["options"]["weight_decay_on"]
    with pytest.raises(UsageError, match=r"--optimizer.weight_decay_on all, this one has matrices"):
        check_same_run(cli.parse([*adam, "0.1"]), recipe)
    check_same_run(cli.parse([*adam, "0.1", "--optimizer.weight_decay_on", "all"]), recipe)
    recipe["optimizer"]["options"]["weight_decay"] = 0.0
    check_same_run(cli.parse([*adam, "0"]), recipe)
