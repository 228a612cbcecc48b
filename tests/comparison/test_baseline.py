"""--save_baseline and --against: yesterday's steps and today's, on two real ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_zero.comparison.baseline import compare
from cifar_zero.step_check.sketches import SIZE, places, sketch, sketch_of
from tests.support.helpers import ROOT, assert_ok, of_test_all, run_program
from tests.support.planted_faults import SITE

CASES = ["--acceptance", "--quick", "--strategies", "deepspeed_stage_1"]
OWN = ROOT / "tests" / "support" / "own_code.py"
MODULE = ["--module", f"{OWN}:Digits", "--datamodule", f"{OWN}:DigitsData", "--strategies", "ddp", "--max_steps", "2"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baseline")
    file = folder / "before.safetensors"
    assert_ok(run_program("compare", *CASES, "--save_baseline", str(file), "--out", str(folder)))
    return file


def verdicts(baseline: Path, folder: Path, fault: str = "") -> tuple[int, str, list[dict[str, Any]]]:
    """Returns the exit code, the notes and the cases of a comparison with a baseline, on two CPU ranks with a fault."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    if fault:
        (folder / "sitecustomize.py").write_text(SITE.format(name=fault))
    done = run_program("compare", *CASES, "--against", str(baseline), "--out", str(folder), env=environment)
    found = json.loads((folder / "acceptance" / "version_0" / "comparison.json").read_text())
    return done.returncode, " ".join(found["notes"]), found["variants"]


@of_test_all
@pytest.mark.distributed
def test_the_same_machine_is_bit_identical(saved: Path, tmp_path: Path):
    code, notes, cases = verdicts(saved, tmp_path)
    assert (code, {case["kind"] for case in cases}) == (0, {"bit-identical"})
    assert "Changed since the baseline" in notes
    assert notes.rstrip(".").endswith("nothing")
    assert saved.stat().st_size < 10**6


@of_test_all
@pytest.mark.distributed
def test_a_fault_is_different_and_the_baseline_was_not(saved: Path, tmp_path: Path):
    code, _, cases = verdicts(saved, tmp_path, "micro_batch_lost")
    assert (code, cases[0]["kind"]) == (1, "different")
    assert cases[0]["remark"].endswith("; in the baseline: within rounding")


@of_test_all
@pytest.mark.distributed
def test_another_torch_is_found_although_each_step_is_plain_pytorch(saved: Path, tmp_path: Path):
    code, _, cases = verdicts(saved, tmp_path, "loss_of_torch_changed")
    assert (code, {case["kind"] for case in cases}) == (1, {"different"})
    assert {case["check"]["outcome"] for case in cases} == {"within rounding"}
    assert cases[0]["remark"].startswith("step 1: loss off by 0.1 %")


@pytest.mark.distributed
def test_a_module_agrees_with_its_baseline_and_a_damaged_one_is_refused(tmp_path: Path):
    file, common = tmp_path / "module.safetensors", [*MODULE, "--devices", "1", "--out", str(tmp_path)]
    assert_ok(run_program("compare", *common, "--save_baseline", str(file)))
    done = run_program("compare", *common, "--against", str(file))
    assert_ok(done)
    assert "1 of 1 agree with the baseline" in done.stdout
    file.write_bytes(file.read_bytes()[:-7])
    done = run_program("compare", *common, "--against", str(file))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "it is damaged" in done.stderr


@of_test_all
@pytest.mark.distributed
def test_a_baseline_of_other_cases_is_refused(saved: Path, tmp_path: Path):
    done = run_program("compare", *MODULE, "--devices", "1", "--out", str(tmp_path), "--against", str(saved))
    assert done.returncode == 2
    assert "has none of these cases on 1 ranks: it was saved by" in done.stderr


def steps(**values: list[list[float]]) -> dict[str, torch.Tensor]:
    found = {"weights": [[1.0], [1.0]], "found": [[1.0], [1.0]], "losses": [[2.0], [2.0]]}
    found |= {"loss/": [[2.0], [2.0]], "gradient/a": [[1.0], [1.0]], "update/": [[0.1], [0.1]], **values}
    return {key: torch.tensor(value, dtype=torch.float64) for key, value in found.items()}


@pytest.mark.parametrize(
    ("changed", "outcome", "judged"),
    [
        ({}, "bit-identical", [1, 2]),
        ({"found": [[1.0], [1.0001]]}, "within rounding", [1, 2]),
        ({"weights": [[1.0], [1.0001]], "gradient/a": [[1.0], [1.3]]}, "within rounding", [1]),
        ({"weights": [[1 + 1e-8], [1.0]], "gradient/a": [[1 + 1e-6], [1.0]]}, "within rounding", [1, 2]),
        ({"gradient/a": [[1.0], [1 + 1e-5]]}, "different", [1, 2]),
        ({"update/": [[0.1001], [0.1]]}, "different", [1, 2]),
        ({"weights": [[0.5], [0.5]], "loss/": [[3.0], [3.0]]}, "not judged", []),
        ({"gradient/b": [[1.0], [1.0]]}, "not judged", []),
        ({"gradient/a": [[float("nan")], [1.0]]}, "different", [1, 2]),
    ],
)
def test_which_steps_agree(changed: dict[str, list[list[float]]], outcome: str, judged: list[int]):
    verdict = compare(steps(), steps(**changed))
    assert (verdict.outcome, verdict.steps) == (outcome, judged)


def test_a_sketch_has_the_norm_of_the_tensor_and_of_a_difference():
    generator = torch.Generator().manual_seed(0)
    for number in range(20):
        one, other = torch.randn(2, 300, 7, generator=generator)
        difference = sketch_of({str(number): one}) - sketch_of({str(number): other})
        assert float(difference.norm()) == pytest.approx(float((one - other).norm()), rel=0.6)


def test_parts_of_a_tensor_add_up_to_its_sketch():
    whole, of_all = torch.randn(40), places("weight", torch.empty(40))
    parts = [sketch(whole[:13], of_all[:13]), sketch(whole[13:], of_all[13:])]
    torch.testing.assert_close(sum(parts), sketch(whole, of_all))


def test_places_are_the_same_on_every_machine():
    assert places("net.conv1.weight", torch.empty(2, 3)).tolist() == [[-8, 4, 10], [16, -2, 12]]
    assert {*places("a", torch.empty(1000)).int().tolist()} == {*range(-SIZE, SIZE + 1)} - {0}
