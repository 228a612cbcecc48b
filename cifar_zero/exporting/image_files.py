"""The image files that are meant by a command line."""

from collections.abc import Sequence
from pathlib import Path

from cifar_zero.core.errors import UsageError
from cifar_zero.data.folder import SUFFIXES


def find_images(paths: Sequence[str]) -> list[Path]:
    """The files, and in place of a folder all images in it and in the folders below, by name, without hidden ones.

    Raises:
        UsageError: a folder has no images.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        inside = [file for file in sorted(path.rglob("[!.]*")) if file.suffix.lower() in SUFFIXES and file.is_file()]
        if not inside:
            raise UsageError(f"no {', '.join(SUFFIXES)} images in {path}")
        found += inside
    return found
