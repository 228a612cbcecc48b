"""Creates tiny CIFAR archives in the published layout."""

import gzip
import hashlib
import io
import pickle
import tarfile

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

IMAGES_PER_BATCH = 20


def cifar_files(num_classes: int) -> dict[str, bytes]:
    """Returns the files of a small CIFAR-10 (num_classes 10) or CIFAR-100 by their path in the archive."""
    rng = np.random.default_rng(0)
    folder, names, label_key, meta, meta_key = {
        10: ("cifar-10-batches-py", [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], "labels", "batches.meta",
             "label_names"),
        100: ("cifar-100-python", ["train", "test"], "fine_labels", "meta", "fine_label_names"),
    }[num_classes]  # fmt: skip
    files = {f"{folder}/{meta}": pickle.dumps({meta_key: [f"class{label}" for label in range(num_classes)]}, 2)}
    for name in names:
        data = rng.integers(0, 256, (IMAGES_PER_BATCH, 3072), dtype=np.uint8)
        labels = rng.integers(0, num_classes, IMAGES_PER_BATCH).tolist()
        files[f"{folder}/{name}"] = pickle.dumps({"data": data, label_key: labels}, 2)
    return files


def tar_gz(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def publish(files: dict[str, bytes], published: type[CIFAR10], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torchvision's class accept these files, packed by `tar_gz`, as the published files."""
    sums = {name.partition("/")[2]: md5(content) for name, content in files.items()}
    for attribute in ("train_list", "test_list"):
        names = [name for name, _ in getattr(published, attribute)]
        monkeypatch.setattr(published, attribute, [[name, sums[name]] for name in names])
    monkeypatch.setattr(published, "meta", published.meta | {"md5": sums[published.meta["filename"]]})
    monkeypatch.setattr(published, "tgz_md5", md5(tar_gz(files)))
