"""Prepares and loads the images of each source. A source decodes its images into one cache, which all ranks map into
memory.

To add a source, add its name to `recipe.SourceName`, its class names to `classes.CLASSES` and one line to `_MODULES`,
and write a module with three functions:

- `cache_key(config)` returns the name of the directory for the decoded images. Configurations whose decoded images
  should be kept at the same time need different names.
- `fingerprint(config)` returns a string that changes if the decoded images would change. A cache with another
  fingerprint is out of date and is replaced.
- `write_arrays(config, directory)` fills the arrays that `cache.allocate(directory, ...)` creates for train and test.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_zero.config.recipe import DataConfig, SourceName
from cifar_zero.data.classes import CLASSES

if TYPE_CHECKING:
    from cifar_zero.data.cache import Dataset

_MODULES = {
    "cifar10": "cifar_zero.data.cifar",
    "cifar100": "cifar_zero.data.cifar",
    "folder": "cifar_zero.data.folder",
    "digits": "cifar_zero.data.digits",
    "synthetic": "cifar_zero.data.synthetic",
}


def class_names(config: DataConfig) -> tuple[str, ...]:
    """Returns the class names of the configured source, without decoding an image. Raises UsageError if the source is
    `folder` and its directories are not valid."""
    if config.source == "folder":
        from cifar_zero.data import folder

        return folder.class_names(config)
    return CLASSES[config.source]


def prepare(config: DataConfig) -> SourceName:
    """Prepares the decoded images and returns the name of the source that is used. For `auto`, this is cifar10 or, with
    a printed warning, digits if CIFAR-10 cannot be downloaded. Any number of ranks, nodes and runs may call this at
    once: one prepares the images, and the others wait.

    Raises:
        UsageError: if the user can fix the error in the configuration or the data.
        RunError: if the network, the archive or the disk fails.
    """
    if config.source != "auto":
        from cifar_zero.data import cache

        source, classes = _module(config), class_names(config)
        build = partial(source.write_arrays, config)
        cache.ensure(_directory(config), config.source, classes, source.fingerprint(config), build)
        return config.source
    from cifar_zero.core.console import say
    from cifar_zero.data.cifar import DownloadError

    try:
        return prepare(replace(config, source="cifar10"))
    except DownloadError as error:
        say(f"CIFAR-10 is not available: {error}.")
        say("WARNING: this run uses the embedded handwritten digits (--data.source digits) INSTEAD OF CIFAR-10.")
        return prepare(replace(config, source="digits"))


def load(config: DataConfig, source: str) -> Dataset:
    """Maps the decoded images of `source`, which `prepare` returned, into memory. Raises RunError if the images are not
    prepared, are damaged, or are replaced during this call."""
    from cifar_zero.data import cache

    return cache.load(_directory(replace(config, source=source)))


def _directory(config: DataConfig) -> Path:
    root = Path(config.cache) if config.cache else Path(config.root) / ".cifar-zero"
    return root / _module(config).cache_key(config)


def _module(config: DataConfig) -> Any:
    return import_module(_MODULES[config.source])
