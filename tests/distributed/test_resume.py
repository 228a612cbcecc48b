"""A run that goes on from a checkpoint: killed at any moment, or with another strategy and number of ranks.

`make fuzz` runs the whole of what is here in small: 20 kills of each strategy, and every pair of shapes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import models
import run_folder
from checkpointing.weights import load_weights
from tests.helpers import ROOT, assert_ok, run_folder_of, run_program

pytestmark = pytest.mark.distributed

WHOLE = "FUZZ" in os.environ
KILLS = 20 if WHOLE else 2
KILLED = [("baseline", 1), *([("deepspeed_stage_2", 2)] if WHOLE else []), ("deepspeed_stage_3", 2)]

Shape = tuple[str, int]
STAGES = [f"deepspeed_stage_{stage}" for stage in range(4)]
ALL_SHAPES: list[Shape] = [("baseline", 1), ("ddp", 2), *((stage, ranks) for stage in STAGES for ranks in (1, 2, 4))]
OFFLOADED: Shape = ("deepspeed_stage_3_offload", 2)
FEW_PAIRS: list[tuple[Shape, Shape]] = [
    (("deepspeed_stage_3", 2), ("deepspeed_stage_2", 1)),
    (("deepspeed_stage_3", 2), ("baseline", 1)),
    (("baseline", 1), ("deepspeed_stage_3", 2)),
    (("baseline", 1), ("deepspeed_stage_1", 4)),
    (("deepspeed_stage_2", 1), OFFLOADED),
    (("deepspeed_stage_2", 1), ("deepspeed_stage_0", 2)),
]
PAIRS = [(one, other) for one in [*ALL_SHAPES, OFFLOADED] for other in [*ALL_SHAPES, OFFLOADED]] if WHOLE else FEW_PAIRS

STOPPED_AT, STEPS = 20, 45
RECIPE = [
    *("--batch_size", "16", "--accelerator", "cpu", "--epochs", "2", "--data.val_fraction", "0.1"),
    *("--optimizer", "adam", "--optimizer.lr", "0.005", "--augment.flip", "random"),
    *("--schedule", "warmup_lr", "--schedule.warmup_num_steps", "30"),
]
"""An epoch of 36 steps: both stops are in the middle of one, the first in the warm-up too."""


class Runs:
    """Runs of the recipe, each when it is first asked for."""

    def __init__(self, folder: Path, data: list[str]):
        self.folder, self.data = folder, data
        self.begun = cache(self._begun)

    def train(self, name: str, shape: Shape, steps: int, *more: str) -> Path:
        """Trains to a step and returns the run folder."""
        out = self.folder / name
        flags = ["--strategy", shape[0], "--devices", str(shape[1]), "--max_steps", str(steps), "--out", str(out)]
        assert_ok(run_program("train.py", *self.data, *RECIPE, *flags, *more))
        return run_folder_of(out)

    def _begun(self, shape: Shape) -> Path:
        return self.train(f"begun-{shape}", shape, STOPPED_AT, "--log_interval", "1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), small_data)


@pytest.fixture(scope="module")
def uninterrupted(runs: Runs) -> dict[int, float]:
    return losses(runs.train("uninterrupted", ("baseline", 1), STEPS, "--log_interval", "1"))


def losses(run: Path) -> dict[int, float]:
    events = EventAccumulator(str(run))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("train/loss")}


def weights(run: Path) -> dict[str, torch.Tensor]:
    net = models.build("net", 10)
    load_weights(net, run_folder.newest_checkpoint(run))
    return dict(net.state_dict())


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=str)
def test_goes_on_in_another_shape(before: Shape, after: Shape, runs: Runs, uninterrupted: dict[int, float]):
    resume = ["--resume", str(runs.begun(before)), "--log_interval", "1"]
    run = runs.train(f"{before}-{after}", after, STEPS, *resume)
    found = losses(run)
    assert list(found) == list(range(STOPPED_AT + 1, STEPS + 1))
    assert max(abs(loss - uninterrupted[step]) for step, loss in found.items()) < 1e-5


def test_goes_on_with_more_micro_batches_in_a_step(runs: Runs, uninterrupted: dict[int, float]):
    """From two ranks to one that takes two micro-batches: the middle of the epoch is the same step."""
    resume = ["--resume", str(runs.begun(("deepspeed_stage_3", 2))), "--accumulate", "2", "--log_interval", "1"]
    found = losses(runs.train("accumulated", ("deepspeed_stage_2", 1), STEPS, *resume))
    assert list(found) == list(range(STOPPED_AT + 1, STEPS + 1))
    assert max(abs(loss - uninterrupted[step]) for step, loss in found.items()) < 1e-5


@pytest.mark.parametrize(("strategy", "devices"), KILLED)
def test_killed_at_random_moments_it_ends_with_the_same_weights(strategy: str, devices: int, runs: Runs):
    whole = weights(runs.train(f"whole-{strategy}", (strategy, devices), STEPS))
    rng = random.Random(0)
    out = runs.folder / f"killed-{strategy}"
    name = f"net-{strategy}"
    command = [*runs.data, *RECIPE, "--strategy", strategy, "--devices", str(devices), "--out", str(out)]
    command += ["--max_steps", str(STEPS), "--save_every_n_steps", "2", "--name", name]
    resume: list[str] = []
    for kill in range(KILLS):
        process = subprocess.Popen(
            [sys.executable, "train.py", *command, *resume],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None and not list((out / name / f"version_{kill}").glob("checkpoints/*")):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)  # its ranks go with it
        process.wait()
        resume = ["--resume", "last"] if list(out.rglob("*.ckpt")) else []
    assert_ok(run_program("train.py", *command, *resume))
    ended = weights(out / name)
    assert all(torch.equal(ended[key], whole[key]) for key in whole)
