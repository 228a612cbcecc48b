"""--strategy auto: one choice for all ranks, told in one line, before anything is launched."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import cli
from errors import UsageError
from planning import automatic, machine

ALONE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", automatic.VARIABLE)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALONE:
        monkeypatch.setenv(name, "")  # so that what `settle` sets is undone
        monkeypatch.delenv(name)


def settled(*flags: str) -> str:
    config = cli.parse(["--strategy", "auto", "--accelerator", "cpu", *flags])
    automatic.settle(config)
    return config.strategy


def test_a_cpu_takes_the_baseline_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert settled("--model", "vit_tiny") == "baseline"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--strategy auto: baseline takes 0.1")
    assert "GB that a rank may take (of this machine's free memory)" in line


def test_less_memory_takes_another(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "cpu_rank_bytes", lambda ranks: 85_000_000 // ranks * 2)
    flags = ["--model", "vit_tiny", "--optimizer", "adam", "--devices", "2", "--batch_size", "2"]
    monkeypatch.setattr("checks.devices.free_memory_bytes", lambda: 10**11)
    assert settled(*flags) == "fsdp2"  # of 16 bytes a parameter
    assert "faster ones need more: baseline, ddp" in capsys.readouterr().err
    monkeypatch.delenv(automatic.VARIABLE)
    monkeypatch.setattr(machine, "cpu_rank_bytes", lambda ranks: 10**6)
    with pytest.raises(UsageError, match=r"--strategy auto: nothing fits into the 0\.00 GB that a rank may take"):
        settled(*flags)


def test_a_rank_takes_what_its_launcher_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(automatic.VARIABLE, "deepspeed_stage_2")
    assert settled() == "deepspeed_stage_2"


def test_ranks_of_torchrun_take_what_rank_0_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the store of torchrun's own, here one of this test."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(automatic, "_chosen", lambda config: "deepspeed_stage_3" if rank == "0" else "chosen alone")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert settled() == "deepspeed_stage_3"
        monkeypatch.delenv(automatic.VARIABLE)


def test_ranks_that_cannot_agree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with pytest.raises(UsageError, match=r"name what plan\.py recommends"):
        settled()


def test_a_run_that_goes_on_keeps_its_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "mine" / "version_0"
    checkpoint = run / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    (run / "config.yaml").write_text("strategy: deepspeed_stage_2\n")
    for resume in (["--resume", str(run)], ["--resume", "last", "--name", "mine", "--out", str(tmp_path)]):
        assert settled(*resume) == "deepspeed_stage_2"
        assert "deepspeed_stage_2, as the run that goes on" in capsys.readouterr().err
        automatic.os.environ.pop(automatic.VARIABLE)
    (run / "config.yaml").unlink()
    assert settled("--resume", str(checkpoint)) == "baseline"


def test_no_raw_configuration_beside_it() -> None:
    with pytest.raises(UsageError, match="--ds_config stands in for a strategy"):
        cli.parse(["--strategy", "auto", "--ds_config", "some.json"])
