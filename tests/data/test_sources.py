"""The registry of sources: cheap to ask, and `auto` falls back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cifar_zero import data
from cifar_zero.config.settings import DataConfig
from cifar_zero.data import digits
from tests.support.helpers import HANG_SECONDS

ASK_ALL = """
import sys
from cifar_zero import data
assert not {"torch", "torchvision", "numpy"} & set(sys.modules)
from cifar_zero.config.settings import DataConfig
for name, count in [("auto", 10), ("cifar10", 10), ("cifar100", 100), ("digits", 10), ("synthetic", 10)]:
    names = data.class_names(DataConfig(name))
    assert len(set(names)) == count, names
assert not {"torch", "torchvision", "lightning"} & set(sys.modules)
"""


def test_class_names_are_known_without_torch():
    repository = Path(data.__file__).parents[2]
    subprocess.run([sys.executable, "-c", ASK_ALL], cwd=repository, check=True, timeout=HANG_SECONDS)


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
