"""Measures a user's own LightningModule for a plan: its parameters, its optimizer, and the activations of one
micro-batch of its loader. Lightning's Trainer starts a run as usual, and the run ends after the first backward pass."""

import sys
import warnings
from contextlib import ExitStack, redirect_stdout, suppress
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.data import extract_batch_size

from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import Settings
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.config.user_classes import Given
from cifar_zero.core.console import quieten, say
from cifar_zero.core.errors import UsageError, short
from cifar_zero.planning.activations import FAKE, ActivationTracker, LinearFit, fake, format_of
from cifar_zero.planning.formulas import STATE_TENSORS, Network, Weight
from cifar_zero.planning.survey import PLANNED
from stepcheck.lightning import user_code
from stepcheck.lightning.user_classes import check_classes, fit, instance

Own = tuple[Settings, Network, dict[str, LinearFit]]
"""The result of `measure`. It consists of the settings with the module's name, optimizer and batch size, the properties
of the module, and its activations by compute format. The activations are counted at one size of the micro-batch and
taken as proportional to it."""

PRECISIONS: dict[str, Any] = {"float32": "32-true", "autocast": "bf16-mixed", "cast": "bf16-true"}
"""The precision of Lightning's Trainer with which a module computes in each of the formats `activations.Computes`."""


class Counted(Exception):
    """Raised to end the Trainer's run after its first backward pass."""


class FirstMicroBatch(Callback):
    """Counts the activations of the first micro-batch of a run, and raises Counted after its backward pass. If the
    module is on the meta device, a copy of it computes the micro-batch without values."""

    def __init__(self) -> None:
        self.modes = ExitStack()  # the modes that count operations, which must be closed after the training

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.micro_batch, self.optimizer = extract_batch_size(batch), trainer.optimizers[0]
        if any(parameter.is_meta for parameter in pl_module.parameters()):
            self.modes.enter_context(FAKE())
            pl_module = fake(pl_module)
            pl_module.trainer = trainer
            trainer.strategy.connect(pl_module)
        # Gradients are model states, so they are kept. Logging is turned off, because torchmetrics (1.9), with which
        # Lightning logs, copies values.
        pl_module.optimizer_zero_grad = pl_module.log = pl_module.log_dict = lambda *_, **__: None
        self.tracker = self.modes.enter_context(ActivationTracker(pl_module))

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        raise Counted


def measure(given: Given, settings: Settings) -> Own:
    """Builds the module that a command line names, and returns its settings, properties and activations (see `Own`).
    The module is built without values if its code allows that. Raises UsageError if the code fails, or the module
    cannot be trained under DeepSpeed."""
    check_classes(given)
    quieten()
    failed = ""
    for device in ("meta", "cpu"):
        try:
            with warnings.catch_warnings(action="ignore"), redirect_stdout(sys.stderr):
                own = _measured(given, settings, device)
        except UsageError:
            raise
        except Exception as error:  # a user's code may raise anything
            failed = f"{user_code.where(error)}{type(error).__name__}: {short(error)}"
        else:
            if failed:
                say(f"--module was built in memory, because on the meta device it raises {failed}")
            return own
    raise UsageError(f"--module: {failed}")


def _measured(given: Given, settings: Settings, device: str) -> Own:
    """Returns the result of `measure` for a module that is built on a device, meta or cpu."""
    placement, lines = settings.placement, dict[str, LinearFit]()
    for computes in {format_of(STRATEGIES[name], placement.precision) for name in PLANNED}:
        with torch.device(device):
            module = instance("module", given)
            module.configure_model()
        first = FirstMicroBatch()
        trainer: Any = Trainer(
            accelerator="cpu",
            devices=1,
            precision=PRECISIONS[computes],
            plugins=LightningEnvironment(),
            callbacks=first,
            fast_dev_run=True,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.strategy.model_to_device = trainer.strategy.teardown = lambda: None  # no values can be moved
        with first.modes, suppress(Counted):
            fit(trainer, module, instance("datamodule", given))
        lines[computes] = LinearFit(0, first.tracker.peak / first.micro_batch)
    weights = [Weight(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    name = type(first.optimizer).__name__.lower()
    if name not in STATE_TENSORS:
        say(f"--module: its optimizer, {name}, counts as adam, which keeps two numbers per parameter")
        name = "adam"
    settings = settings.changed(
        model=Choice(given.options["module"]),
        optimizer=Choice(name, {"weight_decay": 0, **first.optimizer.defaults}),
        batch_size=first.micro_batch * placement.world_size * placement.accumulate,
    )
    return settings, Network(tuple(weights), blocks=(), built_whole=True), lines
