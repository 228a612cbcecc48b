"""A clock for training steps that does not synchronise the device within a lap."""

import time
from typing import Any

import torch


class Stopwatch:
    """Adds up the seconds between `start` and `stop`: on a GPU those of the work done, not of the work queued.

    `start` and `stop` wait for the GPU. `lap` does not: it queues a CUDA event, which is read at the end.

    Args:
        device: whose work is timed.
    """

    def __init__(self, device: torch.device):
        self.seconds = 0.0
        self.running = False
        self._device = device
        self._since = 0.0
        self._lap_began: Any = None
        self._laps: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Starts or continues, with a new lap."""
        self._since = self._now()
        self._lap_began = self._mark()
        self.running = True

    def stop(self) -> None:
        """Stops if it runs; an unfinished lap is dropped."""
        if self.running:
            self.seconds += self._now() - self._since
            self.running = False

    def lap(self) -> None:
        """Ends a lap and starts the next."""
        mark = self._mark()
        self._laps.append((self._lap_began, mark))
        self._lap_began = mark

    def lap_seconds(self) -> list[float]:
        """Returns the laps so far, in seconds of the device's own time; waits for the GPU."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [begin.elapsed_time(end) / 1e3 for begin, end in self._laps]
        return [end - begin for begin, end in self._laps]

    def _now(self) -> float:
        torch.get_device_module(self._device).synchronize(self._device)  # nothing to wait for on the CPU
        return time.perf_counter()

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
