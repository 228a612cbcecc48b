"""The cases of cifar-zero compare --acceptance; test_planted_faults.py trains them."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from cifar_zero.comparison.recorded import cases
from cifar_zero.comparison.recorded.cases import plan_cases, recipes
from cifar_zero.core.errors import UsageError
from tests.support.helpers import assert_ok, of_make_fuzz, run_program


def test_the_cases_are_listed():
    done = run_program("compare", "--acceptance", "--print_cases", "--strategies", "deepspeed_stage_3", "ddp")
    assert_ok(done)
    lines = done.stdout.splitlines()
    assert any(line.startswith("deepspeed_stage_3, torture, sgd, 32-true, 2 ranks, accumulate 4") for line in lines)


def test_raw_configurations_are_cases_too(tmp_path: Path):
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    listed = [
        run_program("compare", "--acceptance", "--print_cases", "--devices", "2", *flags).stdout
        for flags in (["--quick"], ["--strategies", str(mine)])
    ]
    recipe = "torture, sgd, 32-true, 2 ranks, accumulate 4, no clipping"
    for name, found in zip(("deepspeed_stage_1_fp32_gradients", "mine"), listed, strict=True):
        assert f"{name}, {recipe}" in found.splitlines()


@of_make_fuzz
@pytest.mark.distributed
def test_the_pinned_release_passes(tmp_path: Path):
    done = run_program("compare", "--acceptance", "--quick", "--out", str(tmp_path))
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
    done = run_program("compare", *flags.split())
    assert done.returncode == 2
    assert expected in done.stderr


@pytest.mark.parametrize("ranks", range(1, 17))
def test_every_strategy_has_the_same_cases_on_any_number_of_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cifar_zero.config.rules.free_memory_bytes", lambda: 2**40)  # whatever this computer has
    some, two = ([case.name for case in plan_cases([], number, False) if case.ours.ranks > 1] for number in (ranks, 2))
    assert some == [name.replace("2 ranks", f"{ranks} ranks") for name in two if ranks > 1]


@pytest.mark.parametrize("strategies", [[], ["deepspeed_stage_2"]])
def test_no_case_on_the_ranks_that_are_asked_for_is_a_mistake(strategies: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cases, "refusal", lambda strategy, row: "8 ranks are too many" if row["ranks"] == 8 else "")
    with pytest.raises(UsageError, match=r"--strategies \w+: no case on 8 ranks: 8 ranks are too many"):
        plan_cases(strategies, 8, quick=True)


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
