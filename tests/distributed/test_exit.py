"""Runs two ranks as a user starts them, including their exit, which support/many_runs.py skips."""

from pathlib import Path

import pytest

from tests.support.helpers import assert_ok, run_folder_of, run_program

FIGURES = {"confusion_matrix.png", "precision_recall.png", "roc.png"}


@pytest.mark.distributed
def test_two_ranks_write_figures_and_print_once(small_data: list[str], tmp_path: Path):
    """The ranks do not read the recipe again, which comes from a pipe. The environment variable makes DeepSpeed choose
    CUDA, as DeepSpeed does automatically on a machine with a GPU."""
    recipe = "{devices: 2, strategy: deepspeed_stage_2, batch_size: 32, max_steps: 3, accelerator: cpu}"
    flags = [*small_data, "--config", "/dev/stdin", "--out", str(tmp_path), "--test_figures", "true"]
    done = run_program("train.py", *flags, env={"DS_ACCELERATOR": "cuda"}, fresh=True, given=recipe)
    assert_ok(done)
    run = run_folder_of(tmp_path)
    assert {path.name for path in run.glob("*.png")} >= FIGURES
    assert done.stdout.count("run folder") == 1
    may_come = ("Preparing the images", "other programs use")
    first, last = [line for line in done.stderr.splitlines() if line and not line.startswith(may_come)]
    assert first.startswith("starting: model net, strategy deepspeed_stage_2, data synthetic, batch")
    assert last.startswith("Step 3/3 |")
