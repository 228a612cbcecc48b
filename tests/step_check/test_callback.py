"""Tests StepCheck and OutputCheck in a plain Trainer of Lightning, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from cifar_zero.comparison import StepCheck
from cifar_zero.core.errors import RunError
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


def verdict_on(module: LightningModule, check: StepCheck, steps: int = 5) -> Verdict:
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(accelerator="cpu", max_steps=steps, accumulate_grad_batches=2, callbacks=[check], **quiet).fit(module)
    return check.verdict


def test_state_in_attributes_and_outputs_are_followed():
    verdict = verdict_on(Counting(), OutputCheck(every=1))
    assert verdict.outcome == "bit-identical", str(verdict)
    assert (verdict.steps, verdict.judged) == ([1, 2, 3, 4, 5], 1.0)
    assert verdict.tallies["output"].elements == 5 * 2 * 4 * 10


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
