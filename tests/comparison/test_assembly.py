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
from comparison.assembly import Group, assemble, grouped
from comparison.differences import differences
from comparison.reading import Loaded
from comparison.result import Comparison
from comparison.table import print_comparison
from comparison.weights import difference
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


def test_runs_become_variants_by_what_differs() -> None:
    moved = made_up(settings={"name": "rounding-baseline"})
    runs = [moved, made_up(strategy="ddp"), made_up(), made_up(seed=1), made_up(strategy="ddp", accumulate=4)]
    groups, again = grouped(runs)
    names = [group.name for group in groups]
    assert names == ["baseline, 1 micro-batch", "ddp, 1 micro-batch", "ddp, 4 micro-batches"]
    assert [len(group.loaded) for group in groups] == [2, 1, 1]
    assert again == [moved]


def test_junit_has_a_case_for_each_variant(tmp_path: Path) -> None:
    comparison = compared(
        group("same", made_up(seed=0), made_up(seed=1)),
        group("far <&>", made_up(seed=0), made_up((2.0, 1.1), seed=1)),
        group("broken", error="out of memory"),
    )
    junit.write(comparison, tmp_path / "compare.xml")
    suite = ET.parse(tmp_path / "compare.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("4", "2")
    failures: dict[str, Any] = {case.get("name", ""): case.find("failure") for case in suite.iter("testcase")}
    assert failures["same"] is failures["baseline"] is None
    assert "parts at step 2" in failures["far <&>"].get("message")
    assert failures["broken"].get("message") == "not trained: out of memory"


def test_the_table_names_what_differs_first() -> None:
    console = Console(width=160, record=True, force_terminal=False)
    print_comparison(compared(group("[bold]other", made_up(settings={"epochs": 3}))), Path("there"), console)
    text = console.export_text()
    assert text.startswith("not the same: epochs 2 (baseline); 3 ([bold]other)")
    assert "[bold]other" in text
    assert "no verdict" in text


def test_weights_of_two_networks() -> None:
    nan = float("nan")
    one = {"a": torch.tensor([1.0, 2.0, nan]), "n": torch.tensor(3)}
    assert difference(one, one) == 0
    assert difference(one, {**one, "a": torch.tensor([1.0, 2.5, nan])}) == 0.5
    assert difference(one, {"a": one["a"]}) == float("inf")
    assert difference({"a": torch.tensor([1.0])}, {"a": torch.tensor([nan])}) != 0
