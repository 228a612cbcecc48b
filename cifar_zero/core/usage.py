"""For errors in the command line: limits of numbers, and names that the user may have meant; plain Python."""

import argparse
import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import ge, gt, le, lt
from typing import Any, NoReturn, TypeVar

from cifar_zero.core.errors import UsageError

Value = TypeVar("Value")

MEANT = {
    **dict.fromkeys(("lr", "learning_rate"), "optimizer.lr"),
    **dict.fromkeys(("bs", "batch", "train_batch_size"), "batch_size"),
    **dict.fromkeys(("gpus", "num_gpus", "nproc_per_node", "world_size"), "devices"),
    **dict.fromkeys(("nnodes", "nodes"), "num_nodes"),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "accumulate"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping"), "gradient_clip_val"),
    **dict.fromkeys(("amp", "fp16", "bf16", "dtype"), "precision"),
    **dict.fromkeys(("stage", "zero_stage"), "strategy"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "schedule"),
    **dict.fromkeys(("checkpoint", "ckpt", "ckpt_path", "resume_from_checkpoint"), "resume"),
    **dict.fromkeys(("pretrained", "finetune"), "weights"),
    **dict.fromkeys(("dataset", "data"), "data.source"),
    **{"data_dir": "data.root", "num_workers": "data.workers", "output_dir": "out", "arch": "model"},
}
"""Flags of other programs, and ours; a flag that ends in .NAME is found without this table."""

SHOWN = 3  # number of names that an error shows of a long list

LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]]
LIMITS = {"at_least": ("at least", ge), "over": ("over", gt), "below": ("under", lt), "at_most": ("at most", le)}
"""Limits of `limited`: in words, and what a number within them holds."""


def nearest(word: str, words: Iterable[str], most: int = 1, cutoff: float = 0.5, otherwise: str = "") -> str:
    """Returns half a sentence with the closest of `words`, or `otherwise` (default: all of them) if none is close."""
    known = list(words)
    close = difflib.get_close_matches(word, known, most, cutoff)
    return f"did you mean {' or '.join(close)}?" if close else otherwise or f"choose from {', '.join(known)}"


def nearest_flag(key: str, known: Iterable[str]) -> str:
    """Returns the same for a flag; both arguments are without dashes."""
    flags = sorted(known)
    within = [flag for flag in flags if flag.endswith(f".{key}")]
    if meant := MEANT.get(key) or (within[0] if len(within) == 1 else ""):
        return f"did you mean --{meant}?"
    return nearest(f"--{key}", (f"--{flag}" for flag in flags), cutoff=0.65, otherwise="--help all lists all options")


def nearest_few(pattern: str, names: Sequence[str]) -> str:
    """Returns half a sentence with the names of a long list that are closest to a pattern, or with its first ones."""
    more = ", ..." if len(names) > SHOWN else ""
    return nearest(pattern, names, SHOWN, cutoff=0.3, otherwise=f"there are {', '.join(names[:SHOWN])}{more}")


def check_numbers(options: Any) -> None:
    """Raises ValueError unless each number in a dataclass's fields is finite and within its limits, see `limited`."""
    for option in fields(options):
        value, given = getattr(options, option.name), option.metadata
        limits = given if "over" in given else {"at_least": 0, **given}
        for number in value if isinstance(value, (tuple, list)) else [value]:
            if not isinstance(number, (int, float)):
                continue
            finite = math.isfinite(number)
            if not (finite and all(LIMITS[name][1](number, limit) for name, limit in limits.items())):
                wanted = [f"{LIMITS[name][0]} {limit}" for name, limit in limits.items()] + ["finite"] * (not finite)
                raise ValueError(f"{option.name} must be {' and '.join(wanted)}, not {number}")


def limited(default: Value, **limits: float) -> Value:
    """Returns a field with other limits of its numbers than at least 0. Limits are inclusive (`at_least`, `at_most`) or
    exclusive (`over`, `below`); `over` replaces `at_least`."""
    return field(default=default, metadata=limits)


class FlagParser(argparse.ArgumentParser):
    """Reads some flags of a command line, of which another parser reads the rest; raises UsageError."""

    def __init__(self, **options: Any):
        super().__init__(add_help=False, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help all lists all options)")


@dataclass
class Options:
    """Base of the options of models, optimizers and schedules, whose numbers are finite and within their limits. Raises
    ValueError, which names the first option that is not."""

    def __post_init__(self) -> None:
        check_numbers(self)
