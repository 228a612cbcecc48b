"""Tests that no failure of a step check ends the training that it checks. Any part of the check may fail, on one rank
or on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from cifar_zero import strategies
from cifar_zero.config.placement import Placement
from cifar_zero.step_check.callback import StepCheck
from cifar_zero.step_check.replay import PlainCopy
from tests.step_check.test_callback import Module, verdict_on
from tests.support.helpers import on_ranks


class SetUpOnce(Module):
    """Has a setup that cannot run twice, because the first run also changes a variable of the class."""

    done = False

    def setup(self, stage: str) -> None:
        assert not SetUpOnce.done, "was set up before"
        SetUpOnce.done = True


class Sharded(Module):
    """Shards itself in `configure_model`, as users of Lightning's ModelParallelStrategy do."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Uncopied(Module):
    """Has an attribute that cannot be copied when a step begins."""

    class State(torch.Tensor):
        def clone(self, *arguments: Any, **options: Any) -> Any:
            raise OSError("no copy")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.state = torch.zeros(1).as_subclass(Uncopied.State)


class LazyReplay(Module):
    """Has a training step that works only under the strategy."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.lightning_module is not self:
            raise KeyError("only for the strategy")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (SetUpOnce(), "all steps, because the check fails in on_train_start: AssertionError: was set up before"),
        (Uncopied(), "step 1, because the check fails in on_micro_batch_start: OSError: no copy"),
        (LazyReplay(), "steps, because computing them again fails: KeyError: 'only for the strategy'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Module) else "",
)
def test_a_module_that_the_check_cannot_follow_is_trained(module: Module, reason: str):
    verdict = verdict_on(module, StepCheck(every=1))
    assert module.trainer.global_step == 5
    assert (verdict.outcome, verdict.faults) == ("not judged", [])
    assert any(note.startswith(reason) for note in verdict.not_checked), verdict.not_checked


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tmp_path.joinpath("file").touch()
    verdict_on(Module(), StepCheck(every=1, file=tmp_path / "file" / "check.json"))
    assert "the check fails in on_train_end: " in capsys.readouterr().err


def test_an_optimizer_with_state_of_other_shapes_is_judged():
    verdict = verdict_on(Module(torch.optim.Adafactor), StepCheck(every=1))
    assert verdict.outcome == "bit-identical", str(verdict)


PARTS = (
    (PlainCopy, "build"),
    (PlainCopy, "remember"),
    (PlainCopy, "replay"),
    (StepCheck, "_checked_weights"),
    (StepCheck, "_compute_dtypes"),
    (StepCheck, "_expect_updates"),
    (StepCheck, "_compare_rates"),
    (StepCheck, "_finish"),
)
"""The parts of the check, and at least one of each hook."""


def train_while_one_rank_fails() -> None:
    for owner, name in PARTS:
        check, module = StepCheck(every=1), Module()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, _failing_in_step_2_of_rank_1(getattr(owner, name)))
            _trainer(check, "ddp").fit(module)
        assert module.trainer.global_step == 3, name
        assert check.verdict.steps == ([] if name == "build" else [1, 3]), (name, check.verdict.not_checked)
        (note,) = check.verdict.not_checked
        assert "RuntimeError: rank 1 fails" in note, name


def _failing_in_step_2_of_rank_1(method: Any) -> Any:
    def failing(self: Any, *arguments: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "1" and (method.__name__ == "build" or _step(self) == 2):
            raise RuntimeError("rank 1 fails")
        return method(self, *arguments, **options)

    return failing


def _step(part: Any) -> int:
    return part._findings.step if isinstance(part, StepCheck) else part.module.trainer.global_step + 1


def train_a_module_that_shards_itself() -> None:
    check, module = StepCheck(every=1), Sharded()
    _trainer(check, ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)).fit(module)
    assert module.trainer.global_step == 3
    assert "configure_model shards the plain copy of the module too" in str(check.verdict)


def _trainer(check: StepCheck, strategy: Any) -> Trainer:
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    quiet |= {"accelerator": "cpu", "devices": 2, "max_steps": 3, "plugins": [LightningEnvironment()]}
    return Trainer(strategy=strategy, callbacks=[check], **quiet)


def fit_twice() -> None:
    check, module = StepCheck(every=1), Module()
    placement = Placement("deepspeed_stage_2", accelerator="cpu", devices=2)
    for _ in range(2):
        _trainer(check, strategies.build(placement, 250)).fit(module)
        assert check.verdict.outcome in ("bit-identical", "within rounding"), str(check.verdict)
        assert check.verdict.steps == [1, 2, 3]


@pytest.mark.distributed
@pytest.mark.parametrize("function", [train_while_one_rank_fails, train_a_module_that_shards_itself, fit_twice])
def test_the_training_goes_on_on_all_ranks(function: Callable[[], None]):
    on_ranks(2, function)
