"""Tests that cifar-zero predict returns the model's own classes for image files as users have them."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cifar_zero.checkpoints.weights import encode
from cifar_zero.data.augment import normalize
from cifar_zero.exporting import formats, predict
from tests.exporting.made_up import CLASSES, write_checkpoint
from tests.support.helpers import assert_ok, refused, run_program

IMAGES = {"image_size": "32", "mean": "0.5", "std": "0.5"}
"""The size and normalisation of CIFAR-10's images in an export's metadata."""


def test_a_folder_by_a_checkpoint_and_its_export(tmp_path: Path):
    """Some images are in a subfolder, and there are files that are not images."""
    torch.manual_seed(1)
    checkpoint, folder = tmp_path / "net.ckpt", tmp_path / "images"
    net = write_checkpoint(checkpoint)
    formats.export(checkpoint, checkpoint.with_suffix(".safetensors"), "safetensors")
    (folder / "below").mkdir(parents=True)
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden").mkdir()
    for hidden in (".hidden.png", ".hidden/an.png"):
        (folder / hidden).write_text("no image")
    images = np.random.default_rng(0).integers(0, 256, (100, 3, 2, 2), np.uint8).repeat(16, axis=2).repeat(16, axis=3)
    for number, image in enumerate(images):
        Image.fromarray(image.transpose(1, 2, 0)).save(folder / ("below" if number >= 90 else "") / f"{number:02}.png")
    probabilities, labels = net(normalize(torch.tensor(images))).softmax(1).topk(2)
    assert len(labels[:, 0].unique()) > 4
    for network in (checkpoint, checkpoint.with_suffix(".safetensors")):
        done = run_program("predict", str(network), str(folder), "--top", "2", "--json")
        assert_ok(done)
        assert not done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert sorted(Path(line["file"]).stem for line in lines) == [f"{number:02}" for number in range(100)]
        for line in lines:
            number = int(Path(line["file"]).stem)
            assert [each["class"] for each in line["predictions"]] == [CLASSES[label] for label in labels[number]]
            actual = [each["probability"] for each in line["predictions"]]
            assert actual == pytest.approx(probabilities[number].tolist(), abs=1e-5)


def test_names_forge_no_line(tmp_path: Path):
    """Class names may come from another person's model, and names of images from another person's archive."""
    image, broken, network = (tmp_path / name for name in ("a\nb.png", "c\x1b[2K.png", "net.safetensors"))
    Image.new("RGB", (32, 32)).save(image)
    broken.write_text("")
    about = {**IMAGES, "model": "net", "options": "{}", "classes": json.dumps(["x\n\u202esafe.png: é"] * 10)}
    network.write_bytes(encode(write_checkpoint(tmp_path / "net.ckpt").state_dict(), about))
    done = run_program("predict", str(network), str(broken), str(image))  # what can be read is classified
    assert done.returncode == 2
    assert re.fullmatch(r".*a\\nb\.png: x\\n\\u202esafe\.png: é \d+\.\d %\n", done.stdout)
    assert re.fullmatch(r"error: cannot read the image .*c\\x1b\[2K\.png: it is not a PNG.*\n", done.stderr)


@pytest.mark.parametrize(
    ("model", "images", "message"),
    [
        ("last.ckpt", "empty", "no .png, .jpg, .jpeg images in"),
        ("last.ckpt", "a.png --top 0", "--top must be at least 1, not 0"),
        ("last.ckpt", "a.png --model mlp", "give FILE.py:NAME"),
        ("plain.safetensors", "a.png", "does not name its model: give a checkpoint of cifar-zero train"),
        ("moe.safetensors", "a.png", 'comes from another model: Missing key(s) in state_dict: "fc3.'),
        ("evil.safetensors", "a.png", "torchvision:resnet18 (kwargs.checkpoint_path must be a number"),
        ("unclear.safetensors", "a.png", "unclear.safetensors: classes is not JSON"),
        ("cut.onnx", "a.png", "damaged or not an ONNX file"),
        ("cut.safetensors", "a.png", "damaged or not a safetensors file"),
    ],
)
@pytest.mark.filterwarnings("error")  # a warning is a second line
def test_mistakes(model: str, images: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    weights = write_checkpoint(Path("last.ckpt")).state_dict()
    content = Path("last.ckpt").read_bytes()
    classes = json.dumps(CLASSES)
    evil = json.dumps({"kwargs": {"checkpoint_path": "evil.pth"}})
    files = {
        "plain.safetensors": encode(weights, {}),
        "moe.safetensors": encode(weights, {**IMAGES, "model": "net_moe", "options": "{}", "classes": classes}),
        "evil.safetensors": encode(
            {}, {**IMAGES, "model": "torchvision:resnet18", "options": evil, "classes": classes}
        ),
        "unclear.safetensors": encode({}, {"model": "net", "options": "{}", "classes": "[" * 100_000}),
        "cut.onnx": content[:1000],
        "cut.safetensors": content[:1000],
        "a.png": b"",
    }
    for name, written in files.items():
        Path(name).write_bytes(written)
    Path("empty").mkdir()
    monkeypatch.setattr(sys, "argv", ["predict", model, *images.split()])
    with refused(message):
        predict.main()
