"""Exports as ONNX: the model itself, for onnxruntime and other programs without torch."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path

import onnxruntime
import torch
from onnx import helper
from torch import Tensor, nn

from cifar_zero.core.errors import UsageError
from cifar_zero.exporting.classifier import Classifier
from cifar_zero.models import IMAGE_SHAPE

INPUT, OUTPUT = "images", "scores"
"""Names in the file: float32 (N, 3, 32, 32) in [-1, 1] -> float32 (N, classes), for any N."""


def encode(net: nn.Module, metadata: dict[str, str]) -> bytes:
    """See `exporting.Format.module`."""
    program = torch.onnx.export(
        net,
        (torch.zeros(2, *IMAGE_SHAPE),),  # two images: torch would treat a size of 1 as a constant
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


def load(file: Path, known: Mapping[str, str] | None = None, trust: bool = False) -> Classifier:
    """See `exporting.Format.module`; `known` and `trust` are never needed."""
    if known:
        raise UsageError(f"{file} contains the model itself: leave --model out")
    try:
        session = onnxruntime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
        classes = tuple(json.loads(session.get_modelmeta().custom_metadata_map["classes"]))
    except KeyError as error:
        raise UsageError(f"{file} was not written by export.py: it does not name its classes") from error
    except Exception as error:  # onnxruntime's errors have no common base class
        why = textwrap.shorten(str(error), 120, placeholder=" ...")
        raise UsageError(f"{file} cannot be read, it is damaged or not an ONNX file: {why}") from error

    def scores(images: Tensor) -> Tensor:
        (found,) = session.run([OUTPUT], {INPUT: images.numpy()})
        return torch.from_numpy(found)

    return Classifier(scores, classes)
