"""Writes exports (safetensors, ONNX or a delta), and loads exports and checkpoints as classifiers. A new safetensors or
ONNX file is read back, and its scores are compared with those of the checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cifar_zero import models
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.read import read
from cifar_zero.checkpoints.weights import (
    encode,
    load_weights,
    merged_weights,
    metadata_of,
    read_full_safetensors,
    read_with_delta,
    write_delta,
)
from cifar_zero.config.recipe import DataConfig, Inputs
from cifar_zero.core import atomic, plain_data
from cifar_zero.core.errors import RunError, UsageError, short
from cifar_zero.core.usage import check_numbers
from cifar_zero.data.augment import memory_format
from cifar_zero.models import IMAGE_SHAPE
from cifar_zero.models.external import check

INPUT, OUTPUT = "images", "scores"
"""Names of the input and the output in an ONNX file. The input is float32 (N, 3, H, W), normalised, and the output is
float32 (N, classes), for any N."""

ONNX_TOLERANCE = 1e-4
"""Relative and absolute tolerance, as in torch.allclose, between the float32 scores of an ONNX file and those of its
checkpoint. onnxruntime sums in another order, which changed the scores of the model `net` by up to 1e-7."""


@dataclass(frozen=True)
class Classifier:
    """A trained model, the names of its classes by label, and the size and normalisation of its images."""

    scores: Callable[[Tensor], Tensor]  # images float32 (N, 3, H, W), normalised -> scores float32 (N, classes)

    classes: tuple[str, ...]
    inputs: Inputs


def load_classifier(path: str, trust: bool = False, delta: str = "") -> Classifier:
    """Returns the classifier in a file, which is an export (but not a delta) or anything that
    `run_folder.find_checkpoint` accepts. `delta` is a file of `export --to delta` that is applied to the weights, or an
    empty string. Raises UsageError if a file is missing or damaged, or can be loaded only with `trust`."""
    file = run_folder.find_checkpoint(path)
    if not delta and file.suffix in (".safetensors", ".onnx"):
        return load_export(file, file.suffix)
    content = read_with_delta(file, delta, trust)
    return create_classifier(merged_weights(content), metadata_of(content, file.name), file)[1]


def load_export(file: Path, suffix: str) -> Classifier:
    """Returns the classifier in an export. It is read as ONNX if `suffix` is .onnx, else as safetensors, whatever the
    name of `file`, which may be temporary. Raises UsageError if the file is damaged, has another format, or does not
    fit the model that it names."""
    if suffix == ".onnx":
        return _load_onnx(file)
    return create_classifier(*read_full_safetensors(file), file)[1]


def create_classifier(
    weights: Mapping[str, Tensor], metadata: Mapping[str, str], file: Path
) -> tuple[nn.Module, Classifier]:
    """Returns the model with these weights, in float32 and in evaluation mode, and the classifier that runs this model
    on the CPU. `metadata` describes the model and its images, as `weights.metadata_of` returns it. `file` is named in
    error messages. Raises UsageError if the model is unknown, or if model, weights and metadata do not fit together."""
    if "model" not in metadata:
        raise UsageError(f"{file} does not name its model: give a checkpoint of cifar-zero train, or an export of it")
    try:
        classes, options = (plain_data.parse_json(metadata[key], f"{file}: {key}") for key in ("classes", "options"))
        seen = _inputs_of(metadata, file)
        entry = models.MODELS[metadata["model"]](**options)
        net = entry.build(len(classes)).eval()
    except (KeyError, TypeError, ValueError) as error:
        name = metadata["model"]
        hint = f"add --model {name}, if you trust its author" if ".py:" in name else error
        raise UsageError(f"{file} contains the unknown model {name} ({hint})") from error
    load_weights(net, weights, str(file))
    if seen.side != IMAGE_SHAPE[1]:
        try:
            check(entry, len(classes), (1, IMAGE_SHAPE[0], seen.side, seen.side))
        except ValueError as error:
            raise UsageError(f"{file}: its model does not fit its image_size {seen.side}: {short(error)}") from error

    def scores(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return net(images.contiguous(memory_format=memory_format(images.device)))

    return net, Classifier(scores, tuple(classes), seen)


def _inputs_of(metadata: Mapping[str, str], file: Path) -> Inputs:
    try:
        described = DataConfig(
            image_size=int(metadata["image_size"]), normalize=f"{metadata['mean']},{metadata['std']}"
        )
        check_numbers(described)
        return described.inputs
    except (UsageError, ValueError) as error:
        raise UsageError(f"{file}: its description of the images is invalid: {short(error)}") from error


def _encode_onnx(net: nn.Module, metadata: dict[str, str]) -> bytes:
    from onnx import helper  # imported here and below, because these packages are optional

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
    assert program is not None  # torch returns a program if dynamo is True
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
        classes, seen = tuple(plain_data.parse_json(about["classes"], "classes")), _inputs_of(about, file)
    except UsageError:
        raise
    except KeyError as error:
        raise UsageError(f"{file} was not written by cifar-zero export: it does not name its classes") from error
    except Exception as error:  # onnxruntime's errors have no common base class
        raise UsageError(f"{file} cannot be read, because it is damaged or not an ONNX file: {short(error)}") from error

    def scores(images: Tensor) -> Tensor:
        (result,) = session.run([OUTPUT], {INPUT: images.numpy()})
        return torch.from_numpy(result)

    return Classifier(scores, classes, seen)


def export(checkpoint: Path, output: Path, to: str, trust: bool = False, delta: str = "") -> None:
    """Writes an export in the format `to`, safetensors or onnx, reads it back, and compares its scores for random
    images with the checkpoint's scores, exactly for safetensors and within ONNX_TOLERANCE for ONNX. The file is renamed
    to `output` only if the scores agree. Prints a line that describes it.

    Args:
        checkpoint: A checkpoint from any strategy. If `delta` is given, it may be any file of weights.
        trust: Whether to load a checkpoint that could run code.
        delta: A file of `export --to delta` that is applied to the weights, or an empty string.

    Raises:
        UsageError: If the checkpoint is damaged or needs `trust`, or does not fit its model or `delta`.
        RunError: If the file does not compute what the checkpoint computes.
        OSError: If the file cannot be written.
    """
    content = read_with_delta(checkpoint, delta, trust)
    metadata = metadata_of(content, checkpoint.name)
    net, original = create_classifier(merged_weights(content), metadata, checkpoint)
    side, tolerance = original.inputs.side, 0.0
    with atomic.replacing(output) as new:
        if to == "onnx":
            new.write_bytes(_encode_onnx(net, metadata))
            tolerance = ONNX_TOLERANCE
        else:
            new.write_bytes(encode(net.state_dict(), metadata))
        written = load_export(new, output.suffix)
        generator = torch.Generator().manual_seed(0)
        for count in (1, 5):
            images = torch.rand(count, IMAGE_SHAPE[0], side, side, generator=generator) * 2 - 1
            expected, actual = original.scores(images), written.scores(images)
            if not torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
                most = (actual - expected).abs().max().item()
                raise RunError(f"the export does not reproduce the checkpoint: scores differ by up to {most:.2g}")
    parameters = sum(parameter.numel() for parameter in net.parameters())
    print(f"{output}: {metadata['model']}, {parameters:,} parameters, {output.stat().st_size / 1e6:,.2f} MB")


def export_delta(checkpoint: Path, output: Path, trust: bool = False) -> None:
    """Writes only the weights that the checkpoint's run trained (`weights.write_delta`), and prints how to apply
    them."""
    names = write_delta(read(checkpoint, trust), output, checkpoint.name)
    print(f"{output}: {len(names)} trained tensors, {output.stat().st_size / 1e6:,.2f} MB")
    print(f"apply it to the weights that the run started from: BASE --delta {output}")
