from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cifar_zero import __main__
from cifar_zero.core.programs import INSTALLED, command, next_to_python, torchrun
from tests.support.helpers import ROOT

PYTHON = Path(sys.executable)


@pytest.fixture(autouse=True)
def started_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INSTALLED, raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(PYTHON.parent), prepend=":")


def test_commands_of_the_repository():
    started = f"{PYTHON.name} train.py --name 'two words' --devices 2"
    assert command("train", "--name", "two words", "--devices", 2) == started
    assert torchrun("doctor", 4) == (
        "torchrun --nnodes 4 --nproc_per_node M --rdzv_backend c10d --rdzv_endpoint HOST:PORT doctor.py"
    )


def test_commands_paste_without_an_activated_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In whatever directory, a shell starts the interpreter that runs, and tensorboard next to it."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(command("doctor", "--help"), shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # argparse breaks the line after a program that is long
    assert " ".join(done.stdout.split()).startswith(f"usage: {command('doctor')} ")
    (tmp_path / "environment/bin").mkdir(parents=True)
    for name in ("python", "tensorboard", "torchrun"):
        (tmp_path / "environment/bin" / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment/bin/python"))
    assert command("train").startswith("environment/bin/python ")
    assert next_to_python("tensorboard") == "environment/bin/tensorboard"
    assert torchrun("train").startswith("environment/bin/torchrun ")


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
