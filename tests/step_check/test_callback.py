"""Tests StepCheck in a plain Trainer of Lightning, on one rank, with state that it follows, cases that it cannot judge,
and faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from cifar_zero.comparison import StepCheck
from cifar_zero.core.errors import RunError
from cifar_zero.step_check.outputs import OutputCheck
from tests.users_code.own_modules import images


class Module(LightningModule):
    """Trains a linear layer. Subclasses may change its loss."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.net, self.optimizer = torch.nn.Linear(24, 10), optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)  # pyright: ignore

    def train_dataloader(self) -> Any:
        return DataLoader(images(48), 8)


class Counting(Module):
    """Has a loss that grows with three kinds of state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.hidden = 0, list[dict[str, float]](), torch.zeros(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + self.calls + len(self.seen) + self.hidden.item())
        self.calls += 1
        self.seen.append({"loss": loss.item()})
        self.hidden = self.hidden + 1
        return loss


class Faulty(Module):
    """Adds `off` to the bias after each optimizer step, from step `first` on."""

    def __init__(self, first: int = 1, off: float = 1e-3) -> None:
        super().__init__()
        self.first, self.off = first, off

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        super().optimizer_step(*arguments, **options)
        if self.trainer.global_step + 1 >= self.first:
            self.net.bias.data.add_(self.off)


def trained(module: LightningModule, **options: Any) -> StepCheck:
    check = StepCheck(every=1, **options)
    fit(module, check)
    return check


def fit(module: LightningModule, check: StepCheck, steps: int = 5) -> None:
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(accelerator="cpu", max_steps=steps, accumulate_grad_batches=2, callbacks=[check], **quiet).fit(module)


def test_state_in_attributes_is_followed():
    verdict = trained(Counting()).verdict
    assert verdict.outcome == "bit-identical", str(verdict)
    assert (verdict.steps, verdict.judged) == ([1, 2, 3, 4, 5], 1.0)


def test_an_optimizer_that_calls_the_loss_several_times_is_not_judged():
    verdict = trained(Module(torch.optim.LBFGS)).verdict
    assert (verdict.outcome, verdict.faults) == ("not judged", [])
    assert "steps, because computing them again fails" in str(verdict)


def test_a_wrong_update_raises_at_its_step():
    with pytest.raises(RunError, match=r"step 1: update of net\.bias"):
        trained(Faulty())


def test_a_wrong_update_is_counted():
    verdict = trained(Faulty(), on_fault="warn").verdict
    assert verdict.steps == [1, 2, 3, 4, 5]
    assert {fault.name for fault in verdict.faults} == {"net.bias"}


class LateGradient(Module):
    """Has a gradient of the bias that is 0.1 % too large in step 15."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 14:
            assert self.net.bias.grad is not None
            self.net.bias.grad.mul_(1.001)


@pytest.mark.parametrize("module", [Faulty(first=15, off=1e-5), LateGradient()], ids=["update", "gradient"])
def test_a_small_fault_is_found_at_a_late_step_too(module: Module):
    """The bound is the rounding error of one step, and does not grow from step to step."""
    check = StepCheck(every=1, on_fault="warn")
    fit(module, check, steps=15)
    assert check.verdict.steps == [*range(1, 16)]
    assert {(fault.step, fault.name) for fault in check.verdict.faults} == {(15, "net.bias")}


class Deep(Module):
    """Has a second layer that is changed after the copy was made, as an engine may do at its start."""

    def __init__(self) -> None:
        super().__init__()
        self.tanh = torch.nn.Tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.tanh(self.net(batch[0])), batch[1])

    def on_fit_start(self) -> None:
        def halved(part: Any, inputs: Any, output: Any) -> Any:
            return output / 2

        self.tanh.register_forward_hook(halved)


@pytest.mark.parametrize(
    ("module", "where"),
    [(Deep, "the first module whose output differs is tanh"), (Faulty, "the outputs of all modules are correct")],
)
def test_the_first_wrong_module_is_named(module: type[Module], where: str):
    check = OutputCheck(every=1, on_fault="warn")
    fit(module(), check)
    assert str(check.verdict).endswith(f"; {where}")


def test_right_outputs_are_counted():
    check = OutputCheck(every=1)
    fit(Module(), check)
    assert check.verdict.outcome == "bit-identical"
    assert check.verdict.tallies["output"].elements == 5 * 2 * 8 * 10
