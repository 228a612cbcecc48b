"""A model in the user's own file is trained, tested and exported, and is imported only if the command line names it."""

from pathlib import Path

import pytest

from cifar_zero.config import command_line
from cifar_zero.training.resolve import resolve
from tests.support.helpers import ROOT, assert_ok, refused, run_folder_of, run_program, train_all

FILE = ROOT / "tests" / "users_code" / "own_code.py"
MODEL = ["--model", f"{FILE}:Small"]
SMALL = ["--accelerator", "cpu", "--batch_size", "16", "--epochs", "1", "--max_steps", "6", "--model.width", "5"]


@pytest.mark.distributed
def test_it_is_trained_tested_and_exported_where_the_command_line_names_it(small_data: list[str], tmp_path: Path):
    """The run has two ranks, each of which imports the model."""
    flags = [*small_data, *SMALL, *MODEL, "--strategy", "deepspeed_stage_3", "--devices", "2"]
    train_all({tmp_path: flags})
    run = run_folder_of(tmp_path)
    assert (run / FILE.name).read_bytes() == FILE.read_bytes()
    assert run.parent.name == "own_code.py-Small-deepspeed_stage_3"
    refused = run_program("evaluate", str(run))
    assert refused.returncode == 2
    assert f"--model {FILE}:Small" in refused.stderr
    for program in (["evaluate", str(run)], ["export", str(run), "--to", "safetensors"]):
        assert_ok(run_program(*program, *MODEL))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("own_code.py:Small --model.broken true", "(own_code.py, line 34: no good)"),
        ("own_code.py:seven_scores", "a score per class: give its last layer 10 outputs"),
        ("own_code.py:Nothing", "has no Nothing"),
        ("own_code.py:Named", "rename its argument `name`"),
        ("nowhere.py:Small", "nowhere.py does not exist"),
        ("own_code.py:Small --model.widht 5", "did you mean --model.width?"),
    ],
)
def test_a_mistake_is_the_users(flags: str, expected: str):
    name, *rest = flags.split()
    with refused(expected):
        resolve(command_line.parse(["--model", str(FILE.with_name(name)), *rest, "--accelerator", "cpu"]))
