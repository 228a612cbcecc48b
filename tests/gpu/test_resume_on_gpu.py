"""A run continues on another device or on fewer GPUs, also after a rank was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from cifar_zero.checkpoints.read import read
from tests.support.helpers import assert_ok, metrics_of, needs_gpu, run_folder_of, run_program

pytestmark = needs_gpu

Leg = tuple[str, str, int]
"""An accelerator, a strategy and a number of ranks, on which a run trains ten steps."""

SEVERAL = [number for number in (2, 8) if number <= torch.cuda.device_count()]
RELAYS: list[list[Leg]] = [[("cpu", "deepspeed_stage_2", 1), ("gpu", "deepspeed_stage_3", 1), ("cpu", "baseline", 1)]]
RELAYS += [[("gpu", "deepspeed_stage_3", number), ("gpu", "baseline", 1)] for number in SEVERAL]


def trained(out: Path, small_data: list[str], leg: Leg, steps: int, *more: str) -> Path:
    """Trains up to a step and returns the run folder."""
    accelerator, strategy, ranks = leg
    where = ["--accelerator", accelerator, "--strategy", strategy, "--devices", str(ranks), "--max_steps", str(steps)]
    recipe = ["--optimizer", "adam", "--batch_size", "64", "--log_interval", "1", "--out", str(out)]
    # TF32's rounding errors are a thousand times as large as float32's.
    assert_ok(run_program("train.py", *small_data, *recipe, *where, *more, env={"NVIDIA_TF32_OVERRIDE": "0"}))
    return run_folder_of(out)


@pytest.mark.parametrize("relay", RELAYS, ids=str)
def test_a_run_continues_elsewhere(relay: list[Leg], small_data: list[str], tmp_path: Path):
    folder = trained(tmp_path / "0", small_data, relay[0], 10)
    for number, leg in enumerate(relay[1:], 1):
        folder = trained(tmp_path / str(number), small_data, leg, 10 * (number + 1), "--resume", str(folder))
    whole = trained(tmp_path / "whole", small_data, relay[-1], 10 * len(relay))
    assert metrics_of(folder)["train/loss"] == pytest.approx(metrics_of(whole)["train/loss"], abs=1e-3)


class KillLastRank(Callback):
    """Kills the last rank, as the kernel does when memory is full."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Kills this process after twelve steps if it is the last rank."""
        if trainer.global_step == 12 and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("ranks", SEVERAL)
def test_all_ranks_end_after_one_was_killed(ranks: int, small_data: list[str], tmp_path: Path):
    flags = [*small_data, "--devices", str(ranks), "--strategy", "deepspeed_stage_3", "--batch_size", str(32 * ranks)]
    flags += ["--save_every_n_steps", "5", "--max_steps", "20", "--out", str(tmp_path)]
    callback = ["--trainer.callbacks", f"{__name__}.{KillLastRank.__name__}"]
    done = run_program("train.py", *flags, *callback, fresh=True)
    assert done.returncode == 1
    assert f"error: rank {ranks - 1} ended with signal SIGKILL" in done.stderr
    folder = run_folder_of(tmp_path)
    assert read(folder / "checkpoints" / "last.ckpt")["global_step"] == 10
    resumed = tmp_path / "resumed"
    assert_ok(run_program("train.py", *flags, "--resume", str(folder), "--out", str(resumed)))
    assert metrics_of(resumed)["steps"] == 20
