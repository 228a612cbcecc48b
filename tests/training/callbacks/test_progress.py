import re
from collections.abc import Callable
from typing import Any

import pytest

from cifar_zero.config.settings import make_settings


def test_lines_at_the_log_interval(fit: Callable[..., Any], capfd: pytest.CaptureFixture[str]):
    fit(make_settings(epochs=2, batch_size=4, log_interval=5), 40, warmup_steps=6)
    lines = capfd.readouterr().err.splitlines()
    steps = [line for line in lines if line.startswith("Step ")]
    assert [line.split(" | ")[0] for line in steps] == ["Step 5/20", "Step 10/20", "Step 15/20", "Step 20/20"]
    assert re.fullmatch(r"Step 5/20 \| epoch 0.50 \| Loss: \d\.\d{4} \| Learning rate: 0.001", steps[0])
    assert re.search(r"0.001 \| Time: [\d.]+ms \| TFLOPS: [\de.-]+ \| Images/s: \d+ \| 0:00:\d\d left", steps[1])
    assert steps[3].endswith(" | 0:00:00 left")
    assert [line for line in lines if "val/acc" in line][1].startswith("epoch 2  val/loss ")
