"""The operators that offloading compiles: which a run needs, and that it says so before its clock starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cifar_zero.config import command_line
from cifar_zero.training.build import strategy_of
from cifar_zero.training.resolve import resolve
from tests.support.helpers import assert_ok, of_make_fuzz, run_folder_of, run_program

ON_CPU = ["--data.source", "digits", "--accelerator", "cpu", "--batch_size", "16"]


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("deepspeed_stage_2 --optimizer adam", ()),
        ("deepspeed_stage_2_offload --optimizer adam", ("cpu_adam",)),
        ("deepspeed_stage_3_offload --optimizer adamw", ("cpu_adam",)),
        ("deepspeed_stage_2_offload --optimizer sgd", ()),
    ],
)
def test_operators_of_a_run(flags: str, needed: tuple[str, ...]) -> None:
    strategy: Any = strategy_of(resolve(command_line.parse([*ON_CPU, "--strategy", *flags.split()])))
    assert strategy.operators == needed


@of_make_fuzz
@pytest.mark.distributed
def test_compiling_is_announced_and_not_in_the_figures(tmp_path: Path, small_data: list[str]) -> None:
    flags = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "16", "--max_steps", "4"]
    flags += ["--strategy", "deepspeed_stage_2_offload", "--optimizer", "adam", "--out", str(tmp_path / "runs")]
    build = tmp_path / "extensions"
    done = run_program("train.py", *flags, env={**os.environ, "TORCH_EXTENSIONS_DIR": str(build)}, timeout=900)
    assert_ok(done)
    assert done.stderr.count("loading DeepSpeed's cpu_adam") == 1
    folder = build / "cpu_adam"
    took = (folder / "cpu_adam.so").stat().st_mtime - (folder / "build.ninja").stat().st_mtime
    assert json.loads((run_folder_of(tmp_path / "runs") / "metrics.json").read_text())["perf/fit_seconds"] < took
