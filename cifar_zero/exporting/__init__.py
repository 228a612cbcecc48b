"""The registry of export formats, writing each and reading it back; torch is imported only when a file is.

To add a format, write functions like those of the others, and add a line to FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cifar_zero.checkpoints.run_folder import find_checkpoint
from cifar_zero.core import plain_data
from cifar_zero.core.errors import UsageError, short
from cifar_zero.models import IMAGE_SHAPE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from cifar_zero.exporting.classifier import Classifier

INPUT, OUTPUT = "images", "scores"
"""Names in an ONNX file: float32 (N, 3, H, W), normalised -> float32 (N, classes), for any N."""


@dataclass(frozen=True)
class Format:
    """A file format that cifar-zero export writes."""

    suffix: str  # of the file name, by which cifar-zero predict recognises the format

    encode: Callable[[nn.Module, dict[str, str]], bytes]
    """Returns the content of the file, from the model and `safetensors_file.metadata_of`."""

    load: Callable[[Path], Classifier]  # reads a file. Raises UsageError if it is damaged, or of another kind or model.

    summary: str  # half a line for --help
    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # number formats of the weights
    tolerance: float = 0.0  # largest relative and absolute difference of a float32 score from the checkpoint's


def load(path: str, trust: bool = False, delta: str = "") -> Classifier:
    """Returns a classifier from any export, or what `run_folder.find_checkpoint` accepts; `delta`: a file of `export
    --to delta`. Raises UsageError: it is missing, damaged, or needs `trust`."""
    file = find_checkpoint(path)
    for format in FORMATS.values():
        if file.suffix == format.suffix and not delta:
            return format.load(file)
    from cifar_zero.checkpoints.finetuning.load import apply_delta
    from cifar_zero.checkpoints.read import RECORD, plain_network, read
    from cifar_zero.checkpoints.safetensors_file import metadata_of
    from cifar_zero.exporting.classifier import build

    content = apply_delta(file, Path(delta), trust) if delta else read(file, trust)
    metadata = metadata_of(content, file.name) if RECORD in content else {}
    return build(plain_network(content), metadata, Path(delta) if delta else file)[1]


def _encode_safetensors(net: nn.Module, metadata: dict[str, str]) -> bytes:
    from cifar_zero.checkpoints import safetensors_file

    return safetensors_file.encode(net.state_dict(), metadata)


def _load_safetensors(file: Path) -> Classifier:
    from cifar_zero.checkpoints.finetuning.load import read_whole
    from cifar_zero.exporting.classifier import build

    return build(*read_whole(file), file)[1]


def _encode_onnx(net: nn.Module, metadata: dict[str, str]) -> bytes:
    import torch
    from onnx import helper

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
    import torch

    from cifar_zero.exporting.classifier import Classifier, inputs_of

    try:
        session = onnxruntime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
        about = session.get_modelmeta().custom_metadata_map
        classes, inputs = tuple(plain_data.parse_json(about["classes"], "classes")), inputs_of(about)
    except KeyError as error:
        raise UsageError(f"{file} was not written by cifar-zero export: it does not name its classes") from error
    except Exception as error:  # onnxruntime's errors have no common base class
        raise UsageError(f"{file} cannot be read, it is damaged or not an ONNX file: {short(error)}") from error

    def scores(images: Tensor) -> Tensor:
        (found,) = session.run([OUTPUT], {INPUT: images.numpy()})
        return torch.from_numpy(found)

    return Classifier(scores, classes, inputs)


FORMATS = {
    "safetensors": Format(
        ".safetensors", _encode_safetensors, _load_safetensors, "weights, with a description of the model"
    ),
    "onnx": Format(
        ".onnx",
        _encode_onnx,
        _load_onnx,
        "the model itself, for onnxruntime",
        dtypes=("float32",),  # onnxruntime (1.31) has no convolution in bfloat16 on the CPU
        tolerance=1e-4,  # it sums in another order: up to 1e-7 was measured with the tutorial's model
    ),
}
