"""Reads the `cifar10` and `cifar100` sources, Krizhevsky's archives of 50,000 + 10,000 labelled images of 32 x 32
pixels.

The files of an archive are pickled. A file is unpickled from memory, and only if these bytes have the published MD5
(from torchvision's classes), so no archive can run code. torchvision (0.29) itself reads each file a second time after
it has checked it.
"""

import hashlib
import pickle
import socket
import tarfile
import zlib
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import check_integrity, download_url

from cifar_zero.config.recipe import DataConfig
from cifar_zero.core import atomic
from cifar_zero.core.errors import RunError, short
from cifar_zero.data import cache
from cifar_zero.models import IMAGE_SHAPE

TIMEOUT_S = 10.0  # time limit of connecting, and of each read


def cache_key(config: DataConfig) -> str:
    return config.source


def fingerprint(config: DataConfig) -> str:
    return "archive as published"  # always the same images


def write_arrays(config: DataConfig, directory: Path) -> None:
    """Decodes the extracted files in the root directory or, if they are missing or damaged, the archive, which is
    downloaded if necessary. Raises DownloadError if the download fails, and RunError if the archive does not contain
    the published files."""
    published = {"cifar10": CIFAR10, "cifar100": CIFAR100}[config.source]
    splits = _decoded(published, _extracted(published, Path(config.root)))
    if splits is None:
        archive = _obtain(config, published)
        splits = _decoded(published, _packed(published, archive))
        if splits is None:
            raise RunError(f"{archive} does not contain the published files of {published.__name__}: remove it")
    for name, batches in zip(("train", "test"), splits, strict=True):
        images, labels = cache.allocate(directory, name, sum(len(batch["data"]) for batch in batches))
        planes = [batch["data"].reshape(-1, *IMAGE_SHAPE) for batch in batches]  # (n, 3, 32, 32)
        np.concatenate(planes, out=images.transpose(0, 3, 1, 2))
        labels[:] = [label for batch in batches for label in batch.get("labels") or batch["fine_labels"]]


def _sums(published: type[CIFAR10]) -> list[dict[str, str]]:
    lists = published.train_list, published.test_list
    return [{f"{published.base_folder}/{name}": md5 for name, md5 in files} for files in lists]


def _extracted(published: type[CIFAR10], root: Path) -> dict[str, bytes]:
    paths = [path for sums in _sums(published) for path in sums if (root / path).is_file()]
    return {path: (root / path).read_bytes() for path in paths}


def _packed(published: type[CIFAR10], archive: Path) -> dict[str, bytes]:
    """Returns the published files in an archive, as far as they can be read, keyed by path."""
    names, contents = {path for sums in _sums(published) for path in sums}, dict[str, bytes]()
    try:
        with tarfile.open(archive) as members:
            for member in members:
                if member.name in names and member.isreg():
                    content = members.extractfile(member)
                    assert content is not None  # a regular file
                    contents[member.name] = content.read()
    except (tarfile.TarError, EOFError, zlib.error):
        pass
    return contents


def _decoded(published: type[CIFAR10], files: Mapping[str, bytes]) -> list[list[dict[str, Any]]] | None:
    """Returns the training and the test batches, or None if a file is missing or has a wrong MD5."""
    for sums in _sums(published):
        for path, md5 in sums.items():
            if hashlib.md5(files.get(path, b""), usedforsecurity=False).hexdigest() != md5:
                return None
    return [[pickle.loads(files[path], encoding="latin1") for path in sums] for sums in _sums(published)]


def _obtain(config: DataConfig, published: type[CIFAR10]) -> Path:
    """Returns the archive in the root directory, and downloads it if it is missing or damaged. If several runs call
    this at once, one downloads, and the others wait. Raises DownloadError if the download fails."""
    root = Path(config.root)
    root.mkdir(parents=True, exist_ok=True)
    archive = root / published.filename
    fix = f"put {archive.name} into {root}, name a mirror with --data.url URL, or use --data.source digits"
    if not check_integrity(archive, published.tgz_md5):
        with cache.locked(archive.with_name(f"{archive.name}.lock"), f"downloads {archive.name}"):
            if not check_integrity(archive, published.tgz_md5):
                download(config.url or published.url, archive, published.tgz_md5, fix)
    return archive


class DownloadError(RunError):
    """Raised if a file cannot be downloaded, because the connection fails or the content is wrong."""


def download(url: str, target: Path, md5: str, fix: str) -> None:
    """Downloads `url` to `target`, completely or not at all.

    Args:
        md5: hash that the content must have.
        fix: end of the error message, which says what the user can do.

    Raises:
        DownloadError: if the download fails or the content is wrong.
        OSError: if the disk fails.
    """
    default_timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)  # torchvision sets none, and a server that does not answer would block the run
    try:
        with atomic.replacing(target) as new:
            download_url(url, str(new.parent), new.name, md5)
    except (URLError, HTTPException, ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
        raise DownloadError(f"cannot download {url}: {short(error)}; {fix}") from error
    finally:
        socket.setdefaulttimeout(default_timeout_s)
