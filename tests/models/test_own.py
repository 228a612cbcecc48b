"""A model in the user's own file: trained, tested and exported, and imported only where the command line names it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cifar_zero.checkpoints.weights import network
from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from tests.support.helpers import ROOT, assert_ok, last_checkpoint, run_folder_of, run_program, train_all

FILE = ROOT / "tests" / "support" / "own_code.py"
MODEL = ["--model", f"{FILE}:Small"]
SMALL = ["--accelerator", "cpu", "--batch_size", "16", "--epochs", "1", "--max_steps", "6", "--model.width", "5"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> Path:
    out = tmp_path_factory.mktemp("own")
    train_all({out: [*small_data, *SMALL, *MODEL]})
    return run_folder_of(out)


def test_the_run_folder_keeps_the_code(run: Path):
    assert (run / FILE.name).read_bytes() == FILE.read_bytes()
    assert run.parent.name == "own_code.py-Small-baseline"


def test_it_is_tested_and_exported_where_the_command_line_names_it(run: Path, tmp_path: Path):
    for program in (["evaluate", str(run)], ["export", str(run), "--to", "safetensors"]):
        refused = run_program(*program)
        assert refused.returncode == 2
        assert f"--model {FILE}:Small" in refused.stderr
        assert_ok(run_program(*program, *MODEL))


def test_a_recipe_does_not_import_it(tmp_path: Path):
    marker = tmp_path / "imported"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{name: '{tmp_path}/evil.py:X'}}")
    with pytest.raises(UsageError, match="name it on the command line too"):
        command_line.parse(["--config", str(recipe)])
    assert not marker.exists()


@pytest.mark.distributed
def test_zero_3_trains_it_as_ddp_does(small_data: list[str], tmp_path: Path):
    same = [*small_data, *SMALL, *MODEL, "--devices", "2", "--data.val_fraction", "0"]
    names = ("ddp", "deepspeed_stage_3")
    train_all({tmp_path / name: [*same, "--strategy", name] for name in names})
    one, other = (network(last_checkpoint(run_folder_of(tmp_path / name))) for name in names)
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("own_code.py:Small --model.broken true", "(own_code.py, line 38: no good)"),
        (
            "own_code.py:seven_scores",
            "a score per class: give its last layer 10 outputs",
        ),
        ("own_code.py:Nothing", "has no Nothing"),
        ("own_code.py:Named", "call its argument `name` something else"),
        ("nowhere.py:Small", "nowhere.py does not exist"),
        ("own_code.py:Small --model.widht 5", "did you mean --model.width?"),
        ("own_code.py", "own_code.py:NAME"),
    ],
)
def test_a_mistake_is_the_users(flags: str, expected: str):
    name, *rest = flags.split()
    done = run_program("train.py", "--model", str(FILE.with_name(name)), *rest, "--accelerator", "cpu")
    assert done.returncode == 2
    assert expected in done.stderr
