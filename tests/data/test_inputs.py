"""Training, evaluation, exports and prediction apply the same normalisation and image size, if these are not the
defaults."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision.transforms import Compose, Normalize, Resize, ToTensor

from cifar_zero import models
from cifar_zero.core.errors import UsageError
from cifar_zero.exporting import formats, predict
from tests.support.helpers import assert_ok, metrics_of, read_weights, run_folder_of, run_program, train_all


def test_every_command_sees_the_images_that_were_trained_on(tmp_path: Path):
    """The images have 96 x 96 pixels, and are scaled to 48 x 48."""
    root = tmp_path / "images"
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
    train_all({tmp_path / "out": flags})
    folder = run_folder_of(tmp_path / "out")
    checkpoint, export = folder / "checkpoints" / "last.ckpt", tmp_path / "net.safetensors"

    files = sorted((root / "test").rglob("*.png"))
    transform = Compose([Resize(48), ToTensor(), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    seen = default_collate([transform(Image.open(file)) for file in files])
    net = models.build("speednet", 2, width=0.1).eval()
    read_weights(net, checkpoint)
    with torch.inference_mode():
        expected = net(seen).softmax(1)
    accuracy = (expected.argmax(1) == torch.tensor([0] * 5 + [1] * 5)).double().mean().item()
    assert metrics_of(folder)["test/acc"] == pytest.approx(accuracy)
    done = run_program("evaluate", str(folder), "--data.root", str(root))
    assert_ok(done)
    assert f" all   │ {100 * accuracy:>16.2f}% " in done.stdout
    formats.export(checkpoint, export, "safetensors")
    for path in (folder, export):
        for number, (_, actual) in enumerate(predict.predict(formats.load_classifier(str(path)), files, 2)):
            assert not isinstance(actual, UsageError)
            best = expected[number].topk(2)
            assert [name for name, _ in actual] == [("dark", "light")[label] for label in best.indices]
            assert [value for _, value in actual] == pytest.approx(
                best.values.tolist(), abs=1e-2
            )  # Pillow scales bytes
