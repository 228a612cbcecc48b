"""Defines the optimizer of the plain copy, which has the options that each weight must have in a step."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from cifar_zero.step_check.replay import random_state_kept

SCHEDULED = {"lr", "momentum", "betas"}
"""Options that the schedules of torch change."""

Options = dict[str, Any]
"""Options of a parameter group that are numbers, or tuples of numbers, by name."""


class PlainOptimizer:
    """The optimizer and the schedules that `configure_optimizers` of a plain copy returns. The optimizer never steps.
    A schedule steps once per optimizer step or epoch of the training."""

    def __init__(self, plain: LightningModule):
        """Calls `configure_optimizers` of the copy, which may raise any exception."""
        with random_state_kept():
            optimizers, self._schedules = _init_optimizers_and_lr_schedulers(plain)
        self.optimizer: Any = optimizers[0]
        self.optimizer.state.clear()  # torch's Adagrad makes its state at once
        self.optimizer._opt_called = True  # else torch warns that a schedule steps before the optimizer
        names = {id(parameter): name for name, parameter in plain.named_parameters()}
        self._groups = {names[id(each)]: group for group in self.optimizer.param_groups for each in group["params"]}
        self._positions: dict[str, int] = {}
        self._followed: list[Any] = []  # the Trainer's schedules
        self.follows = not is_overridden("lr_scheduler_step", plain)
        """Whether the position of each schedule follows from the numbers of the step and of the epoch. It does not if a
        schedule looks at a metric, or if a callback replaces a schedule."""
        for each in self._schedules:
            self.follows = self.follows and each.frequency == 1 and not each.reduce_on_plateau

    def start(self, trainer: Trainer, actual: Mapping[str, Options]) -> None:
        """Notes the positions of the schedules before the first step. In a resumed run, takes the options and the
        schedules of the checkpoint.

        Args:
            trainer: The Trainer.
            actual: The options with which each weight starts, by the weight's name.
        """
        self._positions, self._followed = _positions(trainer), _schedules(trainer)
        if trainer.ckpt_path is None:
            return
        for name, options in actual.items():
            if name in self._groups:
                self._groups[name].update(options)
        try:
            for own, theirs in zip(self._schedules, trainer.lr_scheduler_configs, strict=True):
                own.scheduler.load_state_dict(theirs.scheduler.state_dict())
        except (ValueError, TypeError):  # the strategy has split the parameter groups
            self.follows = False

    def options(self, trainer: Trainer) -> dict[str, Options]:
        """Steps the schedules up to the Trainer's step. Returns the options that each weight must have in this step, by
        the weight's name. Options that no schedule of known position sets are left out."""
        before, self._positions = self._positions, _positions(trainer)
        if _schedules(trainer) != self._followed:  # a callback, such as stochastic weight averaging, has replaced them
            self.follows = False
        if self.follows:
            for each in self._schedules:
                schedule: Any = each.scheduler
                for _ in range(before[each.interval], self._positions[each.interval]):
                    schedule.step()
        # A group also has values that schedules keep for themselves, such as initial_lr.
        known = self.optimizer.defaults.keys() - (set() if self.follows else SCHEDULED)
        return {
            name: {key: value for key, value in numbers_of(group).items() if key in known}
            for name, group in self._groups.items()
        }


def numbers_of(group: Mapping[str, Any]) -> Options:
    """Returns the options of a parameter group that are numbers, or tuples of numbers, by name."""
    found: Options = {}
    for key, value in group.items():
        number = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        numbers = number if isinstance(number, (tuple, list)) else (number,)
        if key != "params" and all(isinstance(each, (int, float)) for each in numbers):
            found[key] = number
    return found


def same_option(one: Any, other: Any) -> bool:
    """Returns whether two numbers, or two tuples of numbers, are equal up to 0.0001 %."""
    return np.shape(one) == np.shape(other) and np.allclose(one, other, rtol=1e-6, atol=0.0)


def _schedules(trainer: Trainer) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def _positions(trainer: Trainer) -> dict[str, int]:
    return {"step": trainer.global_step, "epoch": trainer.current_epoch}
