"""Contains what the reference loops share: their options, a dataset of images in memory, and a clock."""

import argparse
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
import torch
import torchvision
from torchvision import transforms

from cifar_zero import data as sources
from cifar_zero.config.recipe import DataConfig

WARMUP_STEPS = 20  # optimizer steps before the timed ones, as many as train.py's --bench_steps has

Batch = TypeVar("Batch")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that all loops share."""
    made = argparse.ArgumentParser(description=description, allow_abbrev=False)
    made.add_argument("--cache", required=True, help="directory of decoded images, as --data.cache of train.py")
    made.add_argument("--steps", type=int, default=1000, help="timed optimizer steps (default: 1000)")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to train (default: cpu)")
    return made


class CIFAR10InMemory(torchvision.datasets.CIFAR10):
    """torchvision's CIFAR10 on synthetic images, whose decoded pixels are in `cache`. The content of images does not
    affect the speed. An item is (image, label). The image is float32 (3, 32, 32) from -1 to 1, as in PyTorch's tutorial
    and DeepSpeedExamples."""

    def __init__(self, cache: str):  # does not call CIFAR10.__init__, which reads the files
        dataset = sources.load(DataConfig(source="synthetic", cache=cache), "synthetic")
        self.data = np.array(dataset.train_images)  # (N, 32, 32, 3), as in CIFAR10
        self.targets = dataset.train_labels.tolist()
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)])
        self.target_transform = None


class Clock:
    """Iterates over a loop's batches, and ends the loop after the warm-up and `steps` timed steps. The body of the loop
    thus stays as in its source. The time of waiting for a batch is included. `batch_size` is the number of images of a
    step over all ranks."""

    def __init__(self, steps: int, batch_size: int, device: torch.device):
        self.steps = WARMUP_STEPS + steps  # all optimizer steps
        self._timed_steps = steps
        self._batch_size = batch_size
        self._device = device
        self._seconds = 0.0

    def over(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yields batches, from as many epochs as the steps need."""
        done, started = 0, 0.0
        while True:
            for batch in loader:
                if done == WARMUP_STEPS:
                    started = now(self._device)
                if done == self.steps:
                    self._seconds = now(self._device) - started
                    return
                yield batch
                done += 1

    def figures(self) -> dict[str, float]:
        """Returns the measured figures, named as in metrics.json but without perf/."""
        return {
            "images_per_second": self._timed_steps * self._batch_size / self._seconds,
            "step_time_ms": 1e3 * self._seconds / self._timed_steps,
        }


def now(device: torch.device) -> float:
    """Returns the time in seconds. On a GPU it first waits until all queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
