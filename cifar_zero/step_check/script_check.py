"""Defines `ScriptCheck`, which compares each step that a module computes with the step that a training script computed.

The script ran before, unchanged, and its steps were recorded. A plain copy of the module computes each step again, from
the script's weights, batches and random states. So the two trainings do not drift apart, and the bound is the rounding
error of one step, as in a step check.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from cifar_zero.launch.collectives import gather
from cifar_zero.step_check.callback import CONSTANT, LEAST, ROUNDINGS, StepCheck, constant_factor, norm_of
from cifar_zero.step_check.recorded import Recorded, ScriptStep, matched, options_of, part_of, samples_in, shapes_of
from cifar_zero.step_check.replay import lowest
from cifar_zero.step_check.updates import UPDATE, off_by, torch_step
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.hooks import Updated, tensors_in


class ScriptCheck(StepCheck):
    """Checks each step of a training in place, and that the module computes the script's steps."""

    def __init__(self, recorded: Recorded):
        """Prepares the comparison. The training ends after the last recorded step."""
        super().__init__(every=1, on_fault="warn")
        self.recorded = recorded
        self._gradients: dict[str, Tensor] = {}  # the script's gradients in the step before
        self._hint = ""  # what training on several ranks changes
        self._rates: dict[str, tuple[float, float]] = {}  # learning rates of module and script in the step before

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Copies the module, and makes a verdict on the script's gradients necessary. Without one, the outcome of the
        check is "not judged"."""
        super().setup(trainer, pl_module, stage)
        self.verdict.needed = (*self.verdict.needed, "script's gradient")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keeps what a replay needs. If the module trains on its own data, compares its batch with the script's."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        number = len(self._micro_batches)
        if self.recorded.own_data and number:
            wanted = self.recorded.step(self._step).micro_batches[number - 1].batch
            why = difference(batch, wanted)
            self._add("script's batch", f"micro-batch {number}", math.inf if why else 0.0, 0.0, 1, why)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Replays the script's step with the module and compares the results, then checks the strategy's own step."""
        if self._micro_batches and hooks_of(trainer.strategy).ends_step():
            self._compare_step(self.recorded.step(self._step), trainer, pl_module, optimizer)
        super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compares the rest of the step, and ends the training after the last recorded step."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step >= self.recorded.count:
            trainer.should_stop = True

    def _compare_step(self, step: ScriptStep, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        hooks = hooks_of(trainer.strategy)
        names = matched(step.weights, self._replica.shapes, self.recorded.renames)
        buffer_names = matched(step.buffers, shapes_of(module.named_buffers()), self.recorded.renames)
        dtypes = self._compute_dtypes(trainer, module)
        ranks, rank = hooks.replica()
        if ranks > 1 and any(isinstance(each, _BatchNorm) for each in self._replica.module.modules()):
            self._hint = "; batch norm uses only the samples of one rank"
        parts = []
        for each in step.micro_batches:
            part = trainer.precision_plugin.convert_input(part_of(each.batch, rank, ranks))
            parts.append(replace(each, batch=trainer.strategy.batch_to_device(part)))
        weights, buffers = _named(step.weights, names), _named(step.buffers, buffer_names)
        replays = self._on_all_ranks(
            lambda: self._replay(trainer, parts, weights, dtypes, buffers=buffers), "the script's steps"
        )
        if replays is None:
            return
        low, exact = replays
        low.average()
        exact.average()
        if step.draws and (ranks > 1 or not torch.equal(low.random_state, step.random_state_after)):
            self.verdict.note("the script's losses and gradients, because the module draws other random numbers")
        else:
            self._compare_losses_with(step, low.losses, exact.losses, lowest(dtypes.values()))
            _clip([low.gradients, exact.gradients], hooks.clip_limit(trainer))
            found = {name: gradient.double() for name, gradient in _named(step.gradients, names).items()}
            self._compare_gradients(found, low.gradients, exact.gradients, dtypes, "script's gradient", self._explain)
            self._gradients = found
            after = _named(step.buffers_after, buffer_names)
            self._compare_buffers(after, low.buffers, exact.buffers, "script's buffer")
        parameters = dict(module.named_parameters())
        own = {id(parameters[name]): plain for name, plain in hooks.plain_names(parameters).items()}
        scripts = {ours: name for name, ours in names.items() if name in step.options}
        for updated in hooks.updated(optimizer):
            found = [scripts[own[id(each)]] for each in updated.parameters if own[id(each)] in scripts]
            for name in found:
                self._compare_options(names[name], updated.group, step.options[name])
            # Only whole tensors are compared. The step check compares updates of shards with torch's optimizer's.
            if len(found) == 1 and updated.target.shape == step.weights[found[0]].shape:
                self._compare_update(names[found[0]], updated, step, found[0])

    def _compare_losses_with(
        self, step: ScriptStep, of_low: Sequence[float], of_exact: Sequence[float], dtype: torch.dtype
    ) -> None:
        of_ranks = gather((of_low, of_exact))
        for number, loss in enumerate(step.losses):
            low = fmean(lows[number] for lows, _ in of_ranks)
            exact = fmean(exacts[number] for _, exacts in of_ranks)
            size = max(abs(exact), 1e-30)
            allowed = ROUNDINGS * abs(low - exact) / size + LEAST * torch.finfo(dtype).eps
            off, pattern = abs(loss - low) / size, ""
            if off > allowed and loss:
                pattern = in_words(low / loss, step) + self._hint
            self._add("script's loss", f"micro-batch {number + 1}", off, allowed, 1, pattern)

    def _explain(self, name: str, theirs: Tensor, ours: Tensor) -> str:
        before = self._gradients.get(name)
        if before is not None and off_by(theirs - before, ours) < CONSTANT:
            return "the script adds the gradient of the previous step, because a call of zero_grad is missing"
        factor = constant_factor(ours, theirs)
        return self._hint if factor is None else f"the module has {factor:.3g} times the script's{self._hint}"

    def _compare_options(self, name: str, group: Mapping[str, Any], theirs: Mapping[str, tuple[float, ...]]) -> None:
        ours = options_of(group)
        for key in ours.keys() & theirs.keys():
            off, pattern = 0.0, ""
            if not np.allclose(ours[key], theirs[key], rtol=1e-6, atol=0.0):
                off, pattern = math.inf, f"{key} {_shown(ours[key])} in the module, {_shown(theirs[key])} in the script"
            if key == "lr":
                rates = ours[key][0], theirs[key][0]
                pattern += how_scheduled(*self._rates.get(name, rates), *rates) if off else ""
                self._rates[name] = rates
            self._add("script's option", name, off, 0.0, 1, pattern)

    def _compare_update(self, name: str, updated: Updated, step: ScriptStep, theirs: str) -> None:
        """Compares the script's update with the one that the module's optimizer makes of the script's gradient."""
        target = updated.target
        before = step.weights[theirs].to(target.device, target.dtype)
        twin = Parameter(before.clone())
        twin.grad = step.gradients[theirs].to(target.device, target.dtype)
        state = {**step.state[theirs]}
        if state and not isinstance(state.get("step"), Tensor):
            state["step"] = torch.tensor(float(self._step - 1))  # DeepSpeed's Adam counts steps in its groups
        state = tree_map_only(Tensor, lambda value: value.to(target.device, copy=True), state)
        torch_step(updated, twin, state)
        ours = (twin.detach() - before).double()
        size = float(ours.norm())
        script = (step.weights_after[theirs].to(before) - before).double()
        off = float((script - ours).norm()) / max(size, 1e-30)
        rounding = torch.finfo(target.dtype).eps * float(before.double().norm()) / max(size, 1e-30)
        self._add("script's update", name, off, UPDATE + rounding, before.numel())


def _named(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    return {names[name]: tensor.clone() for name, tensor in tensors.items()}


def _clip(of_replays: Sequence[Mapping[str, Tensor]], limit: float) -> None:
    """Clips the gradients of all replays in place, by the factor that clips the first replay's gradients to the norm
    `limit`."""
    norm = norm_of(of_replays[0])
    if limit and norm > limit:
        for gradients in of_replays:
            for gradient in gradients.values():
                gradient.mul_(limit / (norm + 1e-6))


def in_words(factor: float, step: ScriptStep) -> str:
    """Returns a text that explains why the module's loss is `factor` times the script's."""
    parts, samples = len(step.micro_batches), samples_in(step.micro_batches[0].batch)
    for known, text in (
        (1 / samples, "a sum over the samples in the script, a mean in the module"),
        (samples, "a mean over the samples in the script, a sum in the module"),
        (1 / parts, f"the script does not divide its loss by its {parts} micro-batches"),
    ):
        if known != 1 and math.isclose(factor, known, rel_tol=CONSTANT):
            return text
    return f"the module has {factor:.3g} times the script's"


def how_scheduled(ours_before: float, theirs_before: float, ours: float, theirs: float) -> str:
    """Returns a text if only the module, or only the script, has stepped its scheduler since the step before, else an
    empty string."""
    if ours != ours_before and theirs == theirs_before:
        return ", because only the module steps its scheduler after this step"
    if ours == ours_before and theirs != theirs_before:
        return ", because only the script steps its scheduler after this step"
    return ""


def difference(found: Any, wanted: Any) -> str:
    """Returns a text on how a module's batch differs from a script's. It is empty if they are equal bit by bit."""
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
