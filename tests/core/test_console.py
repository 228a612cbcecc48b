"""Commands that messages tell the user to type."""

import sys
from pathlib import Path

import pytest

from cifar_zero.core.console import next_to_python


def test_an_empty_entry_in_path_is_the_current_directory(monkeypatch: pytest.MonkeyPatch):
    program = Path(sys.executable)
    monkeypatch.chdir(program.parent)
    monkeypatch.setenv("PATH", ":/nowhere")
    assert next_to_python(program.name) == program.name
