"""Export formats: writing each, reading it back, and checking that it computes the same as its checkpoint.

To add a format, write functions like those of the others, add a line to FORMATS and its name to `export.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cifar_zero import models
from cifar_zero.checkpoints import run_folder, safetensors_file
from cifar_zero.checkpoints.finetuning.load import apply_delta, read_whole, write_delta
from cifar_zero.checkpoints.read import RECORD, load_weights, plain_network, read
from cifar_zero.checkpoints.safetensors_file import metadata_of
from cifar_zero.config.recipe import Inputs, inputs
from cifar_zero.core import atomic, plain_data
from cifar_zero.core.errors import RunError, UsageError, short
from cifar_zero.data.augment import memory_format
from cifar_zero.models import IMAGE_SHAPE

INPUT, OUTPUT = "images", "scores"
"""Names in an ONNX file: float32 (N, 3, H, W), normalised -> float32 (N, classes), for any N."""


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


def load(path: str, trust: bool = False, delta: str = "") -> Classifier:
    """Returns a classifier from any export, or what `run_folder.find_checkpoint` accepts; `delta`: a file of `export
    --to delta`. Raises UsageError: it is missing, damaged, or needs `trust`."""
    file = run_folder.find_checkpoint(path)
    for format in FORMATS.values():
        if file.suffix == format.suffix and not delta:
            return format.load(file)
    content = apply_delta(file, Path(delta), trust) if delta else read(file, trust)
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
    return build(*read_whole(file), file)[1]


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


def export(checkpoint: Path, output: Path, to: str, trust: bool = False, delta: str = "") -> None:
    """Writes the file, reads it back, compares its scores of random images with the checkpoint's, and only then gives
    it its name.

    The checkpoint is of any strategy; with `delta` it may be any file of weights. Raises UsageError: the checkpoint is
    damaged, or not of the model that it names. Raises RunError: the file does not compute what the checkpoint does.
    Raises OSError: the file cannot be written.
    """
    content = apply_delta(checkpoint, Path(delta), trust) if delta else read(checkpoint, trust)
    metadata = metadata_of(content, checkpoint.name)
    net, original = build(plain_network(content), metadata, checkpoint)
    format, side = FORMATS[to], original.inputs.side
    staged = atomic.staged(output)
    try:
        staged.write_bytes(format.encode(net, metadata))
        written = format.load(staged)
        generator = torch.Generator().manual_seed(0)
        for count in (1, 5):
            images = torch.rand(count, IMAGE_SHAPE[0], side, side, generator=generator) * 2 - 1
            _compare(original.scores(images), written.scores(images), format.tolerance)
        atomic.put_in_place(output)
    finally:
        atomic.discard(staged)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    print(f"{output}: {metadata['model']}, {parameters:,} parameters, {output.stat().st_size / 1e6:,.2f} MB")


def export_delta(checkpoint: Path, output: Path, trust: bool = False) -> None:
    """Writes only the trained parameters of a run; see `finetuning.load.write_delta`."""
    names = write_delta(read(checkpoint, trust), output, checkpoint.name)
    print(f"{output}: {len(names)} trained tensors, {output.stat().st_size / 1e6:,.2f} MB")
    print(f"apply it to the weights that the run started from: BASE --delta {output}")


def _compare(expected: Tensor, found: Tensor, tolerance: float) -> None:
    """Compares the scores (N, classes) of a checkpoint and its export. Raises RunError: they differ by more than the
    tolerance, relative and absolute."""
    if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        most = (found - expected).abs().max().item()
        raise RunError(f"the export does not compute what the checkpoint does: scores differ by up to {most:.2g}")
