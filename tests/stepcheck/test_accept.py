"""Trains cases of `stepcheck accept` on real ranks, healthy and with planted faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepcheck.__main__ import main
from stepcheck.verdict import Finding
from tests.support.suite import HANG_SECONDS, ROOT, of_test_all

FAULTS = {
    "loss_halved": ("1", r"step 1: the loss of micro-batch 1 is scaled by 0\.125 instead of 0\.25"),
    "second_micro_batch_lost": ("2", r"step 1: the loss of micro-batch 2 is scaled by 0 instead of 0\.25"),
    "one_bucket_not_reduced": ("2", r"step 1: the gradient of "),
    "clipped_by_local_norm": ("1", r"step 1: the norm of all gradients is"),
    "decay_lost": ("2", r"step 1: weight_decay is 0.* in the update and was 0\.5"),
    "rate_restarts": ("1", r"step 2: lr is .* in the update and was"),
    "state_lost_between_steps": ("1", r"step 4: (exp_avg|momentum_buffer) of .* is not what .* left \(rank 0\)"),
    "weights_stale_on_one_rank": ("1", r"step 2: the weight .* is used with another value"),
    "untied_by_the_engine": ("1", r"step 0: .* is no longer tied"),
    "batch_norm_frozen": ("2", r"step 1: the batch norm batch_norm has not counted each batch"),
    "plain_backward_not_divided": ("2", r"step 1: the loss of micro-batch 1 is scaled by 1 instead of 0\.5"),
    "shard_changed_by_zero_3": ("3", r"step 1: the weight .* is used with another value than the optimizer's"),
}
"""For faults of faults.py, the ZeRO stage under which each is planted, and the text of a finding."""

SLOW = {"plain_backward_not_divided"}
"""Faults that the rows of --quick do not execute."""

SITE = """
import os
if "RANK" in os.environ:
    import pytest
    from tests.stepcheck import faults
    faults.{name}(pytest.MonkeyPatch())
"""
"""Plants a fault into ranks, never into the program that starts them."""

FAILING = """
import os
from torch.nn.parallel import DistributedDataParallel as DDP
initialize, calls = DDP.__init__, []
def fail(*args, **options):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 2:
        raise ValueError("planted")
    initialize(*args, **options)
if "RANK" in os.environ:
    DDP.__init__ = fail
"""
"""Lets rank 1 fail in its second case."""


def accept(folder: Path, *flags: str, site: str = "") -> tuple[int, str, dict[str, Any]]:
    """Runs the command. `site` is code that its processes execute first. Returns the exit code, the output and the JSON
    file."""
    (folder / "sitecustomize.py").write_text(site)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "stepcheck", "accept", *flags, "--json", str(folder / "out.json")]
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT, timeout=HANG_SECONDS
    )
    return done.returncode, done.stdout, json.loads((folder / "out.json").read_text())


@pytest.mark.distributed
@pytest.mark.parametrize("flags", ["--quick", *(pytest.param(each, marks=of_test_all) for each in ("--fuzz 40", ""))])
def test_healthy_engines_pass(flags: str, tmp_path: Path):
    code, output, result = accept(tmp_path, *flags.split())
    assert code == 0, output
    assert result["passed"]
    assert len(result["engines"]) >= 27
    assert all(each["steps"] == 4 and each["coverage"] > 0.8 for each in result["engines"]), output
    assert "stepcheck accept: PASSED" in output
    # FSDP2 adds and sends bfloat16 gradients in float32 (torch 2.15).
    (low,) = [each for each in result["engines"] if each["engine"] == "fsdp2: bfloat16, accumulated"] or [None]
    assert low is None or low["smallest_scale_error"] < 1e-6


OTHER_KERNEL = """
import torch.nn.functional as F

gelu = F.gelu
F.gelu = lambda x: gelu(x) * (1 + 1e-4)
"""


@pytest.mark.distributed
def test_a_kernel_that_has_changed_is_found_against_a_baseline(tmp_path: Path):
    """Audit and replay agree with it, because both take what autograd computes."""
    flags = ["--quick", "--strategies", "ddp"]
    assert accept(tmp_path, *flags, "--save", "before.pt")[0] == 0
    code, output, _ = accept(tmp_path, *flags, "--against", "before.pt")
    assert code == 0, output
    code, output, result = accept(tmp_path, *flags, "--against", "before.pt", site=OTHER_KERNEL)
    assert (code, result["passed"]) == (1, False)
    assert "step 1: the gradient of " in output
    assert "differs from the baseline's by " in output


TWICE_DIVIDED = """
from lightning.pytorch.plugins.precision import DeepSpeedPrecision

backward = DeepSpeedPrecision.backward
# without the correction of CPUDeepSpeedStrategy, Lightning and the engine both divide the loss
DeepSpeedPrecision.backward = lambda *args, scale_wrt_gas=True, **named: backward(*args, **named)
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "framework",
    ["lightning", *(pytest.param(each, marks=of_test_all) for each in ("accelerate", "transformers"))],
)
def test_a_framework_trains_the_cases(framework: str, tmp_path: Path):
    pytest.importorskip(framework)
    flags = ["--through", framework, "--quick", "--strategies", "ddp", "deepspeed_stage_2"]
    code, output, result = accept(tmp_path, *flags)
    assert code == 0, output
    assert len(result["engines"]) + 2 * len(result["left_out"]) == 6


@pytest.mark.distributed
@of_test_all
def test_a_fault_of_a_framework_is_found(tmp_path: Path):
    flags = ["--through", "lightning", "--quick", "--strategies", "ddp", "deepspeed_stage_2"]
    code, output, result = accept(tmp_path, *flags, site=TWICE_DIVIDED)
    assert code == 1
    failed = {each["engine"]: str(Finding(**each["findings"][0])) for each in result["engines"] if not each["passed"]}
    assert set(failed) == {f"deepspeed_stage_2: {precision}, accumulated" for precision in ("float32", "bfloat16")}
    assert all("step 1: the loss of micro-batch 1 is scaled by 0.0625" in each for each in failed.values()), output


@pytest.mark.distributed
@pytest.mark.parametrize(
    "fault",
    [each if each == "state_lost_between_steps" else pytest.param(each, marks=of_test_all) for each in FAULTS],
)
def test_a_planted_fault_is_found_at_its_step_with_its_tensor(fault: str, tmp_path: Path):
    stage, expected = FAULTS[fault]
    flags = ["--strategies", f"deepspeed_stage_{stage}", *(() if fault in SLOW else ("--quick",))]
    junit = tmp_path / "junit.xml"
    code, output, result = accept(tmp_path, *flags, "--junit", str(junit), site=SITE.format(name=fault))
    assert code == 1
    found = [str(Finding(**finding)) for each in result["engines"] for finding in each["findings"]]
    assert any(re.match(expected, text) for text in found), output
    assert not [each for each in result["engines"] if each.get("error")], output
    failed = [each for each in result["engines"] if not each["passed"]]
    assert f'failures="{len(failed)}"' in junit.read_text()


@pytest.mark.distributed
def test_a_rank_that_fails_ends_its_case_and_not_the_others(tmp_path: Path):
    code, output, result = accept(tmp_path, "--quick", "--strategies", "ddp", site=FAILING)
    assert code == 1
    errors = [each.get("error") for each in result["engines"]]
    assert errors == [None, "rank 1 failed: ValueError: planted", None], output


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--strategies zero_7", "--strategies: invalid choice: 'zero_7'"),
        ("--through lightning --fuzz 3", "--through lightning does not work with --fuzz, --save, --against or fsdp2"),
        ("--through nothing", "--through: invalid choice: 'nothing'"),
        ("--devices 0", "--devices: 0 is not positive"),
        ("--fuzz 3 --quick", "--fuzz does not work with --quick or --seeds"),
        ("--json .", "--json: . is a folder"),
    ],
)
def test_wrong_flags_end_with_exit_code_2(flags: str, named: str, capsys: pytest.CaptureFixture[str]):
    assert main(["accept", *flags.split()]) == 2
    assert named in capsys.readouterr().err


def test_the_command_imports_no_torch_and_lists_the_cases():
    code = (
        "import sys; from stepcheck.__main__ import main; "
        "main(['accept', '--print_cases']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "deepspeed_stage_3: all parameters sharded\n  ZeRO 3: gathering" in done.stdout
