from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cifar_zero import __main__
from cifar_zero.core.console import command, next_to_python, torchrun
from tests.support.helpers import ROOT

PYTHON = Path(sys.executable)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(PYTHON.parent), prepend=":")


def test_commands_of_the_script(monkeypatch: pytest.MonkeyPatch):
    """`python train.py` names itself."""
    monkeypatch.setattr(sys, "argv", ["./train.py"])
    started = f"{PYTHON.name} train.py --name 'two words' --devices 2"
    assert command("train", "--name", "two words", "--devices", 2) == started
    rendezvous = "--rdzv_backend c10d --rdzv_endpoint HOST:PORT"
    assert torchrun("train", 4) == f"torchrun --nnodes 4 --nproc_per_node M {rendezvous} train.py"
    assert torchrun("doctor") == f"torchrun --nnodes N --nproc_per_node M {rendezvous} -m cifar_zero doctor"


def test_commands_paste_without_an_activated_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In whatever directory, a shell starts the interpreter that runs, and tensorboard next to it."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where the package is not installed
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(command("doctor", "--help"), shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # argparse breaks the line after a program that is long
    assert " ".join(done.stdout.split()).startswith(f"usage: {command('doctor')} ")
    (tmp_path / "environment/bin").mkdir(parents=True)
    for name in ("python", "tensorboard", "torchrun"):
        (tmp_path / "environment/bin" / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment/bin/python"))
    assert command("plan") == "environment/bin/python -m cifar_zero plan"
    (tmp_path / "environment/bin/cifar-zero").touch(mode=0o755)
    assert command("plan") == "environment/bin/cifar-zero plan"
    assert next_to_python("tensorboard") == "environment/bin/tensorboard"
    assert torchrun("train").startswith("environment/bin/torchrun ")
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py")])
    assert command("train").startswith("environment/bin/python ")


def test_a_command_names_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["cifar-zero", "plan", "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit):
        __main__.main()
    said = capsys.readouterr().out
    assert said.startswith(f"usage: {command('plan')} [--device_memory")
    assert f"  {command('plan')} --model vit_large" in said
    assert torchrun("train").endswith(" -m cifar_zero train")
