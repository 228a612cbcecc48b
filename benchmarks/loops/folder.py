"""A folder of images, decoded into the cache, read from it by our loader, or read by torchvision's ImageFolder.

Times are taken inside the process, after the imports. Both sides give batches of float32 from -1 to 1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torchvision
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms

from cifar_zero import data
from cifar_zero.config.flags import DataConfig
from cifar_zero.data.dataset import Split
from cifar_zero.data.memory_loader import MemoryLoader
from cifar_zero.data.order import TrainOrder

BATCH_SIZE = 64
WORKERS = 2
"""Of torchvision's loader, as in the tutorial."""


def decode(root: str, cache: str) -> dict[str, float]:
    """Decodes the images of both splits, once."""
    config = DataConfig(source="folder", root=root, cache=cache)
    started = time.perf_counter()
    data.prepare(config)
    seconds = time.perf_counter() - started
    dataset = data.load(config, "folder")
    count = len(dataset.train_labels) + len(dataset.test_labels)
    return {"seconds": seconds, "images_per_second": count / seconds}


def ours(root: str, cache: str) -> dict[str, float]:
    """The check of the cache, its mapping, and an epoch of the training images."""
    started = time.perf_counter()
    config = DataConfig(source="folder", root=root, cache=cache)
    data.prepare(config)
    dataset = data.load(config, "folder")
    split = Split(dataset.train_images, dataset.train_labels, np.arange(len(dataset.train_labels)))
    order = TrainOrder(split.count, BATCH_SIZE, accumulate=1, world_size=1, rank=0, seed=0)
    return _epoch((images for images, _ in MemoryLoader(split, order)), started)


def image_folder(root: str, cache: str) -> dict[str, float]:
    """torchvision's folder and loader, and an epoch of the training images."""
    started = time.perf_counter()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))])
    folder = torchvision.datasets.ImageFolder(str(Path(root) / "train"), transform)
    loader = DataLoader(folder, batch_size=BATCH_SIZE, shuffle=True, num_workers=WORKERS, drop_last=True)
    return _epoch((images for images, _ in loader), started)


def _epoch(batches: Iterable[Tensor], started: float) -> dict[str, float]:
    """Figures of an epoch, the start of the loader's workers in it; `started`: of `time.perf_counter`, before the
    loader was made."""
    first, images, epoch_started = 0.0, 0, time.perf_counter()
    for batch in batches:
        first = first or time.perf_counter() - started
        images += len(batch)
    return {"seconds_to_first_batch": first, "images_per_second": images / (time.perf_counter() - epoch_started)}


WAYS = {"decode": decode, "ours": ours, "image_folder": image_folder}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--root", required=True, help="the folder, with train/ and test/")
    parser.add_argument("--cache", required=True, help="directory of decoded images")
    options = parser.parse_args()
    print(json.dumps(WAYS[options.way](options.root, options.cache)))
