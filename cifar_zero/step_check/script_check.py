"""Defines `ScriptCheck`, which compares each step that a module computes with the recorded step of a training script.

The script was run unchanged, and its steps were recorded. A plain copy of the module computes each step again, from the
script's weights, batches and random states. Because each step starts from the script's values, differences between
script and module do not accumulate over steps. The bound of an error is the rounding error of one step, as in
`StepCheck`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from cifar_zero.step_check.callback import StepCheck
from cifar_zero.step_check.findings import CONSTANT, constant_factor, off_by
from cifar_zero.step_check.recorded import Recorded, ScriptStep, options_of, part_of, samples_in
from cifar_zero.step_check.replay import gathered_losses, lowest
from cifar_zero.step_check.updates import clip_factor, torch_step, update_error, updated_by
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.hooks import Updated, tensors_in


class ScriptCheck(StepCheck):
    """Checks each step of a run while it trains, as `StepCheck` does, and checks that the module computes the recorded
    steps of the script."""

    needed = ("gradient", "update", "script's gradient")

    def __init__(self, recorded: Recorded):
        """Prepares the comparison with the steps in `recorded`. The training ends after the last recorded step."""
        super().__init__(every=1, on_fault="warn")
        self.recorded = recorded
        self._gradients: dict[str, Tensor] = {}  # the script's gradients in the step before
        self._hint = ""  # what training on several ranks changes
        self._rates: dict[str, dict[str, float]] = {}  # of each weight in the step before, in the module and the script

    def on_micro_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keeps the values that a replay needs. If the module trains on its own data, compares its micro-batch with the
        script's micro-batch."""
        super().on_micro_batch_start(trainer, pl_module, batch, batch_idx)
        number = len(self._micro_batches)
        if self.recorded.own_data and number:
            wanted = self.recorded.step(self._findings.step).micro_batches[number - 1].batch
            why = difference(batch, wanted)
            self._findings.add("script's batch", f"micro-batch {number}", math.inf if why else 0.0, 0.0, 1, why)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Replays the script's step with a plain copy of the module, and compares the results with the recorded
        results. Then checks the step of the strategy, as `StepCheck` does."""
        if self._micro_batches and hooks_of(trainer.strategy).ends_step():
            step = self.recorded.step(self._findings.step).renamed(self._plain_copy.module, self.recorded.renames)
            self._compare_step(step, trainer, pl_module, optimizer)
        super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Finishes the check of the strategy's step, as `StepCheck` does. Ends the training after the last recorded
        step."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step >= self.recorded.count:
            trainer.should_stop = True

    def _compare_step(self, step: ScriptStep, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        hooks = hooks_of(trainer.strategy)
        dtypes = self._compute_dtypes(trainer, module)
        ranks, rank = hooks.replica()
        if ranks > 1 and any(isinstance(each, _BatchNorm) for each in self._plain_copy.module.modules()):
            self._hint = "; batch norm uses only the samples of one rank"
        parts = []
        for each in step.micro_batches:
            part = trainer.precision_plugin.convert_input(part_of(each.batch, rank, ranks))
            parts.append(replace(each, batch=trainer.strategy.batch_to_device(part)))
        parts[0] = replace(parts[0], attributes=self._micro_batches[0].attributes)
        before = {**step.weights, **step.buffers}
        replays = self._on_all_ranks(lambda: self._replay(parts, before, dtypes), "the script's steps")
        replays = replays and self._after_hooks(replays, before)
        if replays is None:
            return
        low, exact = replays
        if step.draws and (ranks > 1 or not torch.equal(low.random_state, step.random_state_after)):
            self.verdict.note("the script's losses and gradients, because the module draws other random numbers")
        else:
            low_losses, exact_losses = gathered_losses(low, exact).mean(0)
            losses, dtype = torch.tensor(step.losses, dtype=torch.float64), lowest(dtypes.values())
            explain = partial(self._explain_loss, step)
            self._findings.compare_losses(losses, low_losses, exact_losses, dtype, "script's loss", explain)
            factor = clip_factor(low.gradients, hooks.clip_limit(trainer))
            for gradient in (*low.gradients.values(), *exact.gradients.values(), *exact.summed.values()):
                gradient.mul_(factor)
            found = {name: gradient.double() for name, gradient in step.gradients.items()}
            self._findings.compare_gradients(found, low, exact, dtypes, "script's gradient", self._explain_gradient)
            self._gradients = found
            self._findings.compare_buffers(step.buffers_after, low.buffers, exact.buffers, "script's buffer")
        for updated, names in updated_by(hooks, module, optimizer):
            trained = [name for name in names if name in step.options]
            for name in trained:
                self._compare_with_script(name, updated.group, step.options[name])
            # Only whole tensors are compared. The step check compares the updates of shards.
            if len(trained) == 1 and updated.target.shape == step.weights[trained[0]].shape:
                self._compare_update(trained[0], updated, step)

    def _explain_loss(self, step: ScriptStep, name: str, theirs: Tensor, ours: Tensor) -> str:
        factor, parts = float(ours / theirs), len(step.micro_batches)
        samples = samples_in(step.micro_batches[0].batch)
        for known, text in (
            (1 / samples, "a sum over the samples in the script, a mean in the module"),
            (samples, "a mean over the samples in the script, a sum in the module"),
            (
                1 / parts,
                f"either the script does not divide its loss by its {parts} micro-batches, or the module divides its "
                "loss, which Lightning divides too",
            ),
        ):
            if known != 1 and math.isclose(factor, known, rel_tol=CONSTANT):
                return text + self._hint
        return f"the module has {factor:.3g} times the script's{self._hint}"

    def _explain_gradient(self, name: str, theirs: Tensor, ours: Tensor) -> str:
        before = self._gradients.get(name)
        if before is not None and off_by(theirs - before, ours) < CONSTANT:
            return "the script adds the gradient of the previous step, because a call of zero_grad is missing"
        factor = constant_factor(ours, theirs)
        return self._hint if factor is None else f"the module has {factor:.3g} times the script's{self._hint}"

    def _compare_with_script(
        self, name: str, group: Mapping[str, Any], theirs: Mapping[str, tuple[float, ...]]
    ) -> None:
        ours = options_of(group)
        for key in ours.keys() & theirs.keys():
            off, pattern = 0.0, ""
            if not np.allclose(ours[key], theirs[key], rtol=1e-6, atol=0.0):
                off, pattern = math.inf, f"{key} {_shown(ours[key])} in the module, {_shown(theirs[key])} in the script"
            if key == "lr":
                rates = {"module": ours[key][0], "script": theirs[key][0]}
                before = self._rates.get(name, rates)
                stepped = [who for who in rates if rates[who] != before[who]]
                if off and len(stepped) == 1:
                    pattern += f", because only the {stepped[0]} steps its scheduler after this step"
                self._rates[name] = rates
            self._findings.add("script's option", name, off, 0.0, 1, pattern)

    def _compare_update(self, name: str, updated: Updated, step: ScriptStep) -> None:
        """Compares the script's update of a weight with the update that the module's optimizer makes from the same
        weight, gradient and optimizer state of the script.

        Args:
            name: Name of the weight.
            updated: The weight in the module's optimizer.
            step: The script's step.
        """
        target = updated.target
        before = step.weights[name].to(target.device, target.dtype)
        twin = Parameter(before.clone())
        twin.grad = step.gradients[name].to(target.device, target.dtype)
        state = {**step.state[name]}
        if state and not isinstance(state.get("step"), Tensor):
            state["step"] = torch.tensor(float(self._findings.step - 1))  # DeepSpeed's Adam counts steps in its groups
        state = tree_map_only(Tensor, lambda value: value.to(target.device, copy=True), state)
        torch_step(updated, twin, state)
        error = update_error(step.weights_after[name].to(before), before, twin.detach())
        self._findings.add("script's update", name, *error, before.numel())


def difference(found: Any, wanted: Any) -> str:
    """Returns a text that explains how two batches differ, or an empty string if they are equal bit by bit.

    Args:
        found: The module's batch.
        wanted: The script's batch.
    """
    ours, theirs = tensors_in(found), tensors_in(wanted)
    shapes = [[tuple(each.shape) for each in batch] for batch in (ours, theirs)]
    if shapes[0] != shapes[1]:
        return f"shapes {shapes[0]} in the module, {shapes[1]} in the script"
    for own, other in zip(ours, theirs, strict=True):
        y, x = own.cpu().double(), other.cpu().double()
        if torch.equal(y, x):
            continue
        spread = x - x.mean()
        slope = float((spread * y).sum() / spread.square().sum().clamp(min=1e-300))  # slope of the line that fits best
        shift = float(y.mean() - slope * x.mean())
        if own.is_floating_point() and off_by(slope * x + shift, y) < CONSTANT:
            line = f"{slope:.4g} times the script's plus {round(shift, 6):g}"
            return f"the module's values are {line}, so the normalisation differs"
        return "the samples or their order differ"
    return ""


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
