"""What one rank wishes and all ranks must do at the same step."""

import time

import torch
from lightning.pytorch import Trainer

SECONDS = 1.0
"""Between two agreements, about: a reduction of two numbers, which takes less than a thousandth of that."""


class Agreement:
    """Asks all ranks about once a second, counted in optimizer steps so that all of them ask at the same one."""

    def __init__(self) -> None:
        self._step = self._next_step = -1
        self._asked = 0.0

    def reached(self, trainer: Trainer, wish: bool) -> bool:
        """Whether some rank wishes it; to be called by every rank after each optimizer step.

        Where several have to be asked and it is not yet time to, False.
        """
        if trainer.world_size == 1:
            return wish
        step, now = trainer.global_step, time.monotonic()
        if self._step < 0:
            self._step, self._asked, self._next_step = step, now, step + 1
        if step < self._next_step:
            return False
        answers = torch.tensor([float(wish), now - self._asked], device=trainer.strategy.root_device)
        torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MAX)
        wished, seconds = answers.tolist()
        pace = (step - self._step) / max(seconds, 1e-6)
        self._step, self._asked, self._next_step = step, now, step + max(1, int(pace * SECONDS))
        return wished > 0
