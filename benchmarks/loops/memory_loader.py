"""An epoch of our loader over synthetic images; then it waits for a line, so that its memory can be looked at."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import numpy as np

from benchmarks.loops.arguments import data_config
from cifar_zero import data
from cifar_zero.data.dataset import Split
from cifar_zero.data.memory_loader import MemoryLoader
from cifar_zero.data.order import TrainOrder

BATCH_SIZE = 512


def main() -> None:
    """Reads every image once, prints the time it took after the set-up, and waits on request."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--cache", required=True, help="directory of decoded images")
    parser.add_argument("--images", type=int, required=True, help="in the training set")
    parser.add_argument("--wait", action="store_true", help="for a line of input, the images still mapped")
    options = parser.parse_args()
    dataset = data.load(replace(data_config(options.cache), synthetic_size=options.images), "synthetic")
    split = Split(dataset.train_images, dataset.train_labels, np.arange(options.images))
    loader = MemoryLoader(split, TrainOrder(split.count, BATCH_SIZE, accumulate=1, world_size=1, rank=0, seed=0))
    started = time.perf_counter()
    images = sum(len(labels) for _, labels in loader)
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "images_per_second": images / seconds}), flush=True)
    if options.wait:
        input()


if __name__ == "__main__":
    main()
