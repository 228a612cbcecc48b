"""Measures the memory of a user's LightningModule in a step under a strategy, on two CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from cifar_zero import strategies
from cifar_zero.config import command_line
from cifar_zero.config.user_classes import instance, read_given
from cifar_zero.launch import rank_environment
from cifar_zero.launch.collectives import gather, init_process_group
from cifar_zero.planning.activations import ActivationTracker
from cifar_zero.strategies import hooks_of
from cifar_zero.training.resolve import make_run

RANKS = 2


class States(Callback):
    """Measures the second step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.tracker = ActivationTracker(torch.nn.Module())
            for tensor in (*pl_module.parameters(), *pl_module.buffers()):
                self.tracker._known[tensor.untyped_storage()] = None
            self.tracker.__enter__()

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_step == 1:
            self.tracker.__exit__(None, None, None)
            self.bytes = [*hooks_of(trainer.strategy).state_bytes(pl_module, trainer.optimizers[0]), self.tracker.peak]


def write_states(file: str, name: str, precision: str, strategy: str) -> None:
    """Trains FILE.py:NAME for two steps, as one of RANKS ranks of `helpers.on_ranks`. Rank 0 writes a JSON list of four
    numbers of bytes in the second step. They are the sizes of parameters, gradients and optimizer state, and the peak
    of what operations of the forward and the backward pass allocate, including gradients and buckets. Each number is
    the largest of all ranks."""
    flags = ["--devices", str(RANKS), "--accelerator", "cpu", "--precision", precision, "--strategy", strategy]
    run = make_run(command_line.parse(flags))
    init_process_group(run)
    module, states = instance("module", read_given(["--module", name])), States()
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategies.build(run.placement, sum(parameter.numel() for parameter in module.parameters())),
        callbacks=states,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    found = [max(sizes) for sizes in map(gather, states.bytes)]
    if rank_environment.global_rank() == 0:
        Path(file).write_text(json.dumps(found))
    hooks_of(trainer.strategy).free()
