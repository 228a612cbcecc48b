"""The cases of compare.py --acceptance; test_planted_faults.py trains them."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from cifar_zero.comparison.recorded.cases import recipes
from tests.support.helpers import assert_ok, of_make_fuzz, run_program


def test_the_cases_are_listed():
    done = run_program("compare.py", "--acceptance", "--print_cases", "--strategies", "deepspeed_stage_3", "ddp")
    assert_ok(done)
    lines = done.stdout.splitlines()
    assert any(line.startswith("deepspeed_stage_3, torture, sgd, 32-true, 2 ranks, accumulate 4") for line in lines)


def test_raw_configurations_are_cases_too(tmp_path: Path):
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    listed = [
        run_program("compare.py", "--acceptance", "--print_cases", "--devices", "2", *flags).stdout
        for flags in (["--quick"], ["--strategies", str(mine)])
    ]
    recipe = "torture, sgd, 32-true, 2 ranks, accumulate 4, no clipping"
    for name, found in zip(("deepspeed_stage_1_fp32_gradients", "mine"), listed, strict=True):
        assert f"{name}, {recipe}" in found.splitlines()


@of_make_fuzz
@pytest.mark.distributed
def test_the_pinned_release_passes(tmp_path: Path):
    done = run_program("compare.py", "--acceptance", "--quick", "--out", str(tmp_path))
    assert_ok(done)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--acceptance --max_steps 5", "--acceptance trains cases of its own"),
        ("--acceptance --strategies deepspeed_stage_9 ddp", "deepspeed_stage_9"),
        ("--acceptance --strategies pipeline --devices 2", "--strategies pipeline: "),
        ("--acceptance --strategies nowhere.json", "nowhere.json cannot be read"),
        ("--quick --strategies baseline ddp", "--quick is for --acceptance"),
        ("--datamodule data.py:Data --strategies baseline ddp", "--datamodule is for --module"),
        ("--acceptance --runs a b", "argument --runs: not allowed with argument --acceptance"),
        ("--module module.py:Module --runs a b", "argument --runs: not allowed with argument --module"),
    ],
)
def test_a_mistake_is_refused(flags: str, expected: str):
    done = run_program("compare.py", *flags.split())
    assert done.returncode == 2
    assert expected in done.stderr


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_each_pair_of_settings_occurs(ranks: int):
    precisions = ("32-true", "bf16-mixed", "16-mixed")
    rows = recipes(ranks, precisions)
    assert len(rows) <= 10
    found = {pair for row in rows for pair in combinations(row.items(), 2)}
    for precision in precisions:
        for model in ("net", "torture"):
            assert (("precision", precision), ("model", model)) in found
    assert (("ranks", ranks), ("accumulate", 4)) in found
    assert (("accumulate", 4), ("precision", "bf16-mixed")) in found
