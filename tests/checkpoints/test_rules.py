"""Configurations that are refused before the ranks start, and settings that a resumed run must keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from cifar_zero.checkpoints.resume import check_same_run
from cifar_zero.config import command_line
from cifar_zero.config.settings import tree_of
from cifar_zero.core.errors import UsageError
from cifar_zero.training.resolve import resolve

LORA = ["--lora.rank", "2", "--lora.target", "fc1"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lora.target fc1", "--lora.rank must be at least 1, not 0"),
        ("--lora.rank -3 --lora.target fc1", "--lora.rank must be at least 1, not -3"),
        ("--lora.rank 8", "--lora.rank needs --lora.target"),
        ("--lora.rank 8 --lora.target fc1 --lora.dropout 1", "under 1"),
        ("--weights /nowhere.pt", "/nowhere.pt does not exist"),
    ],
)
def test_refused(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=expected) as error:
        resolve(command_line.parse([*flags.split(), "--accelerator", "cpu"]))
    assert "\n" not in str(error.value)


def test_lists_are_read_from_flags_and_recipes(tmp_path: Path):
    config = command_line.parse([*LORA, "fc2", "--trainable", "fc3.*", "conv*"])
    assert (config.recipe.lora.target, config.recipe.trainable) == (["fc1", "fc2"], ["fc3.*", "conv*"])
    (tmp_path / "again.yaml").write_text(command_line.dump(config))
    assert command_line.parse(["--config", str(tmp_path / "again.yaml")]) == config


def test_a_resumed_run_trains_the_same_parameters(tmp_path: Path):
    before = tree_of(
        command_line.parse([*LORA, "--trainable", "fc3.*", "--weights", str(tmp_path / "base" / "last.ckpt")])
    )
    same = [*LORA, "--trainable", "fc3.*", "--resume", "run"]
    check_same_run(command_line.parse(same), before)
    check_same_run(command_line.parse([*same, "--weights", str(tmp_path / "base")]), before)  # as after a SLURM requeue
    with pytest.raises(UsageError, match="continues with the weights of its checkpoint: remove --weights"):
        check_same_run(command_line.parse([*same, "--weights", str(tmp_path / "other.pt")]), before)
    with pytest.raises(UsageError, match=r"--lora\.rank 2, not 4"):
        check_same_run(command_line.parse([*same, "--lora.rank", "4"]), before)
    with pytest.raises(UsageError, match="--trainable"):
        check_same_run(command_line.parse([*same, "--trainable", "fc2.*"]), before)
