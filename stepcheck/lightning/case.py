"""Defines a case of `stepcheck module`: what is trained, and how. Imports only Python's own library."""

import json
from dataclasses import dataclass, field
from typing import Any

PARTS = ("module", "datamodule")

FLAGS = {
    "ranks": "--devices",
    "precision": "--precision",
    "accumulate": "--accumulate",
    "clip": "--gradient_clip_val",
    "steps": "--steps",
    "replayed": "--replay",
    "seed": "--seed",
    "resume_at": "--resume_at",
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
        for name, value in self.trainer.items():
            words += [f"--trainer.{name}", value if isinstance(value, str) else json.dumps(value)]
        return words
