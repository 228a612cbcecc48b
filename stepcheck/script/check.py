"""Trains a LightningModule from the weights and on the batches of a script's recorded steps, and compares each step."""

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from stepcheck.engines.plain import overflows
from stepcheck.lightning.callback import INTERNAL, build_copy, loss_of, loss_scale, without_scale
from stepcheck.lightning.case import QUIET
from stepcheck.lightning.user_classes import fit
from stepcheck.patch import wrap_function
from stepcheck.replay.compare import VISIBLE, Compared, compare, identical, loss_errors, mean_square, worst
from stepcheck.replay.plain_copy import Computed, MicroBatch, PlainCopy, buffers_of, cloned, function_of
from stepcheck.replay.random_state import random_state, random_state_kept, same_random_state, set_random_state
from stepcheck.replay.replay import refusing_calls
from stepcheck.script.data import RecordedBatches, compare_batches
from stepcheck.script.explain import explain_gradient, explain_loss
from stepcheck.script.recording import (
    RecordedTensor,
    Recording,
    match_names,
    settings,
    update_options,
    use_settings,
)
from stepcheck.updates import update_errors
from stepcheck.usage import UsageError, short
from stepcheck.verdict import ENOUGH, Outcome, Verdict

COMPUTED, UPDATES = "losses, gradients and buffers", "updates"
"""What must be judged in each step for an agreement. If anything else cannot be judged, the verdict only says so."""


class ScriptVerdict(Verdict):
    """The verdict on a module that computes a script's steps."""

    @property
    def outcome(self) -> Outcome:
        if not self.findings and {COMPUTED, UPDATES} & self.not_judged.keys():
            return "not judged"
        return super().outcome


class ScriptCheck(Callback):
    """Compares the steps of a training with a script's steps. Each step starts from the script's weights, buffers and
    random state, so differences do not accumulate. `verdict` has the result."""

    def __init__(self, recording: Recording, renames: Mapping[str, str]):
        self.recording, self.renames = recording, renames
        self.verdict = ScriptVerdict(skipped=recording.skipped)
        self.step: Any = None  # the script's step that runs
        self.number = 0  # of this step, from 1
        self._trainer: Any = None
        self._module: Any = None
        self._copy: Any = None  # computes steps in float64
        self._caller: str | None = None  # the attribute of the copy that calls the trained module
        self._names: dict[str, str] = {}  # the module's names of weights and buffers, by the script's
        self._computed = Computed()  # what the module computes in this step
        self._micro_batches: list[Any] = []
        self._draws_alike = True  # whether the module has drawn the script's random numbers in this step
        # Weights and buffers of the script in this step, by the module's names.
        self._values: dict[str, RecordedTensor] = {}
        self._before: dict[str, RecordedTensor] = {}  # and in the step before
        self._rates: dict[str, tuple[float, float]] = {}  # of each weight in the step before, in module and script

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer, self._module = trainer, pl_module
        try:
            self._copy = copy.deepcopy(pl_module)
        except Exception as error:  # an attribute of the user's may raise anything
            raise UsageError(f"the module cannot be copied ({type(error).__name__}: {short(error, 200)})") from error
        vars(self._copy).pop("train_dataloader", None)  # of check_script

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Applies the script's numerical settings, matches the names of weights and buffers, and registers the hooks.
        Raises UsageError if the weights do not match. Buffers that do not match are not judged."""
        use_settings(self.recording.settings)
        build_copy(self._copy, trainer)
        self._caller = function_of(pl_module, self._copy)
        self._copy = PlainCopy(self._copy, INTERNAL)
        values = self.recording.step(1).values
        weights, buffers = (
            {name: each.before for name, each in values.items() if each.is_weight is is_weight}
            for is_weight in (True, False)
        )
        self._names = match_names(weights, dict(pl_module.named_parameters()), self.renames)
        try:
            self._names |= match_names(buffers, dict(pl_module.named_buffers()), self.renames)
        except UsageError as error:
            self.verdict.not_judged["buffers"] = str(error)
        wrap_function(trainer.strategy, "training_step", self._training_step)
        optimizer: Any = trainer.optimizers[0]
        optimizer.register_step_post_hook(lambda optimizer, *_: self._after_step(optimizer))

    def _training_step(self, training_step: Callable[..., Any], *arguments: Any) -> Any:
        """Sets the random state that the script had at this micro-batch and, at the first micro-batch of a step, the
        script's weights and buffers. Runs after all hooks that may change the micro-batch."""
        if len(self._micro_batches) in (0, self.recording.accumulate):
            self._begin_step()
        state = self.step.states[len(self._micro_batches)]
        compute, attributes = partial(loss_of, self._trainer), self._copy.state_of(self._module)
        self._micro_batches.append(MicroBatch(compute, cloned(arguments), state, attributes))
        set_random_state(state)
        return training_step(*arguments)

    def _begin_step(self) -> None:
        self.number += 1
        self._before, self.step = self._values, self.recording.step(self.number)
        self._values = {self._names[name]: each for name, each in self.step.values.items() if name in self._names}
        self._computed, self._micro_batches, self._draws_alike = Computed(), [], True
        weights = dict(self._module.named_parameters())
        tensors = {**weights, **dict(self._module.named_buffers())}
        for name, value in self._values.items():
            tensors[name].data.copy_(value.before)
        trained = [name for name, weight in weights.items() if weight.requires_grad]
        self._copy.keep(
            {name: each.detach().clone() for name, each in weights.items()}, buffers_of(self._module), trained
        )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Records the loss of a micro-batch without the loss scale, and whether its forward pass drew the script's
        random numbers."""
        number = len(self._computed.losses)
        self._computed.losses.append(without_scale(trainer, loss))
        self._draws_alike &= same_random_state(random_state(), self.step.states_after[number])

    def _after_step(self, optimizer: Any) -> None:
        if not self._micro_batches or overflows(optimizer):  # the step that repeats the script's update
            return
        weights: dict[str, Any] = {
            name: each for name, each in self._module.named_parameters() if each.grad is not None
        }
        for name, weight in weights.items():
            self._computed.add(name, weight.grad.to_dense())
        self._computed.buffers = buffers_of(self._module)
        self.verdict.steps += 1
        self._compare_gradients()
        self._micro_batches = []
        names = {id(each): name for name, each in weights.items()}
        self._compare_options(optimizer, names)
        self._compare_update(optimizer, weights)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        ended = len(self._micro_batches) in (0, self.recording.accumulate)  # 0 unless a gradient overflowed
        trainer.should_stop = ended and self.number == self.recording.steps

    # Losses, gradients and buffers
    def _compare_gradients(self) -> None:
        script, module = Computed(), self._computed
        device = self._trainer.strategy.root_device
        script.losses = [loss.to(device) for loss in self.step.losses]
        for name, value in self._values.items():
            if value.gradient is not None:
                script.add(name, value.gradient.to(device).to_dense())
            elif not value.is_weight:
                script.buffers[name] = value.after.to(device)
        elements = sum(each.numel() for each in module.gradients.values())
        self.verdict.values_in_all += elements
        if identical(script, module):
            self.verdict.replayed += 1
            self.verdict.identical += 1
            self.verdict.values += elements
            return
        try:
            exact = self._exact()
        except Exception as error:  # the module's code may raise anything in float64
            self._leave_out(f"a copy of the module fails ({type(error).__name__}: {short(error, 200)})")
            return
        rounding = mean_square(loss_errors(module, exact))
        compared = [*compare(script, module, exact, self._copy.lowest, rounding)]
        if not self._draws_alike and any(each.share > 1 for each in compared):
            self._leave_out("the module draws other random numbers than the script")
            return
        gradients = [each for each in compared if each.kind == "replayed gradient"]
        judged = sum(each.elements for each in gradients if each.tolerance < VISIBLE)
        self.verdict.values += judged
        if judged < ENOUGH * elements:
            self._leave_out(f"rounding errors hide more than {1 - ENOUGH:.0%} of the gradients")
        else:
            self.verdict.replayed += 1
        for each in worst(compared):
            self.verdict.add(self.number, each.kind, each.share, self._describe(each, script))

    def _leave_out(self, why: str) -> None:
        """Records why the losses, gradients and buffers of this step are not judged. Of several steps, the verdict
        names the first."""
        self.verdict.not_judged.setdefault(COMPUTED, f"in step {self.number} {why}")

    def _exact(self) -> Computed:
        """Returns the step, computed in float64 by a copy. The copy does not clip, and has no hooks that change
        gradients. So each gradient is the module's, without the rounding error that the copy shows. Raises an error if
        the copy calls the trained module, or if the module's code fails."""
        if self._caller:
            raise RuntimeError(f"{self._caller} has a function that calls the trained module, also in a copy")
        module = self._computed
        scale = loss_scale(self._trainer)  # without it, gradients in float16 may underflow
        self._copy.check_large(self._module)
        with random_state_kept(), refusing_calls(self._module):
            low, exact = (self._copy.compute(self._micro_batches, scale=scale, exact=each) for each in (False, True))
        for name in exact.gradients.keys() & module.gradients.keys():
            actual, raw = module.gradients[name].double(), low.gradients[name].double()
            factor = float(actual.norm() / raw.norm()) if raw.any() else 1 / scale
            exact.gradients[name] = actual + factor * (exact.gradients[name] - raw)
            exact.summands[name] = exact.summands[name] * factor
        return exact

    def _describe(self, each: Compared, script: Computed) -> str:
        what = f"the script's {each.kind.removeprefix('replayed ')} of {each.name}"
        if each.is_missing:
            return f"{what} is missing in the {'module' if each.name in script.gradients else 'script'}"
        why = ""
        if each.share > 1 and each.kind == "replayed loss":
            number = int(each.name.split()[-1]) - 1
            why = explain_loss(script.losses[number], self._computed.losses[number], self.step)
        elif each.share > 1 and each.kind == "replayed gradient":
            before = self._before[each.name].gradient if self._before else None
            why = explain_gradient(script.gradients[each.name], self._computed.gradients[each.name], before)
        return f"{what} is off by {each.error:.2g} of its norm (tolerance {each.tolerance:.1e})" + (why and f"; {why}")

    # The optimizer
    def _compare_options(self, optimizer: Any, names: Mapping[int, str]) -> None:
        """Compares the options of the parameter groups. Of each option, the first wrong value is reported."""
        wrong: dict[str, str] = {}
        for group in optimizer.param_groups:
            module = update_options(group)
            for name in (names[id(each)] for each in group["params"] if id(each) in names):
                script = self._values[name].options
                for key in module.keys() & script.keys():
                    if key == "lr" and self.recording.skipped:
                        self.verdict.not_judged["learning rates"] = "the script skipped steps that overflowed"
                        continue
                    own, other = module[key], script[key]
                    why = self._explain_rate(name, (own[0], other[0])) if key == "lr" else ""
                    if len(own) != len(other) or not all(map(partial(math.isclose, rel_tol=1e-6), own, other)):
                        text = f"{key} of {name} is {_format(own)} in the module, and {_format(other)} in the script"
                        wrong.setdefault(key, text + why)
        self.verdict.record("options", 0.0)
        for text in wrong.values():
            self.verdict.add(self.number, "options", math.inf, text)

    def _explain_rate(self, name: str, rates: tuple[float, float]) -> str:
        before, self._rates[name] = self._rates.get(name, rates), rates
        stepped = [who for who, now, then in zip(("module", "script"), rates, before, strict=True) if now != then]
        return f", because only the {stepped[0]} has changed its rate before this step" if len(stepped) == 1 else ""

    def _compare_update(self, optimizer: Any, weights: Mapping[str, Any]) -> None:
        """Compares the script's update of each weight with the update that the module's optimizer computes from the
        script's weight, gradient and state, which replace the module's."""
        updated: list[str] = []
        for name, weight in weights.items():
            script, state = self._values[name], self._state_for(optimizer, weight, name)
            if script.gradient is not None and state is not None:
                updated.append(name)
                optimizer.state[weight] = state
                weight.data.copy_(script.before)
                weight.grad.copy_(script.gradient)
        if not updated:
            self.verdict.not_judged[UPDATES] = (
                f"{type(optimizer).__name__} cannot use the state of the script's {self.recording.optimizer}"
            )
            return
        before = [weights[name].detach().clone() for name in updated]
        if hasattr(optimizer, "grad_scale"):  # the script's gradients have no loss scale
            optimizer.grad_scale = None
        optimizer.step()
        expected = [weights[name].detach() for name in updated]
        actual = [self._values[name].after.to(weights[name]) for name in updated]
        errors, shares = update_errors(actual, expected, before)
        worst = int(shares.nan_to_num(nan=math.inf).argmax())
        text = f"the script's update of {updated[worst]} is off by {float(errors[worst]):.2g} of its norm"
        if type(optimizer).__name__ != self.recording.optimizer:
            text += f"; the module uses {type(optimizer).__name__}, and the script {self.recording.optimizer}"
        self.verdict.add(self.number, "update", float(shares[worst]), text)

    def _state_for(self, optimizer: Any, weight: Any, name: str) -> dict[str, Any] | None:
        """Returns the script's state of a weight for the module's optimizer, or None if the latter keeps other entries.
        A missing step count becomes the number of recorded steps before this one."""
        own, state = optimizer.state[weight], {**self._values[name].state}
        if state and "step" in own and "step" not in state:  # DeepSpeed's Adam counts steps elsewhere
            state["step"] = self.number - 1
        if state and state.keys() != own.keys():
            return None
        return {key: _converted(value, own[key]) for key, value in state.items()}


def check_script(
    recording: Recording,
    module: Any,
    datamodule: Any = None,
    renames: Mapping[str, str] | None = None,
    own_data: bool = False,
    max_steps: int = 0,
) -> Verdict:
    """Trains a LightningModule on the recorded batches and compares each step with the script's. Returns the verdict.

    Args:
        renames: Maps prefixes of the script's names of weights to the module's prefixes.
        own_data: Whether to also compare the batches of the module's own train_dataloader with the recorded ones.
        max_steps: Length of the training in steps, for schedules that depend on it. The default, and the least, is the
            number of recorded steps.

    Raises:
        UsageError: If the module's weights do not match, or its optimizers cannot be compared.
    """
    check, source = ScriptCheck(recording, renames or {}), datamodule or module
    load: Callable[[], Any] = source.train_dataloader

    def train_dataloader() -> RecordedBatches:
        if own_data:
            with random_state_kept():
                compare_batches(recording, load(), check.verdict)
        return RecordedBatches(recording)

    source.train_dataloader = train_dataloader
    trainer = Trainer(
        accelerator=recording.device if recording.device == "cpu" else "auto",
        devices=1,
        precision=recording.precision,  # pyright: ignore[reportArgumentType]
        accumulate_grad_batches=recording.accumulate,
        gradient_clip_val=recording.gradient_clip_val or None,
        max_steps=max(max_steps, recording.steps),
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=[check],
        **QUIET,
    )
    before = settings()
    try:
        fit(trainer, module, datamodule)
    finally:
        use_settings(before)
    if check.number < recording.steps:
        check.verdict.add(check.number, "counter", math.inf, "the module ends its training after this step")
    check.verdict.engine = f"{type(module).__name__} and {recording.model} of the script"
    return check.verdict


def _converted(value: Any, own: Any) -> Any:
    """Returns a value of the script's optimizer state in the type of the module's value. DeepSpeed's Adam counts steps
    in an int, and torch's in a tensor."""
    if isinstance(own, Tensor):
        return None if value is None else torch.as_tensor(value).to(own)
    return int(value) if isinstance(own, int) else value


def _format(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
