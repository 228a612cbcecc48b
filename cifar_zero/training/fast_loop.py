"""Lightning's training epoch loop with the work per batch cut to what the batch needs.

Around the forward, backward and optimizer step of a batch, Lightning 2.6.6 calls every hook of every callback, of the
module and of the strategy through a profiler's context, whether anybody implements it, and with several ranks it
broadcasts a tensor and waits for its value. For a small network that is a third of the step (Lightning issues 6196,
7093 and 8857). Here the hooks that somebody implements are looked up once an epoch and called in the same order, and
nothing else is done. Same weights, same checkpoints, same counters: tests/training/test_fast_loop.py compares the two.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor

from cifar_zero.data.memory_loader import MemoryLoader

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
"""Of callbacks and of the module: called here, in Lightning's order, where they are implemented."""

STEP_METHODS = (
    *("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    "on_train_batch_start",  # it may end the epoch by returning -1
)
"""Of the module: one that has its own takes Lightning's way."""


def install(trainer: Trainer, fast: bool = True) -> None:
    """Gives a trainer these loops; to be called before `fit`.

    Args:
        trainer: of the run.
        fast: whether batches take the way of `EpochLoop`, else Lightning's own.
    """
    theirs = trainer.fit_loop
    trainer.fit_loop = FitLoop(trainer, theirs.min_epochs, theirs.max_epochs)
    loop = EpochLoop if fast else _TrainingEpochLoop
    trainer.fit_loop.epoch_loop = loop(trainer, theirs.epoch_loop.min_steps, theirs.epoch_loop.max_steps)


class FitLoop(_FitLoop):
    """Trains epoch after epoch.

    Where `max_steps` is set, Lightning 2.6.6 takes a checkpoint of an epoch's end for one of its middle, and a run that
    goes on from it counts that epoch twice: it skips the next one's images, or ends at once. Here such a run goes on as
    one without `max_steps` does. Can go when Lightning's issue 19617 is mended.
    """

    def _iteration_based_training(self) -> bool:
        return False


class EpochLoop(_TrainingEpochLoop):
    """Trains an epoch.

    Lightning's own way is taken where this one does not serve: a loader whose batches are not on the device yet, a
    profiler that wants to see every call, a module with a step of its own, float16 with a gradient scaler; and
    where a run is resumed at a validation.
    """

    _step: Callable[[Any, int], dict[str, Any]] | None = None
    _hooks: dict[str, list[Callable[..., Any]]]

    def on_run_start(self, data_fetcher: Any) -> None:
        """Before the first batch of an epoch: looks up the hooks and the kind of step."""
        super().on_run_start(data_fetcher)
        self._step = self._kind_of_step()
        if self._step is not None:
            self.trainer.lightning_module._current_fx_name = "training_step"  # self.log asks where it is called
        self._hooks = {name: self._implemented(name) for name in HOOKS}

    def advance(self, data_fetcher: Any) -> None:
        """One micro-batch: forward and backward, and the optimizer step where it is the last before one."""
        after_a_validation = self.restarting and self._should_check_val_fx(data_fetcher)
        if self._step is None or after_a_validation:
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
        progress.increment_started()
        outputs = self._step(batch, batch_idx)
        progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self._call("on_train_batch_end", outputs, batch, batch_idx)
        if self._results:  # somebody uses self.log
            trainer._logger_connector.on_batch_end()
            trainer._logger_connector.update_train_step_metrics()
        progress.increment_completed()

    def _torch_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """A step of torch's optimizer, on one device, under DDP, or on shards."""
        trainer: Any = self.trainer
        strategy = trainer.strategy
        optimizer, progress = trainer.optimizers[0], self.automatic_optimization.optim_progress.optimizer
        accumulating = self._should_accumulate()
        no_sync = accumulating and isinstance(strategy, DDPStrategy)
        with strategy.block_backward_sync() if no_sync else nullcontext():
            outputs, loss = self._forward(batch, batch_idx)
            self._zero_grad(batch_idx, optimizer.param_groups)
            self._call("on_before_backward", loss)
            loss.backward()
            self._call("on_after_backward")
        if not accumulating:
            progress.step.increment_ready()
            self._call("on_before_optimizer_step", optimizer)
            if trainer.gradient_clip_val:
                strategy.precision_plugin.clip_gradients(optimizer, trainer.gradient_clip_val)
            optimizer.step()
            progress.step.increment_completed()
        return outputs

    def _deepspeed_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """A step of DeepSpeed's engine, which accumulates, clips and zeroes the gradients by itself."""
        trainer, progress = self.trainer, self.automatic_optimization.optim_progress.optimizer
        engine: Any = trainer.strategy.model
        outputs, loss = self._forward(batch, batch_idx)
        self._zero_grad(batch_idx, [])
        self._call("on_before_backward", loss)
        trainer.strategy.precision_plugin.backward(loss, trainer.lightning_module, None)
        self._call("on_after_backward")
        accumulating = self._should_accumulate()
        if not accumulating:
            progress.step.increment_ready()
        self._call("on_before_optimizer_step", trainer.optimizers[0])
        engine.step()
        if not accumulating:
            progress.step.increment_completed()
        return outputs

    def _zero_grad(self, batch_idx: int, groups: list[dict[str, Any]]) -> None:
        """At the first micro-batch of a step calls the hook and forgets the gradients of these parameter groups."""
        if batch_idx % self.trainer.accumulate_grad_batches:
            return
        progress = self.automatic_optimization.optim_progress.optimizer.zero_grad
        progress.increment_ready()
        self._call("on_before_zero_grad", self.trainer.optimizers[0])
        progress.increment_started()
        for group in groups:  # as zero_grad does, less its profiling: 15 us for ten parameters
            for parameter in group["params"]:
                parameter.grad = None
        progress.increment_completed()

    def _forward(self, batch: Any, batch_idx: int) -> tuple[dict[str, Any], Tensor]:
        """The training step's outputs, the loss in them detached, and the loss to go back from."""
        outputs: Any = self.trainer.strategy.training_step(batch, batch_idx)
        outputs = dict(outputs) if isinstance(outputs, dict) else {"loss": outputs}
        loss = outputs["loss"]
        if self.trainer.accumulate_grad_batches > 1:
            loss = loss / self.trainer.accumulate_grad_batches
        outputs["loss"] = loss.detach()
        return outputs, loss

    def _call(self, name: str, *args: Any) -> None:
        for hook in self._hooks[name]:
            hook(*args)

    def _kind_of_step(self) -> Callable[[Any, int], dict[str, Any]] | None:
        """The step for this trainer; None for Lightning's own."""
        trainer: Any = self.trainer
        strategy, module = trainer.strategy, trainer.lightning_module
        precision = strategy.precision_plugin
        combined = trainer.fit_loop._combined_loader
        on_device = combined is not None and all(isinstance(loader, MemoryLoader) for loader in combined.flattened)
        if not (on_device and module.automatic_optimization and isinstance(trainer.profiler, PassThroughProfiler)):
            return None
        if any(getattr(type(module), name) is not getattr(LightningModule, name) for name in STEP_METHODS):
            return None
        if isinstance(precision, DeepSpeedPrecision):
            return self._deepspeed_step
        plain = type(precision) in (Precision, HalfPrecision) or (
            type(precision) is MixedPrecision and precision.scaler is None
        )
        known = type(strategy) in (SingleDeviceStrategy, DDPStrategy) or isinstance(strategy, ModelParallelStrategy)
        if plain and known:
            return self._torch_step
        return None

    def _implemented(self, name: str) -> list[Callable[..., Any]]:
        """The hook `name` of the callbacks that implement it, then of the module, ready to be called."""
        trainer: Any = self.trainer
        module = trainer.lightning_module
        found: list[Callable[..., Any]] = []
        for callback in trainer.callbacks:
            hook = getattr(callback, name)
            if getattr(hook, "__func__", hook) is not getattr(Callback, name):
                found.append(lambda *args, hook=hook: hook(trainer, module, *args))
        own = getattr(module, name)
        if getattr(own, "__func__", own) is not getattr(LightningModule, name):
            found.append(own)
        return found
