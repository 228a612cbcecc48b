"""Tests that the benchmarks' reference loop trains train.py's model, runs one whole benchmark, and tests what
benchmarks/releases.py keeps of an acceptance, and the page that docs/releases.py makes of it."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.loops import bare
from benchmarks.loops.common import WARMUP_STEPS
from benchmarks.releases import shortened
from cifar_module import CIFARModule
from cifar_zero import data as sources
from cifar_zero.config import command_line
from cifar_zero.config.recipe import DataConfig
from cifar_zero.training import build
from cifar_zero.training.resolve import resolve
from datamodule import CIFARDataModule
from tests.support.helpers import (
    ROOT,
    assert_ok,
    needs_browser,
    of_test_all,
    run_program,
    shown_by_browser,
    wait_until,
)


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
        for actual, expected in zip(module.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_a_call_for_a_gpu_repeats_failed_measurements_last():
    one, two, three, four = (gpu.Measurement(name, 1, ()) for name in ("1", "2", "3", "4"))
    results = {"1": {"succeeded": 0, "tries": 2}, "2": {"succeeded": 0, "tries": 1}, "3": {"succeeded": 1, "tries": 1}}
    assert gpu.in_order([one, two, three, four], results) == [four, two, one]


def test_a_measurement_ends_with_the_first_program_that_fails():
    programs = [("-c", code) for code in ("print(1)", "print(2); raise SystemExit(3)", "print(4)")]
    row = gpu.measure(gpu.Measurement("name", 1, tuple(programs)), 1)
    assert row["succeeded"] == 1
    printed = [line for line in row["output"].splitlines() if not line.startswith("$")]
    assert printed == ["1", "FAILED: ended with exit code 3; its last lines:", "2"]


@of_test_all
@pytest.mark.slow
def test_a_second_call_for_a_gpu_measures_what_a_killed_one_has_not(tmp_path: Path):
    parts = ["kernels", "tests"]
    flags = ["-m", "benchmarks.gpu", "--accelerator", "cpu", "--parts", *parts, "--out", str(tmp_path)]
    file = tmp_path / "results.json"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, *flags], cwd=ROOT, stdout=log, stderr=log)
        wait_until(lambda: process.poll() is not None or file.exists())
        process.kill()
        process.wait()
    first = json.loads(file.read_text())
    assert_ok(run_program(*flags))
    both = json.loads(file.read_text())
    assert [*first] == parts[:1]
    assert [name.partition(":")[0] for name in both] == parts
    assert both["kernels"] == first["kernels"]


@of_test_all
@pytest.mark.slow
def test_tutorial_in_small():
    flags = ["--repeats", "1", "--steps", "10", "--accelerator", "cpu", "--checkout", "."]
    done = run_program("-m", "benchmarks.speed", "tutorial", *flags)
    assert_ok(done)
    for program in (r"train\.py", r"train\.py in \."):
        assert re.search(program + r" / tutorial loop\*\* \| [\d.,]+ / [\d.,]+ / [\d.,]+", done.stdout)


CASES = (
    ("deepspeed_stage_2", "float32", {"shares": {"gradient": 0.25, "loss": 0.0}, "summary": "0.25 of a tolerance"}),
    ("deepspeed_stage_2", "bfloat16", {"shares": {"gradient": 30.0}, "findings": ["a"], "summary": "<b>step</b> 1"}),
    ("deepspeed_stage_3", "float32", {"steps": 0, "passed": False, "shares": {}, "summary": "rank 0 failed"}),
)
"""A correct case, one with a fault that all releases have, and one that does not run."""


@needs_browser
def test_the_page_of_a_release_shows_each_case_and_its_first_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    blank = {"steps": 4, "passed": True, "findings": []}
    engines = [{"strategy": strategy, "row": row, **blank, **case} for strategy, row, case in CASES]
    result = {"date": "2026-11-28", "machine": {"cores": "2"}, **shortened({"passed": False, "engines": engines})}
    (tmp_path / "results.json").write_text(json.dumps({"0.18.1": result}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["releases.py", "results.json"])
    runpy.run_path(str(ROOT / "docs" / "releases.py"), run_name="__main__")
    shown = shown_by_browser((tmp_path / "releases.html").as_uri(), tmp_path / "browser")
    green, grey, red = "#4caf50", "#bdbdbd", "#d32f2f"
    cells = re.findall(r'<td style="background: (.*?)">(.*?)</td>', shown)
    assert cells == [(green, "0.25"), (red, "30"), (grey, ""), ("", "")]
    faults = re.findall(r"<li>(.*?)</li>", shown)
    assert faults == ["ZeRO 2, bfloat16: &lt;b&gt;step&lt;/b&gt; 1", "ZeRO 3, float32: rank 0 failed"]
    assert (tmp_path / "releases.png").exists()
