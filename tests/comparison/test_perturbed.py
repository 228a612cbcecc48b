"""The Lightning module of a perturbed run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from cifar_module import CIFARModule
from cifar_zero.comparison.agreement import LEAST_PERTURBATION, TF32_EPS
from cifar_zero.comparison.perturbed import perturb, perturbed
from cifar_zero.comparison.reading import PERTURBED
from cifar_zero.comparison.recorded import record
from cifar_zero.comparison.recorded.record import Record
from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import make_settings
from cifar_zero.strategies.hooks import Hooks

CONFIG = make_settings(optimizer=Choice("adam", {"lr": 0.001}), seed=3)


@pytest.mark.parametrize(("accelerator", "distance"), [("gpu", TF32_EPS), ("cpu", LEAST_PERTURBATION)])
def test_weights_and_constants_change_by_the_precision_of_the_device(
    tmp_path: Path, accelerator: str, distance: float
) -> None:
    plain = CIFARModule(CONFIG, num_classes=10)
    plain.configure_model()
    module: Any = perturbed("32-true", accelerator)(CONFIG, num_classes=10)
    module._trainer = SimpleNamespace(strategy=None, is_global_zero=True, default_root_dir=str(tmp_path))
    module.configure_model()
    module.configure_model()  # the test after the training: once is enough
    assert plain.net is not None
    for before, after in zip(plain.net.parameters(), module.net.parameters(), strict=True):
        assert torch.allclose((after / before - 1).abs(), torch.full_like(before, distance), rtol=0.05)
    assert module.optimizer.lr == 0.001 * (1 + 2**-23)
    assert json.loads((tmp_path / PERTURBED).read_text()) == {"distance": distance}


def test_recorded_trainings_convolve_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU TF32 would widen the perturbation and with it every bound, from 2^-17 to 2^-10."""
    found = []

    def train(flags: list[str], sign: int, folder: Path) -> Record:
        cudnn = torch.backends.cudnn
        distance = perturb(torch.nn.Conv2d(1, 1, 1), "32-true", "gpu", sign, Hooks())
        found.append((cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, distance))
        return Record()

    for name in ("quieten", "gc"):  # they would change this process
        monkeypatch.setattr(record, name, Mock())
    (tmp_path / "jobs.json").write_text('{"ranks": 1, "jobs": [{"number": 0, "flags": [], "perturbed": 1}]}')
    assert record.train_jobs(tmp_path / "jobs.json", train) == 0
    assert found == [(False, True, False, LEAST_PERTURBATION)]
    assert torch.backends.cudnn.allow_tf32
