"""If a writer is killed, the checkpoint's name leads to the complete old or the complete new checkpoint."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.io import AtomicCheckpointIO
from cifar_zero.core import atomic
from cifar_zero.exporting import formats
from tests.exporting.made_up import write_checkpoint
from tests.support.helpers import ROOT, WHOLE

WRITER = """
import sys
from pathlib import Path
from cifar_zero.core import atomic
final = Path(sys.argv[1]) / "last.ckpt"
for number in range(100_000):
    new = atomic.staged(final)
    atomic.discard(new)
    (new / "checkpoint").mkdir(parents=True)
    for name in ("checkpoint/one", "checkpoint/two", "latest"):
        (new / name).write_text(str(number))
    atomic.put_in_place(final)
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_a_whole_checkpoint_that_is_found(tmp_path: Path):
    newest = 0
    for kill in range(8 if WHOLE else 3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            for number in range(2):
                assert int(writer.stdout.readline()) == number
            time.sleep(0.013 * kill)  # so that each kill comes at another moment
            writer.kill()
        atomic.recover(tmp_path)
        checkpoint = run_folder.find_checkpoint(str(tmp_path))
        assert checkpoint == tmp_path / "last.ckpt"
        numbers = {(checkpoint / name).read_text() for name in ("checkpoint/one", "checkpoint/two", "latest")}
        assert len(numbers) == 1
        newest = max(newest, int(numbers.pop()))
    assert newest > 0


def test_what_a_killed_writer_leaves_is_removed(tmp_path: Path):
    """Only what belongs to checkpoints is removed, because other files in the folder are the user's."""
    for name in ("last.ckpt.tmp", "last.ckpt.old", "last.ckpt.old.tmp"):
        (tmp_path / name / "checkpoint").mkdir(parents=True)
    for name in ("best.ckpt.tmp", "last.ckpt", "notes.tmp", "best.safetensors"):
        (tmp_path / name).touch()
    atomic.remove_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["best.safetensors", "last.ckpt", "notes.tmp"]


def test_json_is_written_whole_and_without_nan(tmp_path: Path):
    file = tmp_path / "metrics.json"
    atomic.write_json(file, {"loss": float("nan"), "deep": [{"norm": float("inf")}, 1.5]})
    assert json.loads(file.read_text(), parse_constant=pytest.fail) == {"loss": None, "deep": [{"norm": None}, 1.5]}
    with pytest.raises(TypeError):
        atomic.write_json(file, {"loss": object()})
    assert json.loads(file.read_text())["loss"] is None  # the old file is still there
    atomic.write_json(file, {"loss": 1})
    assert list(tmp_path.iterdir()) == [file]


def a_checkpoint(file: Path) -> Path:
    write_checkpoint(file)
    return file


WRITERS: dict[str, Callable[[Path], object]] = {
    "a file": lambda file: atomic.write(file, b"new"),
    "JSON": lambda file: atomic.write_json(file, {"a": 1}),
    "a checkpoint": lambda file: AtomicCheckpointIO().save_checkpoint({"a": 1}, file),
    "an export": lambda file: formats.export(a_checkpoint(file.with_name("from.ckpt")), file, "safetensors"),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_planted_link_is_not_followed(write: Callable[[Path], object], tmp_path: Path):
    """Another user has placed it where the file is written before it is renamed."""
    final, target = tmp_path / "new.safetensors", tmp_path / "target"
    target.write_text("mine")
    for planted in (atomic.staged(final), final):
        planted.symlink_to(target)
    write(final)
    assert final.is_file()
    assert not final.is_symlink()
    assert target.read_text() == "mine"
