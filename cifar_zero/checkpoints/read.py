"""Reads a checkpoint of any strategy into the one form that Lightning's plain strategies write."""

from pathlib import Path
from typing import Any

from cifar_zero.checkpoints.safe_load import load
from cifar_zero.checkpoints.zero_folder import read_folder
from cifar_zero.core.errors import UsageError

RECORD = "cifar_zero"
"""Key of what callbacks/resume.py adds to each checkpoint: configuration, class names and random states of a run."""


def read(checkpoint: Path, trust: bool = False, verify: bool = True, device: str = "cpu") -> dict[str, Any]:
    """Returns state_dict, optimizer_states and the progress of the run.

    Args:
        checkpoint: Lightning's file, or the folder that DeepSpeed writes.
        trust: see `safe_load.load`, as for the others.
        verify: whether checksums are compared.
        device: of the tensors.

    Raises:
        UsageError: it is damaged, incomplete, of another kind, or would need `trust`.
    """
    if checkpoint.is_dir():
        return read_folder(checkpoint, trust, verify, device)
    content = load(checkpoint, trust, verify, device)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise UsageError(f"{checkpoint} is no checkpoint of a run: it has no state_dict")
    return content
