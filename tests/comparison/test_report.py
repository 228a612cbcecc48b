"""Tests the table, the plot and the headline of a comparison, also where some of its parts are missing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cifar_zero.comparison.plot import loss_plot, write_plot
from cifar_zero.comparison.report import show
from cifar_zero.comparison.result import Comparison, Outcome, Variant
from tests.comparison.made_up import made_up

STEPS = 30
NASTY = "[red]name[/] `*&$\\x$"
"""A name that is markup in rich and in matplotlib."""


def trained(name: str, outcome: Outcome = "bit-identical", off: float = 0.0) -> Variant:
    """Returns a variant whose losses differ from the reference's by `off` from step 8 on."""
    losses = tuple(2.0 - 0.01 * step + off * (step >= 8) for step in range(1, STEPS + 1))
    metrics: dict[str, Any] = {"perf/images_per_second": 4000.0 if off else 2000.0, "test/acc": None}
    command = f"python train.py --name '{name}'"
    remark = "step 8: gradient of net.fc1.weight off by 20 %" if outcome == "different" else ""
    return Variant(name, command, outcome, remark, made_up(losses, **metrics))


def comparison(*others: Variant) -> Comparison:
    return Comparison([trained("baseline", "reference"), *others])


def failed(name: str) -> Variant:
    command = f"python train.py --name {name}"
    return Variant(name, command, "not trained", "error: <no> GPU")


def test_the_headline_counts_each_outcome():
    others = trained("ddp"), trained("fsdp2", "agrees"), trained("zero", "different"), failed("fsdp")
    counts = "1 bit-identical, 1 agrees, 1 different, 1 not trained"
    compared = comparison(*others)
    assert compared.headline == f"2 of 4 agree with baseline: {counts}"
    compared.reference.outcome = "different"
    assert compared.headline == f"2 of 4 agree with baseline: {counts}; baseline itself: different"


def test_an_accuracy_that_is_too_low_fails():
    variants = comparison(trained("ddp"), trained("fsdp2", "different"))
    for variant in variants.variants[:2]:
        assert variant.run is not None
        variant.run.metrics["test/acc"] = 0.1014
    variants.require(0.1)
    assert [variant.passed for variant in variants.variants] == [True, True, False]
    variants.require(0.5)
    outcomes = [variant.outcome for variant in variants.variants]
    assert outcomes == ["too inaccurate", "too inaccurate", "different"], "what differs is not hidden"
    assert variants.variants[1].verdict == "↓ too inaccurate: accuracy 10.14% is less than --min_accuracy 50.00%"
    untested = comparison(trained("ddp"))
    untested.require(0.5)
    assert untested.variants[1].remark == "the run lacks the test accuracy that --min_accuracy needs"


def test_the_headline_names_a_loss_that_did_not_fall():
    flat = comparison(trained("ddp"))
    runs = [variant.run for variant in flat.variants if variant.run]
    for run in runs:
        run.losses |= {step: 2.303 - 0.0001 * step for step in range(1, STEPS + 1)}
    assert flat.headline.endswith("; no variant has learned (the loss did not fall by 1%): agreement is not evidence")
    runs[1].losses[STEPS] = 0.1
    assert "learned" not in flat.headline


def test_the_table_and_the_plot_show_names_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    compared = comparison(trained(NASTY, off=0.5), failed("fsdp"))
    write_plot(compared, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    show(compared, tmp_path)
    table = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    assert [row[2:] for row in rows] == [["2,000"], ["4,000"], ["-"]]
    assert rows[1][0] == NASTY
    assert rows[2][1] == "✗ not trained: error: <no> GPU"


def test_infinite_losses_are_not_drawn():
    diverged = trained("ddp", "different")
    assert diverged.run is not None
    diverged.run.losses[STEPS] = float("inf")
    assert loss_plot(comparison(diverged)).axes[0].get_ylim()[1] < 4


def test_the_second_panel_has_the_difference_and_gaps_where_there_is_none():
    figure = loss_plot(comparison(trained("ddp", "different", off=0.25), trained("fsdp2")))
    _, below = figure.axes
    (line,) = below.lines
    difference = np.asarray(line.get_ydata(), dtype=float)
    assert np.isnan(difference[:7]).all()
    assert np.allclose(difference[7:], 0.25)
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    assert entries == ["baseline (reference)", "ddp (different)", "fsdp2 (bit-identical)"]
