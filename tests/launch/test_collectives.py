"""The first start reports what torchrun's restarts need."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cifar_zero.config import command_line
from cifar_zero.launch import collectives
from cifar_zero.training.resolve import make_run


@pytest.mark.parametrize(
    ("agents_store", "restarts", "warned"), [("True", "3", True), ("False", "3", False), ("True", "0", False)]
)
def test_restarts_with_the_store_of_the_previous_start_are_warned_of(
    agents_store: str,
    restarts: str,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agents_store)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    _start("cpu", monkeypatch)
    assert ("start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(("accelerator", "expected"), [("gpu", torch.device("cuda", 1)), ("cpu", None)])
def test_nccl_is_told_the_gpu_of_the_rank(
    accelerator: str, expected: torch.device | None, monkeypatch: pytest.MonkeyPatch
):
    assert _start(accelerator, monkeypatch, rank=3)["device_id"] == expected


def _start(accelerator: str, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> dict[str, Any]:
    """Starts the process group as a rank of two nodes; returns the arguments that torch is given."""
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank % 2), ("WORLD_SIZE", 4), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    given: dict[str, Any] = {}
    monkeypatch.setattr(collectives.dist, "init_process_group", lambda backend, **options: given.update(options))
    monkeypatch.setattr(collectives, "_set_timeout", lambda limit: None)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    flags = ["--accelerator", accelerator, "--devices", "2", "--num_nodes", "2"]
    collectives.init_process_group(make_run(command_line.parse([*flags, "--precision", "32-true"])))
    return given
