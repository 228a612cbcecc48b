"""Disks, shared memory, and the images."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cifar_zero.config.flags import DataConfig
from cifar_zero.core.errors import RunError
from cifar_zero.diagnosis.finding import Finding, Options, failed, ok, warning

FREE_BYTES = 1_000_000_000
"""What a disk must have free: CIFAR's archive and its decoded images are 0.36 GB, and a run writes checkpoints."""

SHARED_BYTES = 64_000_000
"""Shared memory for each rank; a container of Docker has 64 MB (`docker run --shm-size`) for all of them. NCCL and the
worker processes of torch's loader put their buffers there."""

SHARED_MEMORY = Path("/dev/shm")

ARCHIVES = {
    "cifar10": ("cifar-10-python.tar.gz", "cifar-10-batches-py"),
    "cifar100": ("cifar-100-python.tar.gz", "cifar-100-python"),
}
"""Files and folders of each source, as torchvision.datasets names them."""


@dataclass(frozen=True)
class _Images:
    """Images that a run can use: where they are, and whether they are decoded already."""

    place: str
    decoded: bool


def shared_memory(options: Options) -> Finding:
    """Whether /dev/shm has room for every rank."""
    if not SHARED_MEMORY.is_dir():
        return ok(f"no {SHARED_MEMORY} on this system")
    free, needed = shutil.disk_usage(SHARED_MEMORY).free, options.ranks * SHARED_BYTES
    if free < needed:
        mend = "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
        return warning(f"{_size(free)} are free, and {options.ranks} ranks may need {_size(needed)}", mend)
    return ok(f"{_size(free)} are free")


def out(options: Options) -> Finding:
    """Whether runs can be kept."""
    return _disk([Path(options.out)], "--out DIR names another place")


def data_disk(options: Options) -> Finding:
    """Whether images can be downloaded and decoded, where they are not yet."""
    images, root = _images(options), Path(options.data_root)
    if images is not None and images.decoded:
        return ok("nothing has to be written, the images are decoded")
    written = [Path(options.data_cache or root / ".cifar-zero"), *([] if images else [root])]
    return _disk(written, "--data.root DIR or --data.cache DIR names another place")


def data(options: Options) -> Finding:
    """Whether there are images."""
    images = _images(options)
    if images is None:
        return warning(
            f"no images in {options.data_root}, a run downloads CIFAR-10 (170 MB) or else trains on digits",
            f"put {ARCHIVES['cifar10'][0]} into {options.data_root}, or name its place with --data.root DIR",
        )
    return ok(f"{images.place}{'' if images.decoded else ', to be decoded by the first run'}")


def _images(options: Options) -> _Images | None:
    from cifar_zero import data

    root = Path(options.data_root)
    for source in ("cifar10", "cifar100"):
        config = DataConfig(source=source, root=options.data_root, cache=options.data_cache)
        try:
            images = data.load(config, source)
        except RunError:
            continue
        return _Images(f"{len(images.train_images):,} training images of {source}, decoded", decoded=True)
    for names in ARCHIVES.values():
        for name in names:
            if (root / name).exists():
                return _Images(str(root / name), decoded=False)
    if (root / "train").is_dir() and (root / "test").is_dir():
        return _Images(f"{root}/train and {root}/test", decoded=False)
    return None


def _disk(folders: list[Path], elsewhere: str) -> Finding:
    """Whether folders that are there or will be made can be written, and have room."""
    least = None
    for folder in folders:
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if free < FREE_BYTES:
            mend = f"free some space, or {elsewhere}"
            return failed(f"{_size(free)} are free in {folder.resolve()}, less than {_size(FREE_BYTES)}", mend)
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"1")
        except OSError as error:
            return failed(f"{folder.resolve()} cannot be written: {error.strerror}", elsewhere)
        least = min(free, least or free)
    return ok(f"{_size(least or 0)} are free in {', '.join(map(str, folders))}")


def _size(count: int) -> str:
    """Bytes for people: 1.2 GB, 64 MB."""
    return f"{count / 1e9:,.1f} GB" if count >= FREE_BYTES else f"{count / 1e6:,.0f} MB"
