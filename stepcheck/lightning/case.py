"""Defines a case of `stepcheck module`: what is trained, and how. Imports no package."""

import json
from dataclasses import dataclass, field
from typing import Any

from stepcheck.usage import UsageError, nearest

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")

PARTS = ("module", "datamodule")

FLAGS = {
    "ranks": "--devices",
    "precision": "--precision",
    "accumulate": "--accumulate",
    "clip": "--gradient_clip_val",
    "steps": "--steps",
    "replayed": "--replay",
    "seed": "--seed",
}
"""The fields of a case that have a flag of their own."""


@dataclass(frozen=True)
class UserClasses:
    """The user's module and data module."""

    options: dict[str, str]
    """Their names and arguments by option: module (FILE.py:NAME or PACKAGE.MODULE:NAME), module.lr, datamodule, ..."""
    files: dict[str, dict[str, dict[str, Any]]]
    """Arguments in each file of --config, by file and by `module` or `datamodule`."""


@dataclass(frozen=True)
class Case(UserClasses):
    """A short training of the user's module. Travels between processes as JSON."""

    strategy: str = "ddp"  # or a file with a configuration of DeepSpeed
    config: dict[str, Any] = field(default_factory=dict)  # the content of this file, without what is a field below
    ranks: int = 1
    precision: str = "32-true"  # by Lightning's names
    accumulate: int = 1  # micro-batches of a step on each rank
    clip: float = 0.0  # largest norm of the gradients, or 0
    steps: int = 20  # of the optimizer
    replayed: int = 4  # steps that a plain copy computes again
    seed: int = 0
    resume_at: int = 0  # the step after which it is saved, and resumed; 0 for neither
    trainer: dict[str, Any] = field(default_factory=dict)  # more options of Lightning's Trainer

    def __post_init__(self) -> None:
        """Raises UsageError if a value is wrong, wherever it comes from."""
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision {self.precision}: {nearest(str(self.precision), PRECISIONS)}")
        for name, value, least in (("accumulate", self.accumulate, 1), ("gradient_clip_val", self.clip, 0)):
            if not isinstance(value, (int, float)) or value < least:
                raise UsageError(f"{name} {value}: it must be a number from {least} on")
        if 0 < self.steps <= self.resume_at:
            raise UsageError(f"--resume_at {self.resume_at} must be from 1 to {self.steps - 1}, so that a step follows")

    def __str__(self) -> str:
        return self.strategy + (f", accumulate {self.accumulate}" if self.accumulate > 1 else "")

    @property
    def command(self) -> list[str]:
        """The command that trains this case alone."""
        words = ["stepcheck", "module", self.options["module"]]
        for option, value in self.options.items():
            words += [f"--{option}", value] if option != "module" else []
        for file in self.files:
            words += ["--config", file]
        words += ["--strategies", self.strategy]
        for name, flag in FLAGS.items():
            words += [flag, str(getattr(self, name))]
        if self.resume_at:
            words += ["--resume_at", str(self.resume_at)]
        for name, value in self.trainer.items():
            words += [f"--trainer.{name}", value if isinstance(value, str) else json.dumps(value)]
        return words
