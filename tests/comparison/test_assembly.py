"""From runs to verdicts, differences, variants, JUnit."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from comparison import junit
from comparison.assembly import assemble
from comparison.differences import differences
from comparison.grouping import Group
from comparison.reading import Loaded
from comparison.result import Comparison
from comparison.table import print_comparison
from comparison.verdicts import SOURCES
from comparison.weights import apart, convolves
from errors import UsageError
from tests.comparison.made_up import made_up


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up runs have none."""
    monkeypatch.setattr(Loaded, "weights", lambda self, trust: {})


def compared(*others: Group, second: Callable[[set[int]], list[Loaded]] = lambda seeds: []) -> Comparison:
    reference = Group("baseline", "train.py", [made_up(seed=0), made_up(seed=1)], "", "baseline", 2, 1)
    return assemble([reference, *others], second, "title", "compare.py", None)


def group(name: str, *loaded: Loaded, error: str = "") -> Group:
    return Group(name, f"train.py --strategy {name}", list(loaded), error, name, 2, 1)


def kinds(comparison: Comparison) -> list[str | None]:
    return [variant.verdict.kind if variant.verdict else None for variant in comparison.variants]


def test_the_worst_seed_decides_and_a_second_run_is_asked_for_where_it_matters() -> None:
    asked: list[set[int]] = []

    def second(seeds: set[int]) -> list[Loaded]:
        asked.append(seeds)
        return [made_up((2.0, 1.0 + 1e-5), seed=1)]

    same = group("same", made_up(seed=0), made_up(seed=1))
    near = group("near", made_up(seed=0), made_up((2.0, 1.00003), seed=1))
    far = group("far", made_up(seed=0), made_up((2.0, 1.1), seed=1))
    comparison = compared(same, near, far, second=second)
    assert asked == [{1}]
    assert kinds(comparison) == ["reference", "bit-identical", "within rounding", "different"]
    assert not comparison.passed
    assert compared(same).passed
    assert compared(same).notes == []


def test_a_bound_of_the_format_alone_is_said() -> None:
    comparison = compared(group("near", made_up(), made_up((2.0, 1.000001), seed=1)))
    assert kinds(comparison) == ["reference", "within rounding"]
    assert "number format alone" in comparison.notes[0]


def test_weights_that_cannot_be_read_are_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(self: Loaded, trust: bool) -> dict[str, torch.Tensor]:
        raise UsageError("a bad checkpoint")

    monkeypatch.setattr(Loaded, "weights", unread)
    comparison = compared(group("same", made_up(seed=0), made_up(seed=1)))
    assert kinds(comparison) == ["reference", "bit-identical"]
    assert comparison.notes == ["The weights of somewhere were not compared: a bad checkpoint."]


def test_runs_without_a_common_step_get_no_verdict() -> None:
    comparison = compared(group("resumed", made_up((1.0, 0.5), first=3), made_up(seed=1)))
    assert kinds(comparison) == ["reference", None]
    assert not comparison.passed
    assert comparison.variants[1].unjudged == "no optimizer step that the reference has too"


def test_a_saturated_drift_is_said_and_ends_the_drawing() -> None:
    reference, other = made_up((2.3,) * 20), made_up((2.3,) * 9 + (2.4,) * 11)
    second = made_up((2.3 + 1e-6,) * 15 + (2.6,) * 5, rounding=2**-23)
    groups = [group("baseline", reference), group("other", other)]
    comparison = assemble(groups, lambda seeds: [second], "title", "compare.py", None)
    assert kinds(comparison) == ["reference", "within rounding"]
    assert "From step 8 on rounding alone" in comparison.notes[-1]
    assert comparison.rounding is not None
    assert comparison.rounding.steps == [*range(1, 8)]
    second.run.losses.values[:] = [9.0] * 20
    comparison = assemble(groups, lambda seeds: [second], "title", "compare.py", None)
    assert "from the first step on" in comparison.variants[1].unjudged
    assert not comparison.passed


@pytest.mark.parametrize(("precision", "source"), [("32-true", "second run"), ("bf16-mixed", "coarser format")])
def test_a_second_run_shows_nothing_of_a_coarser_format(precision: str, source: str) -> None:
    other = group("other", made_up((2.0, 1.0 + 1e-5), settings={"precision": precision}, precision=precision))
    reference = group("baseline", made_up())
    second = made_up((2.0, 1.0 + 1e-5), rounding=2**-23)
    comparison = assemble([reference, other], lambda seeds: [second], "title", "compare.py", None)
    assert comparison.notes == [SOURCES[source]]  # pyright: ignore[reportArgumentType]
    assert comparison.rounding is not None
    assert comparison.rounding.values[1] == pytest.approx(8e-5 if source == "second run" else 2**-7, rel=0.1)


def test_a_run_is_not_its_own_second_one() -> None:
    """Else a fault that the strategy itself repeats would be taken for rounding."""
    again = made_up((2.0, 1.5))
    groups = [group("baseline", made_up()), group("baseline (again)", again)]
    comparison = assemble(groups, lambda seeds: [again], "title", "compare.py", None)
    assert kinds(comparison) == ["reference", "different"]


def test_seeds_that_are_lacking_and_data_that_is_another_are_said() -> None:
    comparison = compared(group("one", made_up(seed=0, fallback="no CIFAR-10")))
    assert comparison.notes == [
        "one: no CIFAR-10.",
        "one lacks seeds that baseline has (1): its verdict is over the others.",
    ]


def test_the_time_to_an_accuracy_needs_all_seeds() -> None:
    quick, slow = made_up(seed=0), made_up(seed=1)
    quick.run.seconds_to_accuracy = 1.0
    assert "seconds_to_accuracy" not in compared(group("one", quick, slow)).variants[1].figures
    slow.run.seconds_to_accuracy = 3.0
    assert compared(group("one", quick, slow)).variants[1].figures["seconds_to_accuracy"].mean == 2.0


def test_what_did_not_train_fails_the_comparison() -> None:
    comparison = compared(group("broken", made_up(seed=0), error="out of memory"))
    assert kinds(comparison) == ["reference", "not trained"]
    assert not comparison.passed


def test_another_recipe_gets_no_verdict() -> None:
    other = made_up(settings={"batch_size": 32})
    comparison = compared(group("other", other))
    assert kinds(comparison) == ["reference", None]
    assert not comparison.passed
    assert [(d.setting, d.values) for d in comparison.differences] == [
        ("batch_size", {"baseline": "16", "other": "32"})
    ]
    assert "batch_size" not in comparison.recipe


def test_what_runs_need_not_share() -> None:
    moved = made_up(settings={"out": "elsewhere", "data": {"source": "digits", "root": "there"}}, strategy="ddp")
    assert differences({"one": made_up(), "other": moved}) == []
    lower = made_up(settings={"precision": "bf16-mixed"}, versions={"torch": "3"})
    found = differences({"one": made_up(), "other": lower})
    assert [difference.setting for difference in found] == ["precision", "versions.torch"]


def test_junit_has_a_case_for_each_variant(tmp_path: Path) -> None:
    comparison = compared(
        group("same", made_up(seed=0), made_up(seed=1)),
        group("far <&>", made_up(seed=0), made_up((2.0, 1.1), seed=1)),
        group("broken", error="out of \x1b\x00memory"),
    )
    junit.write(comparison, tmp_path / "compare.xml")
    suite = ET.parse(tmp_path / "compare.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("4", "2")
    failures: dict[str, Any] = {case.get("name", ""): case.find("failure") for case in suite.iter("testcase")}
    assert failures["same"] is failures["baseline"] is None
    assert "parts at step 2" in failures["far <&>"].get("message")
    assert failures["broken"].get("message") == "not trained: out of memory"


def test_there_is_a_verdict_or_the_reason_for_none(tmp_path: Path) -> None:
    comparison = compared(group("[bold]late", made_up(first=7), made_up(seed=1, first=7)))
    junit.write(comparison, tmp_path / "compare.xml")
    (failure,) = ET.parse(tmp_path / "compare.xml").getroot().iter("failure")
    assert failure.get("message") == "no verdict: no optimizer step that the reference has too"


def test_the_table_names_what_differs_first() -> None:
    console = Console(width=160, record=True, force_terminal=False)
    print_comparison(compared(group("[bold]other", made_up(settings={"epochs": 3}))), Path("there"), console)
    text = console.export_text()
    assert text.startswith("not the same: epochs 2 (baseline); 3 ([bold]other)")
    assert "[bold]other" in text
    assert "no verdict" in text
    assert "tensorboard" not in text


def test_weights_of_two_networks() -> None:
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
    """A normalisation's num_batches_tracked would be the largest of them, and no rounding."""
    counted = {"a": torch.tensor([1.0]), "num_batches_tracked": torch.tensor(1000)}
    assert list(apart(counted, {**counted, "num_batches_tracked": torch.tensor(4000)})) == ["a"]


def test_convolutions_have_weights_of_four_dimensions() -> None:
    assert convolves({"conv.weight": torch.zeros(4, 3, 5, 5)})
    assert not convolves({"linear.weight": torch.zeros(4, 3), "linear.bias": torch.zeros(4)})
