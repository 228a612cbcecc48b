"""CIFAR's archives are read correctly, and no other archive is accepted."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, CIFAR100

from cifar_zero import data
from cifar_zero.config.settings import DataConfig
from cifar_zero.core.errors import RunError
from tests.data.archives import cifar_files, md5, publish, tar_gz

FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"


def write(files: dict[str, bytes], root: Path) -> None:
    """Writes the files of an archive as if it had been extracted."""
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "published", "num_classes"), [("cifar10", CIFAR10, 10), ("cifar100", CIFAR100, 100)], ids=str
)
def test_images_labels_and_names_are_those_of_the_files(
    name: str, published: type[CIFAR10], num_classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The root, which may be read-only, stays unchanged."""
    files = cifar_files(num_classes)
    publish(files, published, monkeypatch)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / published.filename).write_bytes(tar_gz(files))
    config = DataConfig(name, root=str(tmp_path / "root"), cache=str(tmp_path / "cache"))  # pyright: ignore[reportArgumentType]
    dataset = data.load(config, data.prepare(config))
    write(files, tmp_path)
    for train, images, labels in (
        (True, dataset.train_images, dataset.train_labels),
        (False, dataset.test_images, dataset.test_labels),
    ):
        expected = published(str(tmp_path), train)
        np.testing.assert_array_equal(images.transpose(0, 2, 3, 1), expected.data)
        np.testing.assert_array_equal(labels, expected.targets)
    assert dataset.classes == data.CLASSES[name]
    assert not dataset.train_images.flags.writeable
    assert [path.name for path in (tmp_path / "root").iterdir()] == [published.filename]


def test_the_extracted_folder_is_used_where_its_sums_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    files = cifar_files(10)
    write(files, tmp_path)
    config = DataConfig("cifar10", root=str(tmp_path), url="http://127.0.0.1:9/cifar-10-python.tar.gz")
    with pytest.raises(RunError, match="cannot download"):  # these files are not the published ones
        data.prepare(config)
    assert "Preparing" not in capsys.readouterr().err
    publish(files, CIFAR10, monkeypatch)
    assert data.prepare(config) == "cifar10"
    assert capsys.readouterr().err == f"Preparing the images in {tmp_path}/.cifar-zero (only once).\n"


def test_files_that_are_not_the_published_ones_are_refused_whatever_the_sum_of_their_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "evil"),)

    files = cifar_files(10)
    publish(files, CIFAR10, monkeypatch)
    hostile = pickle.dumps({"data": Hostile()})
    without_one = {name: content for name, content in files.items() if not name.endswith("data_batch_5")}
    for wrong in (files | {f"{FOLDER}/test_batch": hostile}, files | {f"{FOLDER}/batches.meta": hostile}, without_one):
        archive = tar_gz(wrong)
        (tmp_path / ARCHIVE).write_bytes(archive)
        monkeypatch.setattr(CIFAR10, "tgz_md5", md5(archive))
        with pytest.raises(RunError, match="does not contain the published files of CIFAR10"):
            data.prepare(DataConfig("cifar10", root=str(tmp_path)))
    assert not (tmp_path / "evil").exists()
