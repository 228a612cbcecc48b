"""Tests how run folders are read, also damaged ones, which runs form a variant, the verdicts on finished runs, the
settings in which they differ, JUnit XML and comparison.json."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cifar_zero.comparison import finished_runs
from cifar_zero.comparison.finished_runs import summarize
from cifar_zero.comparison.reading import differences, load_run, variants_of
from cifar_zero.comparison.report import write_junit
from cifar_zero.comparison.result import Comparison, FinishedRun, Variant
from cifar_zero.core.errors import UsageError
from tests.comparison.made_up import METRICS, SETTINGS, made_up

AGREES = {"outcome": "agrees", "summary": "20 steps checked"}
DIFFERS = {"outcome": "different", "summary": "step 2: gradient of net.fc1.weight off by 20 %"}
BLUNT = {"outcome": "not judged", "summary": "only 90 % could be judged"}


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the reading of weights, because made-up runs have none."""
    monkeypatch.setattr(finished_runs, "_weights", lambda *arguments: {})


def variant(name: str, run: FinishedRun | None = None, error: str = "") -> Variant:
    made = Variant(name, f"train.py --strategy {name}", run=run)
    if error:
        made.outcome, made.remark = "not trained", error
    return made


def compared(*others: Variant) -> Comparison:
    return summarize([variant("baseline", made_up()), *others])


def resumed(step: int, loss: float) -> FinishedRun:
    run = made_up(check=AGREES)
    run.losses = {step: loss}
    return run


@pytest.mark.parametrize(
    ("run", "outcome", "remark"),
    [
        (made_up(), "bit-identical", "losses and weights equal the reference's"),
        (made_up((2.0, 1.1), check=AGREES), "agrees", AGREES["summary"]),
        (made_up(check=DIFFERS), "different", DIFFERS["summary"]),
        (made_up((2.0, 1.1)), "not judged", "no step was checked (--audit, --check_steps)"),
        (made_up((2.0, 1.1), check=BLUNT), "not judged", BLUNT["summary"]),
        (
            made_up((2.3, 1.0), check=AGREES),
            "different",
            "the first loss is 2.3, but 2 in the reference: images or weights differ",
        ),
        (
            made_up(settings={"seed": 2}, check=AGREES),
            "not judged",
            "its recipe differs from the recipe of the reference (seed)",
        ),
        (resumed(2, 1.1), "agrees", AGREES["summary"]),
        (
            resumed(3, 1.1),
            "not judged",
            "no step was recorded in both runs: steps 1 to 2 in the reference, and steps 3 to 3 in the variant",
        ),
    ],
)
def test_the_step_check_decides_on_a_run(run: FinishedRun, outcome: str, remark: str):
    """A faulty step counts even if losses and weights are equal. The step check does not notice another first loss,
    because it checks each run by itself."""
    other = variant("other", run)
    comparison = compared(other)
    assert (comparison.reference.outcome, other.outcome, other.remark) == ("reference", outcome, remark)
    assert comparison.passed == (outcome in ("bit-identical", "agrees"))


@pytest.mark.parametrize(
    ("weights", "settings", "split", "outcome"),
    [
        ({"fc.weight": torch.ones(1)}, {}, {"micro_batch_size": 4}, "different"),
        ({"bn.running_mean": torch.ones(1)}, {}, {"micro_batch_size": 8}, "different"),
        ({"bn.running_mean": torch.ones(1)}, {}, {"micro_batch_size": 4}, "agrees"),
        ({"bn.running_mean": torch.ones(1)}, {}, {"accumulate": 2, "world_size": 1}, "agrees"),
        ({}, {"model": {"name": "vgg16", "dropout": 0.5}}, {"micro_batch_size": 4}, "agrees"),
        ({}, {"model": {"name": "net_moe", "ep_size": 1}}, {"micro_batch_size": 4}, "agrees"),
        ({}, {"model": {"name": "own.py:Net"}}, {"micro_batch_size": 4}, "agrees"),
        ({}, {"model": {"name": "torchvision:vgg16"}}, {"micro_batch_size": 4}, "agrees"),
        ({}, {"model": {"name": "torchvision:vgg16"}}, {"micro_batch_size": 8}, "different"),
        (None, {}, {"micro_batch_size": 4}, "agrees"),
    ],
)
def test_the_first_loss_may_depend_on_the_split(
    weights: dict[str, torch.Tensor] | None,
    settings: dict[str, Any],
    split: dict[str, Any],
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """Batch norms, dropout and experts make the mean loss of a batch depend on its micro-batches. Other people's models
    may have any of them."""
    monkeypatch.setattr(finished_runs, "_weights", lambda *arguments: weights)
    other = variant("other", made_up((2.3, 1.0), settings, AGREES, **split))
    summarize([variant("baseline", made_up(settings=settings)), other])
    assert other.outcome == outcome
    if outcome == "agrees":
        first = "the first loss is 2.3, but 2 in the reference, and may depend on how the batch is split"
        assert other.drift.startswith(first)


def test_a_reference_with_a_faulty_step_fails():
    comparison = summarize([variant("ddp", made_up(check=DIFFERS)), variant("other", made_up())])
    assert [each.outcome for each in comparison.variants] == ["different", "bit-identical"]


def test_a_reference_that_did_not_train_leaves_the_others_without_a_verdict():
    other = variant("ddp", made_up())
    summarize([variant("baseline", error="no GPU"), other])
    assert (other.outcome, other.remark) == ("not judged", "the reference did not train")


def test_the_drift_of_losses_and_weights_is_described(monkeypatch: pytest.MonkeyPatch):
    weights = [{"a": torch.tensor([1.0, -2.0])}, {"a": torch.tensor([1.0, -2.5])}]
    monkeypatch.setattr(finished_runs, "_weights", lambda *arguments: weights.pop(0))
    other = variant("other", made_up((2.0, 1.00003), check=AGREES))
    summarize([variant("baseline", made_up()), other])
    assert other.drift == "losses differ from step 2 on, by 3.0e-05 at step 2; weights differ by up to 5.0e-01"


def test_versions_differ_but_not_a_precision_that_was_not_in_effect():
    newer = made_up(settings={"precision": "bf16-mixed"}, versions={"torch": "3"})
    actual = differences([variant("one", made_up()), variant("other", newer)])
    assert actual == {"versions.torch": {"one": "2", "other": "3"}}


def test_junit_has_a_case_for_each_variant(tmp_path: Path):
    far, broken = variant("far <&>", made_up(check=DIFFERS)), variant("broken", error="out of \x1b\x00memory")
    write_junit(compared(far, broken), tmp_path / "compare.xml")
    suite = ET.parse(tmp_path / "compare.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    assert [case.get("name") for case in suite] == ["baseline", "far <&>", "broken"]
    messages = [failure.get("message") for failure in suite.iter("failure")]
    assert messages == [f"≠ different: {DIFFERS['summary']}", "✗ not trained: out of memory"]


def test_a_figure_is_that_of_the_fullest_rank():
    ranks: dict[str, Any] = {"mem/peak_rank_bytes": [6_000_000, None, 4_000_000], "test/acc": 0.7}
    number = variant("ddp", made_up(**ranks)).number
    assert (number("mem/peak_rank_bytes"), number("test/acc"), number("perf/mfu")) == (6_000_000, 0.7, None)


FILES: dict[str, str] = {
    "config.yaml": yaml.safe_dump(SETTINGS),
    "metrics.json": json.dumps(METRICS),
    "losses.csv": "step,loss\n1,2.5\n2,1.25\n",
}


def write_run(folder: Path, changes: dict[str, str] | None = None) -> Path:
    """Writes the files of a run, with the texts of `changes` by name, and returns the folder."""
    for name, text in {**FILES, **(changes or {})}.items():
        (folder / name).write_text(text)
    return folder


def test_a_run_is_read_with_its_step_check(tmp_path: Path):
    run = load_run(write_run(tmp_path))
    assert (run.losses, run.check) == ({1: 2.5, 2: 1.25}, None)
    assert (run.settings["model"], run.settings["optimizer.lr"]) == ("net", 0.1)
    check = {"outcome": "agrees", "summary": "20 steps audited"}
    assert load_run(write_run(tmp_path, {"step_check.json": json.dumps(check)})).check == check


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses.csv": "step,loss\n1,2.5\n2,1.2"}, "cut off"),
        ({"losses.csv": "step,loss\n1,2.5\n2\n"}, "cannot be read"),
        ({"losses.csv": "time,loss\n1,2.5\n"}, "'step' is missing"),
        ({"losses.csv": "step,loss\n"}, "losses.csv has no losses"),
        ({"config.yaml": ""}, "cannot be read"),
        ({"metrics.json": "{}"}, "'strategy' is missing"),
        ({"metrics.json": json.dumps({**METRICS, "strategy": None})}, "metrics.json has strategy null"),
        ({"step_check.json": '{"outcome": "fine"}'}, "unknown outcome"),
        ({"step_check.json": '{"outcome": "agrees"}'}, "'summary' is missing"),
        ({"metrics.json": '{"seed"'}, "is not JSON"),
    ],
)
def test_a_damaged_file_is_reported_in_one_line(tmp_path: Path, changes: dict[str, str], message: str):
    with pytest.raises(UsageError, match=message) as refused:
        load_run(write_run(tmp_path, changes))
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_an_unfinished_run_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="is not a run folder"):
        load_run(tmp_path)
    write_run(tmp_path)
    (tmp_path / "metrics.json").unlink()
    with pytest.raises(UsageError, match=r"has no metrics\.json, because the run has not finished"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([made_up(strategy="ddp"), made_up()], ["baseline", "ddp"]),
        (
            [made_up(strategy="ddp", accumulate=4), made_up(strategy="ddp"), made_up()],
            ["baseline, 1 micro-batch", "ddp, 4 micro-batches", "ddp, 1 micro-batch"],
        ),
        ([made_up(), made_up(folder="version_1")], ["baseline", "baseline (version_1)"]),
    ],
    ids=["strategies", "micro-batches", "repeated"],
)
def test_a_variant_is_named_by_what_differs(runs: list[FinishedRun], expected: list[str]):
    assert [variant.name for variant in variants_of(runs)] == expected
