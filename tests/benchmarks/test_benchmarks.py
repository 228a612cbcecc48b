"""Tests that the benchmarks' reference loop trains train.py's model, and runs one whole benchmark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.loops import bare
from benchmarks.loops.common import WARMUP_STEPS
from cifar_module import CIFARModule
from cifar_zero import data as sources
from cifar_zero.config import command_line
from cifar_zero.config.settings import DataConfig
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
        for ours, theirs in zip(module.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@of_test_all
@pytest.mark.slow
def test_tutorial_in_small():
    done = run_program("-m", "benchmarks.speed", "tutorial", "--repeats", "1", "--steps", "10", "--accelerator", "cpu")
    assert_ok(done)
    assert re.search(r"ours / tutorial loop\*\* \| [\d.,]+ / [\d.,]+ / [\d.,]+", done.stdout)
