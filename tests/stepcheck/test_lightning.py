"""StepCheck in a plain Trainer of Lightning, on one rank, in plain PyTorch and under DeepSpeed on the CPU."""

import json
import math
from collections import deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

pytest.importorskip("lightning", reason="needs lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import MixedPrecision

from stepcheck import StepCheckError, Verdict
from stepcheck.lightning import StepCheck
from stepcheck.lightning.callback import build_copy
from stepcheck.lightning.resume import StateRecorder, differences
from stepcheck.lightning.strategy import CPUDeepSpeedStrategy
from stepcheck.lightning.train import reproducible_kernels

pytestmark = pytest.mark.usefixtures("own_process_group")

QUIET: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Two(LightningModule):
    """A module with two layers, so that a shard covers several parameters."""

    def __init__(self, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 10))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0].to(self.net[0].weight.dtype)).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        draw = torch.Generator().manual_seed(1)
        return DataLoader(
            TensorDataset(torch.randn(64, 24, generator=draw), torch.randint(0, 10, (64,), generator=draw)), 4
        )


def verdict_of(
    module: LightningModule,
    *callbacks: Callback,
    check: StepCheck | None = None,
    stage: int | None = None,
    steps: int = 4,
    **options: Any,
) -> Verdict:
    """Trains a module, with every step replayed, in plain PyTorch or at a ZeRO stage."""
    torch.manual_seed(0)
    check = check or StepCheck(replay_every=1, on_fault="warn")
    strategy = "auto" if stage is None else CPUDeepSpeedStrategy(stage=stage)
    options = {"strategy": strategy, "max_steps": steps, **QUIET, **options}
    Trainer(accelerator="cpu", devices=1, callbacks=[*callbacks, check], **options).fit(module)
    return check.verdict


class Factor(Enum):
    ONE, TWO = 1, 2


class Batch:
    def __init__(self, inputs: Tensor, labels: Tensor):
        self.inputs, self.labels = inputs, labels


class UncopiedBatch(Batch):
    def __deepcopy__(self, memo: Any) -> Any:
        raise OSError("no copy of a batch")


class Annealed(Two):
    """A module whose loss depends on attributes of several types, which each step changes. Another attribute cannot be
    copied."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.array, self.factor = np.float64(1), np.ones(1), Factor.ONE
        self.config = self.net[1].config = SimpleNamespace(beta=1.0, last=deque([1.0]), weight=torch.ones(1))
        self.hparams["gamma"] = 1.0

    def on_fit_start(self) -> None:
        self.batch = UncopiedBatch(torch.ones(1), torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.number, self.factor = np.float64(1 + batch_idx), Factor.TWO
        self.config.beta += 1
        config = self.net[1].config
        loss = super().training_step(batch, batch_idx) * float(self.number * self.array[0] * config.last[0])
        loss = loss * config.beta * config.weight * self.factor.value * self.hparams["gamma"]
        self.array += 0.5
        self.config.last.appendleft(2.0)
        self.config.weight = loss.detach().sigmoid()
        self.hparams["gamma"] *= 0.9
        return loss.squeeze()


class OwnBatches(Two):
    """A module that changes batches of a class of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch.inputs.mul_(2)
        return super().training_step((batch.inputs, batch.labels), batch_idx)

    def train_dataloader(self) -> Any:
        data: Any = super().train_dataloader().dataset
        return DataLoader(data, 4, collate_fn=lambda rows: self.batch(*map(torch.stack, zip(*rows, strict=True))))

    batch: Any = Batch


class Weighted(Two):
    """A module with a hook that changes the batch, the weight of the loss, and options of the optimizer before each
    training step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.loss_weight = 1 / (1 + batch_idx)
        batch[0].mul_(2)
        for group in self.trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.01 * (1 + self.trainer.global_step)
            group["lr"] = 0.001 * (1 + self.trainer.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_weight * super().training_step(batch, batch_idx)


class Momentum(Two):
    """A module with an encoder that no optimizer updates, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder: Any = nn.Linear(24, 16).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for mine, other in zip(self.encoder.parameters(), self.net[0].parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * other.data
        return super().training_step(batch, batch_idx) - self.encoder(batch[0]).mean() * self.net[2].bias.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.05)


class Scheduled(Two):
    interval = "step"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.001)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, total_steps=60), "interval": self.interval}]

    def train_dataloader(self) -> Any:
        return DataLoader(super().train_dataloader().dataset, 16)  # two steps of two micro-batches


class EachEpoch(Scheduled):
    interval = "epoch"


class Validated(Two):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]).float(), batch[1]))

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


VALIDATES: Any = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}


class Reads(Two):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", sum(each.grad.norm() for each in self.parameters() if each.grad is not None) + 0.0)


class Frozen(Two):
    """A module with a parameter group of frozen weights."""

    def configure_optimizers(self) -> Any:
        self.net[0].requires_grad_(False)
        return torch.optim.AdamW([{"params": self.net[0].parameters()}, {"params": self.net[2].parameters()}], lr=0.05)


class Cyclic(Frozen):
    """A module whose schedule keeps several numbers for each parameter group."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": CyclicLR(optimizer, 0.001, 0.1), "interval": "step"}]


class Skips(Two):
    """A module that leaves out the rest of an epoch, in the middle of a step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 4 else None


class Thaws(Frozen):
    """A module whose first layer is trained from the third step on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(self.trainer.global_step > 1)


class ClampsLater(Two):
    """A module whose gradients are clamped by hooks that it adds at the start of the training."""

    def on_train_start(self) -> None:
        for each in self.parameters():
            each.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class ClipsAsGiven(Two):
    """A module that logs before it clips as the Trainer would."""

    def configure_gradient_clipping(self, optimizer: Any, *arguments: Any, **options: Any) -> None:
        self.log("lr", optimizer.param_groups[0]["lr"])
        self.clip_gradients(optimizer, *arguments, **options)


MAY = (
    Annealed,
    OwnBatches,
    Weighted,
    Momentum,
    Scheduled,
    EachEpoch,
    Validated,
    Reads,
    Frozen,
    Cyclic,
    Skips,
    ClipsAsGiven,
)

OPTIONS: Any = {Validated: VALIDATES, ClipsAsGiven: {"gradient_clip_val": 0.1}}
"""Options of the Trainer, by module."""


@pytest.mark.parametrize("stage", [None, 2, 3])
@pytest.mark.parametrize("module", MAY)
def test_a_module_may_do_this(module: Any, stage: int | None):
    if module is Momentum and stage == 3:
        pytest.skip("ZeRO 3 has no weights to write outside of a module's forward pass")
    options = OPTIONS.get(module, {})
    verdict = verdict_of(module(), stage=stage, accumulate_grad_batches=2, **options)
    assert (verdict.outcome, verdict.steps) == ("agrees", 4), str(verdict)
    assert verdict.replayed == verdict.identical == 4, str(verdict)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_agrees_and_adam_counts_its_steps(stage: int):
    """DeepSpeed's own start of ZeRO 0 makes a step, which no check of later steps sees."""
    module = Two()
    verdict = verdict_of(module, stage=stage, accumulate_grad_batches=2, precision="bf16-mixed")
    assert (verdict.outcome, verdict.replayed) == ("agrees", 4), str(verdict)
    optimizer: Any = module.trainer.optimizers[0]
    assert {int(state["step"]) for state in optimizer.optimizer.state.values()} == {4}


class Changed(Two):
    """A module with a layer that changes after the check has copied it, as an engine may do at its start."""

    def on_fit_start(self) -> None:
        self.net[1].register_forward_hook(lambda part, inputs, output: output / 2)


def test_the_first_wrong_module_is_named():
    verdict = verdict_of(Changed(), check=StepCheck(steps=[1], outputs=True, on_fault="warn"), steps=1)
    assert "the output of net.1" in str(verdict), str(verdict)


class WrongGradient(Two):
    """A module whose first gradient is 0.1 % too large when it reaches the optimizer in step 15."""

    def configure_optimizers(self) -> Any:
        def enlarge(optimizer: Any, *_: Any) -> None:
            if self.trainer.global_step == 14:
                optimizer.param_groups[0]["params"][0].grad.mul_(1.001)

        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(enlarge)
        return optimizer


def test_a_small_fault_in_a_late_step_ends_the_training_at_this_step(tmp_path: Path):
    """The tolerance is the rounding error of one step, and does not grow from step to step."""
    check = StepCheck(file=tmp_path / "check.json")
    with pytest.raises(StepCheckError, match=r"step 15: all gradients together are 1\.001 times"):
        verdict_of(WrongGradient(), check=check, stage=2, steps=16)
    assert json.loads((tmp_path / "check.json").read_text())["outcome"] == "different"


def test_a_module_that_stays_in_evaluation_mode_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_EvaluationLoop, "_on_evaluation_model_train", lambda loop: None)
    verdict = verdict_of(Validated(), stage=2, **VALIDATES)
    assert (verdict.findings[0].step, verdict.outcome) == (3, "different")
    assert "in evaluation mode" in str(verdict)


class Changing(CPUDeepSpeedStrategy):
    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        started = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        optimizer.param_groups[0]["weight_decay"] = 0.5
        return started


class TwiceDivided(CPUDeepSpeedStrategy):
    """A strategy under which Lightning and the engine divide the loss, as under Lightning's own."""

    def setup_environment(self) -> None:
        backward = self.precision_plugin.backward
        super().setup_environment()
        self.precision_plugin.backward = backward


class Unclipped(CPUDeepSpeedStrategy):
    def _setup_model_and_optimizer(self, *args: Any, **options: Any) -> Any:
        self.config["gradient_clipping"] = 0.0
        return super()._setup_model_and_optimizer(*args, **options)


@pytest.mark.parametrize(
    ("strategy", "stage", "text"),
    [
        (Changing, 2, "weight_decay of net.0.weight is 0.5, and 0.01 was given"),
        (Changing, 3, "weight_decay of net.0.weight is 0.5, and 0.01 was given"),
        (TwiceDivided, 2, "the loss of micro-batch 1 is scaled by 0.5 instead of 1"),
        (Unclipped, 2, "the engine clips to 0.0, and 0.001 was given"),
    ],
)
def test_what_a_strategy_changes_is_found(strategy: Any, stage: int, text: str):
    verdict = verdict_of(Two(), strategy=strategy(stage=stage), accumulate_grad_batches=2, gradient_clip_val=1e-3)
    assert text in str(verdict)


@pytest.mark.parametrize("stage", [None, 2])
def test_a_schedule_that_steps_per_micro_batch_is_found(stage: int | None, monkeypatch: pytest.MonkeyPatch):
    def step_always(self: Any, interval: str, update_plateau_schedulers: bool) -> None:
        self._update_learning_rates(interval, update_plateau_schedulers)

    monkeypatch.setattr(_TrainingEpochLoop, "update_lr_schedulers", step_always)
    verdict = verdict_of(Scheduled(), stage=stage, accumulate_grad_batches=2)
    assert verdict.outcome == "different"
    assert "the learning-rate schedule was moved 2 times" in str(verdict.findings[0])


class Zeroes(Two):
    def on_after_backward(self) -> None:
        if self.net[2].bias.grad is not None:
            self.net[2].bias.grad.zero_()


class OwnClipping(Two):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 1e-3, "norm")


class ClippingCallback(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        clip_grad_norm_(pl_module.parameters(), 1e-3)


@pytest.mark.parametrize("stage", [None, 2])
@pytest.mark.parametrize(
    ("module", "callbacks", "hook"),
    [
        (Zeroes, (), "on_after_backward of Zeroes"),
        (OwnClipping, (), "configure_gradient_clipping of OwnClipping"),
        (Two, (ClippingCallback(),), "on_before_optimizer_step of ClippingCallback"),
    ],
)
def test_a_hook_that_changes_gradients_is_a_fault_where_deepspeed_ignores_it(
    module: Any, callbacks: tuple[Callback, ...], hook: str, stage: int | None
):
    verdict = verdict_of(module(), *callbacks, stage=stage, steps=2, accumulate_grad_batches=2)
    assert bool(verdict.findings) == (stage is not None), str(verdict)
    if stage is not None:
        assert f"{hook} changes gradients, and DeepSpeed ignores that" in str(verdict)


class FreezesAtStart(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(False)
        pl_module.net[1].factor = 2
        trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.5


def test_changes_at_the_start_of_the_training_are_not_the_engines():
    module = Two()
    module.net[1].factor = 1
    own = module.configure_optimizers = MethodType(Two.configure_optimizers, module)
    verdict = verdict_of(module, FreezesAtStart())
    assert (verdict.outcome, verdict.replayed) == ("agrees", 4), str(verdict)
    assert vars(module)["configure_optimizers"] is own


class CallsForward(Two):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


def test_a_compiled_module_is_replayed():
    compiled: Any = torch.compile(CallsForward(), backend="eager")
    verdict = verdict_of(compiled)
    assert (verdict.outcome, verdict.replayed) == ("agrees", 4), str(verdict)


def test_a_callback_of_lightning_may_replace_the_schedule():
    averaging = StochasticWeightAveraging(0.1, swa_epoch_start=1, annealing_epochs=2)
    verdict = verdict_of(EachEpoch(), averaging, steps=-1, max_epochs=4, limit_train_batches=2)
    assert (verdict.outcome, verdict.steps) == ("agrees", 8), str(verdict)


def test_a_resumed_run_counts_its_steps_and_continues_its_schedule(tmp_path: Path):
    first = Trainer(accelerator="cpu", max_steps=3, **QUIET)
    first.fit(Scheduled())
    first.save_checkpoint(tmp_path / "saved.ckpt")
    check = StepCheck(steps=[5])
    trainer = Trainer(accelerator="cpu", max_steps=6, callbacks=[check], **QUIET)
    trainer.fit(Scheduled(), ckpt_path=tmp_path / "saved.ckpt", weights_only=False)
    assert (check.verdict.outcome, check.verdict.steps, check.verdict.replayed) == ("agrees", 3, 1)


def test_a_difference_at_the_end_of_a_resumed_run_has_the_last_step():
    saved, resumed = StateRecorder(3), StateRecorder()
    saved.steps = 8
    saved.last["weight", "w"], resumed.last["weight", "w"] = 1, 2
    (found,) = differences(saved, resumed)
    assert str(found).startswith("step 8: w at the end differs"), found


def overflowing() -> Any:
    """Returns Lightning's plugin for float16, with a loss scale that overflows in the first steps."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**21, growth_interval=1000))


class Fused(Two):
    """A module with a fused optimizer, which divides gradients by the loss scale and skips steps itself."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, fused=True)


@pytest.mark.parametrize("module", [Scheduled, Fused])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_overflows_is_no_fault(accumulate: int, module: Any):
    options: Any = {"plugins": overflowing(), "accumulate_grad_batches": accumulate}
    verdict = verdict_of(module(), steps=12, **options)
    assert (verdict.outcome, verdict.findings) == ("agrees", []), str(verdict)
    assert 0 < verdict.skipped < 12
    assert verdict.steps == verdict.replayed == 12 - verdict.skipped
    assert not verdict.notes


class Normalises(Two):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))


def test_a_copy_has_the_synchronised_batch_norms_of_the_training():
    """DDP accepts these only on GPUs, so nothing is trained here."""
    trainer = Trainer(accelerator="cpu", devices=1, strategy="ddp", sync_batchnorm=True, **QUIET)
    trainer.strategy.connect(nn.SyncBatchNorm.convert_sync_batchnorm(Normalises()))  # pyright: ignore[reportArgumentType]
    copied = Normalises()
    build_copy(copied, trainer)
    assert isinstance(copied.net[1], nn.SyncBatchNorm)


@pytest.mark.parametrize("module", [Thaws, ClampsLater])
def test_gradients_are_seen_as_the_hooks_of_the_module_leave_them(module: Any):
    verdict = verdict_of(module(), accumulate_grad_batches=2)
    assert (verdict.outcome, verdict.steps, verdict.replayed) == ("agrees", 4, 4), str(verdict)
    assert ("hooks on parameters may change them" in str(verdict)) == (module is ClampsLater)


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter([(torch.randn(24), 0) for _ in range(12)])


class Streams(Two):
    def train_dataloader(self) -> Any:
        return DataLoader(Endless(), 4)


def test_steps_cannot_be_spread_over_a_run_of_unknown_length():
    verdict = verdict_of(Streams(), check=StepCheck(count=20), steps=-1, max_epochs=1)
    assert (verdict.steps, verdict.replayed) == (3, 0)
    assert "the number of steps is unknown" in str(verdict)


class ManualTwice(Two):
    """A module that steps two optimizers, one of them twice, and each one's schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        schedules: Any = self.lr_schedulers()
        for number in (0, 1, 1):
            loss = super().training_step(batch, batch_idx)
            optimizers[number].zero_grad()
            self.manual_backward(loss)
            optimizers[number].step()
            schedules[number].step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(self.net[number].parameters(), lr=0.05) for number in (0, 2)]
        return optimizers, [{"scheduler": LambdaLR(each, lambda _: 1.0), "interval": "step"} for each in optimizers]


def test_schedules_of_manual_optimization_are_the_modules_own():
    verdict = verdict_of(ManualTwice(), check=StepCheck(on_fault="warn"), steps=12)
    assert not verdict.findings, str(verdict)


def test_an_audit_that_fails_on_another_rank_ends_on_this_rank_too(monkeypatch: pytest.MonkeyPatch):
    reasons = iter(["", "", "no space on rank 1"])  # of the copy, of its setup and of the audit
    monkeypatch.setattr("stepcheck.lightning.callback.first_reason", lambda reason: next(reasons))
    verdict = verdict_of(Two())
    assert (verdict.outcome, verdict.not_judged) == ("not judged", {"all steps": "no space on rank 1"})


class Infinite(Two):
    """A module whose loss is NaN from the third micro-batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (math.nan if batch_idx > 1 else 1)


class SetUpOnce(Two):
    """A module whose setup cannot run twice."""

    done = False

    def setup(self, stage: str) -> None:
        assert not SetUpOnce.done, "was set up before"
        SetUpOnce.done = True


class Uncopied(Two):
    """A module with an attribute that cannot be copied when a step begins."""

    class State(torch.Tensor):
        def clone(self, *arguments: Any, **options: Any) -> Any:
            raise OSError("no copy")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.state = torch.zeros(1).as_subclass(Uncopied.State)


class Lazy(Two):
    """A module whose training step works only in the trained module."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.lightning_module is not self:
            raise KeyError("only for the strategy")
        return super().training_step(batch, batch_idx)


class Teacher(Two):
    """A module that gets another module after the check has copied it."""

    def on_fit_start(self) -> None:
        self.teacher = nn.Linear(24, 10)


class OwnBackward(Two):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class UncopiedBatches(OwnBatches):
    batch = UncopiedBatch


class NoOptimizer(Two):
    def configure_optimizers(self) -> None:
        return None


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (SetUpOnce, "AssertionError: was set up before"),
        (Uncopied, "OSError: no copy"),
        (Lazy, "KeyError: 'only for the strategy'"),
        (ManualTwice, "the module steps its optimizers itself"),
        (Teacher, "the module now has teacher, unlike the copy"),
        (OwnBackward, "a replay does not call the module's own backward"),
        (UncopiedBatches, "OSError: no copy of a batch"),
        (NoOptimizer, "configure_optimizers has returned no optimizer"),
        (lambda: Two(torch.optim.LBFGS), "LBFGS calls its closure several times in a step"),
        (lambda: Two(torch.optim.Adafactor), "Adafactor is not known to update each element on its own"),
    ],
    ids=[
        *("setup", "attribute", "training step", "manual", "teacher", "backward", "batch", "no optimizer"),
        *("LBFGS", "Adafactor"),
    ],
)
def test_what_the_check_cannot_follow_is_trained_and_named(build: Callable[[], Two], reason: str):
    module = build()
    verdict = verdict_of(module)
    assert module.trainer.global_step >= 4
    assert not verdict.findings
    assert reason in str(verdict)


def test_nan_that_autograd_computes_is_no_fault():
    verdict = verdict_of(Infinite())
    assert (verdict.outcome, verdict.findings) == ("not judged", []), str(verdict)
    assert not verdict_of(Infinite(), stage=2).findings  # ZeRO skips these steps


def test_the_file_of_the_verdict_gets_a_folder_and_ends_nothing_if_it_cannot_be_written(tmp_path: Path):
    tmp_path.joinpath("file").touch()
    for file in (tmp_path / "file" / "check.json", tmp_path / "new" / "check.json"):
        assert verdict_of(Two(), check=StepCheck(file=file)).outcome == "agrees"
    assert file.is_file()


def test_a_module_may_set_the_precision_of_float32():
    cudnn: Any = torch.backends.cudnn
    kinds: Any = torch.backends, cudnn, cudnn.conv, torch.backends.cuda.matmul
    before = [each.fp32_precision for each in kinds]
    for kind in kinds:
        with reproducible_kernels():
            kind.fp32_precision = "tf32"
        assert [each.fp32_precision for each in kinds] == before
        assert not cudnn.deterministic
