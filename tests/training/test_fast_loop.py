"""The fast epoch loop has the same hooks, counters, logged values and weights as Lightning's loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from cifar_module import CIFARModule
from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import make_settings
from cifar_zero.training import fast_loop
from cifar_zero.training.build import strategy_of
from cifar_zero.training.resolve import make_run
from tests.training.callbacks.conftest import RandomImages

COUNT, BATCH = 44, 8  # five whole steps per epoch


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


def fit(
    ours: bool, accumulate: int, folder: Path, more: Callback | None = None, strategy: str = "baseline", **options: Any
) -> tuple[Trainer, CIFARModule, Recorder, str]:
    recorder, checkpoint = Recorder(), options.pop("ckpt_path", None)
    config = make_settings(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        batch_size=BATCH,
        accumulate=accumulate,
        gradient_clip_val=0.5,
        optimizer=Choice("adam"),
        schedule=Choice("warmup_lr", {"warmup_num_steps": 3}),
    )
    trainer = Trainer(
        strategy=strategy_of(make_run(config)),
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[recorder, *([more] if more else [])],
        log_every_n_steps=2,
        use_distributed_sampler=False,
        enable_checkpointing=more is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    if ours:
        fast_loop.install(trainer)
    module = Logging(config, num_classes=10)
    trainer.fit(module, datamodule=RandomImages(COUNT, BATCH, accumulate), ckpt_path=checkpoint, weights_only=False)
    return trainer, module, recorder, (folder / "metrics.csv").read_text()


@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize(("strategy", "accumulate"), [("baseline", 1), ("ddp", 2), ("deepspeed_stage_2", 2)])
def test_hooks_counters_logs_and_weights_equal_those_of_lightnings_loop(
    strategy: str, accumulate: int, tmp_path: Path
) -> None:
    trainer, module, recorder, logged = fit(True, accumulate, tmp_path / "ours", strategy=strategy)
    loop: Any = trainer.fit_loop.epoch_loop
    assert loop._is_fast
    theirs, their_module, their_recorder, their_log = fit(False, accumulate, tmp_path / "theirs", strategy=strategy)
    assert recorder.seen == their_recorder.seen
    assert {name for name, *_ in recorder.seen} >= set(fast_loop.HOOKS)
    assert logged == their_log
    assert "own/loss_step" in logged
    assert trainer.callback_metrics.keys() == theirs.callback_metrics.keys()
    assert trainer.fit_loop.state_dict() == theirs.fit_loop.state_dict()
    for one, other in zip(module.parameters(), their_module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_with_max_steps_resumes_after_an_epoch(tmp_path: Path) -> None:
    """Lightning's own loop counts that epoch twice (Lightning issue 19617)."""
    each_epoch = ModelCheckpoint(tmp_path / "saved", "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    whole, module, *_ = fit(True, 1, tmp_path / "whole", each_epoch, max_steps=8)
    saved = tmp_path / "saved" / "epoch=0.ckpt"
    resumed, its_module, *_ = fit(True, 1, tmp_path / "resumed", ckpt_path=saved, max_steps=8)
    assert (resumed.global_step, resumed.current_epoch) == (whole.global_step, whole.current_epoch) == (8, 2)
    for one, other in zip(module.parameters(), its_module.parameters(), strict=True):
        assert torch.equal(one, other)
