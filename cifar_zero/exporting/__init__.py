"""The registry of export formats, and reading exports and checkpoints back; no torch here.

To add a format, write a module with the functions that `Format.module` describes, and add a line to FORMATS.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_zero.checkpoints.run_folder import find_checkpoint

if TYPE_CHECKING:
    from cifar_zero.exporting.classifier import Classifier


@dataclass(frozen=True)
class Format:
    """A file format that export.py writes."""

    suffix: str
    """Suffix of the file name, by which predict.py recognises the format."""

    module: str
    """Module with `encode(net, metadata) -> bytes`, the content of the file, and `load(file, known, trust)`, which
    returns a `Classifier`. metadata: of `safetensors_file.metadata_of`; known: see `classifier.build`; trust: see
    `safe_load.load`. `load` raises UsageError if the file is damaged, or of another kind or model."""

    summary: str
    """Half a line for --help."""

    describes_itself: bool = True
    """Whether the file says which model and classes it has."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Number formats of the weights."""

    tolerance: float = 0.0
    """Largest relative and absolute difference of a float32 score from the checkpoint's."""


FORMATS = {
    "safetensors": Format(
        ".safetensors", "cifar_zero.exporting.safetensors_file", "weights, with a description of the model"
    ),
    "onnx": Format(
        ".onnx",
        "cifar_zero.exporting.onnx_file",
        "the model itself, for onnxruntime",
        dtypes=("float32",),  # onnxruntime (1.31) has no convolution in bfloat16 on the CPU
        tolerance=1e-4,  # it sums in another order: up to 1e-7 was measured with the tutorial's model
    ),
    "state_dict": Format(
        ".pt",
        "cifar_zero.exporting.state_dict_file",
        "only the weights, a dict for torch.load(weights_only=True)",
        describes_itself=False,
    ),
}


def exporter(name: str) -> Any:
    """Returns the module of a format, by its name in FORMATS."""
    return import_module(FORMATS[name].module)


def load(path: str, model: str = "", trust: bool = False, delta: str = "") -> Classifier:
    """Returns a classifier from any checkpoint or export.

    Args:
        path: an export, or what `run_folder.find_checkpoint` accepts.
        model: name of the model, for a file that does not contain it.
        trust: see `safe_load.load`.
        delta: file of export.py --to delta to apply to the weights.

    Raises:
        UsageError: there is no such file, it is damaged or of another model, or it needs `model` or `trust`.
    """
    known = {"model": model} if model else {}
    file = find_checkpoint(path, out="", name="")
    for name, format in FORMATS.items():
        if file.suffix == format.suffix and not delta:
            return exporter(name).load(file, known, trust)
    from cifar_zero.checkpoints.finetuning.delta import together
    from cifar_zero.checkpoints.read import read
    from cifar_zero.exporting import classifier

    content = together(file, Path(delta), trust) if delta else read(file, trust)
    return classifier.of_checkpoint(content, Path(delta) if delta else file, known)
