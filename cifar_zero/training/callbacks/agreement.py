"""Acts on all ranks at the same step, as soon as one rank asks for it."""

import time

import torch
from lightning.pytorch import Trainer

SECONDS = 1.0
"""Approximate time between two agreements; each reduces two numbers, in less than a thousandth of that."""


class Agreement:
    """Asks all ranks about once a second, at the same optimizer step on every rank."""

    def __init__(self) -> None:
        self._step = self._next_step = -1
        self._asked = 0.0

    def reached(self, trainer: Trainer, asks: bool) -> bool:
        """Returns whether any rank asks for it; False between two agreements. Every rank calls it after each step."""
        if trainer.world_size == 1:
            return asks
        step, now = trainer.global_step, time.monotonic()
        if self._step < 0:
            self._step, self._asked, self._next_step = step, now, step + 1
        if step < self._next_step:
            return False
        answers = torch.tensor([float(asks), now - self._asked], device=trainer.strategy.root_device)
        torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MAX)
        asked, seconds = answers.tolist()
        pace = (step - self._step) / max(seconds, 1e-6)
        self._step, self._asked, self._next_step = step, now, step + max(1, int(pace * SECONDS))
        return asked > 0
