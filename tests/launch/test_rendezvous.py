"""The first start reports what torchrun's restarts need."""

from __future__ import annotations

import pytest

from cifar_zero.launch import rendezvous


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
    rendezvous._warn_of_restarts()
    assert ("start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err) == warned
