"""The registry of formats for a trained network outside of this project, and reading them back; no torch here.

To add a format, write a module with the functions of `Exporter` and one line in FORMATS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from cifar_zero.checkpoints.run_folder import find_checkpoint

if TYPE_CHECKING:
    from torch import nn

    from cifar_zero.exporting.classifier import Classifier


@dataclass(frozen=True)
class Format:
    """One kind of file that export.py writes."""

    suffix: str
    """Ends the file's name; predict.py knows the format by it."""

    module: str
    """Has the functions of `Exporter`."""

    summary: str
    """Half a line for --help."""

    describes_itself: bool = True
    """Whether it says of which network and classes it is."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Number formats of the weights."""

    tolerance: float = 0.0
    """Most that a score read back may differ from the checkpoint's, of itself and absolutely, in float32."""


FORMATS = {
    "safetensors": Format(".safetensors", "cifar_zero.exporting.safetensors_file", "weights, with what the network is"),
    "onnx": Format(
        ".onnx",
        "cifar_zero.exporting.onnx_file",
        "the network itself, for onnxruntime",
        dtypes=("float32",),  # onnxruntime (1.31) has no convolution in bfloat16 on the CPU
        tolerance=1e-4,  # it adds up in another order: up to 1e-7 was measured of the tutorial's network
    ),
    "state_dict": Format(
        ".pt",
        "cifar_zero.exporting.state_dict_file",
        "weights alone, a dict for torch.load(weights_only=True)",
        describes_itself=False,
    ),
}


class Exporter(Protocol):
    """What the module of a format provides."""

    def encode(self, net: nn.Module, metadata: dict[str, str]) -> bytes:
        """The content of the file; `metadata` as of `checkpointing.safetensors_file.metadata_of`."""
        ...

    def load(self, file: Path, known: Mapping[str, str] | None = None, trust: bool = False) -> Classifier:
        """Reads the file back.

        Args:
            file: to read.
            known: what a file that does not describe itself is of; see `exporting.network.build`.
            trust: see `checkpointing.safe_load.load`.

        Raises:
            UsageError: it is damaged, of another kind or network, or would need `known` or `trust`.
        """
        ...


def exporter(name: str) -> Exporter:
    """The functions of a format, by its name in FORMATS."""
    return cast(Exporter, import_module(FORMATS[name].module))


def load(path: str, model: str = "", trust: bool = False, delta: str = "") -> Classifier:
    """What classifies images, from any checkpoint or export.

    Args:
        path: an export, or what `run_folder.find_checkpoint` understands.
        model: name of the network, for a file that does not say it.
        trust: see `checkpointing.safe_load.load`.
        delta: what a run has trained over it, written by export.py --to delta.

    Raises:
        UsageError: there is none, it is damaged, of another network, or would need `model` or `trust`.
    """
    known = {"model": model} if model else {}
    file = find_checkpoint(path, out="", name="")
    if delta:
        from cifar_zero.checkpoints.finetuning.delta import together
        from cifar_zero.exporting import checkpoint

        return checkpoint.of_content(together(file, Path(delta), trust), Path(delta), known)
    of_suffix = {format.suffix: name for name, format in FORMATS.items()}
    if file.suffix in of_suffix:
        return exporter(of_suffix[file.suffix]).load(file, known, trust)
    from cifar_zero.exporting import checkpoint

    return checkpoint.load(file, known, trust)
