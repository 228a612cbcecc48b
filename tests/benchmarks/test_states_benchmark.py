from __future__ import annotations

import pytest

from benchmarks import model_states
from cifar_zero.core import exits


@pytest.mark.parametrize("flags", [["--ranks", "0"], ["--ranks", "two"], ["--precisions", "auto"]])
def test_mistakes_are_told_in_one_line(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["model_states", *flags])
    assert exits.guarded(model_states.main) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: argument {flags[0]}: ")
