"""cifar-zero compare from start to end, on two real ranks, with a strategy that is broken on purpose."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.support.helpers import of_test_all, run_program

pytestmark = pytest.mark.distributed

BROKEN_STEP, STEPS = 4, 12
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
def test_a_lost_all_reduce_is_found_at_its_step(tmp_path: Path, small_data: list[str]) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BROKEN_DDP)
    flags = [*small_data, "--accelerator", "cpu", "--batch_size", "16", "--max_steps", str(STEPS)]
    flags += ["--log_interval", "4", "--data.val_fraction", "0", "--trainer.limit_test_batches", "1"]
    what = ["--strategies", "baseline", "ddp", "--devices", "2", "--optimizer.lr", "0.05"]
    where = ["--out", str(tmp_path / "comparisons"), "--junit", str(tmp_path / "compare.xml")]
    done = run_program("compare", *what, *flags, *where, env={"PYTHONPATH": str(tmp_path / "site")})
    assert done.returncode == 1, done.stderr
    folder = tmp_path / "comparisons" / "net" / "version_0"
    comparison = json.loads((folder / "comparison.json").read_text())
    assert comparison["passed"] is False
    reference, broken = comparison["variants"]
    assert reference["kind"] == "reference"
    assert broken["kind"] == "different"
    assert broken["remark"].startswith(f"step {BROKEN_STEP}: gradient of net.")
    assert broken["runs"][0]["losses"]["steps"] == [*range(1, STEPS + 1)]
    assert set(reference["runs"][0]["curves"]) >= {"train/loss", "train/learning_rate"}
    assert reference["runs"][0]["metrics"]["checkpoint_bytes"] > 4 * 62_006
    # TensorBoard shows a run for each variant.
    logged = {file.parent.relative_to(folder).parts[0] for file in folder.rglob("events.out.tfevents.*")}
    assert logged == {"baseline", "ddp"}
    (failure,) = ET.parse(tmp_path / "compare.xml").getroot().iter("failure")
    assert f"step {BROKEN_STEP}: gradient of net." in failure.attrib["message"]


@of_test_all
def test_a_launcher_starts_the_ranks(tmp_path: Path, small_data: list[str]) -> None:
    torchrun = f"{Path(sys.executable).parent / 'torchrun'} --standalone --nproc_per_node 2"
    flags = [*small_data, "--accelerator", "cpu", "--batch_size", "16", "--max_steps", "6", "--data.val_fraction", "0"]
    what = ["--strategies", "ddp", "deepspeed_stage_2", "--devices", "2", "--launcher", torchrun]
    done = run_program("compare", *what, *flags, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = tmp_path.glob("net/*/comparison.json")
    runs = [variant["runs"][0] for variant in json.loads(file.read_text())["variants"]]
    assert [run["metrics"]["world_size"] for run in runs] == [2, 2]
