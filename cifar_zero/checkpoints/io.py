"""Lightning's interface for writing, reading and removing checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from cifar_zero.checkpoints.read import plain_network, read
from cifar_zero.checkpoints.safetensors_file import metadata_of, write_safetensors
from cifar_zero.core import atomic
from cifar_zero.core.console import say

WEIGHTS = ".safetensors"  # suffix of the file of a checkpoint's plain weights


class AtomicCheckpointIO(CheckpointIO):
    """Writes checkpoints atomically; an error of writing is reported and does not end the training. Lightning's own
    (2.6.6) writes to /tmp first, and copies from there to another file system. If wanted, the model's float32 weights
    are written next to each checkpoint. For `trust` see `safe_load.load`."""

    failure = ""  # why the newest checkpoint could not be written; empty if it was

    def __init__(self, trust: bool = False, save_weights: bool = False):
        self.trust = trust
        self._save_weights = save_weights

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        final = Path(path)

        def write() -> None:
            final.parent.mkdir(parents=True, exist_ok=True)
            save(checkpoint, atomic.staged(final))
            atomic.put_in_place(final)

        self.conclude(final, failure_of(write))

    def conclude(self, final: Path, failure: str) -> None:
        """Notes on rank 0 how the writing of a checkpoint ended; after a success, writes the plain weights too."""
        if self._save_weights and not failure:
            failure = failure_of(lambda: write_weights(final))
        self.failure = f"{final} could not be written: {failure}" if failure else ""
        if failure:
            failure_of(lambda: atomic.discard(atomic.staged(final)))
            say(f"{self.failure}. The training continues; earlier checkpoints are complete.")

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint of any strategy on every rank; its checksums were compared at the start."""
        return read(Path(path), self.trust, verify=False)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint that a newer one replaces, unless the newer one could not be written."""

        def remove() -> None:
            atomic.discard(Path(path))
            if self._save_weights:  # otherwise it is a file of cifar-zero export, which the user wanted
                Path(path).with_suffix(WEIGHTS).unlink(missing_ok=True)

        if not self.failure and (failure := failure_of(remove)):
            say(f"{path} could not be removed: {failure}. The training continues.")


def save(content: Any, file: Path) -> None:
    """Writes a file with torch.save. Raises OSError, which torch.save hides behind an error of its own."""
    try:
        with file.open("wb") as stream:
            torch.save(content, stream)
    except RuntimeError as error:  # torch finds its archive truncated when it closes it
        raise error.__context__ if isinstance(error.__context__, OSError) else OSError(str(error)) from error


def write_weights(checkpoint: Path) -> None:
    """Writes the float32 weights of a saved checkpoint, assembled from all ranks, next to it."""
    content = read(checkpoint)
    state = plain_network(content)
    weights = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
    write_safetensors(weights, checkpoint.with_suffix(WEIGHTS), metadata_of(content, checkpoint.name))


def failure_of(write: Callable[[], Any]) -> str:
    """Runs what writes to the disk on one rank; returns its error of any kind as text, empty if there was none: raised,
    it would leave the other ranks waiting for this one."""
    try:
        write()
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, OSError):  # Lightning's loggers (2.6.6) hide it
            cause = cause.__cause__
        if isinstance(cause, OSError):
            return cause.strerror or str(cause) or type(cause).__name__
        return f"{type(error).__name__}: {error}"
    return ""
