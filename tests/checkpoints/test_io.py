"""An error while a rank writes or removes a checkpoint is reported but not raised, because the other ranks would wait
for the rank."""

from pathlib import Path

import pytest

from cifar_zero.checkpoints.io import AtomicCheckpointIO

CANNOT_BE_PICKLED = {"state_dict": {}, "callbacks": lambda: None}


def test_a_checkpoint_that_cannot_be_pickled_is_reported_and_the_earlier_one_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plugin = AtomicCheckpointIO()
    before = tmp_path / "before.ckpt"
    plugin.save_checkpoint({"state_dict": {}}, before)
    plugin.save_checkpoint(CANNOT_BE_PICKLED, tmp_path / "last.ckpt")
    assert "last.ckpt could not be written: " in plugin.failure
    assert "lambda" in plugin.failure
    assert "The training continues" in capsys.readouterr().err
    plugin.remove_checkpoint(before)  # Lightning calls this when there is a newer checkpoint
    assert [path.name for path in tmp_path.iterdir()] == ["before.ckpt"]


def test_a_checkpoint_that_cannot_be_removed_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    plugin = AtomicCheckpointIO()
    plugin.remove_checkpoint(tmp_path / "file" / "last.ckpt")
    assert "last.ckpt could not be removed: Not a directory" in capsys.readouterr().err
    assert not plugin.failure  # it reports only a checkpoint that was not written
