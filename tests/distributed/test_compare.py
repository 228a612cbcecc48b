"""cifar-zero compare from start to end, on two real ranks, with a strategy that is broken on purpose."""

import json
from pathlib import Path

import pytest

from tests.support.helpers import of_test_all, run_program

pytestmark = pytest.mark.distributed

BROKEN_STEP = 4
BROKEN_DDP = f"""
import os, sys

if "RANK" in os.environ and "ddp" in sys.orig_argv:
    from torch.nn.parallel import DistributedDataParallel as DDP

    forward, calls = DDP.forward, 0

    def broken(self, *args, **options):
        global calls
        calls += 1
        if calls != {BROKEN_STEP}:
            return forward(self, *args, **options)
        with self.no_sync():  # the ranks keep their own gradients
            return forward(self, *args, **options)

    DDP.forward = broken
"""


@of_test_all
def test_a_lost_all_reduce_is_found_at_its_step(tmp_path: Path, small_data: list[str]):
    (tmp_path / "sitecustomize.py").write_text(BROKEN_DDP)
    flags = [*small_data, "--accelerator", "cpu", "--batch_size", "16", "--max_steps", "12", "--data.val_fraction", "0"]
    what = ["--strategies", "baseline", "ddp", "--devices", "2", "--optimizer.lr", "0.05"]
    done = run_program("compare", *what, *flags, "--out", str(tmp_path), env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stderr
    (file,) = tmp_path.glob("net/*/comparison.json")
    variants = json.loads(file.read_text())["variants"]
    assert [variant["outcome"] for variant in variants] == ["reference", "different"]
    assert variants[1]["remark"].startswith(f"FAULT step {BROKEN_STEP}: ")
