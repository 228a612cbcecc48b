"""Checks that an export that was read back computes the same as the checkpoint."""

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
"""Test images per forward pass, as in a run's own test."""


def compare_scores(expected: Tensor, found: Tensor, tolerance: float | None) -> None:
    """Compares the scores (N, classes) of a checkpoint and its export; tolerance None accepts any difference.

    Raises:
        RunError: they differ by more than the tolerance, relative and absolute.
    """
    if tolerance is not None and not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        most = (found - expected).abs().max().item()
        raise RunError(f"the export does not compute what the checkpoint does: scores differ by up to {most:.2g}")


def on_random_images(checkpoint: Classifier, export: Classifier, tolerance: float | None) -> None:
    """Compares the scores of random images, in batches of one and of several; raises RunError if they differ."""
    generator = torch.Generator().manual_seed(0)
    for count in (1, 5):
        images = torch.rand(count, *IMAGE_SHAPE, generator=generator) * 2 - 1
        compare_scores(checkpoint.scores(images), export.scores(images), tolerance)


def on_test_images(checkpoint: Classifier, export: Classifier, dataset: Dataset, tolerance: float | None) -> str:
    """Compares the scores of all test images; returns a text with the accuracies. Raises RunError if scores differ."""
    labels = torch.tensor(dataset.test_labels)
    named, named_before = torch.empty_like(labels), torch.empty_like(labels)
    for start in range(0, len(labels), BATCH_SIZE):
        batch = slice(start, start + BATCH_SIZE)
        images = normalize(torch.tensor(dataset.test_images[batch])).contiguous()
        expected, found = checkpoint.scores(images), export.scores(images)
        compare_scores(expected, found, tolerance)
        named[batch], named_before[batch] = found.argmax(1), expected.argmax(1)
    accuracy, before = (f"{100 * (each == labels).double().mean():.2f} %" for each in (named, named_before))
    if torch.equal(named, named_before):
        return f"{accuracy}, the same class as the checkpoint's for each of {len(labels):,} images"
    differing = int((named != named_before).sum())
    return f"{accuracy}, the checkpoint's {before}; {differing:,} of {len(labels):,} images differ in class"


def test_images(checkpoint: Path, recorded: DataConfig, classes: tuple[str, ...]) -> Dataset:
    """Returns the images that the run was tested on, if they are decoded on this machine; nothing is downloaded.

    Args:
        checkpoint: in its run folder, whose recipe has the full path of the images, or elsewhere.
        recorded: the data options in the checkpoint itself.
        classes: of the checkpoint.

    Raises:
        RunError: they are not on this machine.
        UsageError: the recipe is damaged, or the images have other classes.
    """
    recipe = run_folder.recipe_of(checkpoint)
    config = command_line.parse(["--config", str(recipe)]).data if recipe is not None else recorded
    dataset = data.load(config, "cifar10" if config.source == "auto" else config.source)
    if dataset.classes != classes:
        raise UsageError(f"the images of --data.root {config.root} have other classes")
    return dataset
