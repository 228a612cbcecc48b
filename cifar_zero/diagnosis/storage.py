"""Checks disks, shared memory and the images."""

import shutil
import tempfile
from pathlib import Path

from cifar_zero.config.flags import DataConfig
from cifar_zero.core.errors import RunError
from cifar_zero.diagnosis.check import Finding, Options, failed, ok, warning

FREE_BYTES = 1_000_000_000
"""Free space that a disk needs: CIFAR's archive and its decoded images take 0.36 GB, and a run writes checkpoints."""

SHARED_BYTES = 64_000_000
"""Shared memory per rank, for the buffers of NCCL and of the torch loader's worker processes. A Docker container has 64
MB for all ranks by default (`docker run --shm-size`)."""

SHARED_MEMORY = Path("/dev/shm")

ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-batches-py", "cifar-100-python.tar.gz", "cifar-100-python")
"""Files and folders of the CIFAR sources, as torchvision.datasets names them."""


def shared_memory(options: Options) -> Finding:
    """Whether /dev/shm has room for every rank."""
    if not SHARED_MEMORY.is_dir():
        return ok(f"no {SHARED_MEMORY} on this system")
    free, needed = shutil.disk_usage(SHARED_MEMORY).free, options.ranks * SHARED_BYTES
    if free < needed:
        fix = "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
        return warning(f"{_size(free)} are free, but {options.ranks} ranks may need {_size(needed)}", fix)
    return ok(f"{_size(free)} are free")


def out(options: Options) -> Finding:
    """Whether run folders can be written."""
    return _disk([Path(options.out)], "choose another directory with --out DIR")


def data(options: Options) -> Finding:
    """Whether there are images; if they still have to be downloaded or decoded, whether they can be written."""
    if decoded := _decoded(options):
        return ok(decoded)
    root = Path(options.data_root)
    found = next((str(root / name) for name in ARCHIVES if (root / name).exists()), "")
    if not found and (root / "train").is_dir() and (root / "test").is_dir():
        found = f"{root}/train and {root}/test"
    written = [Path(options.data_cache or root / ".cifar-zero"), *([] if found else [root])]
    disk = _disk(written, "choose another directory with --data.root DIR or --data.cache DIR")
    if disk.status == "failed":
        return disk
    if found:
        return ok(f"{found}; the first run decodes it; {disk.found}")
    return warning(
        f"no images in {root}: a run downloads CIFAR-10 (170 MB), or trains on digits if it cannot",
        f"put {ARCHIVES[0]} into {root}, or name its directory with --data.root DIR",
    )


def _decoded(options: Options) -> str:
    """Describes the decoded images that a run can use; empty if there are none."""
    from cifar_zero.data import load

    for source in ("cifar10", "cifar100"):
        try:
            images = load(DataConfig(source=source, root=options.data_root, cache=options.data_cache), source)
        except RunError:
            continue
        return f"{len(images.train_images):,} training images of {source}, decoded"
    return ""


def _disk(folders: list[Path], elsewhere: str) -> Finding:
    """Whether folders, which need not exist yet, can be written and have room."""
    sizes: list[int] = []
    for folder in folders:
        while not folder.exists():
            folder = folder.parent
        sizes.append(shutil.disk_usage(folder).free)
        if sizes[-1] < FREE_BYTES:
            found = f"{_size(sizes[-1])} are free in {folder.resolve()}, less than {_size(FREE_BYTES)}"
            return failed(found, f"free some space, or {elsewhere}")
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"1")
        except OSError as error:
            return failed(f"{folder.resolve()} cannot be written: {error.strerror}", elsewhere)
    return ok(f"{_size(min(sizes))} are free in {', '.join(map(str, folders))}")


def _size(count: int) -> str:
    """Returns a size for people: 1.2 GB, 64 MB."""
    return f"{count / 1e9:,.1f} GB" if count >= FREE_BYTES else f"{count / 1e6:,.0f} MB"
