"""Defines `StepCheck`, the callback that audits each step of a training and replays chosen ones."""

import copy
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import SyncBatchNorm

from stepcheck.auditor import Audit, audit
from stepcheck.engines import NotAuditable
from stepcheck.engines.adapter import RankInfo
from stepcheck.lightning.user_hooks import UserHooks, optimizer_of
from stepcheck.patch import wrap_function
from stepcheck.replay import Replay
from stepcheck.replay.plain_copy import drop_weights
from stepcheck.replay.random_state import random_state_kept
from stepcheck.start import Start
from stepcheck.verdict import Verdict

INTERNAL = vars(LightningModule()).keys()
"""Names of the attributes of every LightningModule. A replay restores only the other attributes of a module, which are
the user's own, such as counters and modes."""


IGNORED = "DeepSpeed ignores that; to clip, use the Trainer's gradient_clip_val"


class StepCheck(Callback):
    """Audits each step of a training, with any module, data and strategy. Every rank must have this callback.

    After the training, `verdict` holds the result. A strategy that cannot be audited does not end the training: the
    verdict is then "not judged".
    """

    def __init__(
        self,
        replay_every: int = 0,
        steps: Collection[int] = (),
        count: int = 0,
        only: str = "",
        outputs: bool = False,
        on_fault: Literal["raise", "warn"] = "raise",
        file: Path | None = None,
    ):
        """Chooses the steps that a plain copy of the module computes again. Steps count from 1.

        Args:
            replay_every: Replay each step whose number is divisible by this; 0 for none.
            count: Replay this many steps, spread evenly over the run, with its first and its last.
            only: Regular expression that is searched in the names of weights. Only the gradients of matching weights
                are kept and compared.
            outputs: Whether to compare the outputs of all submodules in replayed steps.
            on_fault: Whether to raise StepCheckError at the first step with a fault, or to print this fault and
                continue.
            file: JSON file to which rank 0 writes the verdict at the end, also after an exception. An error of the file
                system is ignored.
        """
        self.replays: dict[str, Any] = {
            "every": replay_every,
            "steps": {*steps},
            "only": re.compile(only),
            "outputs": outputs,
        }
        self.count = count
        self.on_fault: Literal["raise", "warn"] = on_fault
        self.file = file
        self._undo = ExitStack()  # takes back what is wrapped
        self._reset()

    def _reset(self) -> None:
        self.verdicts: list[Verdict] = []  # of each optimizer
        self._audits: list[Audit] = []
        self._copy: Any = None
        self._start: Start | None = None
        self._has_optimizer = True  # DeepSpeed may build it, without configure_optimizers
        self._replay: Replay | None = None
        self._seen = -1  # the step in which the schedules were last compared
        self._positions: dict[int, int] = {}  # of the schedules, by their number
        self._unjudged: dict[str, str] = {}  # what is not judged of any optimizer, and why

    @property
    def verdict(self) -> Verdict:
        """The verdict of the training, or the worst one if several optimizers train."""
        order = ("different", "not judged", "agrees")
        return min(self.verdicts, key=lambda each: order.index(each.outcome), default=Verdict())

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """At the start of `fit`, copies the module if steps are to be replayed, before the strategy shards it. Makes
        `configure_optimizers` record the module and its optimizer, and the strategy's `setup` start the audits."""
        if stage != "fit":
            return
        self._reset()
        if self.count or self.replays["every"] or self.replays["steps"]:
            try:
                self._copy = copy.deepcopy(pl_module)  # Lightning leaves the trainer out
                if self._copy._compiler_ctx is not None:
                    to_uncompiled(self._copy)
            except Exception as error:  # an attribute of the user's may raise anything
                self._unjudged["replays"] = f"the module cannot be copied ({type(error).__name__}: {error})"
        configure = partial(self._configure_optimizers, pl_module)
        self._undo.callback(wrap_function(pl_module, "configure_optimizers", configure))
        self._undo.callback(wrap_function(trainer.strategy, "setup", partial(self._set_up_strategy, pl_module)))

    def _configure_optimizers(self, module: LightningModule, configure: Callable[[], Any]) -> Any:
        """Calls the module's own `configure_optimizers`, and records the module and its first optimizer. Under
        DeepSpeed, no later hook comes before the engine is built."""
        self._undo.close()  # the engine may copy or pickle the module
        configured = configure()
        self._start = Start(module, optimizer_of(configured))
        self._has_optimizer = configured is not None
        return configured

    def _set_up_strategy(self, module: LightningModule, setup: Callable[[Trainer], None], trainer: Trainer) -> None:
        """Calls the strategy's own `setup`, which builds the engine. Then starts an audit for each optimizer, before
        the `on_fit_start` of a callback can change the module."""
        setup(trainer)
        self._undo.close()
        if not self._has_optimizer:
            self._copy = None
            self.verdicts.append(Verdict(not_judged={"all steps": "configure_optimizers has returned no optimizer"}))
            return
        if not module.automatic_optimization and self._copy is not None:
            self._unjudged["replays"] = "the module steps its optimizers itself"
        elif is_overridden("backward", module) and self._copy is not None:
            self._unjudged["replays"] = "a replay does not call the module's own backward"
        self._replay = self._build_replay(trainer)
        for optimizer in trainer.optimizers:
            self._audit(trainer, module, optimizer)

    def _audit(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        replay = self._replay if len(trainer.optimizers) == 1 else None
        model: Any = trainer.strategy.model  # DeepSpeed's engine has its optimizer itself
        audited, reason = None, ""
        try:
            audited = audit(model, optimizer, on_fault=self.on_fault, start=self._start, replay=replay)
        except Exception as error:  # NotAuditable, or the check's own: it must not end the training
            what = "" if isinstance(error, NotAuditable) else f"the audit fails: {type(error).__name__}: "
            reason = f"{what}{error}"
        reason = first_reason(reason)
        if audited is None or reason:
            if audited is not None:
                audited.detach()
            self.verdicts.append(Verdict(not_judged={"all steps": reason}))
            self._replay = None
            return
        self._audits.append(audited)
        self.verdicts.append(audited.verdict)
        limit = float(trainer.gradient_clip_val or 0.0)
        if audited.adapter.owns_step:
            audited.adapter.divides_loss = False  # Lightning has divided it
            if limit and limit != audited.adapter.clip_limit():
                audited.add(
                    "clipping", 2.0, f"the engine clips to {audited.adapter.clip_limit()}, and {limit} was given"
                )
            hooks = UserHooks(trainer, module, audited.adapter.clip_limit())
            if replay is not None and hooks.names:
                replay.then = partial(self._run_hooks, hooks, audited)
            elif hooks.names:
                audited.verdict.notes[", ".join(hooks.names)] = f"if it changes gradients, {IGNORED}"

    def _run_hooks(self, hooks: UserHooks, audited: Audit, plain: Any) -> None:
        """Reports each of the user's hooks that changes gradients, because DeepSpeed ignores such changes. `plain` is a
        copy of the module that has the gradients of a step."""
        try:
            for name in hooks.changing(plain):
                audited.add("gradient", 2.0, f"{name} changes gradients, and {IGNORED}")
        except Exception as error:  # a hook may read the engine, which the copy lacks
            text = f"it fails on a copy of the module ({type(error).__name__}: {error})"
            audited.verdict.not_judged[f"what {' and '.join(hooks.names)} changes"] = text

    def _build_replay(self, trainer: Trainer) -> Replay | None:
        """Returns the replay of the copy, or None on all ranks if a rank cannot make its copy."""
        plain, self._copy, replay = self._copy, None, None
        reason = first_reason(self._unjudged.get("replays", ""))
        if plain is not None and not reason:
            try:
                build_copy(plain, trainer)
                replay = Replay(plain, **self.replays, internal=INTERNAL)
            except Exception as error:  # the module's code may raise anything
                reason = f"building a copy of the module fails ({type(error).__name__}: {error})"
            reason = first_reason(reason)
        if reason:
            self._unjudged["replays"] = reason
        return None if reason else replay

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Numbers the steps as the run does, also if it is resumed, and spreads the `count` replays over the run."""
        for each in self._audits:
            each.step = trainer.global_step + 1
        step = partial(self._training_step, trainer)
        self._undo.callback(wrap_function(trainer.strategy, "training_step", step))
        if self._replay is None:
            return
        total, first = trainer.estimated_stepping_batches, trainer.global_step + 1
        if self.count and 0 < total < math.inf:
            parts = max(self.count - 1, 1)
            self._replay.steps |= {first + round(part * (total - first) / parts) for part in range(self.count)}
        elif self.count:
            self._unjudged["replays"] = "the number of steps is unknown: give replay_every or steps"

    def _training_step(self, trainer: Trainer, training_step: Callable[..., Any], *arguments: Any) -> Any:
        """Watches the gradients, and passes a micro-batch to the replay. Lightning calls this method of the strategy
        after all hooks that may change the micro-batch or the module, and not for a micro-batch that a hook leaves
        out."""
        for each in self._audits:
            each.watch_gradients()
        if self._replay is not None:
            self._replay.micro_batch(partial(loss_of, trainer), *arguments)
        return training_step(*arguments)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._replay is not None and self._replay.actual is not None:
            self._replay.loss(without_scale(trainer, loss))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Reports learning-rate schedules with the interval "step" that have moved more than once per step, unless the
        module moves its schedules itself, in manual optimization."""
        if not self._audits or not pl_module.automatic_optimization:
            return
        audited = self._audits[0]
        # Lightning counts steps that its GradScaler leaves out, and DeepSpeed's engine ends a step in its own way.
        step = audited.step if audited.adapter.owns_step else trainer.global_step
        steps, self._seen = step - self._seen, step
        for number, config in enumerate(trainer.lr_scheduler_configs if steps else ()):
            position = int(getattr(config.scheduler, "last_epoch", 0))
            moved = position - self._positions.get(number, position)
            self._positions[number] = position
            if moved > steps and config.interval == "step":
                audited.add("options", 2.0, f"the learning-rate schedule was moved {moved} times since the last step")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)
        if trainer.is_global_zero:
            print(f"stepcheck: {self.verdict.outcome}: {self.verdict}", flush=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        self._undo.close()
        for each in self._audits:
            each.detach()
        self._audits = []
        for each in self.verdicts:
            each.not_judged |= self._unjudged
        if self.file is not None and trainer.is_global_zero:
            with suppress(OSError):  # a full disk must not end the training
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.write_text(json.dumps(self.verdict.as_dict(), indent=1))


def build_copy(copied: Any, trainer: Trainer) -> None:
    """Builds a copy of a module in place as Lightning builds the module, by `setup("fit")` and `configure_model`. The
    copy's `log` and `log_dict` do nothing, its weights use no memory, and its buffers move to the rank's device."""
    copied.trainer = trainer
    copied.log = copied.log_dict = _nothing
    with random_state_kept():
        copied.setup("fit")
        copied.configure_model()
    # Of sync_batchnorm=True. Some strategies lack it, and some ignore it.
    layer_sync: Any = getattr(trainer.strategy, "_layer_sync", None)
    if layer_sync and any(isinstance(each, SyncBatchNorm) for each in trainer.lightning_module.modules()):
        layer_sync.apply(copied)
    drop_weights(copied, trainer.strategy.root_device)
    copied.to(trainer.strategy.root_device)  # its buffers


def first_reason(reason: str) -> str:
    """Returns the first reason of all ranks, in rank order, or "". Every rank must call it and act on the result,
    because a rank that leaves out a collective would let the others wait in vain."""
    return RankInfo.current().first(reason)


def loss_of(trainer: Trainer, module: Any, *arguments: Any) -> Tensor:
    """Calls training_step in Lightning's precision context. Returns the loss divided by the number of micro-batches,
    without a loss scale."""
    with trainer.precision_plugin.train_step_context():
        outputs = module.training_step(*arguments)
    loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
    return loss / trainer.accumulate_grad_batches


def without_scale(trainer: Trainer, loss: Tensor) -> Tensor:
    """Returns a loss that is passed to `backward`, detached, without the loss scale of Lightning's GradScaler."""
    return loss.detach() / loss_scale(trainer)


def loss_scale(trainer: Trainer) -> float:
    """Returns the scale by which Lightning's GradScaler multiplies losses, or 1 without one."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler.get_scale() if scaler else 1.0


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces the module's `log` in a replay, and logs nothing."""
