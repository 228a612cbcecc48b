"""The data path: a folder of JPEG images decoded once and read from then on, against torchvision's ImageFolder; an
epoch over ten times the images; and the memory that two ranks take for one dataset."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks import harness, options, processes
from benchmarks.case import Case, Ratio
from benchmarks.contenders import Bench, bench, last_json
from benchmarks.jpegs import make_folder
from benchmarks.pss import mapped_bytes
from cifar_zero import data
from cifar_zero.config.flags import DataConfig
from cifar_zero.core import exits
from cifar_zero.core.errors import UsageError

IMAGES, SHORT_IMAGES = 6000, 2000
"""JPEG images of the folder."""

SET_SIZE, SHORT_SET_SIZE = 50_000, 10_000
"""Synthetic training images, of which there are then ten times as many."""

BATCH_SIZE = 512
"""Of the epochs with training."""


def main() -> int:
    """Measures; returns the exit code."""
    parser = options.parser("data", __doc__, steps=False)
    parser.add_argument("--images", type=int, help=f"JPEG images of the folder (default: {IMAGES})")
    namespace = parser.parse_args()
    given = options.settle(namespace)
    images = namespace.images or (SHORT_IMAGES if given.short else IMAGES)
    if images < 1000:
        raise UsageError(f"--images must be at least 1000, not {images}")
    size = SHORT_SET_SIZE if given.short else SET_SIZE
    harness.heed_sigterm()
    with bench(given) as place:
        make_folder(place.directory / "folder", images)
        data.prepare(DataConfig(source="folder", root=str(place.directory / "folder"), cache=str(place.cache)))
        place.prepare(size)
        place.prepare(10 * size)
        cases = [folder(place, images), ten_times_loader(place, size), ten_times_training(place, size)]
        if Path("/proc/self/smaps").exists():
            cases.append(Case("memory for the images", {"two processes": partial(copies_of_two, place, size)}))
        return harness.compare("data", cases, given)


def folder(place: Bench, images: int) -> Case:
    """The folder of JPEG images: decoding, the first batch, an epoch."""
    root = str(place.directory / "folder")

    def decode() -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=place.directory) as cache:
            return folder_program("decode", root, cache)

    cache = str(place.cache)
    runs = {
        "ours, decoding once": decode,
        "ours": partial(folder_program, "ours", root, cache),
        "ImageFolder": partial(folder_program, "image_folder", root, cache),
    }
    ratio = Ratio("ours", "ImageFolder", ("seconds_to_first_batch", "images_per_second"))
    return Case(f"a folder of {images:,} JPEG images, read in batches of 64, without training", runs, [ratio])


def folder_program(way: str, root: str, cache: str) -> dict[str, float]:
    """A run of benchmarks.loops.folder."""
    return last_json(processes.run("-m", "benchmarks.loops.folder", way, "--root", root, "--cache", cache).stdout)


def ten_times_loader(place: Bench, size: int) -> Case:
    """An epoch of the loader alone, over one and ten times the images."""

    def epoch(count: int) -> dict[str, float]:
        program = ("-m", "benchmarks.loops.memory_loader", "--cache", str(place.cache), "--images", str(count))
        return last_json(processes.run(*program).stdout)

    return _ten_times("an epoch of the loader alone", epoch, size)


def ten_times_training(place: Bench, size: int) -> Case:
    """An epoch of training, from its images per second, over one and ten times the images."""

    def epoch(count: int) -> dict[str, float]:
        recipe = ("--config", "configs/tutorial.yaml", "--epochs", "1", "--batch_size", str(BATCH_SIZE))
        metrics = place.train(*recipe, "--data.synthetic_size", str(count))
        speed = metrics["perf/images_per_second"]
        return {"seconds": count / speed, "images_per_second": speed}

    return _ten_times(f"an epoch of training at batch {BATCH_SIZE}, {place.options.accelerator}", epoch, size)


def copies_of_two(place: Bench, size: int) -> dict[str, float]:
    """How often the training images lie in memory when two processes have read all of them."""
    (file,) = place.cache.glob(f"synthetic-{size}/train_images.npy")
    program = ("-m", "benchmarks.loops.memory_loader", "--cache", str(place.cache), "--images", str(size), "--wait")
    with ExitStack() as stack:
        readers = [stack.enter_context(processes.running(*program)) for _ in range(2)]
        for reader in readers:
            assert reader.stdout is not None
            last_json(reader.stdout.readline())  # it has read them, and waits
        return {"copies": sum(mapped_bytes(reader.pid, file) for reader in readers) / file.stat().st_size}


def _ten_times(name: str, epoch: Callable[[int], dict[str, float]], size: int) -> Case:
    one, ten = f"{size:,} images", f"{10 * size:,} images"
    return Case(name, {one: partial(epoch, size), ten: partial(epoch, 10 * size)}, [Ratio(ten, one, ("seconds",))])


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
