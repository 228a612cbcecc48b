"""Image files as people have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from sources.images import decode


def test_modes_and_orientation_change_no_pixel(tmp_path: Path):
    """One picture, grey and opaque so that each mode holds all of it, stored in each of them."""
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
        "palette.gif": grey.convert("P"),
        "grey16.png": sixteen,
        "grey16.tif": sixteen,
        "bits32.tif": sixteen.convert("I"),
    }
    for name, image in stored.items():
        image.save(tmp_path / name)
    turned.save(tmp_path / "turned.png", exif=exif)
    expected = decode(tmp_path / "rgb.png")
    assert expected.std() > 10
    for name in (*stored, "turned.png"):
        assert np.array_equal(decode(tmp_path / name), expected), name
