"""Defines a case of `stepcheck module`: what is trained, and how. Imports neither torch nor Lightning."""

from dataclasses import dataclass, field
from typing import Any

from stepcheck.usage import UsageError, nearest

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")

PARTS = ("module", "datamodule")

QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
"""Options of Lightning's Trainer for a training without output."""


@dataclass(frozen=True)
class ModuleCase:
    """A short training of the user's module, which is sent between processes as JSON."""

    options: dict[str, str]  # names and arguments of the user's classes: module, module.lr, datamodule, ...
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
        """Raises UsageError if a value is wrong, whether a flag or a file sets it."""
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision {self.precision}: {nearest(str(self.precision), PRECISIONS)}")
        for name, value, least in (("accumulate", self.accumulate, 1), ("gradient_clip_val", self.clip, 0)):
            if not isinstance(value, (int, float)) or value < least:
                raise UsageError(f"{name} {value}: it must be a number of at least {least}")
        if 0 < self.steps <= self.resume_at:
            raise UsageError(f"--resume_at {self.resume_at} must be from 1 to {self.steps - 1}, so that a step follows")

    def __str__(self) -> str:
        return self.strategy + (f", accumulate {self.accumulate}" if self.accumulate > 1 else "")
