"""Defines `StepCheck`, which compares what a strategy computes in a step with what plain PyTorch computes in the same
step.

In a checked step, the same micro-batches are replayed through a plain, unsharded copy of the module. torch's optimizer
then updates copies of the weights, from the optimizer state, gradient and learning rate of the strategy. The strategy's
values must equal the results of the replay and of torch's optimizer up to the rounding error of this step. A second
replay, in float64, measures this rounding error. No separate reference run is trained, so differences do not accumulate
over the steps. At step 10,000 the bound is still the rounding error of one step.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from rich.filesize import decimal
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from cifar_zero.core.atomic import write_json
from cifar_zero.core.console import say
from cifar_zero.core.errors import RunError
from cifar_zero.step_check.between_steps import BetweenSteps, Modes, changed_modes, checksum, modes_of
from cifar_zero.step_check.findings import Findings, explain_factor, norm_of, off_by
from cifar_zero.step_check.gradient_hooks import GradientHooks, ignored
from cifar_zero.step_check.guard import Guarded, describe, exchange
from cifar_zero.step_check.plain_optimizer import Options, PlainOptimizer, numbers_of, same_option
from cifar_zero.step_check.replay import MicroBatch, PlainCopy, Replay, lowest, random_state, random_state_kept
from cifar_zero.step_check.updates import UPDATE, Expected, clip_factor, expected_updates, parameters_of, updated_by
from cifar_zero.step_check.user_code import may_set_options, owners_of_hooks
from cifar_zero.step_check.verdict import SHARED, Kind, Verdict
from cifar_zero.strategies import hooks_of

PARAMETER_BYTES = 80
"""Most bytes that a rank needs for each parameter in a checked step, in addition to the training. The replay in float64
needs the most: weights, gradients, their float64 copies from both replays and the strategy, and the buffer in which
gradients are averaged (two CPU ranks, torch 2.15)."""


class StepCheck(Guarded):
    """Checks chosen steps of a run while it trains, for any module, data and strategy. Every rank must have this
    callback.

    A checked step takes 6 to 15 times as long on a CPU, and a rank needs up to PARAMETER_BYTES more memory for each
    parameter. After the training, the attribute `verdict` holds the result.
    """

    needed: tuple[Kind, ...] = ("gradient", "update")
    """The kinds of values of which the share ENOUGH must be judged, or the verdict is "not judged"; see
    `Verdict.needed`."""

    checkpoint: Path | None = None
    """The checkpoint that the run must resume. Only a `ResumeCheck` that judges a resumed run sets it."""

    comes_first = True
    """Whether the check runs before the Trainer's other callbacks, which may change weights after a step."""

    resumed_at = 0
    """The optimizer step after which `checkpoint` was saved, or 0 without a checkpoint."""

    def __init__(
        self,
        every: int = 0,
        steps: Collection[int] = (),
        count: int = 0,
        on_fault: Literal["raise", "warn"] = "raise",
        file: Path | None = None,
    ):
        """Chooses the steps to check. Steps count from 1.

        Args:
            every: Check each step whose number is divisible by this; 0 checks none.
            steps: Check the steps with these numbers.
            count: Check this many steps, spread evenly over the run, including its first and its last step.
            on_fault: Whether to raise RunError at the first step with a fault, or to warn and continue.
            file: JSON file to which rank 0 writes the verdict at the end.
        """
        self._every, self._steps, self._count, self._on_fault, self._file = every, {*steps}, count, on_fault, file
        self.verdict = Verdict()
        self._plain_copy: Any = None
        self._micro_batches: list[MicroBatch] = []
        self._losses: list[Tensor] = []
        self._weights: dict[str, Tensor] = {}  # before the step
        self._buffers: dict[str, Tensor] = {}  # before the step
        self._expected: list[Expected] = []
        self._findings = Findings(0, self.verdict)  # of the step that is being checked
        self._replays: tuple[Replay, Replay] | None = None  # in the training's precision, and in float64
        self._can_check = self._overflows = False
        self._gradient_hooks: Any = None  # a GradientHooks
        self._later_hooks = ""  # explains how the user's hooks change gradients after the check has read them
        self._plain_optimizer: PlainOptimizer | None = None
        self._first_options: dict[str, Options] = {}  # by weight, at the start of the training
        self._options: dict[str, Options] = {}  # by weight, which the step must use
        self._between: Any = None  # a BetweenSteps
        self._norm = 0.0
        self._modes: Modes = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Copies the module before the strategy shards it, and keeps its modes before the strategy's engine starts."""
        if stage == "fit":
            if self.comes_first:
                callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
                trainer.callbacks = [self, *(each for each in callbacks if each is not self)]  # pyright: ignore
            self.verdict, self._micro_batches = Verdict(needed=self.needed), []
            try:
                self._plain_copy = PlainCopy(pl_module)
            except Exception as error:  # an attribute of the user's may raise anything, on one rank only
                # An engine leaves objects in a module that cannot be copied for the next fit.
                if self._plain_copy is None or self._plain_copy.original is not pl_module:
                    reason = f"the module cannot be copied ({describe(error)})"
                    self.verdict.note(f"{reason}: if it has been trained before, train a new one")

            keep = partial(self._keep_modes, pl_module)
            _call_after(pl_module, "configure_optimizers", keep)  # the last hook before an engine starts

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that the start of the strategy's engine has left each weight trained or frozen, and each submodule in
        training or evaluation, as it was."""
        vars(pl_module).pop("configure_optimizers", None)
        self._findings, before, self._modes = Findings(0, self.verdict), self._modes, modes_of(pl_module)
        for kind, name in changed_modes(before, self._modes):
            how = "stops its training" if before[kind, name] else "makes it train"
            self._findings.add(kind, name or "the module", math.inf, 0.0, 1, f"the start of the strategy {how}")
        self._finish(trainer)

    def _keep_modes(self, module: LightningModule) -> None:
        self._modes = modes_of(module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Spreads the `count` steps to check over the run, and builds the plain copy if the module can be checked. For
        a model of more than 10 million parameters, prints the memory that the check needs."""
        _call_after(trainer.strategy, "on_train_batch_start", partial(self.on_micro_batch_start, trainer, pl_module))
        if not pl_module.automatic_optimization:
            self.verdict.note("the module steps its optimizers itself")
        total, first = trainer.estimated_stepping_batches, trainer.global_step + 1
        if self._count and 0 < total < math.inf:
            parts = max(self._count - 1, 1)
            self._steps |= {first + round(part * (total - first) / parts) for part in range(self._count)}
        elif self._count:
            self.verdict.note("the number of steps is unknown: give `every` or `steps`")
        for reason in chain(*exchange(self.verdict.not_checked)):
            self.verdict.note(reason)
        self._can_check = not self.verdict.not_checked
        if not self._can_check:
            return
        if any(getattr(each, "_backward_hooks", None) for each in pl_module.parameters()):
            self.verdict.note("parameter hooks, because the copy lacks them")
        self._plain_copy.build(trainer)
        self._plain_optimizer = self._build_optimizer(trainer, pl_module)
        own = self._plain_optimizer and self._plain_optimizer.optimizer
        self._between = BetweenSteps()
        self._gradient_hooks = GradientHooks(self, trainer, pl_module, self._plain_copy, own)
        shape = hooks_of(trainer.strategy).shape
        elements = sum(math.prod(shape(each)) for each in pl_module.parameters())
        if trainer.is_global_zero and elements > 10**7:
            size = decimal(elements * PARAMETER_BYTES)
            time = "a checked step takes 6 to 15 times as long on a CPU"
            say(f"step check: {time}, and each rank needs up to {size} more memory")

    def on_micro_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keeps the values that the replay of a checked step needs: the weights and buffers before the step, and each
        micro-batch with the random state before its forward pass.

        The strategy's hook `on_train_batch_start` calls it. The hooks of all callbacks and of the module have run
        then, and may have changed these values."""
        del self._micro_batches[len(self._losses) :]  # the previous micro-batch, if the module skipped it
        if not self._micro_batches:
            step = trainer.global_step + 1
            chosen = step in self._steps or (self._every and step % self._every == 0)
            if not self._can_check or not chosen:
                return
            if not hooks_of(trainer.strategy).starts_step(batch_idx, trainer.accumulate_grad_batches):
                return
            self._findings, self._losses = Findings(step, self.verdict), []
            self._weights = self._checked_weights(trainer, pl_module)
            self._between.compare(self._findings, trainer, pl_module, self._weights)
            self._plain_copy.remember(pl_module)
            self._buffers = {name: buffer.detach().clone() for name, buffer in pl_module.named_buffers()}
            if _shares_buffers(trainer.strategy.model):
                exchange(None)
                for buffer in self._buffers.values():
                    dist.broadcast(buffer, 0)
        kept = tree_map_only(Tensor, Tensor.clone, batch)
        attributes = self._plain_copy.attributes_of(pl_module)
        self._micro_batches.append(MicroBatch(kept, batch_idx, random_state(), attributes))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Replays a checked step, and compares the strategy's gradients with the gradients of the replay. Computes the
        update that torch's optimizer makes from the strategy's gradients, and compares the learning rates."""
        if not self._micro_batches:
            return
        hooks = hooks_of(trainer.strategy)
        if not hooks.ends_step():
            return
        gradients = {name: gradient.double() for name, gradient in hooks.gradients(pl_module).items()}
        dtypes = self._compute_dtypes(trainer, pl_module)
        scale = hooks.loss_scale()
        self._norm = norm_of(gradients)
        self._overflows = scale is not None and not math.isfinite(self._norm)

        def compute() -> tuple[Replay, Replay]:
            replays = self._replay(self._micro_batches, {**self._weights, **self._buffers}, dtypes, scale or 1.0)
            if not self._overflows:
                self._expected, self._norm = self._expect_updates(trainer, pl_module, optimizer, gradients)
            return replays

        self._compare_rates(trainer, optimizer)
        self._options = self._compare_options(trainer, pl_module, optimizer)
        before_hooks = self._on_all_ranks(compute, "steps")
        if before_hooks is None:
            self._forget()
            return
        self._replays = self._after_hooks(before_hooks, self._weights | self._buffers, scale or 1.0)
        if self._overflows:
            return
        low, exact = self._replays
        explain = partial(self._explain_hooks, pl_module, before_hooks[0])
        self._findings.compare_gradients(gradients, low, exact, dtypes, explain=explain)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compares the other values after the last micro-batch of a checked step. Losses and buffers must equal the
        values of the replay, and updates must equal the updates of torch's optimizer. Weights that no optimizer updates
        must be unchanged."""
        if not self._micro_batches:
            return
        self._losses.append(outputs["loss"] if isinstance(outputs, Mapping) else outputs)
        if self._replays is None:
            return
        hooks = hooks_of(trainer.strategy)
        low, exact = self._replays
        dtype = lowest(loss.dtype for loss in self._losses)
        self._findings.compare_losses(torch.stack(self._losses).cpu(), low.losses, exact.losses, dtype)
        updated = set().union(*exchange({name for each in self._expected for name in each.names}))
        if updated.intersection(*exchange(low.unused)):
            self.verdict.note("weights that a step did not use, because only the engine updates them (gradient 0)")
        if self._overflows:
            step = self._findings.step
            self.verdict.note(f"the update of step {step}, because its gradient overflows in float16")
        elif updated and not math.isfinite(self._norm):
            self.verdict.note(f"the update of step {self._findings.step}, because its gradient is NaN or infinite")
        elif updated:
            for each in self._expected:
                each.compare(self._findings)
        else:
            self.verdict.note("updates, because the optimizer state cannot be read")
        norm = hooks.step_gradient_norm()
        if norm is not None and math.isfinite(self._norm):
            self._findings.add("gradient norm", "", abs(norm - self._norm) / max(self._norm, 1e-30), UPDATE)
        after = self._checked_weights(trainer, pl_module)
        if updated or self._overflows:  # weights that no optimizer updates must stay as they were
            for name in after.keys() - updated - low.weights.keys():
                off = off_by(after[name], self._weights[name])
                self._findings.add("weight", name, off, 0.0, 1, "no optimizer updates it")
            for name in low.weights.keys() - updated:  # such as a momentum encoder
                wanted = low.weights[name]
                high = exact.weights.get(name, wanted)
                self._findings.compare("weight", name, after[name], wanted, high, wanted.dtype)
        self._findings.compare_buffers(dict(pl_module.named_buffers()), low.buffers, exact.buffers)
        self._between.keep(self._findings.step, trainer, pl_module, after)
        self._forget()
        self._finish(trainer)
        self.verdict.steps.append(self._findings.step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the verdict, and writes it to the file if one was given."""
        vars(trainer.strategy).pop("on_train_batch_start", None)
        if self._micro_batches:
            self.verdict.note(f"step {self._findings.step} did not finish")
        if self._can_check and not self.verdict.steps:
            self.verdict.note("this training has none of the steps to check")
        if trainer.is_global_zero:
            say(f"step check: {self.verdict.outcome}: {self.verdict}")
        if self._file is not None and trainer.is_global_zero:
            write_json(self._file, self.verdict.as_dict())

    def _compute_dtypes(self, trainer: Trainer, module: LightningModule) -> dict[str, torch.dtype]:
        """Returns the dtype in which the strategy computes with each weight, keyed by the weight's name in the plain
        model."""
        hooks = hooks_of(trainer.strategy)
        own = {name: hooks.compute_dtype(each) for name, each in parameters_of(hooks, module).items()}
        # Weights that only other ranks hold get the lowest dtype of this rank.
        return dict.fromkeys(self._weights, lowest(own.values())) | own

    def _replay(self, *given: Any) -> tuple[Replay, Replay]:
        """Replays a step twice, in the training's precision and in float64. The arguments are those of
        `PlainCopy.replay`."""
        with random_state_kept():
            return self._plain_copy.replay(*given), self._plain_copy.replay(*given, exact=True)

    def _on_all_ranks(self, compute: Callable[[], tuple[Replay, Replay]], what: str) -> tuple[Replay, Replay] | None:
        """Returns the replays that `compute` returns, after averaging their gradients over the ranks. If `compute`
        fails on any rank, adds a note to the verdict and returns None on all ranks.

        Args:
            compute: Replays the step on this rank.
            what: Names, in the note, the values that are not checked.
        """
        replays, error = None, ""
        try:
            replays = compute()
        except Exception as failure:  # the module's code may raise anything, in float64 for example
            error = describe(failure)
        errors = [each for each in exchange(error) if each]
        if errors:
            self.verdict.note(f"{what}, because computing them again fails: {errors[0]}")
            return None
        for replay in replays or ():
            replay.average()
        return replays

    def is_checking(self) -> bool:
        """Returns whether the current step is being checked."""
        return bool(self._micro_batches)

    def abandon(self, hook: str, failure: str) -> None:
        """Ends the check of the step, or of the whole training if the check could not start. Adds a note to the
        verdict."""
        what = f"step {self._findings.step}" if self._findings.step else "the start of the strategy"
        if hook == "on_train_start":
            self._can_check, what = False, "all steps"
        reason = f"{what}, because the check fails in {hook}: {failure}"
        rank_zero_only(say)(f"warning: step check: not checked: {reason}")
        self.verdict.note(reason)
        self._forget()

    def _after_hooks(
        self, replays: tuple[Replay, Replay], tensors: Mapping[str, Tensor], scale: float = 1.0
    ) -> tuple[Replay, Replay]:
        """Returns replays with the gradients that the user's hooks leave. `tensors` and `scale` are arguments of
        `PlainCopy.replay`."""
        hooks = self._gradient_hooks
        if not hooks.before_check:
            return replays

        def run(replay: Replay, exact: bool) -> Replay:
            left = hooks.run(hooks.before_check, replay.gradients, tensors, scale, exact, replay.random_state)
            zeros = {name: torch.zeros_like(gradient) for name, gradient in replay.gradients.items()}
            return replace(replay, gradients=zeros | left)

        return run(replays[0], False), run(replays[1], True)

    def _explain_hooks(self, module: LightningModule, before: Replay, name: str, found: Tensor, low: Tensor) -> str:
        """Returns a text that explains a wrong gradient. `before` is the replay before the last hooks of the user."""
        if not torch.equal(low, before.gradients[name]):
            return ignored(self._gradient_hooks.before_check, module)
        # Under DeepSpeed, these hooks run after each micro-batch, and ZeRO 1 sums up the gradients that they leave.
        return explain_factor(name, found, low) or self._later_hooks

    def _forget(self) -> None:
        self._micro_batches, self._losses, self._expected, self._replays = [], [], [], None

    def _checked_weights(self, trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
        """Returns the unsharded weights, keyed by their names in the plain model. Checks that the weights which each
        rank holds in memory equal these weights, and that the unsharded weights are the same on all ranks."""
        hooks = hooks_of(trainer.strategy)
        exchange(None)
        weights = hooks.weights(module)
        for name, parameter in parameters_of(hooks, module).items():
            for held, expected in hooks.held(parameter, weights[name].to(parameter.device)):
                if held.shape != expected.shape:
                    self.verdict.note("weights that a rank does not hold in memory")
                    continue
                self._findings.add("weight", name, off_by(held, expected), 0.0, held.numel())
        sums = {name: checksum(value) for name, value in weights.items()}
        for rank, others in enumerate(exchange(sums)):
            for name in sums:
                if others.get(name) != sums[name]:
                    self._findings.add("weight", name, math.inf, 0.0, 1, f"rank {rank} has a different value")
        return weights

    def _compare_rates(self, trainer: Trainer, optimizer: Any) -> None:
        """Compares the learning rates in the optimizer with the optimizer's learning rates on the other ranks. If the
        position of the scheduler is unknown, also compares them with the learning rates of the scheduler itself."""
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if any(others != rates for others in exchange(rates)):
            self._findings.add("learning rate", "", math.inf, 0.0, 1, "not the same on all ranks")
        if self._plain_optimizer is not None and self._plain_optimizer.follows:
            return
        for config in trainer.lr_scheduler_configs:
            last = getattr(config.scheduler, "get_last_lr", list)()
            if len(last) != len(rates) or len(trainer.lr_scheduler_configs) > 1:
                self.verdict.note("learning rates, because no single scheduler sets all of them")
                continue
            for number, (rate, wanted) in enumerate(zip(rates, last, strict=True)):
                off = abs(rate - float(wanted)) / max(abs(float(wanted)), 1e-30)
                self._findings.add("learning rate", f"parameter group {number}", off, 1e-6)

    def _expect_updates(
        self, trainer: Trainer, module: LightningModule, optimizer: Any, gradients: Mapping[str, Tensor]
    ) -> tuple[list[Expected], float]:
        """Returns the updates that a copy of the optimizer makes to this rank's share of the weights, and the norm of
        the gradients before they are clipped."""
        hooks, given, tensors = self._gradient_hooks, gradients, self._weights | self._buffers
        if hooks.after_check:
            gradients = hooks.run(hooks.after_check, gradients, tensors)
        norm = norm_of(gradients)
        if hooks.clips:
            gradients = hooks.run(hooks.clips, gradients, tensors)
        changed = any(gradients.get(name) is not gradient for name, gradient in given.items())
        self._later_hooks = why = ignored([*hooks.after_check, *hooks.clips], module) if changed else ""
        scale = 1.0 if hooks.clips else clip_factor(gradients, hooks_of(trainer.strategy).clip_limit(trainer))
        clipped = {name: gradient.float() * scale for name, gradient in gradients.items()}
        hooks = hooks_of(trainer.strategy)
        return [*expected_updates(hooks, module, optimizer, clipped, self._weights, self._options, why)], norm

    def _build_optimizer(self, trainer: Trainer, module: LightningModule) -> PlainOptimizer | None:
        """Returns the optimizer of the plain copy, or None with a note if it cannot be made."""
        try:
            plain = PlainOptimizer(self._plain_copy.module)
            self._first_options = self._read_options(trainer, module, trainer.optimizers[0], at_any_step=True)
            plain.start(trainer, self._first_options)
        except Exception as error:  # the module's code may raise anything
            self.verdict.note(f"the optimizer's options, because a copy of the module fails ({describe(error)})")
            return None
        return plain

    def _read_options(self, trainer: Trainer, module: LightningModule, optimizer: Any, **which: bool) -> dict[str, Any]:
        """Returns the options in the strategy's optimizer by the names of the weights. `which` are arguments of
        `Hooks.updated`."""
        updated = updated_by(hooks_of(trainer.strategy), module, optimizer, **which)
        return {name: numbers_of(each.group) for each, names in updated for name in names}

    def _compare_options(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> dict[str, Options]:
        """Compares the optimizer's options with the options that `configure_optimizers` and the schedules give, and
        returns the options that the step must use. The user's own code may change options during the training."""
        if self._plain_optimizer is None:
            return {}
        expected = self._plain_optimizer.options(trainer)
        for name, actual in self._read_options(trainer, module, optimizer).items():
            wanted = expected.get(name, {})
            wrong: list[str] = []
            for key in sorted(wanted.keys() & actual.keys()):
                if same_option(actual[key], wanted[key]):
                    continue
                changes = actual[key] != self._first_options.get(name, {}).get(key)
                if changes and may_set_options(owners_of_hooks(trainer, module)):
                    self.verdict.note(f"the optimizer's {key}, because the module or a callback may set it")
                    wanted[key] = actual[key]
                else:
                    wrong.append(f"{key} is {actual[key]} instead of {wanted[key]}")
            self._findings.add("option", name, math.inf if wrong else 0.0, 0.0, 1, " and ".join(wrong))
        return expected

    def _finish(self, trainer: Trainer, only_rank_0: bool = False) -> None:
        """Adds the collected findings to the verdict. Every rank adds the same findings, so that all ranks have the
        same verdict. If there is a fault, raises RunError or prints a warning, depending on `on_fault`.

        Args:
            trainer: The Trainer.
            only_rank_0: Whether to add only the findings of rank 0, because all ranks have the same. Otherwise only
                findings of the kinds in SHARED are left out on the other ranks.
        """
        findings = []
        for rank, of_rank in enumerate(exchange(self._findings.all)):
            for found in of_rank:
                if not only_rank_0 and found.kind not in SHARED:
                    where = f"on rank {rank}" if trainer.world_size > 1 and found.share > 1 else ""
                    findings.append(replace(found, pattern=found.pattern or where))
                elif rank == 0:
                    findings.append(found)
        faults = self.verdict.add(findings)
        if faults and self._on_fault == "raise":
            raise RunError(str(self.verdict))
        if faults and trainer.is_global_zero:
            say(f"warning: {faults[0]}")


def _call_after(owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Makes an object call `then`, with the same arguments, after its method `name`."""
    method = getattr(owner, name)

    @wraps(method)
    def both(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        then(*args, **options)
        return result

    setattr(owner, name, both)


def _shares_buffers(model: Any) -> bool:
    """Returns whether DDP copies the buffers of rank 0 to the other ranks before a step. torch 2.15 has renamed DDP's
    option `broadcast_buffers` to `forward_sync_buffers`."""
    shares = getattr(model, "forward_sync_buffers", getattr(model, "broadcast_buffers", False))
    return isinstance(model, DistributedDataParallel) and shares
