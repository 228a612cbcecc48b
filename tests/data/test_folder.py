"""A user's folder of images is decoded correctly, refused clearly, and decoded again when it changes."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cifar_zero import data
from cifar_zero.config.recipe import DataConfig
from cifar_zero.core.errors import UsageError
from cifar_zero.data.cache import Dataset


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Returns a folder with two classes of 3 train and 2 test images, of CIFAR's size, as PNG."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 3), ("test", 2)):
        for name in ("cat", "dog"):
            directory = tmp_path / split / name
            directory.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(directory / f"{number}.png")
    return tmp_path


def prepare(root: Path) -> Dataset:
    config = DataConfig("folder", root=str(root))
    assert data.prepare(config) == "folder"
    return data.load(config, "folder")


def test_pixels_labels_and_order(root: Path):
    dataset = prepare(root)
    assert dataset.classes == ("cat", "dog")
    assert dataset.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert dataset.test_labels.tolist() == [0, 0, 1, 1]
    expected = np.asarray(Image.open(root / "train" / "dog" / "1.png"))
    np.testing.assert_array_equal(dataset.train_images[4], expected)


def test_other_sizes_and_formats_are_resized_and_cut_to_the_centre(root: Path):
    wide = np.zeros((64, 192, 3), np.uint8)
    wide[:, 64:128] = (200, 100, 50)  # the central square, to which the image is cut
    Image.fromarray(wide).save(root / "train" / "cat" / "wide.PNG")
    Image.fromarray(np.full((20, 10), 77, np.uint8)).save(root / "train" / "dog" / "grey.jpeg")
    dataset = prepare(root)
    inner = dataset.train_images[3][2:-2, 2:-2]
    np.testing.assert_array_equal(inner, np.broadcast_to([200, 100, 50], inner.shape))
    np.testing.assert_allclose(dataset.train_images[7], 77, atol=1)


def test_a_changed_folder_is_decoded_again(root: Path):
    before = np.array(prepare(root).train_images)
    shutil.copy(root / "test" / "cat" / "0.png", root / "train" / "cat" / "0.png")
    after = prepare(root)
    np.testing.assert_array_equal(after.train_images[0], after.test_images[0])
    np.testing.assert_array_equal(after.train_images[1:], before[1:])
    (root / "train" / "cat" / "0.png").unlink()
    assert len(prepare(root).train_images) == 5
    for split in ("train", "test"):
        (root / split / "cat").rename(root / split / "cow")
    assert prepare(root).classes == ("cow", "dog")
    assert len([path for path in (root / ".cifar-zero").iterdir() if path.is_dir()]) == 1


def test_an_image_that_cannot_be_read_is_named(root: Path):
    whole = (root / "train" / "cat" / "1.png").read_bytes()
    (root / "train" / "cat" / "1.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"train/cat/1\.png"):
        prepare(root)
    assert not list(root.rglob("*.npy"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: shutil.rmtree(root / "test"), "cannot read .*test: No such file"),
        (lambda root: (shutil.rmtree(root / "train" / "cat"), shutil.rmtree(root / "test" / "cat")), "only dog"),
        (lambda root: (root / "test" / "dog").rename(root / "test" / "fox"), "in one only: dog, fox"),
        (lambda root: [path.unlink() for path in (root / "test" / "dog").iterdir()], "no .* images in .*test/dog"),
    ],
)
def test_a_folder_that_cannot_work_is_refused_before_anything_is_decoded(root: Path, spoil, message: str):
    assert data.class_names(DataConfig("folder", root=str(root))) == ("cat", "dog")
    spoil(root)
    with pytest.raises(UsageError, match=message):
        data.class_names(DataConfig("folder", root=str(root)))
