"""Opens the folder of a run: claims its name and writes the recipe that repeats it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import cast

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.finetuning.load import Match
from cifar_zero.config import command_line
from cifar_zero.config.flags import SourceName
from cifar_zero.config.run import Run
from cifar_zero.core.console import say


def open_run(run: Run, source: str, weights: Match | None) -> Path:
    """Returns the new run folder, and prints what a user should know of the run's start; for rank 0.

    Args:
        run: to train.
        source: of its images; if --data.source auto fell back to the digits, the run's name says so.
        weights: that it starts from.

    Raises:
        UsageError: the folder cannot be written.
    """
    config = run.config
    fell_back = config.data.source == "auto" and source == "digits"
    folder = run_folder.claim(config.out, config.run_name + run_folder.FALLBACK_SUFFIX * fell_back)
    # Absolute paths: the recipe repeats the run from any directory.
    cache = config.data.cache and os.path.abspath(config.data.cache)
    data = replace(config.data, source=cast(SourceName, source), root=os.path.abspath(config.data.root), cache=cache)
    (folder / run_folder.CONFIG).write_text(command_line.dump(replace(config, data=data)))
    if fell_back and config.resume:
        say("WARNING: this run continues on the embedded handwritten digits INSTEAD OF CIFAR-10, as it began.")
    if weights is not None:
        say(weights.summary(folder))
    return folder
