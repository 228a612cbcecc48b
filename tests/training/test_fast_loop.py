"""The fast epoch loop has the same hooks, counters, logged values and weights as Lightning's loop."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from cifar_module import CIFARModule
from cifar_zero.comparison.reading import read_losses
from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import make_settings
from cifar_zero.training import fast_loop
from cifar_zero.training.callbacks.checkpoint import RunState
from tests.support.helpers import largest_difference

COUNT = 44  # images: five whole steps per epoch
OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 8, "optimizer": Choice("adam")}
OPTIONS["schedule"] = Choice("warmup_lr", {"warmup_num_steps": 3})


class Logging(CIFARModule):
    """Logs values in the training step, as a user's module may."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("own/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = next(self.parameters()).grad  # DeepSpeed keeps its own
        self.log("own/grad", torch.ones(()) if gradient is None else gradient.norm())


class Recorder(Callback):
    """Records the counters at each call of a hook."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name in ("on_save_checkpoint", "on_load_checkpoint", "on_exception"):
            return super().__getattribute__(name)

        def hook(trainer: Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
            progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
            counters = (progress.ready, progress.started, progress.processed, progress.completed)
            losses = [float(arg["loss"]) for arg in args if isinstance(arg, dict)]
            indices = [arg for arg in args if isinstance(arg, int)]
            gradients = [parameter.grad is None for parameter in module.parameters()]
            self.seen.append((name, trainer.global_step, *counters, *losses, *indices, all(gradients)))

        return hook


@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_stage_2"])
def test_hooks_counters_logs_and_weights_equal_those_of_lightnings_loop(strategy: str, fit: Callable[..., Any]):
    runs, recorders = {}, {}
    for fast in (True, False):
        config = make_settings(strategy=strategy, accumulate=2, gradient_clip_val=0.5, log_interval=2, **OPTIONS)
        recorders[fast] = Recorder()
        runs[fast] = fit(config.changed(fast_loop=fast), COUNT, recorders[fast], module_class=Logging)
    fast_run, lightning_run = runs[True], runs[False]
    assert fast_run.trainer.fit_loop.epoch_loop._is_fast
    assert not lightning_run.trainer.fit_loop.epoch_loop._is_fast
    assert recorders[True].seen == recorders[False].seen
    assert {name for name, *_ in recorders[True].seen} >= set(fast_loop.HOOKS)
    for tag in ("own/loss_step", "own/loss_epoch", "own/grad", "val/loss"):
        assert fast_run.points(tag) == lightning_run.points(tag), tag
    assert fast_run.trainer.callback_metrics.keys() == lightning_run.trainer.callback_metrics.keys()
    assert fast_run.trainer.fit_loop.state_dict() == lightning_run.trainer.fit_loop.state_dict()
    assert largest_difference(fast_run.module.state_dict(), lightning_run.module.state_dict()) == 0


def test_gradients_in_float16_are_clipped_after_the_loss_scale_is_removed(fit: Callable[..., Any]):
    """The runs have a gradient scaler as on a GPU. Its scale is far above the clipped norm."""
    weights = []
    for fast in (True, False):
        config = make_settings(gradient_clip_val=0.5, **OPTIONS)
        scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
        run = fit(config.changed(fast_loop=fast), COUNT, plugins=[scaled], precision=None)
        weights.append(run.module.state_dict())
    assert largest_difference(*weights) == 0


def test_a_run_with_max_steps_resumes_after_an_epoch(fit: Callable[..., Any], tmp_path: Path):
    """Lightning's own loop counts that epoch twice (Lightning issue 19617)."""
    each_epoch = ModelCheckpoint(tmp_path / "saved", "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    config = make_settings(max_steps=8, **OPTIONS)
    uninterrupted = fit(config, COUNT, each_epoch, enable_checkpointing=True)
    resumed = fit(config, COUNT, ckpt_path=tmp_path / "saved" / "epoch=0.ckpt")
    for run in (uninterrupted, resumed):
        assert (run.trainer.global_step, run.trainer.current_epoch) == (8, 2)
    assert largest_difference(uninterrupted.module.state_dict(), resumed.module.state_dict()) == 0


class Saving(Callback):
    """Saves after some micro-batches, counted from the start of the training, and names the file after the count."""

    def __init__(self, folder: Path, *counts: int):
        self.folder, self.counts = folder, counts

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        count = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if count in self.counts:
            trainer.save_checkpoint(self.folder / f"{count}.ckpt")


class Draws(Callback):
    """Records the random numbers that a user's code draws in each step, of each generator."""

    def __init__(self) -> None:
        self.of_step: dict[int, tuple[float, ...]] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.of_step[trainer.global_step + 1] = random.random(), np.random.normal(), torch.rand(()).item()


def test_a_resumed_run_draws_the_random_numbers_that_follow(fit: Callable[..., Any], tmp_path: Path):
    """The same seed draws the same numbers, whatever the process has drawn before."""
    (tmp_path / "saved").mkdir()
    config, whole, again, resumed = make_settings(**OPTIONS), Draws(), Draws(), Draws()
    fit(config, COUNT, RunState(), Saving(tmp_path / "saved", 7), whole)
    fit(config, COUNT, RunState(), again)
    fit(config, COUNT, RunState(), resumed, ckpt_path=tmp_path / "saved" / "7.ckpt")
    assert again.of_step == whole.of_step
    assert resumed.of_step == {step: drawn for step, drawn in whole.of_step.items() if step > 7}


def test_a_step_that_a_checkpoint_splits_begins_again(fit: Callable[..., Any], tmp_path: Path):
    """An epoch has 20 micro-batches in five steps. The last checkpoint is between two steps."""
    config = make_settings(accumulate=4, **OPTIONS)
    (tmp_path / "saved").mkdir()
    whole = fit(config, COUNT, RunState(), Saving(tmp_path / "saved", 1, 21, 26, 28))
    expected = read_losses(whole.folder / "losses.csv")
    for count in (1, 21, 26, 28):
        resumed = fit(config, COUNT, RunState(), ckpt_path=tmp_path / "saved" / f"{count}.ckpt")
        later = {step: loss for step, loss in expected.items() if step > count // 4}
        assert read_losses(resumed.folder / "losses.csv") == later
        assert largest_difference(whole.module.state_dict(), resumed.module.state_dict()) == 0
