"""Tests what the step check says of hooks and options of users: gradients that a hook changes, the options of an
optimizer, and values that change between two steps. Each training runs on one rank, in this process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.engine import DeepSpeedEngine
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from cifar_zero.optimizers import torch_updates
from cifar_zero.step_check.callback import StepCheck
from cifar_zero.step_check.updates import is_elementwise
from cifar_zero.step_check.verdict import Verdict
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.deepspeed import ZeROStrategy
from cifar_zero.strategies.hooks import Updated
from tests.users_code.own_modules import LoRA, Own, Plateau, images

pytestmark = pytest.mark.usefixtures("own_process_group")

QUIET: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Two(Own):
    """Has two layers, so that a shard covers several parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 10))


def verdict_of(module: Own, *callbacks: Callback, stage: int | None = None, steps: int = 4, **options: Any) -> Verdict:
    """Trains a module, with every step checked, in plain PyTorch or at a ZeRO stage."""
    check = StepCheck(every=1, on_fault="warn")
    options = {"strategy": "auto" if stage is None else ZeROStrategy(stage), "max_steps": steps, **QUIET, **options}
    Trainer(accelerator="cpu", devices=1, callbacks=[*callbacks, check], **options).fit(module)
    return check.verdict


class Clips(Two):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_(self.parameters(), 1e-3)


class ClipsByOptimizer(Two):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 1e-3)


class Zeroes(Two):
    """Zeroes a gradient in the first micro-batch and halves another one in each."""

    def on_after_backward(self) -> None:
        if self.net[2].bias.grad is not None:
            self.net[2].bias.grad.zero_()
            self.net[0].bias.grad.mul_(0.5)


class Noisy(Two):
    def on_after_backward(self) -> None:
        for each in self.parameters():
            if each.grad is not None:
                each.grad += 0.1 * torch.randn_like(each.grad)


class OwnClipping(Two):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 1e-3, "norm")


class Reads(Two):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", sum(each.grad.norm() for each in self.parameters() if each.grad is not None) + 0.0)


class ReadsDeepSpeed(Two):
    """Reads an attribute that only the parameters of DeepSpeed's engine have."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.net[0].weight._hp_mapping is not None


class ClippingCallback(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        clip_grad_norm_(pl_module.parameters(), 1e-3)


CHANGES = {
    "own clipping": (Clips, "on_before_optimizer_step of Clips"),
    "clipping of the optimizer's parameters": (ClipsByOptimizer, "on_before_optimizer_step of ClipsByOptimizer"),
    "zeroing": (Zeroes, "on_after_backward of Zeroes"),
    "noise": (Noisy, "on_after_backward of Noisy"),
    "the clipping hook": (OwnClipping, "configure_gradient_clipping of OwnClipping"),
    "a callback": (Two, "on_before_optimizer_step of ClippingCallback"),
}


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
@pytest.mark.parametrize("name", CHANGES)
def test_a_hook_that_changes_gradients_counts_and_deepspeed_ignores_it(name: str, stage: int | None):
    module, hook = CHANGES[name]
    callbacks = [ClippingCallback()] if name == "a callback" else []
    verdict = verdict_of(module(), *callbacks, stage=stage, steps=2, accumulate_grad_batches=2)
    if stage is None:
        assert verdict.outcome in ("bit-identical", "within rounding"), str(verdict)
        assert not verdict.not_checked
    else:
        assert verdict.outcome == "different"
        assert f"{hook} changes gradients, and DeepSpeed ignores that" in str(verdict)


@pytest.mark.parametrize("module", [Reads, ReadsDeepSpeed])
def test_a_hook_that_only_reads_gradients_changes_no_verdict(module: Any):
    verdict = verdict_of(module(), stage=2)
    assert verdict.outcome == "within rounding"
    noted = "what on_before_optimizer_step of ReadsDeepSpeed changes, because it fails on a copy"
    assert (noted in str(verdict)) == (module is ReadsDeepSpeed)


@pytest.mark.parametrize("algorithm", ["value", "norm"])
def test_clipping_of_the_trainer_is_judged(algorithm: str):
    verdict = verdict_of(Two(), gradient_clip_val=1e-3, gradient_clip_algorithm=algorithm)
    assert verdict.outcome in ("bit-identical", "within rounding"), str(verdict)


class LARS(torch.optim.Optimizer):
    """Scales the step of each tensor by the norms of the tensor and of its gradient (You et al. 2017)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    speed = self.state[each].setdefault("speed", torch.zeros_like(each))
                    speed.mul_(group["momentum"]).add_(self.scaled(each))
                    each.sub_(speed, alpha=group["lr"])

    def scaled(self, parameter: Any) -> Tensor:
        return parameter.grad * (parameter.norm() / (parameter.grad.norm() + 1e-9))


class OwnSigns(LARS):
    """Steps in the direction of the signs, which is elementwise."""

    def scaled(self, parameter: Any) -> Tensor:
        return 0.01 * parameter.grad.sign()


class With(Two):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.05)


@pytest.mark.parametrize(
    ("optimizer", "stage"),
    [
        (LARS, None),
        (LARS, 1),
        (LARS, 3),
        (torch.optim.Adafactor, None),
        (torch.optim.Adafactor, 2),
        (OwnSigns, 2),
        (OwnSigns, 3),
    ],
)
def test_an_optimizer_that_needs_whole_tensors_differs_where_shards_are_flat(optimizer: Any, stage: int | None):
    verdict = verdict_of(With(optimizer), stage=stage)
    if stage is None or optimizer is OwnSigns:
        assert verdict.outcome in ("bit-identical", "within rounding"), str(verdict)
    else:
        assert verdict.outcome == "different"
        assert verdict.faults[0].step == 1
        assert f"{optimizer.__name__} needs whole tensors, and gets flat parts of them" in str(verdict)


def test_a_later_step_of_such_an_optimizer_is_not_judged():
    check = StepCheck(steps=[3], on_fault="warn")
    Trainer(accelerator="cpu", callbacks=[check], strategy=ZeROStrategy(2), max_steps=3, **QUIET).fit(With(LARS))
    assert check.verdict.outcome == "not judged"
    assert "the update of LARS, which is not known to be elementwise" in str(check.verdict)


ELEMENTWISE = {
    **dict.fromkeys(("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam"), True),
    **dict.fromkeys(("ASGD", "Rprop", "TorchLion", "TorchAdagrad"), True),
    **dict.fromkeys(("Adafactor", "Muon", "LBFGS", "TorchMuon"), False),
}


OPTIONS: dict[str, dict[str, Any]] = {
    "TorchLion": {"weight_decay": 0.1, "betas": (0.9, 0.99)},
    "TorchAdagrad": {"weight_decay": 0.1, "eps": 1e-10},
    "TorchMuon": {"muon": True, "momentum": 0.9, "ns_steps": 3, "weight_decay": 0.1, "betas": (0.9, 0.99)},
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_whether_an_optimizer_is_elementwise_is_found_by_trying(name: str):
    weight = nn.Parameter(torch.randn(4, 3))
    optimizer = getattr(torch_updates, name, None) or getattr(torch.optim, name)
    made = optimizer([weight], lr=0.1, **OPTIONS.get(name, {}))
    updated = Updated(weight, [weight], lambda wholes: wholes[0], made, made.param_groups[0])
    assert is_elementwise(updated) == ELEMENTWISE[name]


def test_options_that_the_engine_changes_at_its_start_are_found():
    class Changing(ZeROStrategy):
        def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
            started = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
            optimizer.param_groups[0]["weight_decay"] = 0.5
            return started

    verdict = verdict_of(Two(), strategy=Changing(2))
    assert "step 1: option of net.0.weight: weight_decay is 0.5 instead of 0.01" in str(verdict)
    assert any("step 1: update of net.0.weight" in str(fault) for fault in verdict.faults)


def test_a_clip_value_that_does_not_reach_the_engine_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DeepSpeedEngine, "gradient_clipping", lambda self: 0.0)
    verdict = verdict_of(Two(), stage=2, gradient_clip_val=1e-3)
    assert "step 1: update of net.0.weight to net.2.bias" in str(verdict)


class Scheduled(Two):
    interval = "step"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.001)
        schedule = OneCycleLR(optimizer, 0.1, total_steps=60)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]

    def train_dataloader(self) -> Any:
        return DataLoader(images(16), 4)  # two steps of two micro-batches


class EachEpoch(Scheduled):
    interval = "epoch"


@pytest.mark.parametrize("stage", [None, 2])
def test_a_schedule_that_steps_per_micro_batch_is_found(stage: int | None, monkeypatch: pytest.MonkeyPatch):
    def step_always(self: Any, interval: str, update_plateau_schedulers: bool) -> None:
        self._update_learning_rates(interval, update_plateau_schedulers)

    monkeypatch.setattr(_TrainingEpochLoop, "update_lr_schedulers", step_always)
    verdict = verdict_of(Scheduled(), stage=stage, accumulate_grad_batches=2)
    assert re.match(r"step 1: option of net.0.weight: betas is .* and lr is ", str(verdict)), str(verdict)


class WarmedUp(Two):
    """Sets a rate and a weight decay by hand."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.01 * (1 + self.trainer.global_step)
            group["lr"] = 0.001 * (1 + self.trainer.global_step)


@pytest.mark.parametrize("stage", [None, 2])
@pytest.mark.parametrize("module", [Scheduled, EachEpoch, WarmedUp, Plateau, LoRA])
def test_options_that_the_user_changes_are_no_fault(module: Any, stage: int | None):
    options = {"logger": DummyLogger()} if module is Plateau else {}
    verdict = verdict_of(module(), stage=stage, steps=5, accumulate_grad_batches=2, **options)
    assert verdict.outcome in ("bit-identical", "within rounding"), str(verdict)
    noted = "the optimizer's lr, because the module or a callback may set it"
    assert (noted in str(verdict)) == (module is WarmedUp)


@pytest.mark.parametrize("module", [EachEpoch, Two])
def test_a_callback_of_lightning_may_replace_the_schedule(module: Any):
    averaging = StochasticWeightAveraging(0.1, swa_epoch_start=1, annealing_epochs=2)
    verdict = verdict_of(module(), averaging, steps=-1, max_epochs=4, limit_train_batches=2)
    assert verdict.outcome == "bit-identical", str(verdict)
    assert len(verdict.steps) == 8


def test_a_resumed_run_continues_its_schedule(tmp_path: Path):
    first = Trainer(accelerator="cpu", max_steps=3, **QUIET)
    first.fit(Scheduled())
    first.save_checkpoint(tmp_path / "saved.ckpt")
    check = StepCheck(every=1)
    Trainer(accelerator="cpu", max_steps=6, callbacks=[check], **QUIET).fit(
        Scheduled(), ckpt_path=tmp_path / "saved.ckpt", weights_only=False
    )
    assert check.verdict.outcome == "bit-identical", str(check.verdict)


class Validated(Two):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]).float(), batch[1]))

    def val_dataloader(self) -> Any:
        return DataLoader(images(8), 4)


BETWEEN: dict[str, tuple[Callable[[Updated], Any], str]] = {
    "weights": (lambda updated: updated.target.data.add_(1e-3), r"weight of net\.0\.weight"),
    "state": (lambda updated: updated.state["exp_avg"].zero_(), r"state of exp_avg of net\.0\.weight"),
    "mode": (lambda updated: None, r"training mode of net: it is in evaluation mode, unlike before"),
}
"""What goes wrong after a validation, and the text of the verdict."""


@pytest.mark.parametrize("stage", [None, 2])
@pytest.mark.parametrize("fault", BETWEEN)
def test_what_changes_between_two_steps_is_found(fault: str, stage: int | None, monkeypatch: pytest.MonkeyPatch):
    change, expected = BETWEEN[fault]

    def end(loop: _EvaluationLoop, *_: Any, **__: Any) -> None:
        for each in hooks_of(loop.trainer.strategy).updated(loop.trainer.optimizers[0], at_any_step=True):
            change(each)

    monkeypatch.setattr(_EvaluationLoop, "_on_evaluation_end", end)
    if fault == "mode":
        monkeypatch.setattr(_EvaluationLoop, "_on_evaluation_model_train", lambda loop: None)
    verdict = verdict_of(Validated(), stage=stage, val_check_interval=2, num_sanity_val_steps=0)
    assert any(re.match(f"step 3: {expected}", str(found)) for found in verdict.faults), str(verdict)
    assert not [found for found in verdict.faults if found.step < 3]


class Clamped(Validated):
    """Changes weights and a training mode between steps."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.net[2].bias.clamp_(-1e-4, 1e-4)
        self.net[1].train(not self.net[1].training)


def test_what_a_hook_changes_between_two_steps_is_no_fault():
    verdict = verdict_of(Clamped())
    assert verdict.outcome == "within rounding"
    assert (
        str(verdict).count("what changes between two steps, because on_train_batch_end of Clamped may change weights")
        == 1
    )
    assert "training modes, because the module or a callback may set them" in str(verdict)


def test_a_validation_changes_nothing():
    assert verdict_of(Validated(), val_check_interval=2).outcome == "bit-identical"
