"""Tests that --strategy auto makes one choice for all ranks, and prints it in one line before anything is launched."""

import pytest

from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from cifar_zero.planning import estimates


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cifar_zero.config.rules.free_memory_bytes", lambda: 10**11)


def settled(*flags: str) -> str:
    return estimates.without_auto(
        command_line.parse(["--strategy", "auto", "--accelerator", "cpu", *flags])
    ).placement.strategy


@pytest.mark.parametrize(
    ("rank_bytes", "strategy"),
    [(10**10, "baseline"), (85_000_000, "fsdp2")],  # fsdp2 shards the 16 bytes per parameter
)
def test_the_first_strategy_that_fits_is_taken_and_printed(
    rank_bytes: int, strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(estimates, "free_memory_bytes", lambda: 2 * (estimates.CPU_RANK_BYTES + rank_bytes))
    taken = settled("--model", "vit_tiny", "--optimizer", "adam", "--devices", "2", "--batch_size", "2")
    assert taken == strategy
    first, line = capsys.readouterr().err.splitlines()
    assert first.startswith("--strategy auto: predicts")  # at once, as it takes seconds
    assert line.startswith(f"--strategy auto: {strategy} needs 0.")
    assert line.endswith("GB available to a rank")


def test_a_run_for_which_no_strategy_can_be_taken_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match="--precision 16-mixed needs a GPU"):
        settled("--precision", "16-mixed")
    monkeypatch.setattr(estimates, "free_memory_bytes", lambda: 10**6)
    with pytest.raises(UsageError, match=r"auto: no strategy fits: .* memory, of which 0\.00 GB are available"):
        settled()
