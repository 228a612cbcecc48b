"""Tests that --strategy auto makes one choice for all ranks, and prints it in one line before anything is launched."""

from __future__ import annotations

import pytest

from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from cifar_zero.planning import survey

ALONE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALONE:
        monkeypatch.setenv(name, "")  # so that what `choose` sets is undone
        monkeypatch.delenv(name)


def settled(*flags: str) -> str:
    return survey.without_auto(
        command_line.parse(["--strategy", "auto", "--accelerator", "cpu", *flags])
    ).placement.strategy


def test_a_cpu_takes_the_baseline_and_prints_it(capsys: pytest.CaptureFixture[str]):
    assert settled("--model", "vit_tiny") == "baseline"
    first, line = capsys.readouterr().err.splitlines()
    assert first.startswith("--strategy auto: predicts")  # at once, as it takes seconds
    assert line.startswith("--strategy auto: baseline needs 0.1")
    assert line.endswith("GB available to a rank")


def test_less_memory_takes_another_strategy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(survey, "free_memory_bytes", lambda: 2 * (survey.CPU_RANK_BYTES + 85_000_000))
    flags = ["--model", "vit_tiny", "--optimizer", "adam", "--devices", "2", "--batch_size", "2"]
    monkeypatch.setattr("cifar_zero.config.rules.free_memory_bytes", lambda: 10**11)
    assert settled(*flags) == "fsdp2"  # which shards the 16 bytes per parameter
    assert "--strategy auto: fsdp2 needs" in capsys.readouterr().err
    monkeypatch.setattr(survey, "free_memory_bytes", lambda: 10**6)
    with pytest.raises(
        UsageError, match=r"auto: no strategy fits: .* GB of device memory, of which 0\.00 GB are available"
    ):
        settled(*flags)


def test_a_configuration_that_no_strategy_can_run_is_refused_with_its_own_error():
    with pytest.raises(UsageError, match="--precision 16-mixed needs a GPU"):
        settled("--precision", "16-mixed")
