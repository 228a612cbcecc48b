"""CIFAR's archives are read right, and nothing but CIFAR's archives."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, CIFAR100

import sources
from config import DataConfig
from errors import RunError, UsageError
from sources.dataset import Dataset
from tests.sources.archives import ArchiveServer, cifar_files, md5, python2_pickle, tar_gz

FOLDER = "cifar-10-batches-py"


def prepare(root: Path, archive: bytes, name: str = "cifar10") -> Dataset:
    """Put the archive into the root by hand, as a user without network would, and prepare it."""
    filename = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name].filename
    root.mkdir(exist_ok=True)
    (root / filename).write_bytes(archive)
    config = DataConfig(name, root=str(root), md5=md5(archive))  # pyright: ignore[reportArgumentType]
    return sources.load(config, sources.prepare(config))


@pytest.mark.parametrize("num_classes", [10, 100])
def test_images_and_labels_are_torchvisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_classes: int) -> None:
    files = cifar_files(num_classes)
    dataset = prepare(tmp_path, tar_gz(files), f"cifar{num_classes}")
    reference_class = CIFAR10 if num_classes == 10 else CIFAR100
    use_sums_of(files, reference_class, monkeypatch)
    write_extracted(files, tmp_path)
    for train, images, labels in (
        (True, dataset.train_images, dataset.train_labels),
        (False, dataset.test_images, dataset.test_labels),
    ):
        reference = reference_class(str(tmp_path), train=train)
        np.testing.assert_array_equal(images.transpose(0, 2, 3, 1), reference.data)
        np.testing.assert_array_equal(labels, reference.targets)
        assert list(dataset.classes) == reference.classes
    assert dataset.train_images.dtype == np.uint8
    assert dataset.train_labels.dtype == np.int64
    assert not dataset.train_images.flags.writeable


def test_the_extracted_folder_is_used_where_its_sums_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_url: str
) -> None:
    files = cifar_files(10)
    write_extracted(files, tmp_path)
    config = DataConfig("cifar10", root=str(tmp_path), url=closed_url)
    with pytest.raises(RunError, match="cannot download"):  # these files are not the published ones
        sources.prepare(config)
    use_sums_of(files, CIFAR10, monkeypatch)
    assert sources.prepare(config) == "cifar10"


def test_a_damaged_archive_in_the_root_is_downloaded_again(
    tmp_path: Path, serve: Callable[[bytes], ArchiveServer], archive10: bytes
) -> None:
    in_root = tmp_path / "cifar-10-python.tar.gz"
    in_root.write_bytes(archive10[:-100])
    config = DataConfig("cifar10", root=str(tmp_path), url=serve(archive10).url, md5=md5(archive10))
    assert sources.prepare(config) == "cifar10"
    assert in_root.read_bytes() == archive10


def link(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (tarfile.TarInfo("../evil"), "leads out"),
        (tarfile.TarInfo("/tmp/evil"), "leads out"),
        (link(f"{FOLDER}/link", tarfile.SYMTYPE, "/etc/passwd"), "not a regular file"),
        (link(f"{FOLDER}/link", tarfile.LNKTYPE, "/etc/passwd"), "not a regular file"),
    ],
)
def test_an_archive_with_a_hostile_member_is_refused(tmp_path: Path, member: tarfile.TarInfo, message: str) -> None:
    with pytest.raises(RunError, match=message):
        prepare(tmp_path / "root", tar_gz(cifar_files(10), member))
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert not list(tmp_path.rglob("*.npy"))


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "evil"),)

    files = cifar_files(10) | {f"{FOLDER}/data_batch_3": pickle.dumps({"data": Hostile()})}
    with pytest.raises(RunError, match=r"data_batch_3 .* refused: it asks for posix\.mkdir"):
        prepare(tmp_path, tar_gz(files))
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "batch",
    [
        {"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2]},
        {"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2, 10]},
        {"data": np.zeros((4, 1024), np.uint8), "labels": [0, 1, 2, 3]},
        {"data": np.zeros((4, 3072), np.float32), "labels": [0, 1, 2, 3]},
        {"data": np.zeros((0, 3072), np.uint8), "labels": []},
    ],
)
def test_a_batch_that_is_not_cifars_is_refused(tmp_path: Path, batch: dict[str, object]) -> None:
    files = cifar_files(10) | {f"{FOLDER}/test_batch": python2_pickle(batch)}
    with pytest.raises(RunError, match="test_batch"):
        prepare(tmp_path, tar_gz(files))


def test_an_archive_that_is_none_or_lacks_a_file_is_refused(tmp_path: Path) -> None:
    files = cifar_files(10)
    del files[f"{FOLDER}/data_batch_5"]
    with pytest.raises(RunError, match="lacks data_batch_5"):
        prepare(tmp_path, tar_gz(files))
    for content in (b"<html>not found</html>", tar_gz(files)[:-500], tar_gz(files)[:100]):
        with pytest.raises(RunError, match=r"cifar-10-python\.tar\.gz"):
            prepare(tmp_path, content)


def test_a_sum_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not an MD5"):
        sources.prepare(DataConfig("cifar10", root=str(tmp_path), md5="../../somewhere"))


def write_extracted(files: dict[str, bytes], root: Path) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


def use_sums_of(files: dict[str, bytes], published: type[CIFAR10], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torchvision's class publish the MD5s of these files."""
    sums = {name.partition("/")[2]: md5(content) for name, content in files.items()}
    for attribute in ("train_list", "test_list"):
        names = [name for name, _ in getattr(published, attribute)]
        monkeypatch.setattr(published, attribute, [[name, sums[name]] for name in names])
    monkeypatch.setattr(published, "meta", published.meta | {"md5": sums[published.meta["filename"]]})


def test_the_restricted_unpickler_reads_what_numpy_2_writes() -> None:
    from sources.cifar_pickle import read_batch

    buffer = io.BytesIO()
    pickle.dump({b"data": np.ones((2, 3072), np.uint8), b"labels": [3, 4]}, buffer, protocol=4)
    images, labels = read_batch("data_batch_1", buffer.getvalue(), 10)
    assert images.shape == (2, 3, 32, 32)
    assert labels.tolist() == [3, 4]
