"""Tests that cifar-zero predict returns the model's own classes for image files as users have them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cifar_zero import data as sources
from cifar_zero import models
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.weights import encode
from cifar_zero.config.settings import DataConfig
from cifar_zero.core import atomic
from cifar_zero.core.errors import UsageError
from cifar_zero.data.augment import normalize
from cifar_zero.data.cache import Dataset
from cifar_zero.exporting import formats, predict
from tests.support.helpers import WHOLE, assert_ok, read_weights, run_program, train_all


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    """Returns the checkpoint of a run that has learned to distinguish some digits, and the images of the run."""
    out = tmp_path_factory.mktemp("digits")
    data = DataConfig(source="digits", root=str(out / "data"))
    options = ["--max_steps", "100", "--batch_size", "64", "--optimizer", "adam", "--logger", "none"]
    train_all({out: ["--data.source", "digits", "--data.root", data.root, *options]})
    return run_folder.newest_checkpoint(out), sources.load(data, "digits")


@pytest.fixture(scope="module")
def folder(digits: tuple[Path, Dataset], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with 100 test images. Some are in a subfolder, and there are files that are not images."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "below").mkdir()
    for number, image in enumerate(digits[1].test_images[:100]):
        Image.fromarray(image.transpose(1, 2, 0)).save(folder / ("below" if number >= 90 else "") / f"{number:02}.png")
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_text("no image")
    return folder


IMAGES = {"image_size": "32", "mean": "0.5", "std": "0.5"}
"""The size and normalisation of CIFAR-10's images in an export's metadata."""


def own_probabilities(checkpoint: Path, images: np.ndarray) -> torch.Tensor:
    """Returns the model's own predictions for images, uint8 (N, 3, 32, 32)."""
    net = models.build("net", 10).eval()
    net.load_state_dict(read_weights(net, checkpoint))
    with torch.inference_mode():
        return net(normalize(torch.tensor(images))).softmax(1)


def predictions(*arguments: str) -> dict[str, list[tuple[str, float]]]:
    """Returns cifar-zero predict's predictions by file name."""
    done = run_program("predict", *arguments, "--json")
    assert_ok(done)
    assert not done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {Path(line["file"]).name: [(p["class"], p["probability"]) for p in line["predictions"]] for line in lines}


def test_a_folder_by_a_checkpoint_and_every_export(digits: tuple[Path, Dataset], folder: Path, tmp_path: Path):
    checkpoint, dataset = digits
    probabilities, labels = own_probabilities(checkpoint, dataset.test_images[:100]).topk(2)
    assert len(labels[:, 0].unique()) > 4
    networks = [checkpoint]
    for name in ("safetensors", "onnx") if WHOLE else ("safetensors",):  # test_export.py has the scores of both
        networks.append(tmp_path / f"net.{name}")
        formats.export(checkpoint, networks[-1], name)
    for network in networks:
        found = predictions(str(network), str(folder), "--top", "2")
        assert sorted(found) == [f"{number:02}.png" for number in range(100)]
        for number in range(100):
            names, values = zip(*found[f"{number:02}.png"], strict=True)
            assert names == tuple(dataset.classes[label] for label in labels[number])
            assert values == pytest.approx(probabilities[number].tolist(), abs=1e-5)


def test_names_forge_no_line(digits: tuple[Path, Dataset], folder: Path, tmp_path: Path):
    """Class names may come from another person's model, and names of images from another person's archive."""
    image, broken, network = (tmp_path / name for name in ("a\nb.png", "c\x1b[2K.png", "net.safetensors"))
    image.write_bytes((folder / "00.png").read_bytes())
    broken.write_text("")
    about = {**IMAGES, "model": "net", "options": "{}", "classes": json.dumps(["x\r\x1b[31m\nsafe.png: é"] * 10)}
    atomic.write(network, encode(read_weights(models.build("net", 10), digits[0]), about))
    done = run_program("predict", str(network), str(broken), str(image))  # what can be read is classified
    assert done.returncode == 2
    assert re.fullmatch(r".*a\\nb\.png: x\\r\\x1b\[31m\\nsafe\.png: é \d+\.\d %\n", done.stdout)
    assert re.fullmatch(r"error: cannot read the image .*c\\x1b\[2K\.png: it is not a PNG.*\n", done.stderr)


@pytest.mark.parametrize(
    ("model", "images", "message"),
    [
        ("last.ckpt", "empty", "no .png, .jpg, .jpeg images in"),
        ("last.ckpt", "a.png --top 0", "--top must be at least 1, not 0"),
        ("last.ckpt", "a.png --model mlp", "give FILE.py:NAME"),
        ("nowhere", "a.png", "nowhere does not exist"),
        ("plain.safetensors", "a.png", "does not name its model: give a checkpoint of cifar-zero train"),
        ("moe.safetensors", "a.png", 'comes from another model: Missing key(s) in state_dict: "fc3.'),
        ("evil.safetensors", "a.png", "torchvision:resnet18 (kwargs.checkpoint_path must be a number"),
        ("unclear.safetensors", "a.png", "unclear.safetensors: classes is not JSON"),
        ("cut.onnx", "a.png", "damaged or not an ONNX file"),
        ("cut.safetensors", "a.png", "damaged or not a safetensors file"),
    ],
)
@pytest.mark.filterwarnings("error")  # a warning is a second line
def test_mistakes(
    model: str, images: str, message: str, digits: tuple[Path, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    content = digits[0].read_bytes()
    classes = json.dumps(["a"] * 10)
    evil = json.dumps({"kwargs": {"checkpoint_path": "evil.pth"}})
    weights = read_weights(models.build("net", 10), digits[0])
    files = {
        "last.ckpt": content,
        "plain.safetensors": encode(weights, {}),
        "moe.safetensors": encode(weights, {**IMAGES, "model": "net_moe", "options": "{}", "classes": classes}),
        "evil.safetensors": encode({}, {"model": "torchvision:resnet18", "options": evil, "classes": classes}),
        "unclear.safetensors": encode({}, {"model": "net", "options": "{}", "classes": "[" * 100_000}),
        "cut.onnx": content[:1000],
        "cut.safetensors": content[:1000],
    }
    for name, written in files.items():
        Path(name).write_bytes(written)
    Path("empty").mkdir()
    monkeypatch.setattr(sys, "argv", ["predict", model, *images.split()])
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        predict.main()
    assert "\n" not in str(caught.value)
