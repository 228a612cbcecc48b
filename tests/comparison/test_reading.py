"""Tests how run folders are read, including damaged ones, and which runs form a variant."""

import json
from pathlib import Path

import pytest
import yaml

from cifar_zero.comparison.reading import load_run, variants_of
from cifar_zero.comparison.result import FinishedRun
from cifar_zero.core.errors import UsageError
from tests.comparison.made_up import METRICS, SETTINGS, made_up

WHOLE: dict[str, str] = {
    "config.yaml": yaml.safe_dump(SETTINGS),
    "metrics.json": json.dumps(METRICS),
    "losses.csv": "step,loss\n1,2.5\n2,1.25\n",
}


def write_run(folder: Path, changes: dict[str, str] | None = None) -> Path:
    """Writes the files of a run, with the texts of `changes` by name, and returns the folder."""
    for name, text in {**WHOLE, **(changes or {})}.items():
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
