"""Defines `OutputCheck`, a step check that also compares the outputs of all submodules. Its verdict names the first
submodule whose output is wrong."""

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from cifar_zero.step_check.callback import StepCheck
from cifar_zero.strategies.hooks import tensors_in


class OutputCheck(StepCheck):
    """Checks steps as `StepCheck` does, and also compares the outputs of all submodules with their outputs in the
    replay. In a checked step, memory holds all outputs three times: from the strategy and from the two replays."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Registers hooks that keep the outputs of all submodules of the trained module and of its plain copy. The
        outermost module has no hook, because only the trained module would run it. A strategy may call the trained
        module itself, but a replay calls only the copy's `training_step`."""
        self._outputs: list[tuple[str, Tensor]] = []  # of the strategy, then of the two replays
        self._handles: list[Any] = []
        super().on_train_start(trainer, pl_module)
        if self._can_check:
            parts = [*pl_module.named_modules(), *self._plain_copy.module.named_modules()]
            self._handles = [part.register_forward_hook(partial(self._keep, name)) for name, part in parts if name]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Compares the gradients of the step, and the outputs of the submodules, with their values in the replay."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if self._replays is None:
            return
        count = len(self._outputs) // 3
        found, low, exact = (self._outputs[part * count :][:count] for part in range(3))
        for (name, output), (other, wanted), (_, high) in zip(found, low, exact, strict=True):
            if name != other or output.shape != wanted.shape:
                self.verdict.note("module outputs, because a copy calls modules in another order or with other inputs")
                return
            self._findings.compare("output", name, output, wanted, high, output.dtype)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes the hooks and prints the verdict."""
        for handle in self._handles:
            handle.remove()
        super().on_train_end(trainer, pl_module)

    def _forget(self) -> None:
        super()._forget()
        self._outputs.clear()

    def _keep(self, name: str, part: Any, inputs: Any, output: Any) -> None:
        if self._micro_batches:
            self._outputs += [(name, each.detach().clone()) for each in tensors_in(output) if each.is_floating_point()]
