"""Times epochs of a loader without training: one of ours, or torchvision's dataset with torch's DataLoader.

Times are taken inside the process, after the imports. All give batches of float32 from -1 to 1.
"""

import argparse
import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torchvision
from torch.utils.data import DataLoader

from benchmarks.loops.common import CIFAR10InMemory, to_normalised_tensor
from cifar_zero.config.settings import DataConfig, make_settings
from datamodule import CIFARDataModule

BATCH_SIZE = 64

SECONDS = 1.0  # whole epochs are timed until so many have passed

WORKERS = 2  # worker processes of torch's DataLoader, as in the tutorial


def ours(config: DataConfig) -> Iterable[Any]:
    """Returns our loader of the training images, which are decoded first if the cache is empty."""
    images = CIFARDataModule(make_settings(data=config, batch_size=BATCH_SIZE))
    images.prepare_data()
    images.setup()
    return images.train_dataloader()


def of_torchvision(config: DataConfig) -> Iterable[Any]:
    """Returns torch's DataLoader of torchvision's ImageFolder or CIFAR10."""
    if config.source == "folder":
        dataset = torchvision.datasets.ImageFolder(str(Path(config.root) / "train"), to_normalised_tensor())
    else:
        dataset = CIFAR10InMemory(config.cache)
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=WORKERS, drop_last=True)


def evict(cache: str) -> None:
    """Makes the kernel forget what it holds of the decoded images, so that they come from the disk."""
    for path in Path(cache).glob("*/*.npy"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("loader", choices=["memory", "torch", "torchvision"])
    parser.add_argument("--root", default="", help="a folder with train/ and test/ (default: synthetic images)")
    parser.add_argument("--cache", required=True, help="directory of decoded images")
    parser.add_argument("--size", type=int, help="number of synthetic images; also measures the memory")
    parser.add_argument("--cold", action="store_true", help="start with no decoded images in memory")
    options = parser.parse_args()
    if options.cold:
        evict(options.cache)
    started = time.perf_counter()
    source = "folder" if options.root else "synthetic"
    config = DataConfig(source=source, root=options.root, cache=options.cache, val_fraction=0, workers=WORKERS)
    config = replace(config, synthetic_size=options.size or config.synthetic_size)
    loader = of_torchvision(config) if options.loader == "torchvision" else ours(replace(config, loader=options.loader))
    first, images, epoch_started = 0.0, 0, time.perf_counter()
    while (seconds := time.perf_counter() - epoch_started) < SECONDS:  # 50,000 images take 0.1 s
        for inputs, _ in loader:
            first = first or time.perf_counter() - started
            images += len(inputs)
    figures = {"images_per_second": images / seconds, "seconds_to_first_batch": first}
    if options.size:
        memory = psutil.Process().memory_info()
        mapped = getattr(memory, "shared", 0)  # not on macOS
        figures |= {"own_mb": (memory.rss - mapped) / 1e6, "mapped_mb": mapped / 1e6}
    print(json.dumps(figures))
