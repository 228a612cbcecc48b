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
    batches = {name.partition("/")[2]: pickle.loads(content, encoding="latin1") for name, content in files.items()}
    label = "labels" if num_classes == 10 else "fine_labels"
    for split, images, labels in (
        (published.train_list, dataset.train_images, dataset.train_labels),
        (published.test_list, dataset.test_images, dataset.test_labels),
    ):
        expected = [batches[name] for name, _ in split]
        np.testing.assert_array_equal(images.reshape(-1, 3072), np.concatenate([batch["data"] for batch in expected]))
        np.testing.assert_array_equal(labels, np.concatenate([batch[label] for batch in expected]))
    assert dataset.classes == data.CLASSES[name]
    assert not dataset.train_images.flags.writeable
    assert [path.name for path in (tmp_path / "root").iterdir()] == [published.filename]


def test_the_extracted_folder_is_used_where_its_sums_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed_url: str
):
    files = cifar_files(10)
    (tmp_path / FOLDER).mkdir()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    config = DataConfig("cifar10", root=str(tmp_path), url=closed_url)
    with pytest.raises(RunError, match="cannot download"):  # these files are not the published ones
        data.prepare(config)
    publish(files, CIFAR10, monkeypatch)
    assert data.prepare(config) == "cifar10"


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
