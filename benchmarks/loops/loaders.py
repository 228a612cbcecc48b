"""Times epochs of a loader without training. The loader is one of this project's loaders, or torch's DataLoader over
torchvision's dataset.

Times are taken inside the process, after the imports. All loaders return batches of float32 from -1 to 1.
"""

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.loops.common import CIFAR10InMemory
from cifar_zero.config.recipe import DataConfig
from cifar_zero.config.settings import make_settings
from datamodule import CIFARDataModule

BATCH_SIZE = 64

SECONDS = 1.0  # whole epochs are timed until this many seconds have passed

WORKERS = 2  # worker processes of torch's DataLoader, as in the tutorial


def own_loader(config: DataConfig) -> Iterable[Any]:
    """Returns this project's loader of the training images, which are decoded first if the cache is empty."""
    images = CIFARDataModule(make_settings(data=config, batch_size=BATCH_SIZE))
    images.prepare_data()
    images.setup()
    return images.train_dataloader()


def of_torchvision(config: DataConfig) -> Iterable[Any]:
    """Returns torch's DataLoader over torchvision's CIFAR10."""
    dataset = CIFAR10InMemory(config.cache)
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=WORKERS, drop_last=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("loader", choices=["memory", "torch", "torchvision"])
    parser.add_argument("--cache", required=True, help="directory of decoded images")
    parser.add_argument("--size", type=int, default=DataConfig.synthetic_size, help="number of synthetic images")
    options = parser.parse_args()
    started = time.perf_counter()
    config = DataConfig(source="synthetic", cache=options.cache, val_fraction=0, workers=WORKERS)
    if options.loader == "torchvision":
        loader = of_torchvision(config)
    else:
        loader = own_loader(replace(config, loader=options.loader, synthetic_size=options.size))
    first, images, epoch_started = 0.0, 0, time.perf_counter()
    while (seconds := time.perf_counter() - epoch_started) < SECONDS:  # 50,000 images take 0.1 s
        for inputs, _ in loader:
            first = first or time.perf_counter() - started
            images += len(inputs)
    print(json.dumps({"images_per_second": images / seconds, "seconds_to_first_batch": first}))
