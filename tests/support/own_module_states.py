"""Trains a user's LightningModule for two steps under several strategies, on two CPU ranks that are started once.

`python -m tests.support.own_module_states FILE.py:NAME PRECISION STRATEGY ...` prints a JSON list for each strategy, on
rank 0. It has four numbers of bytes in the second step, each the largest of all ranks: parameters, gradients, optimizer
state, and the peak of what operations of the forward and the backward pass allocate, including gradients and buckets.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from cifar_zero import strategies
from cifar_zero.config import command_line
from cifar_zero.config.user_classes import instance, read_given
from cifar_zero.core import exits
from cifar_zero.core.console import quieten
from cifar_zero.launch import local_launcher, rank_environment
from cifar_zero.launch.collectives import gather
from cifar_zero.planning.activations import ActivationTracker
from cifar_zero.strategies import hooks_of

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


def main() -> int:
    """Trains under each strategy and returns the exit code."""
    name, precision, *names = sys.argv[1:]
    if not rank_environment.is_rank():
        return local_launcher.run_ranks(RANKS, on_cpu=True)
    quieten()
    environment = dict(os.environ)
    for strategy in names:
        os.environ.update(environment)  # Lightning removes WORLD_SIZE at the end of a training
        flags = ["--devices", str(RANKS), "--accelerator", "cpu", "--precision", precision, "--strategy", strategy]
        placement = command_line.parse(flags).placement
        module, states = instance("module", read_given(["--module", name])), States()
        trainer = Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy=strategies.build(placement, sum(parameter.numel() for parameter in module.parameters())),
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
            print(json.dumps(found), flush=True)
        hooks_of(trainer.strategy).free()
    return 0


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
