"""Tests the planning of variants, and their runs, with programs that end in different ways."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cifar_zero.comparison import trainings
from cifar_zero.comparison.reading import load_run
from cifar_zero.comparison.trainings import plan_variants, train_run, train_variants
from cifar_zero.core.errors import RunError
from tests.comparison.made_up import made_up
from tests.support.helpers import has_ended, wait_until

SMALL = ["--data.source", "synthetic", "--accelerator", "cpu", "--batch_size", "16"]


def test_all_variants_train_the_recipe_of_a_deepspeed_configuration():
    file = "cifar_zero/config/deepspeed_examples.json"
    baseline, deepspeed = (each.run for each in plan_variants([file, "baseline"], ["2"], [], SMALL))
    assert (baseline.placement.ds_config, deepspeed.placement.ds_config) == ("", file)
    assert baseline.recipe == deepspeed.recipe
    recipe, precision = baseline.recipe, baseline.placement.precision
    assert (recipe.batch_size, recipe.gradient_clip_val, precision) == (16, 1.0, "bf16-mixed")


@pytest.fixture
def replace_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Returns a function that replaces the program `train` by another one, which is given as its source."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(trainings, "TRAIN", ("program_of_a_test",))
    return (tmp_path / "program_of_a_test.py").write_text


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import sys; print('error: the first\\nerror: the last\\nmore', file=sys.stderr); sys.exit(1)", "the last"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
    ],
)
def test_a_failed_run_is_reported_with_its_last_error_or_its_signal(
    code: str, error: str, replace_train: Callable[[str], int], tmp_path: Path
):
    replace_train(code)
    with pytest.raises(RunError, match=f"^{error}$"):
        train_run("a", [], tmp_path)


def test_a_failed_run_leaves_its_variant_untrained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def train(name: str, flags: list[str], folder: Path) -> Path:
        if name == "baseline":
            raise RunError("no memory")
        return folder

    monkeypatch.setattr(trainings, "train_run", train)
    monkeypatch.setattr(trainings, "load_run", lambda folder: made_up())
    variants = train_variants(plan_variants(["baseline", "ddp"], ["1"], [], SMALL), tmp_path)
    assert [variant.outcome for variant in variants] == ["not trained", "not judged"]
    assert [variant.run is None for variant in variants] == [True, False]
    said = capfd.readouterr().err
    assert "[1/2] baseline: training, see " in said
    assert "baseline: no memory\n" in said


FAULT = """
import stepcheck.updates  # keeps torch's own steps
import torch
from lightning.pytorch import Callback

real = torch.optim.SGD.step

def step(self, *args, **more):
    result = real(self, *args, **more)
    self.param_groups[0]["params"][0].data.mul_(1.01)
    return result

torch.optim.SGD.step = step

class Fault(Callback):
    pass
"""


def test_a_run_with_a_fault_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "planted.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = [*SMALL, "--devices", "1", "--max_steps", "2", "--audit", "--trainer.callbacks", "planted.Fault"]
    run = load_run(train_run("a", flags, tmp_path))
    assert run.check is not None
    assert run.check["outcome"] == "different"
    *_, error = (tmp_path / "a.log").read_text().splitlines()
    assert error.startswith("error: step 1: the update of net.")


RANKS = """
import signal, subprocess, sys, time
rank = "import time\\ntry: print('ready', flush=True); time.sleep(3600)\\nexcept KeyboardInterrupt: print('saved')"
stubborn = "from signal import *; import time; signal(SIGINT, SIG_IGN); print('ready', flush=True); time.sleep(3600)"
signal.signal(signal.SIGINT, lambda *_: None)
ranks = [subprocess.Popen([sys.executable, "-I", "-S", "-c", code]) for code in (rank, stubborn)]
print(ranks[1].pid, flush=True)
ranks[0].wait()
"""
"""A launcher that forwards no signal, as this program's launcher forwards no Ctrl-C, because a terminal sends Ctrl-C to
the ranks directly."""


@pytest.mark.parametrize("impatient", [False, True], ids=["once", "twice"])
def test_ctrl_c_interrupts_all_ranks_and_leaves_no_process(
    impatient: bool, replace_train: Callable[[str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wait, log, waits = subprocess.Popen.wait, tmp_path / "a.log", list[float | None]()

    def interrupted(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waits.append(timeout)
        if len(waits) == 1:
            wait_until(lambda: log.read_text().count("\n") == 3)
            raise KeyboardInterrupt
        if impatient and timeout is not None:  # the time to save a checkpoint
            raise KeyboardInterrupt
        return wait(self, timeout)

    replace_train(RANKS)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_run("a", [], tmp_path)
    words = log.read_text().split()
    assert impatient or "saved" in words
    stubborn = next(int(word) for word in words if word.isdigit())
    wait_until(lambda: has_ended(stubborn))


def test_a_run_finds_this_repository_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module of the same name in the user's directory is not imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar_zero.py").write_text("print('error: the wrong one'); raise SystemExit(3)")
    with pytest.raises(RunError, match="--devices"):
        train_run("a", ["--devices", "none"], tmp_path)
