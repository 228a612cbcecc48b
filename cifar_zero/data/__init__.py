"""Sources of images: each brings its images, decoded, into one cache that all ranks map into memory.

To add a source, write a module with the four functions of `Source` and one line in `_MODULES`. Importing this package
or a source's module costs next to nothing (no torch): the command line asks for class names before anything starts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from cifar_zero.config.flags import DataConfig, SourceName
from cifar_zero.core.errors import UsageError

if TYPE_CHECKING:
    from cifar_zero.data.dataset import Dataset

_MODULES = {
    "cifar10": "cifar_zero.data.cifar",
    "cifar100": "cifar_zero.data.cifar",
    "folder": "cifar_zero.data.folder",
    "digits": "cifar_zero.data.digits",
    "synthetic": "cifar_zero.data.synthetic",
}


class Source(Protocol):
    """What the module of a source provides; `config.source` is the source's own name, never `auto`."""

    def class_names(self, config: DataConfig) -> tuple[str, ...]:
        """The classes, found without decoding an image. Raises UsageError where the configuration cannot work."""
        ...

    def cache_key(self, config: DataConfig) -> str:
        """Name of the directory for the decoded images: one for each set of inputs that may be wanted side by side."""
        ...

    def fingerprint(self, config: DataConfig) -> str:
        """What the decoded images depend on: a cache with another fingerprint is out of date and is replaced."""
        ...

    def build(self, config: DataConfig, directory: Path) -> tuple[str, ...]:
        """Fill the arrays got from `cache.allocate(directory, ...)` for train and test; returns the class names."""
        ...


def class_names(config: DataConfig) -> tuple[str, ...]:
    """The classes of the configured source (of `auto`: CIFAR-10's), without decoding anything, in milliseconds.

    Raises UsageError for what can be known to be wrong before a run: a folder that is missing, cannot be read, or does
    not hold the same two or more classes of images under train/ and test/.
    """
    config = _named(config, "cifar10" if config.source == "auto" else config.source)
    return _module(config).class_names(config)


def prepare(config: DataConfig) -> str:
    """Make the decoded images ready and return the name of the source that is really used (`auto` is resolved).

    Any number of ranks, nodes and runs may call this at once: one works, the others wait. Once the images are ready
    it takes milliseconds.

    Raises UsageError for what the user can fix in the configuration or the data, RunError where the network, the
    archive or the disk fails.
    """
    if config.source != "auto":
        from cifar_zero.data import cache

        source = _module(config)
        cache.ensure(_directory(config), config.source, source.fingerprint(config), partial(source.build, config))
        return config.source
    from cifar_zero.core.console import say
    from cifar_zero.data.download import DownloadError

    try:
        return prepare(_named(config, "cifar10"))
    except DownloadError as error:
        say(f"CIFAR-10 cannot be had: {error}.")
        say("WARNING: this run uses the embedded handwritten digits (--data.source digits) INSTEAD OF CIFAR-10.")
        return prepare(_named(config, "digits"))


def load(config: DataConfig, source: str) -> Dataset:
    """Map the images of `source`, the name that `prepare` returned.

    Raises RunError where `prepare` has not made them ready.
    """
    from cifar_zero.data import cache

    return cache.load(_directory(_named(config, source)))


def _directory(config: DataConfig) -> Path:
    root = Path(config.cache) if config.cache else Path(config.root) / ".cifar-zero"
    return root / _module(config).cache_key(config)


def _named(config: DataConfig, source: str) -> DataConfig:
    return replace(config, source=cast(SourceName, source))


def _module(config: DataConfig) -> Source:
    if config.source not in _MODULES:
        raise UsageError(f"--data.source {config.source} is not known: choose auto, {', '.join(_MODULES)}")
    return cast(Source, import_module(_MODULES[config.source]))
