"""The source `auto` falls back to the digits."""

from __future__ import annotations

from pathlib import Path

import pytest

from cifar_zero import data
from cifar_zero.config.settings import DataConfig
from cifar_zero.data import digits


def test_auto_without_a_connection_falls_back_to_digits_with_a_warning(
    tmp_path: Path, closed_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(digits, "TRAIN_PER_CLASS", 6)
    monkeypatch.setattr(digits, "TEST_PER_CLASS", 2)
    config = DataConfig("auto", root=str(tmp_path), url=closed_url)
    assert data.prepare(config) == "digits"
    assert data.load(config, "digits").name == "digits"
    messages = capsys.readouterr().err
    assert "refused" in messages
    assert "INSTEAD OF CIFAR-10" in messages
