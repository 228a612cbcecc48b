from __future__ import annotations

import sys

import pytest

from cifar_zero import __main__
from cifar_zero.core.programs import INSTALLED, command, torchrun


def test_commands_of_the_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(INSTALLED, raising=False)
    assert command("train", "--name", "two words", "--devices", 2) == "python train.py --name 'two words' --devices 2"
    assert torchrun("doctor", 4).endswith(
        " --nnodes 4 --nproc_per_node M --rdzv_backend c10d --rdzv_endpoint HOST:PORT doctor.py"
    )


def test_commands_of_an_installed_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The console script says it once, for everything that the program prints."""
    monkeypatch.setenv(INSTALLED, "")
    monkeypatch.delenv(INSTALLED)
    monkeypatch.setattr(sys, "argv", ["cifar-zero", "plan", "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit):
        __main__.main()
    said = capsys.readouterr().out
    assert said.startswith("usage: cifar-zero plan [--device_memory")
    assert "  cifar-zero plan --model vit_large" in said
    assert "python plan.py" not in said
    assert command("train", "--seed", 1) == "cifar-zero train --seed 1"
    assert torchrun("train").endswith(" -m cifar_zero train")
