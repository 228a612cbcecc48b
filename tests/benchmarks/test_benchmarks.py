"""The benchmarks' statistics, that reference loops and train.py do the same work, and one benchmark in small."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import contenders, harness, others, processes
from benchmarks.case import Case, Ratio
from benchmarks.loops import bare, profiled
from benchmarks.loops.clock import WARMUP_STEPS, Clock
from benchmarks.options import Options
from benchmarks.pss import mapped_bytes
from benchmarks.spread import Spread, number, paired_ratios
from cifar_module import CIFARModule
from cifar_zero import data as sources
from cifar_zero.config import command_line
from cifar_zero.config.flags import DataConfig
from cifar_zero.core.errors import RunError
from cifar_zero.training import build
from cifar_zero.training.resolve import resolve
from datamodule import CIFARDataModule
from tests.helpers import assert_ok, of_make_fuzz, run_program

TWO_ROUNDS = Options(repeats=2, steps=None, short=True, accelerator="cpu")


def test_spread_by_hand():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(1.0, 2.0, 3.0)
    assert Spread.of([4.0, 1.0]) == Spread(1.0, 2.5, 4.0)
    assert str(Spread.of([0.5, 1000.0, 12.345])) == "0.500 / 12.3 / 1,000"
    assert [number(value) for value in (0.0, 0.0811, 2.607, 99.94, 3328.6)] == [
        "0.000",
        "0.081",
        "2.61",
        "99.9",
        "3,329",
    ]


def test_ratios_are_taken_round_by_round():
    # The machine was half as fast in the second round: the ratio is 2 in both, where the medians' would be 1.33.
    assert paired_ratios([200.0, 100.0], [100.0, 50.0]) == [2.0, 2.0]
    assert paired_ratios([200.0, None, 90.0], [100.0, 50.0, None]) == [2.0]


def test_a_failed_run_stays_in_the_table(capsys: pytest.CaptureFixture[str]):
    order: list[str] = []

    def works() -> dict[str, float]:
        order.append("works")
        return {"images_per_second": 300.0, "timed_images": 40}

    def fails_at_first() -> dict[str, float]:
        order.append("fails")
        if order.count("fails") == 1:
            raise processes.RunFailed("ended with exit code 1, not 0; its last lines:\nrank 1 ended with SIGKILL")
        return {"images_per_second": 100.0, "timed_images": 40}

    case = Case("a case", {"works": works, "fails": fails_at_first}, [Ratio("works", "fails")])
    assert harness.compare("title", [case], TWO_ROUNDS) == 1
    assert order == ["works", "fails", "fails", "works"]  # the other way round in the second round
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "works 300 / 300 / 300" in lines
    assert "fails: 1 of 2 failed 100 / 100 / 100" in lines
    assert "works / fails 3.00 / 3.00 / 3.00" in lines
    assert lines[-1] == "rank 1 ended with SIGKILL"


def test_different_work_is_not_compared():
    runs: list[object] = [{"timed_images": 40}, {"timed_images": 44}]
    case = Case("a case", {}, figures={"ours": runs[:1], "loop": runs[1:]})  # pyright: ignore[reportArgumentType]
    with pytest.raises(RunError, match=r"different numbers of images, \[40, 44\]"):
        _ = case.timed_images


def test_the_clock_leaves_the_warm_up_out(monkeypatch: pytest.MonkeyPatch):
    seconds = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: seconds)
    clock = Clock(steps=30, batch_size=8, device=torch.device("cpu"))
    batches = 0
    for _ in clock.over(range(7)):  # epochs of seven batches
        batches += 1
        seconds += 100.0 if batches <= WARMUP_STEPS else 0.5
    assert batches == clock.steps == WARMUP_STEPS + 30
    assert {"images_per_second": 16.0, "step_time_ms": 500.0, "timed_images": 240}.items() <= clock.figures().items()


def test_a_failing_process_shows_its_end():
    with pytest.raises(processes.RunFailed, match="exit code 3, not 0; its last lines:\nthe reason"):
        processes.run("-c", "import sys; print('the reason', file=sys.stderr); sys.exit(3)")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_proportional_set_size(tmp_path: Path):
    file = tmp_path / "array.npy"
    np.save(file, np.ones(1 << 20, dtype=np.uint8))
    mapped = np.load(file, mmap_mode="r")
    assert mapped.sum() == 1 << 20
    assert mapped_bytes(os.getpid(), file) == pytest.approx(file.stat().st_size, rel=0.02)


def test_share_of_other_programs_by_hand(monkeypatch: pytest.MonkeyPatch):
    clocks = {"_busy_seconds": [10.0, 14.0], "_own_seconds": [1.0, 2.0]}
    for name, readings in clocks.items():
        monkeypatch.setattr(others, name, functools.partial(readings.pop, 0))
    monkeypatch.setattr("time.perf_counter", iter([0.0, 2.0]).__next__)
    monkeypatch.setattr("psutil.cpu_count", lambda: 2)
    assert others.Others().share() == 0.75  # 3 of the 4 seconds of two cores


def test_constants_of_modules_that_may_not_be_imported():
    assert contenders.WARMUP_STEPS == build.WARMUP_STEPS


def test_profiled_functions_exist():
    for functions in profiled.PARTS.values():
        for module, name in functions:
            assert callable(functools.reduce(getattr, name.split("."), import_module(module)))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For this test; afterwards torch is as before, whose threads and kernels train.py chooses for its process."""
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
    module, trainer = build.module(CIFARModule, run), build.trainer(run, None)
    trainer.fit(module, datamodule=build.datamodule(CIFARDataModule, config))
    for tuned in (False, True):
        net, figures = bare.train(images, 64, trainer.global_step - WARMUP_STEPS, torch.device("cpu"), tuned)
        assert figures["timed_images"] == 20 * 64
        for ours, theirs in zip(module.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_wrong_usage_is_one_line():
    done = run_program("-m", "benchmarks.limit", "--steps", "5")
    assert (done.returncode, done.stderr) == (2, "error: --steps must be at least 10, not 5\n")


@of_make_fuzz
@pytest.mark.slow
def test_tutorial_in_small():
    done = run_program("-m", "benchmarks.tutorial", "--repeats", "1", "--steps", "10", "--accelerator", "cpu")
    assert_ok(done)
    assert "(40 timed images in each run)" in done.stdout  # which it refuses to say of runs that differ
    ratio = re.search(r"ours / tutorial loop +([\d.,]+) / ([\d.,]+) / ([\d.,]+)", done.stdout)
    assert ratio is not None
    assert float(ratio[1].replace(",", "")) > 0
    assert "run 3 of 3" in done.stderr
