"""The clock of the reference loops: it goes round a loop's batches, so that the body stays as its source has it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from cifar_zero.core import start_time

WARMUP_STEPS = 20
"""Optimizer steps before the timed ones: allocation, autotuning and the loader's workers settle in them."""

Batch = TypeVar("Batch")


class Clock:
    """Ends a loop after the warm-up and so many timed steps; waiting for a batch counts.

    Args:
        steps: timed optimizer steps.
        batch_size: images per step, over all ranks.
        device: of the network; on a GPU the clock waits for the work done before it is read.
    """

    def __init__(self, steps: int, batch_size: int, device: torch.device):
        self.steps = WARMUP_STEPS + steps
        """Optimizer steps in all."""
        self._timed_steps = steps
        self._batch_size = batch_size
        self._device = device
        self._seconds_to_first_step = 0.0
        self._seconds = 0.0

    def over(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of as many epochs as it takes."""
        done, started = 0, 0.0
        while True:
            for batch in loader:
                if done == 1:
                    self._now()
                    self._seconds_to_first_step = time.time() - start_time.command_given()
                if done == WARMUP_STEPS:
                    started = self._now()
                if done == self.steps:
                    self._seconds = self._now() - started
                    return
                yield batch
                done += 1

    def figures(self) -> dict[str, float]:
        """What was measured, in the terms of metrics.json."""
        return {
            "images_per_second": self._timed_steps * self._batch_size / self._seconds,
            "step_time_ms": 1e3 * self._seconds / self._timed_steps,
            "seconds_to_first_step": self._seconds_to_first_step,
            "timed_images": self._timed_steps * self._batch_size,
        }

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
