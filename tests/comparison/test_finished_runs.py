"""Tests verdicts on runs, their differences, the printed report, JUnit and comparison.json."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_zero.comparison import finished_runs
from cifar_zero.comparison.finished_runs import summarize
from cifar_zero.comparison.reading import differences
from cifar_zero.comparison.report import write_comparison, write_junit
from cifar_zero.comparison.result import Comparison, FinishedRun, Variant
from tests.comparison.made_up import made_up

AGREES = {"outcome": "within rounding", "used": 0.1, "text": "20 steps checked"}
DIFFERS = {"outcome": "different", "used": 9.0, "text": "step 2: gradient of net.fc1.weight off by 20 %"}
BLUNT = {"outcome": "not judged", "used": 0.2, "text": "only 90 % could be judged"}


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the reading of weights, because made-up runs have none."""
    monkeypatch.setattr(finished_runs, "_weights", lambda *arguments: {})


def variant(name: str, *runs: FinishedRun, error: str = "") -> Variant:
    made = Variant(name, name, 2, command=f"train.py --strategy {name}", runs=list(runs))
    if error:
        made.judge("not trained", error)
    return made


def compared(*others: Variant) -> Comparison:
    reference = variant("baseline", made_up(seed=0), made_up(seed=1))
    return summarize([reference, *others])


def kinds(comparison: Comparison) -> list[str]:
    return [variant.kind for variant in comparison.variants]


def test_the_worst_seed_decides() -> None:
    same = variant("same", made_up(seed=0), made_up(seed=1))
    near = variant("near", made_up(seed=0, check=AGREES), made_up((2.0, 1.00003), seed=1, check=AGREES))
    far = variant("far", made_up(seed=0, check=AGREES), made_up((2.0, 1.1), seed=1, check=DIFFERS))
    comparison = compared(same, near, far)
    assert kinds(comparison) == ["reference", "bit-identical", "within rounding", "different"]
    assert far.remark == DIFFERS["text"]
    assert near.drift == "losses differ from step 2 on, by 3.0e-05 at step 2"
    assert not comparison.passed
    assert compared(same).passed


@pytest.mark.parametrize("check", [None, BLUNT])
def test_a_run_whose_steps_were_not_judged_is_no_agreement(check: Any) -> None:
    near = variant("near", made_up(check=check), made_up((2.0, 1.000001), seed=1, check=check))
    comparison = compared(near)
    assert kinds(comparison) == ["reference", "not judged"]
    assert not comparison.passed


def test_a_faulty_step_counts_even_if_losses_and_weights_are_equal() -> None:
    comparison = compared(variant("same", made_up(check=DIFFERS), made_up(seed=1, check=AGREES)))
    assert kinds(comparison) == ["reference", "different"]


def test_a_reference_with_a_faulty_step_fails() -> None:
    comparison = summarize([variant("ddp", made_up(check=DIFFERS)), variant("other", made_up())])
    assert kinds(comparison) == ["different", "bit-identical"]
    assert not comparison.passed


def test_a_first_loss_that_differs_is_no_rounding() -> None:
    """Both runs train from the same weights on the same images. A step check cannot find that they do not, because it
    checks each run by itself."""
    other = variant("other", made_up((2.3, 1.0), check=AGREES), made_up(seed=1, check=AGREES))
    comparison = compared(other)
    assert kinds(comparison) == ["reference", "different"]
    assert other.remark.startswith("the first loss is 2.3, but 2 in the reference: images or weights differ")


def test_weights_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [{"a": torch.tensor([1.0, -2.0])}, {"a": torch.tensor([1.0, -2.5])}]
    monkeypatch.setattr(finished_runs, "_weights", lambda *arguments: found.pop(0))
    other = variant("other", made_up(check=AGREES))
    comparison = summarize([variant("baseline", made_up()), other])
    assert kinds(comparison) == ["reference", "within rounding"]
    assert other.drift == "weights differ by up to 5.0e-01"


@pytest.mark.parametrize(
    ("reference", "other", "reason"),
    [
        (variant("baseline", error="no GPU"), variant("ddp", made_up()), "the reference did not train"),
        (variant("baseline", made_up()), variant("ddp", made_up(seed=1)), "no seed in common with the reference"),
    ],
)
def test_a_variant_that_cannot_be_judged_has_a_reason(reference: Variant, other: Variant, reason: str) -> None:
    comparison = summarize([reference, other])
    assert (other.kind, other.remark) == ("not judged", reason)
    assert not comparison.passed


def test_another_recipe_gets_no_verdict() -> None:
    comparison = compared(variant("other", made_up(settings={"batch_size": 32})))
    assert kinds(comparison) == ["reference", "not judged"]
    assert not comparison.passed
    assert comparison.differences == {"batch_size": {"baseline": "16", "other": "32"}}
    assert "batch_size" not in comparison.recipe


def test_settings_that_may_differ_between_runs() -> None:
    moved = made_up(settings={"out": "elsewhere", "data": {"source": "digits", "root": "there"}}, strategy="ddp")
    assert differences([variant("one", made_up()), variant("other", moved)]) == {}
    lower = made_up(settings={"precision": "bf16-mixed"}, versions={"torch": "3"})
    found = differences([variant("one", made_up()), variant("other", lower)])
    assert [*found] == ["versions.torch"]


def test_junit_has_a_case_for_each_variant(tmp_path: Path) -> None:
    comparison = compared(
        variant("same", made_up(seed=0), made_up(seed=1)),
        variant("far <&>", made_up(seed=0), made_up((2.0, 1.1), seed=1, check=DIFFERS)),
        variant("broken", error="out of \x1b\x00memory"),
    )
    write_junit(comparison, tmp_path / "compare.xml")
    suite = ET.parse(tmp_path / "compare.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("4", "2")
    failures: dict[str, Any] = {case.get("name", ""): case.find("failure") for case in suite.iter("testcase")}
    assert failures["same"] is failures["baseline"] is None
    assert DIFFERS["text"] in failures["far <&>"].get("message")
    assert failures["broken"].get("message") == "✗ not trained: out of memory"


def test_figures_are_those_of_each_seed_and_of_the_fullest_rank(tmp_path: Path) -> None:
    ranks: dict[str, Any] = {"mem/peak_rank_bytes": [3_000_000, 4_000_000]}
    other: dict[str, Any] = {"mem/peak_rank_bytes": [6_000_000, None], "test/acc": 0.7}
    runs = [made_up(seed=0, **ranks), made_up(seed=1, **other)]
    comparison = compared(variant("ddp", *runs))
    figures = comparison.variants[1].figures
    assert (figures["mem/peak_rank_bytes"], figures["test/acc"]) == ([4_000_000, 6_000_000], [0.5, 0.7])
    runs[0].losses.values[1] = float("nan")
    write_comparison(comparison, tmp_path / "comparison.json")
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert (written["schema"], written["passed"]) == (3, True)
    assert written["variants"][1]["runs"][0]["losses"]["values"] == [2.0, None], "JSON has no NaN"
