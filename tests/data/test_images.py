"""Tests image files in the formats that users have."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cifar_zero.core.errors import UsageError
from cifar_zero.data.folder import decode


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
