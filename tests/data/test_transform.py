"""A transform in the user's own file is tried out, used in training and copied into the run folder."""

from pathlib import Path

import pytest

from cifar_zero.config import command_line
from cifar_zero.training.resolve import resolve
from tests.support.helpers import ROOT, assert_ok, refused, run_folder_of, run_program, train_all

FILE = ROOT / "tests" / "users_code" / "own_code.py"
SHORT = ["--accelerator", "cpu", "--batch_size", "16", "--max_steps", "4"]


def test_a_run_trains_with_it_and_keeps_it(small_data: list[str], tmp_path: Path):
    train_all({tmp_path: [*small_data, *SHORT, "--augment.transform", f"{FILE}:warmer"]})
    run = run_folder_of(tmp_path)
    assert (run / FILE.name).read_bytes() == FILE.read_bytes()
    assert_ok(run_program("evaluate", str(run)))  # which augments nothing


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("brightest", "its result for an image depends on the other images of the batch"),
        ("grey", "of the same shape, but returned torch.uint8 (4, 1, 32, 32) for 4 images"),
        ("from_0_to_1", "ValueError: must return uint8 images of the same shape, but returned torch.float32 (4, 3"),
        ("not_there", "own_code.py has no not_there"),
        ("Small", "own_code.py, line"),
    ],
)
def test_one_that_cannot_be_used_is_refused(name: str, message: str):
    with refused(f"--augment.transform {FILE}:{name}: ", message):
        resolve(command_line.parse(["--data.source", "digits", *SHORT, "--augment.transform", f"{FILE}:{name}"]))
