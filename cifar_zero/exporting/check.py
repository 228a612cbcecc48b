"""Whether an export that was read back does what the checkpoint does."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cifar_zero import data
from cifar_zero.checkpoints import run_folder
from cifar_zero.config import command_line
from cifar_zero.config.flags import DataConfig
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.data.augment import normalize
from cifar_zero.data.dataset import Dataset
from cifar_zero.exporting.classifier import Classifier
from cifar_zero.models import IMAGE_SHAPE

BATCH_SIZE = 1000
"""Test images in one pass, as in a run's own test."""


@dataclass(frozen=True)
class Agreement:
    """Of a checkpoint and its export on the test images."""

    images: int
    correct: int
    """Images that the export names rightly."""
    checkpoint_correct: int
    differing: int
    """Images that the two name differently."""


def compare_scores(expected: Tensor, found: Tensor, tolerance: float | None) -> None:
    """Compares the scores (N, classes) of a checkpoint with those of its export; None: they may differ at will.

    Raises:
        RunError: they differ by more than the tolerance.
    """
    if tolerance is not None and not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        most = (found - expected).abs().max().item()
        raise RunError(f"the export does not do what the checkpoint does: scores differ by up to {most:.2g}")


def on_random_images(checkpoint: Classifier, export: Classifier, tolerance: float | None) -> None:
    """Compares the scores of random images, of one and of several at a time; raises RunError where they differ."""
    generator = torch.Generator().manual_seed(0)
    for count in (1, 5):
        images = torch.rand(count, *IMAGE_SHAPE, generator=generator) * 2 - 1
        compare_scores(checkpoint.scores(images), export.scores(images), tolerance)


def on_test_images(checkpoint: Classifier, export: Classifier, dataset: Dataset, tolerance: float | None) -> Agreement:
    """Compares the scores of all test images, and counts; raises RunError where the scores differ."""
    correct = checkpoint_correct = differing = 0
    for start in range(0, len(dataset.test_labels), BATCH_SIZE):
        batch = slice(start, start + BATCH_SIZE)
        images = normalize(torch.tensor(dataset.test_images[batch])).contiguous()
        labels = torch.tensor(dataset.test_labels[batch])
        expected, found = checkpoint.scores(images), export.scores(images)
        compare_scores(expected, found, tolerance)
        named, checkpoint_named = found.argmax(1), expected.argmax(1)
        correct += int((named == labels).sum())
        checkpoint_correct += int((checkpoint_named == labels).sum())
        differing += int((named != checkpoint_named).sum())
    return Agreement(len(dataset.test_labels), correct, checkpoint_correct, differing)


def test_images(checkpoint: Path, recorded: DataConfig, classes: tuple[str, ...]) -> Dataset:
    """The images that the run was tested on, where they are still decoded on this machine; nothing is downloaded.

    Args:
        checkpoint: in its run folder, whose recipe names the images by their full path, or elsewhere.
        recorded: what the checkpoint itself says of the images.
        classes: of the checkpoint.

    Raises:
        RunError: they are not there.
        UsageError: the recipe is none.
    """
    recipe = run_folder.recipe_of(checkpoint)
    config = command_line.parse(["--config", str(recipe)]).data if recipe is not None else recorded
    dataset = data.load(config, "cifar10" if config.source == "auto" else config.source)
    if dataset.classes != classes:
        raise UsageError(f"the images of --data.root {config.root} are of other classes")
    return dataset
