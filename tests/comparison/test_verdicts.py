"""Verdicts on runs, their differences, the printed report, JUnit and comparison.json."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_zero.comparison import verdicts
from cifar_zero.comparison.agreement import EPS, TF32_EPS
from cifar_zero.comparison.reading import differences
from cifar_zero.comparison.report import show, write_comparison, write_junit
from cifar_zero.comparison.result import Comparison, Run, Variant
from cifar_zero.comparison.verdicts import Perturb, apart, summarize
from tests.comparison.made_up import made_up


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up runs have no weights."""
    monkeypatch.setattr(verdicts, "_weights", lambda *arguments: {})


def variant(name: str, *runs: Run, error: str = "") -> Variant:
    return Variant(name, name, 2, 1, f"train.py --strategy {name}", list(runs), error=error)


def compared(*others: Variant, perturb: Perturb = lambda seeds: []) -> Comparison:
    reference = variant("baseline", made_up(seed=0), made_up(seed=1))
    return summarize([reference, *others], perturb, "cifar-zero compare")


def kinds(comparison: Comparison) -> list[str | None]:
    return [variant.verdict.kind if variant.verdict else None for variant in comparison.variants]


def test_the_worst_seed_decides_and_perturbed_runs_are_made_only_where_needed() -> None:
    asked: list[set[int]] = []

    def perturb(seeds: set[int]) -> list[Run]:
        asked.append(seeds)
        return [made_up((2.0, 1.0 + 1e-5), seed=1)]

    same = variant("same", made_up(seed=0), made_up(seed=1))
    near = variant("near", made_up(seed=0), made_up((2.0, 1.00003), seed=1))
    far = variant("far", made_up(seed=0), made_up((2.0, 1.1), seed=1))
    comparison = compared(same, near, far, perturb=perturb)
    assert asked == [{1}]
    assert kinds(comparison) == ["reference", "bit-identical", "within rounding", "different"]
    assert not comparison.passed
    assert compared(same).passed
    assert compared(same).notes == []


def test_without_a_perturbed_run_only_equal_and_broken_runs_get_a_verdict() -> None:
    near = variant("near", made_up(), made_up((2.0, 1.000001), seed=1))
    broken = variant("broken", made_up(), made_up((2.0, float("nan")), seed=1))
    comparison = compared(variant("same", made_up(), made_up(seed=1)), near, broken)
    assert kinds(comparison) == ["reference", "bit-identical", None, "different"]
    assert near.unjudged.startswith("no perturbed run shows what rounding may do, see ")
    assert (comparison.notes, comparison.rounding) == ([], None)


def test_unreadable_weights_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # reads the checkpoints, which made-up runs lack
    reference, other = variant("baseline", made_up()), variant("same", made_up(folder="other"))
    comparison = summarize([reference, other], lambda seeds: [], "cifar-zero compare")
    assert kinds(comparison) == ["reference", "bit-identical"]
    assert [note.split(" were")[0] for note in comparison.notes] == [
        "The weights of somewhere",
        "The weights of other",
    ]


def test_there_is_a_verdict_or_the_reason_for_none(tmp_path: Path) -> None:
    comparison = compared(variant("[bold]late", made_up((1.0, 0.5), first=3), made_up(seed=1)))
    assert kinds(comparison) == ["reference", None]
    assert not comparison.passed
    write_junit(comparison, tmp_path / "compare.xml")
    (failure,) = ET.parse(tmp_path / "compare.xml").getroot().iter("failure")
    assert failure.get("message") == "not judged: no optimizer step in common with the reference"


@pytest.mark.parametrize(
    ("reference", "other", "reason"),
    [
        (variant("baseline", error="no GPU"), variant("ddp", made_up()), "the reference did not train"),
        (variant("baseline", made_up()), variant("ddp", made_up(seed=1)), "no seed in common with the reference"),
    ],
)
def test_a_variant_that_cannot_be_judged_has_a_reason(reference: Variant, other: Variant, reason: str) -> None:
    comparison = summarize([reference, other], lambda seeds: [], "cifar-zero compare")
    assert (other.verdict, other.unjudged) == (None, reason)
    assert not comparison.passed


def test_the_seeds_in_common_are_named() -> None:
    comparison = compared(variant("ddp", made_up(seed=1), made_up(seed=2)))
    assert kinds(comparison) == ["reference", "bit-identical"]
    assert comparison.notes == ["ddp is judged by the seeds in common with the reference: 1."]


def test_a_saturated_drift_is_noted_and_ends_the_plotted_bound() -> None:
    perturbed = made_up((2.3 + 1e-6,) * 15 + (2.6,) * 5, perturbed=True)

    def judged() -> Comparison:
        variants = [variant("baseline", made_up((2.3,) * 20)), variant("other", made_up((2.3,) * 9 + (2.4,) * 11))]
        return summarize(variants, lambda seeds: [perturbed], "cifar-zero compare")

    comparison = judged()
    assert kinds(comparison) == ["reference", "within rounding"]
    assert "From step 8 on rounding alone" in comparison.notes[-1]
    assert comparison.rounding is not None
    assert comparison.rounding.steps == [*range(1, 8)]
    perturbed.losses.values[:] = [9.0] * 20
    comparison = judged()
    assert "from the first step on" in comparison.variants[1].unjudged
    assert not comparison.passed


def test_the_eps_is_that_of_the_coarser_run() -> None:
    bf16 = variant("other", made_up((2.0, 1.0 + 1e-5), settings={"precision": "bf16-mixed"}, precision="bf16-mixed"))
    perturbed = made_up((2.0, 1.0 + 1e-5), perturbed=True)
    comparison = summarize([variant("baseline", made_up()), bf16], lambda seeds: [perturbed], "cifar-zero compare")
    assert kinds(comparison) == ["reference", "within rounding"]
    assert comparison.rounding is not None
    assert comparison.rounding.values[1] == pytest.approx(8e-5 + 2**-7)


def test_another_recipe_gets_no_verdict() -> None:
    comparison = compared(variant("other", made_up(settings={"batch_size": 32})))
    assert kinds(comparison) == ["reference", None]
    assert not comparison.passed
    assert [(each.setting, str(each)) for each in comparison.differences] == [
        ("batch_size", "16 (baseline); 32 (other)")
    ]
    assert "batch_size" not in comparison.recipe


def test_settings_that_may_differ_between_runs() -> None:
    moved = made_up(settings={"out": "elsewhere", "data": {"source": "digits", "root": "there"}}, strategy="ddp")
    assert differences([variant("one", made_up()), variant("other", moved)]) == []
    lower = made_up(settings={"precision": "bf16-mixed"}, versions={"torch": "3"})
    found = differences([variant("one", made_up()), variant("other", lower)])
    assert [difference.setting for difference in found] == ["versions.torch"]


def test_junit_has_a_case_for_each_variant(tmp_path: Path) -> None:
    comparison = compared(
        variant("same", made_up(seed=0), made_up(seed=1)),
        variant("far <&>", made_up(seed=0), made_up((2.0, 1.1), seed=1)),
        variant("broken", error="out of \x1b\x00memory"),
        perturb=lambda seeds: [made_up((2.0, 1.0 + 1e-5), seed=1)],
    )
    write_junit(comparison, tmp_path / "compare.xml")
    suite = ET.parse(tmp_path / "compare.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("4", "2")
    failures: dict[str, Any] = {case.get("name", ""): case.find("failure") for case in suite.iter("testcase")}
    assert failures["same"] is failures["baseline"] is None
    assert "beyond rounding from step 2 on" in failures["far <&>"].get("message")
    assert failures["broken"].get("message") == "✗ not trained: out of memory"


def test_figures_are_means_over_seeds_of_the_fullest_rank(tmp_path: Path) -> None:
    ranks: dict[str, Any] = {"mem/peak_rank_bytes": [3_000_000, 4_000_000]}
    other: dict[str, Any] = {"mem/peak_rank_bytes": [6_000_000, None], "test/acc": 0.7}
    runs = [made_up(seed=0, **ranks), made_up(seed=1, **other)]
    comparison = compared(variant("ddp", *runs))
    figures = comparison.variants[1].figures
    assert (figures["mem/peak_rank_bytes"].mean, figures["test/acc"].lowest) == (5_000_000, 0.5)
    runs[0].losses.values[1] = float("nan")
    write_comparison(comparison, tmp_path / "comparison.json")
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert (written["schema"], written["passed"]) == (1, True)
    assert written["variants"][1]["runs"][0]["losses"]["values"] == [2.0, None], "JSON has no NaN"


def test_the_printed_report_begins_with_the_differences(capsys: pytest.CaptureFixture[str]) -> None:
    show(compared(variant("[bold]other", made_up(settings={"epochs": 3}))), Path("there"))
    text = capsys.readouterr().out
    assert text.startswith("not the same: epochs 2 (baseline); 3 ([bold]other)")
    assert "[bold]other" in text
    assert "not judged: its recipe differs" in text
    assert "tensorboard" not in text


def test_weights_of_two_models() -> None:
    nan = float("nan")
    one = {"a": torch.tensor([1.0, -2.0]), "empty": torch.zeros(0), "n": torch.tensor(3)}
    assert {name: (each.difference, each.largest) for name, each in apart(one, one).items()} == {
        "a": (0.0, 2.0),
        "empty": (0.0, 0.0),
    }
    assert apart(one, {**one, "a": torch.tensor([1.0, -2.5])})["a"].difference == 0.5
    assert apart(one, {"empty": one["empty"]})["a"].difference == float("inf")
    assert apart({}, one)["a"].difference == float("inf")
    assert apart(one, {**one, "a": torch.zeros(1, 2)})["a"].difference == float("inf")
    assert apart({"a": torch.tensor([1.0, nan])}, {"a": torch.tensor([nan, nan])})["a"].difference == float("inf")
    assert apart({"a": torch.tensor([nan])}, {"a": torch.tensor([nan])})["a"].difference == 0


def test_counters_are_no_weights() -> None:
    """A normalisation's num_batches_tracked would be the largest difference, but is not rounding."""
    counted = {"a": torch.tensor([1.0]), "num_batches_tracked": torch.tensor(1000)}
    assert list(apart(counted, {**counted, "num_batches_tracked": torch.tensor(4000)})) == ["a"]


def test_convolutions_have_weights_of_four_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes convolutions in TensorFloat-32, and nothing else."""
    run = made_up(accelerator="gpu")
    for shape, eps in (((4, 3, 5, 5), TF32_EPS), ((4, 3), EPS["32"])):
        monkeypatch.setattr(verdicts, "_weights", lambda *arguments, shape=shape: {"weight": torch.zeros(shape)})
        (pair,) = verdicts._pairs(run, [run], False, [])
        assert pair.eps == eps
