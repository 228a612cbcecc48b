"""Another normalisation and larger images are the same in training, evaluation, exports and prediction."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch.utils.data import default_collate
from torchvision.transforms import Compose, Normalize, Resize, ToTensor

from cifar_zero import models
from cifar_zero.config import command_line
from cifar_zero.config.recipe import AugmentConfig, inputs
from cifar_zero.core.errors import UsageError
from cifar_zero.data.augment import Augmentation, normalize
from cifar_zero.data.dataset import Split, TrainOrder
from cifar_zero.data.loaders import MemoryLoader, TorchLoader
from cifar_zero.exporting import formats, predict
from tests.support.helpers import assert_ok, read_weights, run_folder_of, run_program, train_all

SIDE, MEAN, STD = 48, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of a run on images of 96 x 96 pixels that are scaled to 48, and the images."""
    root, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 5)):
        for brightness, name in ((60, "dark"), (160, "light")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(brightness - 60, brightness + 90, (96, 96, 3), np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    flags = ["--data.source", "folder", "--data.root", str(root), "--data.image_size", "48"]
    flags += ["--data.normalize", "imagenet", "--augment.crop", "20", "--augment.cutout", "40", "--epochs", "3"]
    flags += ["--model", "speednet", "--model.width", "0.1", "--batch_size", "4", "--logger", "none"]
    train_all({out: flags})
    return run_folder_of(out), root


def test_every_command_sees_the_images_that_were_trained_on(run: tuple[Path, Path], tmp_path: Path):
    folder, root = run
    files = sorted((root / "test").rglob("*.png"))
    transform = Compose([Resize(SIDE), ToTensor(), Normalize(MEAN, STD)])
    seen = default_collate([transform(Image.open(file)) for file in files])
    checkpoint = folder / "checkpoints" / "last.ckpt"
    net = models.build("speednet", 2, width=0.1).eval()
    read_weights(net, checkpoint)
    with torch.inference_mode():
        expected = net(seen).softmax(1)
    accuracy = (expected.argmax(1) == torch.tensor([0] * 5 + [1] * 5)).double().mean().item()
    assert json.loads((folder / "metrics.json").read_text())["test/acc"] == pytest.approx(accuracy)
    done = run_program("evaluate", str(folder))
    assert_ok(done)
    assert f" all   │ {100 * accuracy:>16.2f}% " in done.stdout
    formats.export(checkpoint, tmp_path / "net.safetensors", "safetensors")
    formats.export(checkpoint, tmp_path / "net.onnx", "onnx")
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        about = file.metadata()
    assert [about[key] for key in ("image_size", "mean", "std")] == ["48", "0.485,0.456,0.406", "0.229,0.224,0.225"]
    for path in (folder, tmp_path / "net.safetensors", tmp_path / "net.onnx"):
        for number, (_, found) in enumerate(predict.predict(formats.load(str(path)), files, 2)):
            assert not isinstance(found, UsageError)
            best = expected[number].topk(2)
            assert [name for name, _ in found] == [("dark", "light")[label] for label in best.indices]
            assert [value for _, value in found] == pytest.approx(best.values.tolist(), abs=1e-2)  # Pillow scales bytes
    assert [path.name[-3:] for path in (root / ".cifar-zero").iterdir() if path.is_dir()] == ["-48"]
    flags = ["--config", str(folder / "config.yaml"), "--data.normalize", "half", "--resume", str(folder)]
    refused = run_program("train", *flags)
    assert refused.returncode == 2
    assert "that run had --data.normalize imagenet, not half" in refused.stderr


@pytest.mark.parametrize("normalization", ["half", "cifar", "imagenet", "0.4,0.3", "0.1,0.2,0.3,0.4,0.5,0.6"])
def test_both_loaders_normalise_bit_by_bit_as_torchvision(normalization: str):
    images = np.random.default_rng(0).integers(0, 256, (24, 40, 40, 3), dtype=np.uint8).transpose(0, 3, 1, 2)
    split, seen = Split(images, np.arange(24), np.arange(24)), inputs(40, normalization)
    torch_loader = TorchLoader(split, TrainOrder(24, 8, 1, 1, 0, seed=1), 0, seen)
    memory = MemoryLoader(
        split, TrainOrder(24, 8, 1, 1, 0, seed=1), None, Augmentation(AugmentConfig(), 24, 24, 1, seen)
    )
    for (one, labels), (other, _) in zip(memory, torch_loader, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, normalize(torch.tensor(images[labels]), seen))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data.normalize grey", "--data.normalize grey: give half, cifar, imagenet, or mean,std as 2 or 6 numbers"),
        ("--data.normalize 0.5,0", "std above 0"),
        ("--data.normalize 0.5,nan", "as 2 or 6 numbers"),
        ("--data.normalize 1,2,3,4", "as 2 or 6 numbers"),
        ("--data.image_size 64", "--data.image_size 64 needs --data.source folder"),
        ("--data.image_size 31 --data.source folder", "--data.image_size must be at least 32, not 31"),
        ("--data.image_size 64 --data.source folder --augment.cutout 65", "--augment.cutout must be at most 64"),
    ],
)
def test_mistakes_are_one_clear_line(flags: str, message: str):
    with pytest.raises(UsageError) as error:
        command_line.parse(flags.split())
    assert message in str(error.value)
    assert "\n" not in str(error.value)
