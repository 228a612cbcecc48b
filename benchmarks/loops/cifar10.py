"""torchvision's CIFAR10 over images in memory: its own __getitem__ and transforms, without its files.

CIFAR-10 cannot be downloaded everywhere, and what the pixels show makes no difference to the speed.
"""

from __future__ import annotations

import numpy as np
import torchvision
from torchvision import transforms

from benchmarks.loops.arguments import data_config
from cifar_zero import data


class CIFAR10InMemory(torchvision.datasets.CIFAR10):
    """Image by image (float32 (3, 32, 32) from -1 to 1, label), as both sources' transforms give them."""

    def __init__(self, cache: str):
        """`cache`: directory of the decoded images; CIFAR10's own constructor, which reads its files, is not called."""
        dataset = data.load(data_config(cache), "synthetic")
        self.data = np.ascontiguousarray(dataset.train_images.transpose(0, 2, 3, 1))  # (N, 32, 32, 3), as in CIFAR10
        self.targets = dataset.train_labels.tolist()
        self.transform = transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))]
        )
        self.target_transform = None
