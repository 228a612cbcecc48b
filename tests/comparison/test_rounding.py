"""The run that shows what rounding does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from comparison.agreement import LEAST_MOVE, TF32_UNIT, UNITS
from comparison.reading import MARK
from comparison.rounding import moved
from optimizers import OPTIMIZERS


class Module:
    """What of CIFARModule is moved."""

    def __init__(self, drawn: nn.Module, folder: Path):
        self.optimizer = OPTIMIZERS["sgd"]()
        self.net: Any = None
        self.drawn = drawn
        self.trainer = SimpleNamespace(is_global_zero=True, default_root_dir=str(folder))

    def configure_model(self) -> None:
        """Draws the network."""
        self.net = self.drawn


@pytest.mark.parametrize(
    ("layer", "accelerator", "unit"),
    [
        (nn.Conv2d(1, 1, 3), "gpu", TF32_UNIT),
        (nn.Linear(2, 2), "gpu", UNITS["32"]),
        (nn.Conv2d(1, 1, 3), "cpu", UNITS["32"]),
    ],
)
def test_the_weights_are_moved_by_what_the_network_computes_in(
    tmp_path: Path, layer: nn.Module, accelerator: str, unit: float
) -> None:
    made: Any = moved(Module, "32-true", accelerator)  # pyright: ignore[reportArgumentType]
    module = made(nn.Sequential(layer), tmp_path)
    before: Any = layer.weight.detach().clone()  # pyright: ignore[reportCallIssue]
    module.configure_model()
    distance = max(unit, LEAST_MOVE)
    after: Any = layer.weight
    assert torch.allclose((after / before - 1).abs(), torch.full_like(before, distance), rtol=0.05)
    assert json.loads((tmp_path / MARK).read_text()) == {"unit": unit}
