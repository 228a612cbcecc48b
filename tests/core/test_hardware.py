from pathlib import Path

import pytest
import torch

from cifar_zero.core import hardware
from stepcheck import control_groups
from stepcheck.replay import memory


def test_a_container_may_have_less_memory_than_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limit = {"memory.max": "3000000\n", "memory.current": "2500000\n", "memory.stat": "anon 1\ninactive_file 1000000\n"}
    for name, text in limit.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    assert hardware.free_memory_bytes() == 1_500_000
    assert memory.available(torch.device("cpu")) == 1_500_000
