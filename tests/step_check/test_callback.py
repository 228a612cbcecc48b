"""Tests StepCheck and OutputCheck in a plain Trainer of Lightning, on one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from cifar_zero.core.errors import RunError
from cifar_zero.step_check.callback import StepCheck
from cifar_zero.step_check.outputs import OutputCheck
from cifar_zero.step_check.verdict import Verdict
from tests.users_code.own_modules import Own


class Module(Own):
    """Trains a linear layer."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.net, self.optimizer = torch.nn.Linear(24, 10), optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)  # pyright: ignore


class Counting(Module):
    """Multiplies the loss by a factor that grows with a number, a list and a tensor in the module's attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.hidden = 0, list[dict[str, float]](), torch.zeros(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + self.calls + len(self.seen) + self.hidden.item())
        self.calls += 1
        self.seen.append({"loss": loss.item()})
        self.hidden = self.hidden + 1
        return loss


class Weighted(Module):
    """Sets a weight of the loss, and changes the batch, in a hook that runs before each training step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.loss_weight = 1 / (1 + batch_idx)
        batch[0].mul_(2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_weight * super().training_step(batch, batch_idx)


class Momentum(Module):
    """Has an encoder that no optimizer updates, as MoCo and BYOL have. It follows the trained layer, in the training
    step or in a callback."""

    def __init__(self, by_callback: bool) -> None:
        super().__init__()
        self.encoder, self.by_callback = torch.nn.Linear(24, 10).requires_grad_(False), by_callback

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.by_callback:
            self.follow()
        return super().training_step(batch, batch_idx) - self.encoder(batch[0]).mean() * self.net.bias.sum()

    def follow(self) -> None:
        for mine, other in zip(self.encoder.parameters(), self.net.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * other.data


class Follow(Callback):
    """Updates the encoder of `Momentum` after each micro-batch, as BYOL's callback does."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *arguments: Any) -> None:
        pl_module.follow()


class Infinite(Module):
    """Computes a loss that is NaN from the third micro-batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (math.nan if batch_idx > 1 else 1)


class WrongUpdate(Module):
    """Adds 0.0001 to the bias after the optimizer step `step`."""

    def __init__(self, step: int = 1) -> None:
        super().__init__()
        self.step = step

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        super().optimizer_step(*arguments, **options)
        if self.trainer.global_step + 1 == self.step:
            self.net.bias.data.add_(1e-4)


class WrongGradient(Module):
    """Computes a gradient of the bias that is 0.1 % too large in step 15."""

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        super().backward(loss, *arguments, **options)
        if self.trainer.global_step == 14:
            assert self.net.bias.grad is not None
            self.net.bias.grad.mul_(1.001)


def verdict_on(
    module: LightningModule, check: StepCheck, steps: int = 5, before: Sequence[Callback] = (), accumulate: int = 2
) -> Verdict:
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [*before, check]
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, accumulate_grad_batches=accumulate, callbacks=callbacks, **quiet
    )
    trainer.fit(module)
    return check.verdict


def test_state_in_attributes_and_outputs_are_followed():
    verdict = verdict_on(Counting(), OutputCheck(every=1))
    assert verdict.outcome == "bit-identical", str(verdict)
    assert (verdict.steps, verdict.judged) == ([1, 2, 3, 4, 5], 1.0)
    assert verdict.tallies["output"].elements == 5 * 2 * 4 * 10


@pytest.mark.parametrize(
    ("module", "before", "accumulate", "not_checked"),
    [
        (Weighted(), [], 2, []),
        (Momentum(False), [], 2, []),
        (
            Momentum(True),
            [Follow()],
            1,
            ["what changes between two steps, because on_train_batch_end of Follow may change weights"],
        ),
    ],
    ids=["hook", "training step", "callback"],
)
def test_what_a_module_changes_itself_is_no_fault(
    module: Module, before: list[Callback], accumulate: int, not_checked: list[str]
):
    verdict = verdict_on(module, StepCheck(every=1), before=before, accumulate=accumulate)
    assert (verdict.judged, verdict.not_checked) == (1.0, not_checked)
    assert verdict.outcome == ("within rounding" if not_checked else "bit-identical"), str(verdict)


def test_nan_that_plain_pytorch_computes_too_is_not_judged():
    verdict = verdict_on(Infinite(), StepCheck(every=1))
    assert (verdict.outcome, verdict.faults, verdict.steps) == ("not judged", [], [1, 2, 3, 4, 5])
    assert "parts of step 2, because plain PyTorch computes NaN or infinite values too" in str(verdict)


def test_an_optimizer_that_calls_the_loss_several_times_is_not_judged():
    verdict = verdict_on(Module(torch.optim.LBFGS), StepCheck(every=1))
    assert (verdict.outcome, verdict.faults) == ("not judged", [])
    assert "steps, because computing them again fails" in str(verdict)


def test_a_wrong_update_raises_at_its_step():
    with pytest.raises(RunError, match=r"step 1: update of net\.bias"):
        verdict_on(WrongUpdate(), StepCheck(every=1))


@pytest.mark.parametrize("module", [WrongUpdate(step=15), WrongGradient()], ids=["update", "gradient"])
def test_a_small_fault_in_a_late_step_is_found_in_this_step_only(module: Module):
    """The bound is the rounding error of one step, and does not grow from step to step."""
    verdict = verdict_on(module, StepCheck(every=1, on_fault="warn"), steps=16)
    assert verdict.steps == [*range(1, 17)]
    assert {(fault.step, fault.name) for fault in verdict.faults} == {(15, "net.bias")}


class Changed(Module):
    """Has a second layer that is changed after the check has copied the module, as an engine may do at its start."""

    def __init__(self) -> None:
        super().__init__()
        self.tanh = torch.nn.Tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.tanh(self.net(batch[0])), batch[1])

    def on_fit_start(self) -> None:
        def halved(part: Any, inputs: Any, output: Any) -> Any:
            return output / 2

        self.tanh.register_forward_hook(halved)


def test_the_first_wrong_module_is_named():
    verdict = verdict_on(Changed(), OutputCheck(every=1, on_fault="warn"), steps=1)
    assert str(verdict).endswith("; the first module whose output differs is tanh")
