"""Reads the `cifar10` and `cifar100` sources, Krizhevsky's archives of 50,000 + 10,000 labelled images of 32 x 32
pixels.

torchvision checks and decodes the archives. It unpickles a file only if its MD5 is the published one, so no archive can
run code.
"""

import socket
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError

from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import check_integrity, download_url, extract_archive

from cifar_zero.config.settings import DataConfig
from cifar_zero.core.errors import RunError, short
from cifar_zero.data import cache

TIMEOUT_S = 10.0  # time limit of connecting, and of each read


def cache_key(config: DataConfig) -> str:
    return config.source


def fingerprint(config: DataConfig) -> str:
    return "archive as published"  # always the same images


def build(config: DataConfig, directory: Path) -> None:
    """Finds or downloads the archive and decodes it. Raises DownloadError if the archive cannot be downloaded, and
    RunError if it does not contain the published files."""
    published = {"cifar10": CIFAR10, "cifar100": CIFAR100}[config.source]
    splits = _read(published, config.root)
    if splits is None:
        archive = _obtain(config, published)
        with TemporaryDirectory(dir=directory) as extracted:  # the root may be read-only
            extract_archive(str(archive), extracted)
            splits = _read(published, extracted)
        if splits is None:
            raise RunError(f"{archive} does not contain the published files of {published.__name__}: remove it")
    for name, split in zip(("train", "test"), splits, strict=True):
        images, labels = cache.allocate(directory, name, len(split))
        images[:] = split.data.transpose(0, 3, 1, 2)  # from (N, 32, 32, 3)
        labels[:] = split.targets


def _read(published: type[CIFAR10], root: str) -> list[CIFAR10] | None:
    """Returns the training and test images of an extracted archive, or None if a file is missing or has a wrong MD5."""
    try:
        return [published(root, train=train) for train in (True, False)]
    except RuntimeError:
        return None


def _obtain(config: DataConfig, published: type[CIFAR10]) -> Path:
    """Returns the archive in the root directory, and downloads it if it is missing or damaged. Several runs with
    separate caches may call this at once: one downloads, and the others wait."""
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
    """Raised if a file cannot be downloaded. The reason is a missing or broken connection, or wrong content."""


def download(url: str, target: Path, md5: str, fix: str) -> None:
    """Downloads `url` to `<target>.part` and renames it to `target` if its MD5 is right.

    Args:
        fix: end of the error message, which says what the user can do.

    Raises:
        DownloadError: if the download fails.
        OSError: if the disk fails.
    """
    part = target.with_name(f"{target.name}.part")
    default_timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)  # torchvision sets none, and a server that does not answer would block the run
    try:
        download_url(url, str(part.parent), part.name, md5)
        part.replace(target)
    except (URLError, HTTPException, ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
        raise DownloadError(f"cannot download {url}: {short(error)}; {fix}") from error
    finally:
        socket.setdefaulttimeout(default_timeout_s)
        part.unlink(missing_ok=True)
