"""The `cifar10` and `cifar100` sources: Krizhevsky's archives of 50,000 + 10,000 labelled images of 32x32 pixels.

Address, checksums and file names are torchvision's; it is imported only where the cache is not ready yet.
"""

from __future__ import annotations

import re
from pathlib import Path

from config import DataConfig
from errors import RunError, UsageError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""
CIFAR100_CLASSES = tuple(_CIFAR100_NAMES.split())


def class_names(config: DataConfig) -> tuple[str, ...]:
    """The published names, in the order of the labels. Raises UsageError where --data.md5 is no MD5."""
    if config.md5 and not re.fullmatch("[0-9a-f]{32}", config.md5):
        raise UsageError(f"--data.md5 {config.md5} is not an MD5: 32 digits 0-9a-f are expected")
    return CIFAR10_CLASSES if config.source == "cifar10" else CIFAR100_CLASSES


def cache_key(config: DataConfig) -> str:
    """Directory name: one for the published archive, and one for each other archive named by its MD5."""
    class_names(config)  # an MD5 that is none must not become a path
    return f"{config.source}-{config.md5}" if config.md5 else config.source


def fingerprint(config: DataConfig) -> str:
    """MD5 of the archive, where it is not the published one."""
    return f"archive {config.md5 or 'as published'}"


def build(config: DataConfig, directory: Path) -> tuple[str, ...]:
    """Find or download the archive and decode it; returns the class names that it gives.

    Raises DownloadError where it cannot be had, RunError where it is not what CIFAR's archive should be.
    """
    import numpy as np
    from torchvision.datasets import CIFAR10, CIFAR100

    from sources import cache
    from sources.cifar_files import obtain
    from sources.cifar_pickle import read_batch, read_names

    published = CIFAR10 if config.source == "cifar10" else CIFAR100
    files = obtain(config, published)
    meta = published.meta
    classes = read_names(meta["filename"], files[meta["filename"]], meta["key"])
    if len(classes) != len(class_names(config)):
        raise RunError(f"the archive has {len(classes)} classes, but {config.source} has {len(class_names(config))}")
    for split, batch_list in (("train", published.train_list), ("test", published.test_list)):
        batches = [read_batch(name, files.pop(name), len(classes)) for name, _ in batch_list]
        images_out, labels_out = cache.allocate(directory, split, sum(len(labels) for _, labels in batches))
        np.concatenate([images for images, _ in batches], out=images_out)
        np.concatenate([labels for _, labels in batches], out=labels_out)
    return classes
