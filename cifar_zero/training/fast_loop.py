"""Replaces Lightning's epoch loop and fit loop.

For each batch, Lightning 2.6.6 calls every hook of every callback, of the module and of the strategy through a
profiler's context, whether the hook is implemented or not. With several ranks it also broadcasts a tensor and waits for
its value (Lightning's issues 6196, 7093 and 8857). This takes a third of the step time of a small model. `EpochLoop`
calls only the implemented hooks, in the same order, with the same results bit for bit
(tests/training/test_fast_loop.py). With `--fast_loop false` it runs Lightning's own code.

`FitLoop`, which iterates over epochs, corrects three faults of Lightning's fit loop in resumed runs. It also keeps an
epoch or a training from ending within an optimizer step.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from cifar_zero.core.errors import UsageError
from cifar_zero.data.loaders import MemoryLoader

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
"""Hooks of the callbacks and of the module. The fast loop calls the implemented hooks in Lightning's order."""

STEP_METHODS = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_train_batch_start",  # it may end the epoch by returning -1
)
"""Methods of a module that change a training step. If a module overrides one of them, Lightning's own code trains it
instead of the fast loop."""


def install(trainer: Trainer, fast: bool = True) -> None:
    """Replaces the loops of a Trainer by a `FitLoop` and an `EpochLoop`, which trains with Lightning's own code unless
    `fast` is set. Must be called before `fit`."""
    before = trainer.fit_loop
    trainer.fit_loop = FitLoop(trainer, before.min_epochs, before.max_epochs)
    trainer.fit_loop.epoch_loop = loop = EpochLoop(trainer, before.epoch_loop.min_steps, before.epoch_loop.max_steps)
    loop.may_be_fast = fast


class EpochLoop(_TrainingEpochLoop):
    """Trains an epoch faster than Lightning's own code, which still runs in five cases: batches that are not on the
    device yet, a profiler, a custom training step, float16 with a gradient scaler, and a run that resumes at a
    validation.

    Also makes up the validation of a step in mid-epoch whose checkpoint was saved before it, as after Ctrl-C or by
    --save_every_n_steps. A run that Lightning (2.6.6) resumes would skip this validation. No upstream issue is known.
    """

    may_be_fast = True
    _is_fast = False
    _hooks: dict[str, list[Callable[..., Any]]]

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        self._is_fast = self._applies()
        if self._is_fast:
            self.trainer.lightning_module._current_fx_name = "training_step"  # self.log reads the name of its hook
        self._hooks = {name: self._implemented(name) for name in HOOKS}

    def advance(self, data_fetcher: Any) -> None:
        """Trains on one micro-batch, and calls the hooks."""
        resumes_at_validation = self.restarting and self._should_check_val_fx(data_fetcher)
        if resumes_at_validation and self.restarted_on_train_batch_end and self.batch_progress.current.ready:
            self.val_loop.restarting = False
            self._batches_that_stepped -= 1  # `reset` has counted the step, and `on_advance_end` counts it again
            return  # to `on_advance_end`, which validates
        if resumes_at_validation or not self._is_fast:
            super().advance(data_fetcher)
            return
        trainer, progress = self.trainer, self.batch_progress
        self.val_loop.restarting = False
        batch, _, _ = next(data_fetcher)
        batch_idx = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        self._call("on_train_batch_start", batch, batch_idx)
        trainer.strategy.on_train_batch_start(batch, batch_idx)
        progress.increment_started()
        outputs = self._step(batch, batch_idx)
        progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._call("on_train_batch_end", outputs, batch, batch_idx)
        if self._results:  # a step or hook has called self.log
            trainer._logger_connector.on_batch_end()
            trainer._logger_connector.update_train_step_metrics()
        progress.increment_completed()

    def _step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Runs the forward and backward pass of a micro-batch and, at an accumulation boundary, the optimizer step.
        Returns the outputs of the module's training step, with the detached loss divided by accumulate_grad_batches.
        DeepSpeed's engine accumulates, clips and zeroes the gradients itself, so its `step` is called after every
        micro-batch."""
        trainer: Any = self.trainer
        strategy, optimizer = trainer.strategy, trainer.optimizers[0]
        engine = strategy.model if isinstance(strategy.precision_plugin, DeepSpeedPrecision) else None
        accumulating = self._should_accumulate()
        no_sync = accumulating and engine is None and isinstance(strategy, DDPStrategy)
        with strategy.block_backward_sync() if no_sync else nullcontext():
            outputs: Any = strategy.training_step(batch, batch_idx)
            if not isinstance(outputs, dict):
                outputs = {"loss": outputs}
            loss = outputs["loss"]
            if trainer.accumulate_grad_batches > 1:
                loss = loss / trainer.accumulate_grad_batches
            outputs = {**outputs, "loss": loss.detach()}
            self._zero_grad(batch_idx, [] if engine else optimizer.param_groups)
            self._call("on_before_backward", loss)
            strategy.precision_plugin.backward(loss, trainer.lightning_module, None)
            self._call("on_after_backward")
        if accumulating and engine is None:
            return outputs
        progress = self.automatic_optimization.optim_progress.optimizer.step
        if not accumulating:
            progress.increment_ready()
        self._call("on_before_optimizer_step", optimizer)
        if engine is not None:
            engine.step()
        else:
            if trainer.gradient_clip_val:
                strategy.precision_plugin.clip_gradients(optimizer, trainer.gradient_clip_val)
            optimizer.step()
        if not accumulating:
            progress.increment_completed()
        return outputs

    def _zero_grad(self, batch_idx: int, groups: list[dict[str, Any]]) -> None:
        if batch_idx % self.trainer.accumulate_grad_batches:
            return
        progress = self.automatic_optimization.optim_progress.optimizer.zero_grad
        progress.increment_ready()
        self._call("on_before_zero_grad", self.trainer.optimizers[0])
        progress.increment_started()
        for group in groups:  # optimizer.zero_grad without its profiling, 15 us for ten parameters
            for parameter in group["params"]:
                parameter.grad = None
        progress.increment_completed()

    def _call(self, name: str, *args: Any) -> None:
        for hook in self._hooks[name]:
            hook(*args)

    def _applies(self) -> bool:
        trainer: Any = self.trainer
        module, combined = trainer.lightning_module, trainer.fit_loop._combined_loader
        on_device = combined is not None and all(isinstance(loader, MemoryLoader) for loader in combined.flattened)
        is_custom = not module.automatic_optimization or any(is_overridden(name, module) for name in STEP_METHODS)
        is_profiled = not isinstance(trainer.profiler, PassThroughProfiler)
        is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        return self.may_be_fast and on_device and not (is_custom or is_profiled or is_scaled)

    def _implemented(self, name: str) -> list[Callable[..., Any]]:
        trainer: Any = self.trainer
        module = trainer.lightning_module
        hooks: list[Callable[..., Any]] = [
            partial(getattr(callback, name), trainer, module)
            for callback in trainer.callbacks
            if is_overridden(name, callback)
        ]
        if is_overridden(name, module):
            hooks.append(getattr(module, name))
        return hooks


class FitLoop(_FitLoop):
    """Trains epoch after epoch, and corrects three faults of Lightning 2.6.6 in resumed runs.

    1. If `max_steps` is set, Lightning treats a checkpoint from the end of an epoch as if it were from the middle. The
    resumed run counts that epoch twice, and either skips the images of the next epoch or ends at once (Lightning's
    issue 19617).

    2. A user's own ModelCheckpoint may save at the last batch of an epoch. A run that resumes from this checkpoint does
    not count the start of the next epoch. From a later checkpoint in the middle of that epoch, it then resumes at the
    first image of the epoch. No upstream issue is known; tests/distributed/test_resume.py shows the fault.

    3. `Trainer.estimated_stepping_batches` creates the training loader, and a schedule or callback may read it before
    the state of the run is restored. Lightning then keeps this loader, which starts the epoch again, and never gives it
    the position in the checkpoint (Lightning's issue 20550).
    """

    def setup_data(self) -> None:
        """Creates the training loader. Raises UsageError if an epoch has fewer batches than --accumulate, or if a
        validation or the end of an epoch would come within an optimizer step. This can happen if batches are limited or
        come from a user's loader. The end of an epoch does not count if `max_steps` ends the run before it."""
        super().setup_data()
        parts, batches, steps = self.trainer.accumulate_grad_batches, self.max_batches, self.trainer.max_steps
        if 0 < batches < parts:
            raise UsageError(f"--accumulate {parts} must be at most the batches per epoch on a rank, {batches}")
        interval = self.trainer.val_check_batch  # None for a time, infinite for an IterableDataset
        if interval not in (None, math.inf, batches) and interval % parts:
            given = self.trainer.val_check_interval
            raise UsageError(
                f"--accumulate {parts} does not divide --trainer.val_check_interval {given}, which is {interval} "
                "batches: a validation would come within an optimizer step"
            )
        if 0 <= steps * parts < batches:  # -1 if the number of steps is not limited
            return
        if batches != math.inf and batches % parts:  # infinite for an IterableDataset
            raise UsageError(
                f"--accumulate {parts} does not divide the {batches} batches of an epoch. Plain PyTorch would end the "
                "epoch with a smaller step, and DeepSpeed would finish this step in the next epoch: add "
                f"--trainer.limit_train_batches {batches // parts * parts}"
            )

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Keeps the loaders' positions in the checkpoint for `setup_data`, and drops a loader that exists already, so
        that `setup_data` creates one at the saved position."""
        super().on_load_checkpoint(state_dict)
        self._combined_loader = None

    def reset(self) -> None:
        """Restores the counters of epochs and batches. If the checkpoint was saved at the last batch of an epoch, makes
        the next epoch begin like any other epoch."""
        super().reset()
        epoch: Any = self.epoch_progress.current
        if self.restarted_mid_epoch and epoch.processed == epoch.ready:
            self.reset_restart_stage()

    @property
    def _can_stop_early(self) -> bool:
        """Whether `Trainer.should_stop` ends the training now, for both epoch loops. If a Timer (--trainer.max_time) or
        a user's callback asks to stop within an optimizer step, the step is finished first."""
        return super()._can_stop_early and not self._should_accumulate()

    def _iteration_based_training(self) -> bool:
        return False
