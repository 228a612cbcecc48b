"""Where CIFAR's raw files come from: the archive in the root, torchvision's extracted folder, or the network.

Nothing is unpacked to the disk: members are read from the archive into memory, so no path in it can lead anywhere.
"""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from pathlib import Path

from torchvision.datasets import CIFAR10

from config import DataConfig
from errors import RunError
from sources.console import say
from sources.download import download, file_md5
from sources.lock import locked


def obtain(config: DataConfig, published: type[CIFAR10]) -> dict[str, bytes]:
    """The content of CIFAR's batch and meta files by name, each verified by an MD5 (its own or the archive's).

    `published` is torchvision's class, whose address, sums and names hold unless the configuration overrides them.
    Raises DownloadError where the archive is not in the root and cannot be had, RunError where it is not CIFAR's.
    """
    root = Path(config.root)
    archive = root / published.filename
    md5 = config.md5 or published.tgz_md5
    if archive.exists():
        found = file_md5(archive)
        if found == md5:
            return _read_archive(archive, published)
        say(f"{archive} is not used: its MD5 is {found}, expected {md5}.")
    if not config.md5 and (files := _read_extracted(root / published.base_folder, published)) is not None:
        return files
    root.mkdir(parents=True, exist_ok=True)
    with locked(archive.with_name(f"{archive.name}.lock"), f"downloads {archive.name}"):
        # Another run, with another cache, may have fetched it in the meantime.
        if not archive.exists() or file_md5(archive) != md5:
            mend = f"put {archive.name} into {root}, name a mirror with --data.url URL, or use --data.source digits"
            download(config.url or published.url, archive, md5, mend)
    return _read_archive(archive, published)


def _sums(published: type[CIFAR10]) -> dict[str, str]:
    """File name -> published MD5, of all files that are needed."""
    return {
        published.meta["filename"]: published.meta["md5"],
        **dict((*published.train_list, *published.test_list)),
    }


def _read_extracted(folder: Path, published: type[CIFAR10]) -> dict[str, bytes] | None:
    """The files that torchvision (or a user) unpacked, or None where one is missing or not as published."""
    if not folder.is_dir():
        return None
    files = {}
    for name, md5 in _sums(published).items():
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            say(f"{folder} is not used: {name}: {error.strerror}.")
            return None
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
            say(f"{folder} is not used: {name} has a wrong MD5.")
            return None
        files[name] = content
    return files


def _read_archive(archive: Path, published: type[CIFAR10]) -> dict[str, bytes]:
    """The needed members, by exact name. Raises RunError for an archive that holds what CIFAR's does not."""
    wanted = {f"{published.base_folder}/{name}": name for name in _sums(published)}
    files = {}
    try:
        with tarfile.open(archive, "r|gz") as tar:  # in one pass: going back would decompress from the start again
            for member in tar:
                if ".." in Path(member.name).parts or Path(member.name).is_absolute():
                    raise RunError(f"{archive} is refused: {member.name} leads out of its directory")
                if not (member.isfile() or member.isdir()):
                    raise RunError(f"{archive} is refused: {member.name} is not a regular file")
                if member.name in wanted and (file := tar.extractfile(member)) is not None:
                    files[wanted[member.name]] = file.read()
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise RunError(f"{archive} is not a readable .tar.gz archive: {error}") from error
    if missing := sorted(set(wanted.values()) - files.keys()):
        raise RunError(f"{archive} is not {published.__name__}: it lacks {', '.join(missing)}")
    return files
