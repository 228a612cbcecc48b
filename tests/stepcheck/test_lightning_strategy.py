"""CPUDeepSpeedStrategy trains a LightningModule at each ZeRO stage as DDP does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 0.04}
"""Largest error of the weights after the training, as a share of their change in the training. A needless step of Adam
while the engine starts causes an error of 0.16, and a loss that is divided twice an error of 0.49."""


@pytest.mark.distributed
def test_the_weights_of_each_stage_are_those_of_ddp(tmp_path: Path) -> None:
    file = tmp_path / "errors.json"
    command = [sys.executable, "-m", "tests.stepcheck.lightning_stages", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = json.loads(file.read_text())
    assert len(errors) == 12
    assert {name: error for name, error in errors.items() if error > TOLERANCE[name.split(", ")[-1]]} == {}
