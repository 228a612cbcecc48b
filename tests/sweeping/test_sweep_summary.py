from __future__ import annotations

import json
from pathlib import Path

import pytest

from sweeping.result import Result, Run, ranked, write
from sweeping.summary import print_summary

RESULTS = [
    Result(0, {"model.hidden": "[64]"}, "failed", error="no [bold] idea"),
    Result(1, {"model.hidden": "[128]"}, "finished", [Run(0, 0.25, "a", 30.0), Run(1, 0.75, "b", 31.0)]),
    Result(2, {"model.hidden": "[256]"}, "finished", [Run(0, 0.75, "c", 32.0)]),
    Result(3, {"model.hidden": "[32]"}, "pruned"),
]


def test_the_best_comes_first_by_what_is_better() -> None:
    assert [result.trial for result in ranked(RESULTS, "val/acc")] == [2, 1, 0, 3]
    assert [result.trial for result in ranked(RESULTS, "train/loss")] == [1, 2, 0, 3]


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(ranked(RESULTS, "val/acc"), "val/acc", "python train.py --model.hidden '[256]'", Path("sweeps/mlp"))
    printed = capsys.readouterr().out
    rows = [[*map(str.strip, line.split("│")[1:-1])] for line in printed.splitlines() if line.startswith("│")]
    assert rows == [
        ["1", "[256]", "0.7500", "-", "-", "1", "32"],
        ["2", "[128]", "0.5000", "0.2500-0.7500", "0.3536", "2", "61"],
        ["", "[64]", "failed", "", "", "", ""],
        ["", "[32]", "pruned", "", "", "", ""],
    ]
    assert "failed: model.hidden [64]: no [bold] idea" in printed
    assert "best    python train.py --model.hidden '[256]'" in printed


def test_what_is_written(tmp_path: Path) -> None:
    write(ranked(RESULTS, "val/acc"), "val/acc", "python sweep.py", "python train.py", tmp_path / "sweep.json")
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert (content["direction"], content["best_command"]) == ("maximize", "python train.py")
    first, second, failed, _ = content["settings"]
    assert (first["mean"], first["standard_deviation"], first["runs"][0]["folder"]) == (0.75, None, "c")
    assert (second["lowest"], second["highest"]) == (0.25, 0.75)
    assert (failed["mean"], failed["error"]) == (None, "no [bold] idea")
