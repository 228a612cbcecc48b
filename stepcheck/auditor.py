"""Proves, while a training runs, that each optimizer step uses the gradients and weights that it should.

Autograd is trusted: a hook on each parameter sees the gradient of each micro-batch as PyTorch computed it, unreduced
and unsharded. What an engine makes of these gradients (it adds, scales, reduces, clips and shards them) is linear. So
their random projections (sketch.py), averaged over the ranks, must equal the projections of what reaches the optimizer,
up to the factor of clipping. The weights that forward and backward passes use must have the projections of the
optimizer's weights. torch's optimizer repeats slices of each update. Nothing else is computed twice, and no tensor is
gathered. A step without a fault costs one small collective.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stepcheck.batch_norms import BatchNormCounts
from stepcheck.batches import Batches
from stepcheck.engines import adapter_of
from stepcheck.engines.adapter import records_cuda_graph, running_steps
from stepcheck.hooks import Hooks, outermost_backward
from stepcheck.judge import Judge, Step
from stepcheck.start import Start, changed_options, options_of
from stepcheck.totals import FAILED, Totals
from stepcheck.updates import UpdateCheck
from stepcheck.verdict import Finding, Kind, StepCheckError, Verdict


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Wraps a method of Audit that hooks call, and adds its time to the verdict. After an exception the step is not
    judged, the audit ends on all ranks at the end of the step, and the training continues. The method does nothing from
    then on, and after `stop` or `detach`."""

    @wraps(method)
    def run(self: "Audit", *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        try:
            if not self.stopped and records_cuda_graph():
                if not torch.is_grad_enabled():
                    return  # of an evaluation, for example
                self.stop("a CUDA graph replays them, without the hooks of the audit")
            if not self.error and not self.stopped:
                method(self, *args, **kwargs)
        except Exception as error:  # the audit's own, or what a user's tensor raises
            self.error = _failure(error)
        self.verdict.seconds += time.perf_counter() - start

    return run


def _failure(error: Exception) -> str:
    return f"the audit failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Audit:
    """Audits each step from now on. Every rank must start it, after the engine or wrapper was built.

    `verdict` has the result so far. As a context manager, the audit ends with the block.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        every: int = 1,
        weights_every: int = 8,
        on_fault: Literal["raise", "warn"] | Callable[[Finding], None] = "raise",
        start: Start | None = None,
        replay: Any = None,
        baseline: Any = None,
    ):
        """Starts the audit.

        Args:
            model: A DeepSpeedEngine, or the model: as it is, in DistributedDataParallel, or after `fully_shard`.
            optimizer: The torch optimizer that updates the model, unless `model` is a DeepSpeedEngine.
            every: Audit each step whose number is divisible by this.
            weights_every: Compare each weight in every so many of the audited steps. Gradients and updates are compared
                in each of them.
            on_fault: "raise" raises StepCheckError on all ranks at the end of a step with a fault. "warn" prints the
                first fault of the training, on rank 0. A function is called on all ranks with the first fault of each
                step that has one.
            start: What `Start` recorded before the engine was built.
            replay: A `Replay`, which computes chosen steps again on a copy of the module.
            baseline: An `AuditBaseline`, which saves each step or compares it with a saved one.

        Raises:
            NotAuditable: If the audit cannot read the engine. The message says why.
        """
        self.adapter = adapter = adapter_of(model, optimizer)
        self.every, self.weights_every, self.on_fault = every, weights_every, on_fault
        self.replay, self.baseline = replay, baseline
        self.verdict = Verdict(engine=adapter.label)
        self.step = 1  # the optimizer step that runs, from 1
        self.running = False  # whether a step that is audited has begun
        self.micro_batches = 0
        self.scale = 1.0  # the loss scale in autograd's gradients
        self.updating = False  # whether an update has begun that has not ended, perhaps because it failed
        self.error = ""  # why a hook of this rank failed
        self.stopped = False  # whether all ranks have ended the audit
        self.undo = ExitStack()  # removes all hooks
        self._judge = Judge(adapter, self.verdict)
        self._totals = Totals(adapter)
        self._updates = UpdateCheck(adapter)
        self._batches = Batches(adapter.ranks)
        self._options: dict[int, dict[str, Any]] = {}  # before the engine's step, by id of the parameter group
        self._counts: dict[int, int] = {}  # gradients that autograd has computed in this step, by index
        self._local: list[tuple[Kind, Tensor, Any]] = []  # what `add` has got in this step
        # Whether the module was in training mode in the last backward pass, and in the last step.
        self._mode: bool | None = None
        self._trains: bool | None = None
        self._began = 0.0
        self._in_backward = False
        self._backward = -1  # the last outermost backward pass, by autograd's id
        try:
            self._start(start)
        except BaseException:
            self.undo.close()
            raise

    def _start(self, start: Start | None) -> None:
        adapter = self.adapter
        self._batch_norms = BatchNormCounts(adapter.module, self.undo)
        if self._updates.optimizer_class is None:
            self.verdict.not_judged["updates"] = (
                f"{type(adapter.optimizer).__name__} is not known to update each element on its own, as torch would"
            )
        if not adapter.trained:
            self.add("start", 2.0, "the optimizer has no weight of the module, so nothing is trained")
        for text in changed_options(adapter, start):
            self.add("options", 2.0, text)
        for text in start.changes(adapter.module) if start else ():
            self.add("start", 2.0, text)
        if self.replay is not None:
            self.replay.attach(self)
        adapter.attach(self)
        self._hooks = Hooks(self)
        self.verdict.bytes = self._totals.matrix.nbytes

    def __enter__(self) -> "Audit":
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Removes all hooks. The training continues without the audit."""
        self.undo.close()
        self.stopped = True

    def stop(self, why: str) -> None:
        """Ends the audit: from now on its hooks do nothing. They stay in place, because a hook that runs cannot remove
        them. The verdict says why this step and later steps are not judged. Every rank must call it at the same point
        of the training."""
        self._report_end(why)
        self.running, self.stopped = False, True

    def _report_end(self, why: str) -> None:
        if not self.verdict.ended:
            self.verdict.ended = True
            self.verdict.not_judged[f"step {self.step} and later steps"] = why

    def reset_history(self, trained: bool = True) -> None:
        """Drops what is kept from earlier steps, because a checkpoint is about to be loaded. A step without a gradient
        so far begins again.

        Args:
            trained: Whether the checkpoint may change trained weights or the state of the optimizer.
        """
        self.running &= bool(self._counts)
        self._judge.frozen = {}
        if trained:
            self._updates.reset()

    def add(self, kind: Kind, share: Tensor | float, text: Any) -> None:
        """Adds a value that only this rank compares. It is judged at the end of the step.

        Args:
            kind: What was compared.
            share: Error / tolerance. Of a tensor, the largest element counts. For the kind "note", it is reduced to at
                most 1, so that it is no fault.
            text: What is wrong if the share exceeds 1, or a function that returns it.
        """
        if self.stopped:
            return
        # Not on torch's default device, which a script may have set.
        share = share.double() if isinstance(share, Tensor) else torch.tensor(share, dtype=torch.float64, device="cpu")
        share = share.max() if share.numel() else share.sum()
        self._local.append((kind, share.clamp(max=1) if kind == "note" else share, text))

    # What hooks call
    @guarded
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self.adapter.optimizer is None:
            return self.detach()
        # After an error that the script has caught, a step or a backward pass has not ended.
        if self.updating and not running_steps(self.adapter.optimizer):
            self.running = self.updating = False  # the step begins again
        self._in_backward &= torch._C._current_graph_task_id() >= 0
        self._hooks.watch_gradients()
        self._begin_step()
        if not self.running:
            return
        self._batches.before_forward((args, kwargs))
        if why := self.adapter.begin_micro_batch():
            return self.stop(why)
        for index in self._in_turn if not self.adapter.gathers else ():
            self._totals.add_used_weight(index, self.adapter.parameters[index])

    @guarded
    def before_module(self, own: dict[str, int], module: nn.Module, inputs: Any) -> None:
        """Records the unsharded weights of a module that this step compares, just before the module computes. Also
        watches the gradients of the weights that FSDP2 has just unsharded. `own` maps the names of the module's own
        parameters to their indices."""
        if not self.running or not torch.is_grad_enabled():
            return
        for name, index in own.items():
            parameter = module._parameters[name]
            if parameter is None:
                continue
            if parameter is not self.adapter.parameters[index] and parameter.requires_grad:  # FSDP2's unsharded one
                self._hooks.watch_gradient(index, parameter)
            if index in self._in_turn:
                self._totals.add_used_weight(index, parameter)

    @guarded
    def watch_gradients(self) -> None:
        """Watches the gradients of the trained parameters. A forward pass of the module does this itself, but a
        training step of Lightning may call only parts of the module."""
        self._hooks.watch_gradients()

    @guarded
    def add_gradient(self, index: int, parameter: Any, gradient: Tensor) -> None:
        """Adds the gradient that autograd has computed for a parameter in one micro-batch. The engine has not changed
        it yet."""
        self._begin_step()  # if the module itself was not called, only parts of it
        if not self.running:
            return
        if self.replay is not None:
            self.replay.add_gradient(index, gradient)
        if not self._in_backward:
            self._begin_backward()
        self._totals.add_gradient(index, gradient)
        self._counts[index] = self._counts.get(index, 0) + 1
        self.micro_batches = max(self.micro_batches, self._counts[index])
        if index in self._in_turn:
            self._totals.add_used_weight(index, parameter)

    def _begin_backward(self) -> None:
        self._in_backward = True
        self._batches.begin_backward()
        outermost, before = outermost_backward(), self._backward
        self._backward = outermost
        if outermost != before:  # not the next part of a pass with reentrant checkpoints
            for index, earlier in self.adapter.gradients_before_pass(self._counts).items():
                self._totals.begin_gradient(index, earlier)
                if earlier is None:
                    self._counts[index] = 0
        # Only modules without parts, because Lightning does not change the mode of a wrapper such as DDP.
        self._mode = any(each.training for each in self.adapter.module.modules() if not [*each.children()])
        engine = torch.autograd.Variable._execution_engine
        # A callback that an engine has queued in this backward pass, such as DDP's, runs before the inner one.
        engine.queue_callback(lambda: engine.queue_callback(self._after_backward))

    @guarded
    def _after_backward(self) -> None:
        self._in_backward = False
        self.adapter.after_backward()

    # A step
    def _begin_step(self) -> None:
        if self.running or self.step % self.every:
            return
        self.running, self.micro_batches = True, 0
        if self.every > 1:  # other updates came in between
            self._updates.reset()
        self._began = self._began or time.perf_counter()
        self._totals.begin_step()
        self._counts = {}
        self._batches.begin_step()
        self._mode = None
        self.scale = self.adapter.loss_scale()
        self._totals.add_optimizer_weights(self._in_turn)

    begin = guarded(_begin_step)

    @guarded
    def before_step(self) -> None:
        self._options = {id(group): options_of(group) for group in self.adapter.optimizer.param_groups}

    @guarded
    def before_update(self, optimizer: Any) -> None:
        """Adds the gradients that reach the optimizer, and prepares the comparison of the update. Reports options that
        differ from those that `before_step` has recorded, and a module in evaluation mode that was in training mode
        before."""
        if not self.adapter.owns_step:  # the script may set gradients itself
            self._begin_step()
        if not self.running:
            return
        if self._trains and self._mode is False:
            self.add("state", 2.0, "the module is in evaluation mode, unlike in the step before")
        self._trains = self._trains if self._mode is None else self._mode
        if self.updating:
            self._totals.begin_update()
        self.updating = True
        if not self.adapter.owns_step:
            self.scale = self.adapter.loss_scale()
        for index in self.adapter.removed_gradients():
            self._totals.begin_gradient(index, None)
        self._totals.mark("modified", self.adapter.modified_gradients())
        self._totals.mark("trained", self.adapter.trained)
        clips = self.adapter.clip_limit() > 0
        for group in optimizer.param_groups:
            for key, value in self._options.get(id(group), {}).items():
                if group.get(key, value) != value:
                    self.add("options", 2.0, f"{key} is {group[key]} in the update and was {value} before the step")
            for tensor in group["params"]:
                target = self.adapter.targets.get(id(tensor))
                if target is None and not self.adapter.owns_step:
                    self.verdict.not_judged["some parameters"] = "they were added to the optimizer after its first step"
                if target is not None and tensor.grad is not None:
                    gradient = self.adapter.local(tensor.grad).detach()
                    self._totals.add_optimizer_gradient(target.parts, gradient, measure=clips)
        self._updates.begin(optimizer, self.add)

    @guarded
    def after_update(self, optimizer: Any) -> None:
        self.updating = False
        if self.running:
            self._updates.end(optimizer, self.add)

    @property
    def judges_step(self) -> bool:
        """Whether the running step is judged when it ends. All ranks have the same answer, also if the audit of a rank
        has failed, because the other ranks learn this only at the end of an audited step."""
        return self.running or (bool(self.error) and not self.stopped and self.step % self.every == 0)

    def end_step(self, skipped: bool = False) -> None:
        """Judges the step that has ended, if it is audited, and moves on to the next step. Handles a fault as
        `on_fault` says. Every rank must call this method.

        Args:
            skipped: Whether the engine left the update out, because a gradient overflowed.
        """
        judges = self.judges_step
        if judges and self.replay is not None and not skipped:
            self.replay.judge()
        start = time.perf_counter()
        before = len(self.verdict.findings)
        if judges:
            try:
                self._judge_step(skipped)
            except Exception as error:  # the audit's own. The training continues, and the audit ends with the next step
                self.stopped = bool(self.error)  # this rank has tried to tell the others
                self.error = _failure(error)
                self._report_end(self.error)
        findings = self.verdict.findings[before:]
        self.verdict.seconds += time.perf_counter() - start
        self.running, self.step = False, self.step + 1
        if findings and callable(self.on_fault):
            self.on_fault(findings[0])
        elif findings and self.on_fault == "raise":
            raise StepCheckError(findings[0])
        elif findings and not before and self.adapter.ranks.rank == 0:
            print(f"stepcheck: {findings[0]}", flush=True)

    def _judge_step(self, skipped: bool) -> None:
        """Sums the contributions of the ranks, judges the sums, and adds the same findings to the verdict of every
        rank. If the audit of a rank has failed, ends the audit on all ranks instead."""
        adapter, verdict = self.adapter, self.verdict
        self._batch_norms.compare(self.add)
        local, self._local = self._local, []
        sums, worst, fingerprints, shares = self._totals.all_reduce(
            [share for _, share, _ in local], bool(self.error), self._batches.fingerprints
        )
        verdict.notes |= self._batches.notes(self.step, fingerprints)
        if worst == FAILED:
            return self.stop(next(filter(None, adapter.ranks.all_gather(self.error))))
        found: list[tuple[Kind, str, float]] = []
        for (kind, _, text), share in zip(local, shares, strict=True):
            if kind == "note":
                if share > 0:
                    verdict.notes["weights or optimizer state that change between steps"] = (
                        f"{text()} (step {self.step})"
                    )
                continue
            verdict.record(kind, share)
            if share > 1:
                found.append((kind, str(text() if callable(text) else text), share))
        for rank, of_rank in enumerate(adapter.ranks.all_gather(found) if worst > 1 else ()):
            for kind, text, share in of_rank:
                verdict.add(0 if kind == "start" else self.step, kind, share, text, rank)
        step = Step(self.step, self.micro_batches, self.scale, sums, fingerprints)
        if skipped:
            verdict.skipped += 1
            if adapter.owns_step and adapter.loss_scale() == 1:  # a loss scale overflows now and then
                verdict.notes["skipped steps"] = "gradients were not finite, and plain PyTorch would have used them"
        else:
            gradients, deviations = self._judge.gradients(step)
            if self.baseline is not None:
                self.baseline.judge(self._judge, step, gradients, deviations)
        self._judge.weights(step)
        verdict.steps += not skipped
        verdict.training_seconds = time.perf_counter() - self._began

    @property
    def _in_turn(self) -> range:
        """The indices of the weights to compare in this step. Turns count audited steps, so that each weight gets
        one."""
        turn = self.step // self.every
        return range(-turn % self.weights_every, len(self.adapter.parameters), self.weights_every)


audit = Audit
"""The name by which a script starts an audit: `with audit(engine):`."""
