"""Implements Lightning's interface for writing, reading and removing checkpoints."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from cifar_zero.checkpoints.read import read
from cifar_zero.core import atomic
from cifar_zero.core.atomic import failure_of
from cifar_zero.core.console import say


class AtomicCheckpointIO(CheckpointIO):
    """Writes checkpoints atomically. A failure to write is printed and does not end the training. Lightning's own
    plugin (2.6.6) writes to /tmp and copies from there to another file system, which is not atomic. For `trust` see
    `safe_load.load_safely`."""

    failure = ""  # why the newest checkpoint could not be written; empty if it was written

    def __init__(self, trust: bool = False):
        self.trust = trust

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        final = Path(path)

        def write() -> None:
            final.parent.mkdir(parents=True, exist_ok=True)
            with atomic.replacing(final) as new:
                save(checkpoint, new)

        self.conclude(final, failure_of(write))

    def conclude(self, final: Path, failure: str) -> None:
        """Ends an attempt to write the checkpoint `final` on rank 0, and sets `self.failure`. After an error, whose
        message is `failure`, prints it and removes what was written."""
        self.failure = f"{final} could not be written: {failure}" if failure else ""
        if failure:
            failure_of(lambda: atomic.discard(atomic.staged(final)))
            say(f"{self.failure}. The training continues; earlier checkpoints are complete.")

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint of any strategy, with its tensors on the CPU. The checksums in the file were compared at
        the start of the run, and are not compared again. Lightning calls this method on every rank."""
        return read(Path(path), self.trust, verify=False)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint that a newer one replaces, unless the newer one could not be written. A failure to
        remove it is printed and not raised."""
        if not self.failure and (failure := failure_of(lambda: atomic.discard(Path(path)))):
            say(f"{path} could not be removed: {failure}. The training continues.")


def save(content: Any, file: Path) -> None:
    """Writes a file with torch.save. Raises OSError if it cannot be written, also where torch.save raises
    RuntimeError."""
    try:
        with file.open("wb") as stream:
            torch.save(content, stream)
    except RuntimeError as error:  # raised when torch closes the archive and finds it truncated
        raise error.__context__ if isinstance(error.__context__, OSError) else OSError(str(error)) from error
