"""A trained model with the names of its classes, from plain weights or a checkpoint of any strategy; checks that an
export computes the same as its checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cifar_zero import data, models
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.read import load_weights
from cifar_zero.config import command_line
from cifar_zero.config.recipe import Inputs, inputs
from cifar_zero.config.settings import DataConfig
from cifar_zero.core import plain_data
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.data.augment import memory_format, normalize
from cifar_zero.data.cache import Dataset
from cifar_zero.models import IMAGE_SHAPE

BATCH_SIZE = 1000  # test images of 32 x 32 pixels per forward pass, as in a run's own test


@dataclass(frozen=True)
class Classifier:
    """A trained model, the names of its classes by label, and the size and normalisation of its images."""

    scores: Callable[[Tensor], Tensor]  # images float32 (N, 3, H, W), normalised -> scores float32 (N, classes)

    classes: tuple[str, ...]
    inputs: Inputs


def inputs_of(metadata: Mapping[str, str]) -> Inputs:
    """Returns the inputs that an export's metadata describe; older files lack the size, or have mean and std once."""
    normalization = f"{metadata['mean']},{metadata['std']}" if "mean" in metadata else "half"
    return inputs(int(metadata.get("image_size", IMAGE_SHAPE[1])), normalization)


def build(weights: Mapping[str, Tensor], metadata: Mapping[str, str], file: Path) -> tuple[nn.Module, Classifier]:
    """Returns the model with these weights in float32, in evaluation mode, and the classifier that runs it on the CPU.
    `metadata` are those of `safetensors_file.metadata_of`. Raises UsageError: they do not fit."""
    if "model" not in metadata:
        raise UsageError(
            f"{file} does not say which model it is of: give a checkpoint of cifar-zero train, or an export of it"
        )
    try:
        classes, options = (plain_data.parse_json(metadata[key], f"{file}: {key}") for key in ("classes", "options"))
        net = models.build(metadata["model"], len(classes), **options).eval()
        seen = inputs_of(metadata)
    except (KeyError, TypeError, ValueError) as error:
        name = metadata["model"]
        hint = f"add --model {name}, if you trust that code" if ".py:" in name else error
        raise UsageError(f"{file} is of a model that is not known here: {name} ({hint})") from error
    load_weights(net, weights, str(file))

    def scores(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return net(images.contiguous(memory_format=memory_format(images.device)))

    return net, Classifier(scores, tuple(classes), seen)


def compare_scores(expected: Tensor, found: Tensor, tolerance: float | None) -> None:
    """Compares the scores (N, classes) of a checkpoint and its export; tolerance None accepts any difference. Raises
    RunError: they differ by more than the tolerance, relative and absolute."""
    if tolerance is not None and not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        most = (found - expected).abs().max().item()
        raise RunError(f"the export does not compute what the checkpoint does: scores differ by up to {most:.2g}")


def on_random_images(checkpoint: Classifier, export: Classifier, tolerance: float | None) -> None:
    """Compares the scores of random images, in batches of one and of several; raises RunError if they differ."""
    generator = torch.Generator().manual_seed(0)
    for count in (1, 5):
        side = checkpoint.inputs.side
        images = torch.rand(count, IMAGE_SHAPE[0], side, side, generator=generator) * 2 - 1
        compare_scores(checkpoint.scores(images), export.scores(images), tolerance)


def on_test_images(checkpoint: Classifier, export: Classifier, dataset: Dataset, tolerance: float | None) -> str:
    """Compares the scores of all test images; returns a text with the accuracies. Raises RunError if scores differ."""
    labels = torch.tensor(dataset.test_labels)
    named, named_before = torch.empty_like(labels), torch.empty_like(labels)
    size = checkpoint.inputs.as_many(BATCH_SIZE)
    for start in range(0, len(labels), size):
        batch = slice(start, start + size)
        images = normalize(torch.tensor(dataset.test_images[batch]), checkpoint.inputs).contiguous()
        expected, found = checkpoint.scores(images), export.scores(images)
        compare_scores(expected, found, tolerance)
        named[batch], named_before[batch] = found.argmax(1), expected.argmax(1)
    accuracy, before = (f"{100 * (each == labels).double().mean():.2f} %" for each in (named, named_before))
    if torch.equal(named, named_before):
        return f"{accuracy}, the same class as the checkpoint's for each of {len(labels):,} images"
    differing = int((named != named_before).sum())
    return f"{accuracy}, the checkpoint's {before}; {differing:,} of {len(labels):,} images differ in class"


def test_images(checkpoint: Path, recorded: DataConfig, classes: tuple[str, ...]) -> Dataset:
    """Returns the images that the run was tested on, if they are decoded on this machine; nothing is downloaded. The
    recipe in the checkpoint's run folder has the full path of the images; elsewhere the options `recorded` in the
    checkpoint itself count. Raises RunError: they are not on this machine, or UsageError: they do not fit."""
    recipe = run_folder.recipe_of(checkpoint)
    config = command_line.parse(["--config", str(recipe)]).data if recipe is not None else recorded
    dataset = data.load(config, "cifar10" if config.source == "auto" else config.source)
    if dataset.classes != classes:
        raise UsageError(f"the images of --data.root {config.root} have other classes")
    return dataset
