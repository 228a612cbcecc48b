"""--strategy auto: one choice for all ranks, told in one line, before anything is launched."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import cli
import launchers
from config import Config
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
    monkeypatch.setattr(machine, "cpu_rank_bytes", lambda ranks: 10**6)
    with pytest.raises(
        UsageError, match=r"--strategy auto: nothing fits: .* GB of the device, where it may take 0\.00"
    ):
        settled(*flags)


def test_a_rank_takes_what_its_launcher_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ.get(automatic.VARIABLE) is None
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(automatic.VARIABLE, "deepspeed_stage_2")
    assert settled() == "deepspeed_stage_2"
    assert automatic.VARIABLE not in os.environ


@pytest.mark.parametrize("told", ["foo", "deepspeed_stage_2"])
def test_nobody_else_is_told_what_to_take(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(automatic.VARIABLE, told)
    assert settled("--model", "mlp") == "baseline"


def test_what_no_strategy_can_run_is_refused_as_such() -> None:
    with pytest.raises(UsageError, match="--precision 16-mixed needs a GPU"):
        settled("--precision", "16-mixed")
    with pytest.raises(UsageError, match=r"--lora\.rank must be at least 1"):
        settled("--lora.rank", "-1", "--lora.target", "fc1")
    with pytest.raises(UsageError, match=r"--lora\.rank needs --lora\.target"):
        settled("--lora.rank", "4")


def test_ranks_of_torchrun_take_what_rank_0_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the store of torchrun's own, here one of this test."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    choice = {"0": "deepspeed_stage_3", "1": "chosen alone"}
    monkeypatch.setattr(automatic, "_chosen", lambda config, starters: choice[rank])
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert settled() == "deepspeed_stage_3"

    def refuse(config: Config, starters: set[str]) -> str:
        assert rank == "0", "it waits for rank 0"
        assert starters == {launchers.starter()}
        raise UsageError("nothing fits")

    monkeypatch.setattr(automatic, "_chosen", refuse)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(UsageError, match=r"^nothing fits$"):
            settled()


def test_ranks_that_cannot_agree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "a,b")
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
    (run / "config.yaml").write_text("strategy: deepspeed_stage_2\nds_config: some.json\n")
    assert settled("--resume", str(checkpoint)) == "baseline"
    (run / "config.yaml").unlink()
    assert settled("--resume", str(checkpoint)) == "baseline"


@pytest.mark.parametrize("requeued", [False, True])
def test_the_last_run_is_the_networks_newest(requeued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a job that SLURM has started again, and where a crash came between two renames."""
    for second, strategy in enumerate(("fsdp2", "deepspeed_stage_2", "ddp")):
        run = tmp_path / f"{'net' if strategy != 'ddp' else 'mlp'}-{strategy}"
        (run / "version_0" / "checkpoints").mkdir(parents=True)
        (run / "version_0" / "checkpoints" / ("last.ckpt.old" if strategy == "fsdp2" else "last.ckpt")).touch()
        (run / "version_0" / "config.yaml").write_text(f"strategy: {strategy}\n")
        os.utime(run, (second, second))
    if requeued:
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert settled("--out", str(tmp_path), *([] if requeued else ["--resume", "last"])) == "deepspeed_stage_2"
    assert settled("--out", str(tmp_path), "--resume", "last", "--name", "net-fsdp2") == "fsdp2"


def test_what_torchrun_starts_anew_keeps_its_strategy(tmp_path: Path) -> None:
    """Of its own run, not of a newer one of somebody else; a note that a crash has left empty says nothing."""
    for second, (strategy, starter) in enumerate((("fsdp2", "ours"), ("ddp", "theirs"), ("deepspeed_stage_1", ""))):
        run = tmp_path / f"net-{strategy}" / "version_0"
        (run / "checkpoints").mkdir(parents=True)
        checkpoint = run / "checkpoints" / "last.ckpt"
        checkpoint.touch()
        os.utime(checkpoint, (second, second))
        (run / "config.yaml").write_text(f"strategy: {strategy}\n")
        (run / "ranks.json").write_text(json.dumps([{"starter": starter}]) if starter else "")
    config = cli.parse(["--strategy", "auto", "--accelerator", "cpu", "--out", str(tmp_path)])
    assert automatic._chosen(config, {"ours", "new"}) == "fsdp2"
    assert config.resume == ""  # found again under the run's name, by all ranks
    assert automatic._chosen(config, {"new"}) == "baseline"


def test_no_raw_configuration_beside_it() -> None:
    with pytest.raises(UsageError, match="--ds_config stands in for a strategy"):
        cli.parse(["--strategy", "auto", "--ds_config", "some.json"])
