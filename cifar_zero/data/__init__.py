"""Sources of images: each decodes its images into one cache that all ranks map into memory.

To add a source, write a module with four functions of its configuration, and one line in `_MODULES`:
- `class_names(config)` returns the classes, without decoding an image; raises UsageError: a wrong option;
- `cache_key(config)`: the name of the directory for the decoded images, one for each set of inputs to keep;
- `fingerprint(config)`: what the decoded images depend on; a cache with another one is out of date and replaced;
- `build(config, directory)` fills the arrays of `cache.allocate(directory, ...)` for train and test; returns the class
  names.
A source's module imports no torch at its top, because the command line reads class names before anything starts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cifar_zero.config.recipe import SourceName
from cifar_zero.config.settings import DataConfig

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
    """Returns the classes of the configured source (for `auto` CIFAR-10's), without decoding, in milliseconds. Raises
    UsageError for a folder as `folder.class_names` does."""
    config = _named(config, "cifar10" if config.source == "auto" else config.source)
    return _module(config).class_names(config)


def prepare(config: DataConfig) -> SourceName:
    """Prepares the decoded images and returns the name of the source that is used (`auto` is resolved). Any number of
    ranks, nodes and runs may call this at once: one works, the others wait. Raises UsageError for what the user can fix
    in the configuration or the data, RunError if the network, the archive or the disk fails."""
    if config.source != "auto":
        from cifar_zero.data import cache

        source = _module(config)
        cache.ensure(_directory(config), config.source, source.fingerprint(config), partial(source.build, config))
        return config.source
    from cifar_zero.core.console import say
    from cifar_zero.data.cifar import DownloadError

    try:
        return prepare(_named(config, "cifar10"))
    except DownloadError as error:
        say(f"CIFAR-10 is not available: {error}.")
        say("WARNING: this run uses the embedded handwritten digits (--data.source digits) INSTEAD OF CIFAR-10.")
        return prepare(_named(config, "digits"))


def load(config: DataConfig, source: str) -> Dataset:
    """Maps the images of `source`, the name that `prepare` returned; raises RunError if they are not prepared."""
    from cifar_zero.data import cache

    return cache.load(_directory(_named(config, source)))


def _directory(config: DataConfig) -> Path:
    root = Path(config.cache) if config.cache else Path(config.root) / ".cifar-zero"
    return root / _module(config).cache_key(config)


def _named(config: DataConfig, source: str) -> DataConfig:
    return replace(config, source=cast(SourceName, source))


def _module(config: DataConfig) -> Any:
    return import_module(_MODULES[config.source])
