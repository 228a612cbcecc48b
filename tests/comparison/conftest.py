"""Runs `cifar-zero compare` in the process of the tests, which has its imports. The ranks are new processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cifar_zero.comparison.compare import main
from tests.comparison.planted_faults import SITE
from tests.support.helpers import ROOT


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_handlers: None) -> Callable[..., Any]:
    """Returns a function that runs the command with flags and returns its exit code and comparison.json. `fault`, a
    function of tests.comparison.planted_faults, is planted into all ranks."""

    def run(*flags: object, fault: str = "") -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr("sys.argv", ["compare", *map(str, flags), "--out", str(tmp_path / "out")])
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        if fault:
            (tmp_path / "sitecustomize.py").write_text(SITE.format(name=fault))
            monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        code = main()
        file = max((tmp_path / "out").glob("*/version_*/comparison.json"))
        return code, json.loads(file.read_text())

    return run
