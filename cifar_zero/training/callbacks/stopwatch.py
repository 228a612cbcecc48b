"""A clock for training steps that makes nobody wait in between."""

import time
from typing import Any

import torch


class Stopwatch:
    """Adds up the seconds between `start` and `stop`; with a GPU, of work done rather than of work queued.

    `start` and `stop` wait for the GPU. `lap` does not: it queues a CUDA event, which is read in the end.

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
        """Goes on, with a new lap."""
        self._since = self._now()
        self._lap_began = self._mark()
        self.running = True

    def stop(self) -> None:
        """Halts, if it runs; a lap that has not been ended is dropped."""
        if self.running:
            self.seconds += self._now() - self._since
            self.running = False

    def lap(self) -> None:
        """Ends a lap and begins the next."""
        mark = self._mark()
        self._laps.append((self._lap_began, mark))
        self._lap_began = mark

    def lap_seconds(self) -> list[float]:
        """The laps so far, each in seconds of the device's own time; waits for the GPU."""
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
