"""Benchmarks: figures computed by hand, a reference loop that trains train.py's model, and one whole benchmark run."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import torch

from benchmarks import harness, releases, runs
from benchmarks.harness import Case, number, paired_ratios, spread
from benchmarks.loops import bare
from benchmarks.loops.common import WARMUP_STEPS, Clock
from cifar_module import CIFARModule
from cifar_zero import data as sources
from cifar_zero.config import command_line
from cifar_zero.config.output import Output
from cifar_zero.config.settings import DataConfig
from cifar_zero.training import build
from cifar_zero.training.resolve import resolve
from datamodule import CIFARDataModule
from tests.support.helpers import ROOT, assert_ok, of_make_fuzz, run_program


def test_spread_by_hand():
    assert spread([3.0, 1.0, 2.0]) == "1.00 / 2.00 / 3.00"
    assert spread([0.5, 1000.0, 12.345, 12.345]) == "0.500 / 12.3 / 1,000"
    figures = {0.0: "0.000", 0.0811: "0.081", 2.607: "2.61", 99.94: "99.9", 3328.6: "3,329"}
    assert {value: number(value) for value in figures} == figures


def test_ratios_are_taken_within_a_round():
    # The machine was half as fast in the second round: the ratio is 2 in both, where the medians' would be 1.33.
    def rounds(*values: float | None) -> list[dict[str, float] | None]:
        return [None if value is None else {"images_per_second": value} for value in values]

    assert paired_ratios(rounds(200.0, 100.0), rounds(100.0, 50.0)) == [2.0, 2.0]
    assert paired_ratios(rounds(200.0, None, 90.0), rounds(100.0, 50.0, None)) == [2.0]


def test_a_failed_run_stays_in_the_table(capsys: pytest.CaptureFixture[str]):
    order: list[str] = []

    def works() -> dict[str, float]:
        order.append("works")
        return {"images_per_second": 300.0}

    def fails_at_first() -> dict[str, float]:
        order.append("fails")
        if order.count("fails") == 1:
            runs.run("-c", "import sys; print('the reason', file=sys.stderr); sys.exit(3)")
        return {"images_per_second": 100.0}

    case = Case("a case", {"works": works, "fails": fails_at_first}, [("works", "fails")])
    assert harness.compare("title", [case], Namespace(repeats=2, accelerator="cpu")) == 1
    assert order == ["works", "fails", "fails", "works"]  # the second round runs in reverse order
    lines = capsys.readouterr().out.splitlines()
    assert "| works | 300 / 300 / 300 |" in lines
    assert "| fails: 1 of 2 failed | 100 / 100 / 100 |" in lines
    assert "| **works / fails** | 3.00 / 3.00 / 3.00 |" in lines
    assert lines[-2:] == ["failed: fails ended with exit code 3, not 0; its last lines:", "the reason"]


def test_the_clock_leaves_the_warm_up_out(monkeypatch: pytest.MonkeyPatch):
    seconds = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: seconds)
    clock = Clock(steps=30, batch_size=8, device=torch.device("cpu"))
    batches = 0
    for _ in clock.over(range(7)):  # epochs of seven batches
        batches += 1
        seconds += 100.0 if batches <= WARMUP_STEPS else 0.5
    assert batches == clock.steps == Output.warmup_steps + 30
    assert clock.figures() == {"images_per_second": 16.0, "step_time_ms": 500.0}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sets one thread for this test and restores threads and kernels afterwards, because the loops change them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.backends.mkldnn.set_flags(True)


@pytest.mark.usefixtures("one_thread")
def test_the_bare_loop_trains_what_train_py_trains(tmp_path: Path):
    images = DataConfig(source="synthetic", cache=str(tmp_path), synthetic_size=1000)  # 15 steps an epoch
    sources.prepare(images)
    data = ["--data.source", "synthetic", "--data.cache", str(tmp_path), "--data.synthetic_size", "1000"]
    data += ["--accelerator", "cpu", "--logger", "none"]
    config = command_line.parse(
        ["--config", "configs/tutorial.yaml", "--batch_size", "64", "--bench_steps", "20", *data]
    )
    run = resolve(config)
    module, trainer = CIFARModule(run, run.num_classes), build.trainer(run, None)
    trainer.fit(module, datamodule=CIFARDataModule(config))
    for tuned in (False, True):
        net, _ = bare.train(images, 64, trainer.global_step - WARMUP_STEPS, torch.device("cpu"), tuned)
        for ours, theirs in zip(module.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_only_agreement_lets_a_release_pass():
    verdicts = ("bit-identical", "within rounding", "not judged", "not trained", "different")
    kinds = [releases.kind({"kind": verdict}) for verdict in verdicts]
    assert kinds == ["passes", "passes", "not judged", "cannot run", "different"]


def test_the_results_of_releases_are_complete():
    results = json.loads((ROOT / "benchmarks" / "results" / "deepspeed_releases.json").read_text())
    ((flags, of_releases),) = results.items()
    assert flags.startswith("--quick --strategies deepspeed_stage_0")
    assert {"0.18.1", "0.19.5"} < of_releases.keys()
    for release, found in of_releases.items():
        datetime.fromisoformat(found["date"])
        assert (found["machine"]["deepspeed"], found["machine"]["torch"]) == (release, "2.15.0")
        assert len(found["strategies"]) == 10
        assert {kind for kind, _ in found["strategies"].values()} <= {*releases.KINDS}
        assert "different" in "".join(releases.lines(release, found["strategies"])) or release == "0.19.8"


def test_wrong_usage_is_reported_in_one_line():
    done = run_program("-m", "benchmarks.speed", "limit", "--steps", "0")
    assert (done.returncode, done.stderr) == (2, "error: --steps must be at least 1, not 0\n")


@of_make_fuzz
@pytest.mark.slow
def test_tutorial_in_small():
    done = run_program("-m", "benchmarks.speed", "tutorial", "--repeats", "1", "--steps", "10", "--accelerator", "cpu")
    assert_ok(done)
    ratio = re.search(r"ours / tutorial loop\*\* \| ([\d.,]+) / ([\d.,]+) / ([\d.,]+)", done.stdout)
    assert ratio is not None
    assert float(ratio[1].replace(",", "")) > 0
    assert "run 3 of 3" in done.stderr
