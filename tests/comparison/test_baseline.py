"""Tests --save_baseline and --against on two real ranks."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_zero.comparison.baseline import compare
from cifar_zero.core.errors import UsageError
from cifar_zero.step_check.sketches import SIZE, places, sketch, sketch_of
from tests.support.helpers import ROOT, of_test_all

CASES = ["--acceptance", "--quick", "--strategies", "deepspeed_stage_1"]
OWN = ROOT / "tests" / "users_code" / "own_code.py"
MODULE = ["--module", f"{OWN}:Digits", "--datamodule", f"{OWN}:DigitsData", "--max_steps", "2"]
MODULE += ["--strategies", "ddp", "--devices", "1"]


@of_test_all
@pytest.mark.distributed
def test_today_is_compared_with_yesterday(compared: Callable[..., Any], tmp_path: Path):
    """With a fault, the verdict is "different", and the remark names the baseline's verdict. A change of torch is
    found, although each step still equals what plain PyTorch computes."""
    file = tmp_path / "before.safetensors"
    compared(*CASES, "--save_baseline", file)
    assert file.stat().st_size < 10**6
    code, found = compared(*CASES, "--against", file, fault="micro_batch_lost")
    assert (code, found["variants"][0]["kind"]) == (1, "different")
    assert found["variants"][0]["remark"].endswith("; in the baseline: within rounding")
    code, found = compared(*CASES, "--against", file, fault="loss_of_torch_changed")
    assert (code, {case["kind"] for case in found["variants"]}) == (1, {"different"})
    assert {case["check"]["outcome"] for case in found["variants"]} == {"within rounding"}
    assert found["variants"][0]["remark"].startswith("step 1: loss off by 0.1 %")
    with pytest.raises(UsageError, match="has none of these cases on 1 ranks: it was saved by"):
        compared(*MODULE, "--against", file)


def test_a_module_agrees_with_its_baseline_and_a_damaged_one_is_refused(
    compared: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Also tests what the first command writes: a line for each finished case, and the command that repeats the
    case."""
    file, junit = tmp_path / "new" / "module.safetensors", tmp_path / "other" / "compare.xml"
    _, found = compared(*MODULE, "--save_baseline", file, "--junit", junit)
    assert "1/1 ddp: bit-identical\n" in capsys.readouterr().err
    assert junit.is_file()
    again = f"compare {shlex.join(MODULE[:6])} --out {tmp_path / 'out'} --strategies ddp --devices 1"
    assert found["variants"][0]["command"].endswith(again)
    code, found = compared(*MODULE, "--against", file)
    assert (code, [case["kind"] for case in found["variants"]]) == (0, ["bit-identical"])
    assert found["notes"][-1].endswith(": nothing.")
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(UsageError, match="it is damaged"):
        compared(*MODULE, "--against", file)


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
