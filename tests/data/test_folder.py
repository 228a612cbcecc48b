"""A user's folder of images is decoded correctly, refused clearly, and decoded again when it changes."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cifar_zero import data
from cifar_zero.config.recipe import DataConfig
from cifar_zero.core.errors import UsageError
from cifar_zero.data.cache import Dataset
from cifar_zero.data.folder import decode


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


def test_modes_and_orientation_change_no_pixel(tmp_path: Path):
    """One picture is stored in each mode. It is grey and opaque, so that no mode loses any part of it."""
    grey = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 57), dtype=np.uint8))
    sixteen = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    turned = grey.convert("RGB").transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise (EXIF 2.3, 4.6.4)
    stored = {
        "rgb.png": grey.convert("RGB"),
        "grey.png": grey,
        "rgba.png": grey.convert("RGBA"),
        "grey_alpha.png": grey.convert("LA"),
        "palette.png": grey.convert("P"),
        "grey16.png": sixteen,
    }
    for name, image in stored.items():
        image.save(tmp_path / name)
    turned.save(tmp_path / "turned.png", exif=exif)
    expected = decode(tmp_path / "rgb.png")
    assert expected.std() > 10
    for name in (*stored, "turned.png"):
        assert np.array_equal(decode(tmp_path / name), expected), name


def test_a_file_of_another_kind_is_refused_whatever_its_name(tmp_path: Path):
    """Pillow would let Ghostscript run the program in an EPS file."""
    image = Image.new("RGB", (32, 32))
    for kind in ("EPS", "GIF", "TIFF", "BMP"):
        image.save(tmp_path / "image.png", kind)
        with pytest.raises(UsageError, match=r"image\.png: it is not a PNG or JPEG file; convert or remove it$"):
            decode(tmp_path / "image.png")


@pytest.mark.filterwarnings("error")  # Pillow's warning would reach the console
def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path: Path):
    """The files end within the pixels. An image whose pixels are read is reported as truncated."""
    file = tmp_path / "image.png"
    for height, message in ((8192, "truncated"), (8193, "it has 8192 x 8193 pixels, more than 67,108,864; fix or ")):
        Image.new("1", (8192, height)).save(file)
        os.truncate(file, 100)
        with pytest.raises(UsageError, match=message):
            decode(file)
