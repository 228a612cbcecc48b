"""Export formats: writing each, reading it back, and checking that it computes the same as its checkpoint.

To add a format, write functions like those of the others, add a line to FORMATS and its name to `export.py`.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cifar_zero import data, models
from cifar_zero.checkpoints import run_folder, safetensors_file
from cifar_zero.checkpoints.read import RECORD, load_weights, plain_network, read
from cifar_zero.checkpoints.safetensors_file import metadata_of
from cifar_zero.config import command_line
from cifar_zero.config.recipe import Inputs, inputs
from cifar_zero.config.settings import DataConfig
from cifar_zero.core import atomic, plain_data
from cifar_zero.core.errors import RunError, UsageError, short
from cifar_zero.data.augment import memory_format, normalize
from cifar_zero.data.cache import Dataset
from cifar_zero.models import IMAGE_SHAPE

INPUT, OUTPUT = "images", "scores"
"""Names in an ONNX file: float32 (N, 3, H, W), normalised -> float32 (N, classes), for any N."""

BATCH_SIZE = 1000  # test images of 32 x 32 pixels per forward pass, as in a run's own test


@dataclass(frozen=True)
class Classifier:
    """A trained model, the names of its classes by label, and the size and normalisation of its images."""

    scores: Callable[[Tensor], Tensor]  # images float32 (N, 3, H, W), normalised -> scores float32 (N, classes)

    classes: tuple[str, ...]
    inputs: Inputs


@dataclass(frozen=True)
class Format:
    """A file format that cifar-zero export writes."""

    suffix: str  # of the file name, by which cifar-zero predict recognises the format

    encode: Callable[[nn.Module, dict[str, str]], bytes]
    """Returns the content of the file, from the model and `safetensors_file.metadata_of`."""

    load: Callable[[Path], Classifier]  # reads a file. Raises UsageError if it is damaged, or of another kind or model.

    tolerance: float = 0.0  # largest relative and absolute difference of a float32 score from the checkpoint's


def load(path: str, trust: bool = False) -> Classifier:
    """Returns a classifier from any export, or what `run_folder.find_checkpoint` accepts. Raises UsageError: it is
    missing, damaged, or needs `trust`."""
    file = run_folder.find_checkpoint(path)
    for format in FORMATS.values():
        if file.suffix == format.suffix:
            return format.load(file)
    content = read(file, trust)
    metadata = metadata_of(content, file.name) if RECORD in content else {}
    return build(plain_network(content), metadata, file)[1]


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
        seen = _inputs_of(metadata)
    except (KeyError, TypeError, ValueError) as error:
        name = metadata["model"]
        hint = f"add --model {name}, if you trust that code" if ".py:" in name else error
        raise UsageError(f"{file} is of a model that is not known here: {name} ({hint})") from error
    load_weights(net, weights, str(file))

    def scores(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return net(images.contiguous(memory_format=memory_format(images.device)))

    return net, Classifier(scores, tuple(classes), seen)


def _inputs_of(metadata: Mapping[str, str]) -> Inputs:
    return inputs(int(metadata["image_size"]), f"{metadata['mean']},{metadata['std']}")


def _encode_safetensors(net: nn.Module, metadata: dict[str, str]) -> bytes:
    return safetensors_file.encode(net.state_dict(), metadata)


def _load_safetensors(file: Path) -> Classifier:
    return build(*safetensors_file.read_safetensors(file), file)[1]


def _encode_onnx(net: nn.Module, metadata: dict[str, str]) -> bytes:
    from onnx import helper  # here and below: these packages are optional

    side = int(metadata["image_size"])
    program = torch.onnx.export(
        net,
        (torch.zeros(2, IMAGE_SHAPE[0], side, side),),  # two images: torch would treat a size of 1 as a constant
        dynamo=True,
        verbose=False,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=({0: torch.export.Dim("N")},),
    )
    assert program is not None  # with dynamo
    model = program.model_proto
    for node in model.graph.node:
        del node.metadata_props[:]  # source lines of this machine, with their paths
    helper.set_model_props(model, metadata)
    return model.SerializeToString()


def _load_onnx(file: Path) -> Classifier:
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
        about = session.get_modelmeta().custom_metadata_map
        classes, seen = tuple(plain_data.parse_json(about["classes"], "classes")), _inputs_of(about)
    except KeyError as error:
        raise UsageError(f"{file} was not written by cifar-zero export: it does not name its classes") from error
    except Exception as error:  # onnxruntime's errors have no common base class
        raise UsageError(f"{file} cannot be read, it is damaged or not an ONNX file: {short(error)}") from error

    def scores(images: Tensor) -> Tensor:
        (found,) = session.run([OUTPUT], {INPUT: images.numpy()})
        return torch.from_numpy(found)

    return Classifier(scores, classes, seen)


FORMATS = {
    "safetensors": Format(".safetensors", _encode_safetensors, _load_safetensors),
    # onnxruntime sums in another order: up to 1e-7 was measured with the tutorial's model.
    "onnx": Format(".onnx", _encode_onnx, _load_onnx, tolerance=1e-4),
}


def export(checkpoint: Path, output: Path, to: str, dtype: str, trust: bool = False, check: bool = True) -> None:
    """Writes the file, reads it back, compares it with the checkpoint, and only then gives it its name.

    The checkpoint is of any strategy. `dtype` is that of the weights in the
    file; `check` compares the scores of the run's test images too, if they are on this machine. Raises UsageError: the
    checkpoint is damaged, or not of the model that it names. Raises RunError: the file does not compute what the
    checkpoint does. Raises OSError: the file cannot be written.
    """
    content = read(checkpoint, trust)
    metadata = metadata_of(content, checkpoint.name, dtype)
    net, original = build(plain_network(content), metadata, checkpoint)
    format = FORMATS[to]
    tolerance = format.tolerance if dtype == "float32" else None  # rounding to bfloat16 is shown, not refused
    accuracy = "not checked"
    staged = atomic.staged(output)
    try:
        staged.write_bytes(format.encode(deepcopy(net).to(getattr(torch, dtype)), metadata))
        written = format.load(staged)
        generator = torch.Generator().manual_seed(0)
        for count in (1, 5):
            images = torch.rand(count, IMAGE_SHAPE[0], *[original.inputs.side] * 2, generator=generator) * 2 - 1
            _compare(original.scores(images), written.scores(images), tolerance)
        if check:
            try:
                dataset = _test_images(checkpoint, DataConfig(**content[RECORD]["config"]["data"]), original.classes)
            except (UsageError, RunError) as error:
                accuracy = f"not checked: {error}"
            else:
                accuracy = _compare_on(dataset, original, written, tolerance)
        atomic.put_in_place(output)
    finally:
        atomic.discard(staged)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    print(f"{output}: {metadata['model']}, {parameters:,} parameters in {dtype}, {output.stat().st_size / 1e6:,.2f} MB")
    print(f"test accuracy {accuracy}")


def _compare(expected: Tensor, found: Tensor, tolerance: float | None) -> None:
    """Compares the scores (N, classes) of a checkpoint and its export; tolerance None accepts any difference. Raises
    RunError: they differ by more than the tolerance, relative and absolute."""
    if tolerance is not None and not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        most = (found - expected).abs().max().item()
        raise RunError(f"the export does not compute what the checkpoint does: scores differ by up to {most:.2g}")


def _compare_on(dataset: Dataset, checkpoint: Classifier, export: Classifier, tolerance: float | None) -> str:
    """Compares the scores of all test images; returns a text with the accuracies. Raises RunError if scores differ."""
    labels = torch.tensor(dataset.test_labels)
    named, named_before = torch.empty_like(labels), torch.empty_like(labels)
    size = checkpoint.inputs.as_many(BATCH_SIZE)
    for start in range(0, len(labels), size):
        batch = slice(start, start + size)
        images = normalize(torch.tensor(dataset.test_images[batch]), checkpoint.inputs).contiguous()
        expected, found = checkpoint.scores(images), export.scores(images)
        _compare(expected, found, tolerance)
        named[batch], named_before[batch] = found.argmax(1), expected.argmax(1)
    accuracy, before = (f"{100 * (each == labels).double().mean():.2f} %" for each in (named, named_before))
    if torch.equal(named, named_before):
        return f"{accuracy}, the same class as the checkpoint's for each of {len(labels):,} images"
    differing = int((named != named_before).sum())
    return f"{accuracy}, the checkpoint's {before}; {differing:,} of {len(labels):,} images differ in class"


def _test_images(checkpoint: Path, recorded: DataConfig, classes: tuple[str, ...]) -> Dataset:
    """Returns the images that the run was tested on, if they are decoded on this machine; nothing is downloaded. The
    recipe in the checkpoint's run folder has the full path of the images; elsewhere the options `recorded` in the
    checkpoint itself count. Raises RunError: they are not on this machine, or UsageError: they do not fit."""
    recipe = run_folder.recipe_of(checkpoint)
    config = command_line.parse(["--config", str(recipe)]).data if recipe is not None else recorded
    dataset = data.load(config, "cifar10" if config.source == "auto" else config.source)
    if dataset.classes != classes:
        raise UsageError(f"the images of --data.root {config.root} have other classes")
    return dataset
