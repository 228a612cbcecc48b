"""Tests that the benchmarks' reference loop trains train.py's model, and runs one whole benchmark."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.loops import bare
from benchmarks.loops.common import WARMUP_STEPS
from cifar_module import CIFARModule
from cifar_zero import data as sources
from cifar_zero.config import command_line
from cifar_zero.config.recipe import DataConfig
from cifar_zero.training import build
from cifar_zero.training.resolve import resolve
from datamodule import CIFARDataModule
from tests.support.helpers import assert_ok, of_test_all, run_program


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
def test_tutorial_in_small():
    flags = ["--repeats", "1", "--steps", "10", "--accelerator", "cpu", "--checkout", "."]
    done = run_program("-m", "benchmarks.speed", "tutorial", *flags)
    assert_ok(done)
    for program in (r"train\.py", r"train\.py in \."):
        assert re.search(program + r" / tutorial loop\*\* \| [\d.,]+ / [\d.,]+ / [\d.,]+", done.stdout)
