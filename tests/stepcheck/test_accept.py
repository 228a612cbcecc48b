"""Trains cases of `stepcheck accept` on real ranks, healthy and with planted faults."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from stepcheck import strategies
from stepcheck.__main__ import main
from stepcheck.accept import command, release
from stepcheck.accept.cases import STEPS, Case, plan
from stepcheck.launch.launcher import result_of, train_cases
from stepcheck.verdict import Finding, Verdict
from tests.support.suite import ROOT, of_test_all, run_python

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

SHORT = "--quick --strategies ddp fsdp2 deepspeed_stage_1 deepspeed_stage_3_offload"

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

CHANGES = """
import os

if "RANK" in os.environ:
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel as DDP

    initialize, gelu, calls = DDP.__init__, F.gelu, []

    def fail(*args, **options):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 2:
            raise ValueError("planted")
        initialize(*args, **options)

    DDP.__init__ = fail
    F.gelu = lambda x: gelu(x) * (1 + 1e-4) if x.dtype == torch.float32 else gelu(x)
"""
"""Changes a kernel of float32, and lets rank 1 fail in its second case."""


def accept(folder: Path, *flags: str, site: str = "") -> tuple[int, str, dict[str, Any]]:
    """Runs the command. `site` is code that its processes execute first. Returns the exit code, the output and the JSON
    file."""
    (folder / "sitecustomize.py").write_text(site)
    command = ["-m", "stepcheck", "accept", *flags, "--json", str(folder / "out.json")]
    env = {"PYTHONPATH": f"{folder}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    done = run_python(*command, cwd=folder, env=env)
    return done.returncode, done.stdout + done.stderr, json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def healthy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Runs the command on healthy engines. Returns the folder with the baseline before.pt, and what `accept` returns
    for them."""
    folder = tmp_path_factory.mktemp("accept")
    return folder, accept(folder, *request.param.split(), "--save", "before.pt")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "healthy", [SHORT, *(pytest.param(each, marks=of_test_all) for each in ("--fuzz 40", ""))], indirect=True
)
def test_healthy_engines_pass(healthy: tuple[Path, Any]):
    code, output, result = healthy[1]
    assert code == 0, output
    assert result["passed"]
    assert len(result["engines"]) >= 12
    assert all(each["steps"] == 4 and each["coverage"] > 0.8 for each in result["engines"]), output
    assert "stepcheck accept: PASSED" in output
    # FSDP2 adds and sends bfloat16 gradients in float32 (torch 2.15).
    (low,) = [each for each in result["engines"] if each["engine"] == "fsdp2: bfloat16, accumulated"] or [None]
    assert low is None or low["smallest_scale_error"] < 1e-6


@pytest.mark.distributed
@pytest.mark.parametrize("healthy", [SHORT], indirect=True)
def test_a_changed_kernel_and_a_failing_rank_fail_their_cases_and_not_the_others(
    healthy: tuple[Path, Any], tmp_path: Path
):
    """Audit and replay agree with the changed kernel, because both take what autograd computes. A baseline differs."""
    flags = ["--quick", "--strategies", "ddp", "--against", str(healthy[0] / "before.pt"), "--junit", "junit.xml"]
    code, output, result = accept(tmp_path, *flags, site=CHANGES)
    assert code == 1
    errors = [each.get("error") for each in result["engines"]]
    assert errors == [None, "rank 1 failed: ValueError: planted", None], output
    assert [each["passed"] for each in result["engines"]] == [False, False, True], output
    first = result["engines"][0]["summary"]
    assert re.match("step 1: the gradient of .* differs from the baseline's by ", first), first
    assert 'failures="2"' in (tmp_path / "junit.xml").read_text()


def nothing(case: dict[str, Any], device: Any, folder: Path) -> dict[str, Any]:
    return {}


def test_ctrl_c_keeps_the_results_of_the_cases_that_have_ended():
    cases = [Case(row, strategy="ddp") for row in "abcd"]

    def judge(case: Case, verdict: dict[str, Any]) -> dict[str, Any]:
        if case.row == "b" and "error" not in verdict:
            raise KeyboardInterrupt
        return result_of(case, verdict, 0)

    results = train_cases(cases, 1, f"{__name__}:nothing", judge)
    assert [each.get("error") for each in results] == [results[0].get("error"), "stopped by Ctrl-C after 1 of 4 cases"]


@of_test_all
@pytest.mark.distributed
@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_a_framework_trains_the_cases(framework: str, tmp_path: Path):
    pytest.importorskip(framework)
    code, output, result = accept(
        tmp_path, "--through", framework, "--quick", "--strategies", "ddp", "deepspeed_stage_2"
    )
    assert code == 0, output
    assert len(result["engines"]) + 2 * len(result["left_out"]) == 6


@pytest.mark.distributed
@of_test_all
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_at_its_step_with_its_tensor(fault: str, tmp_path: Path):
    stage, expected = FAULTS[fault]
    flags = ["--strategies", f"deepspeed_stage_{stage}", *(() if fault in SLOW else ("--quick",))]
    code, output, result = accept(tmp_path, *flags, site=SITE.format(name=fault))
    assert code == 1
    found = [str(Finding(**finding)) for each in result["engines"] for finding in each["findings"]]
    assert any(re.match(expected, text) for text in found), output
    assert not [each for each in result["engines"] if each.get("error")], output


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


@pytest.mark.parametrize(
    ("gpus", "through", "is_trained"), [(1, "raw", False), (2, "raw", True), (2, "lightning", False)]
)
def test_float16_needs_a_gpu_for_each_rank_and_a_plain_loop(
    gpus: int, through: str, is_trained: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The machine's CPU has no float16."""
    monkeypatch.setattr(release, "PROCESSOR", tmp_path / "missing")
    monkeypatch.setattr(strategies, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    cases, left_out = plan(["deepspeed_stage_2"], 2, False, 1, through)
    assert any(case.precision == "float16" for case in cases) == is_trained
    assert ("float16, clipped" in left_out) != is_trained


@pytest.mark.parametrize(
    ("changed", "release", "outcome"),
    [
        ({}, "0.19.8", "known"),
        ({}, "0.18.3+local", "known"),
        ({}, "0.18.2", "different"),
        ({"steps": STEPS - 1}, "0.19.8", "different"),
        ({"values": 8}, "0.19.8", "different"),
        ({"not_judged": {"updates": "of an unknown optimizer"}}, "0.19.8", "different"),
    ],
)
def test_a_known_fault_passes_only_if_its_release_has_it_and_all_was_judged(
    changed: dict[str, Any], release: str, outcome: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command, "installed_version", lambda package: release)
    case = Case("float16, clipped", strategy="deepspeed_stage_0", precision="float16")
    verdict = Verdict(**{"steps": STEPS, "values": 10, "values_in_all": 10, **changed})
    verdict.add(1, "loss", 2.0, "the loss of micro-batch 1 is scaled by 1 instead of 256")
    assert command._judge(case, {**verdict.as_dict(), "took": 1.0})["outcome"] == outcome
