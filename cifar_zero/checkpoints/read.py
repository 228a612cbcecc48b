"""Reads a checkpoint of any strategy into the form that Lightning's plain strategies write. Does not import
Lightning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar_zero.checkpoints.safe_load import load_safely
from cifar_zero.checkpoints.zero_folder import TAG, read_folder
from cifar_zero.config.settings import settings_of, tree_of
from cifar_zero.core.errors import UsageError, short

RECORD = "cifar_zero"
"""Key under which training/callbacks/checkpoint.py adds a run's configuration, class names, image identity and random
states to each checkpoint."""


def read(checkpoint: Path, trust: bool = False, verify: bool = True, device: str = "cpu") -> dict[str, Any]:
    """Returns the content of a checkpoint file of Lightning or folder of DeepSpeed: state_dict, optimizer_states and
    the progress of the run. For the arguments see `safe_load.load_safely`. Raises UsageError if the checkpoint is
    damaged, would need `trust`, or is of another kind or version."""
    if checkpoint.is_dir():
        return with_checked_record(read_folder(checkpoint / TAG, trust, verify, device), checkpoint)
    if checkpoint.suffix == ".safetensors":
        raise UsageError(f"{checkpoint} contains only weights: give the checkpoint that they come from")
    content = load_safely(checkpoint, trust, verify, device)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise UsageError(f"{checkpoint} is not a checkpoint of a run: it has no state_dict")
    return with_checked_record(content, checkpoint)


def with_checked_record(content: dict[str, Any], name: object) -> dict[str, Any]:
    """Returns the content of a checkpoint with defaults for the options that its record (see RECORD) lacks. Content
    without a record is returned unchanged. Raises UsageError, which names `name`, if the record is damaged or of
    another version."""
    if RECORD not in content:
        return content
    try:
        record = content[RECORD]
        config, classes = tree_of(settings_of(record["config"])), record["classes"]
        if not isinstance(classes, list) or not all(isinstance(each, str) for each in classes):
            raise TypeError("classes is not a list of names")
        return {**content, RECORD: {**record, "config": config}}
    except (AttributeError, KeyError, TypeError) as error:
        raise of_another_version(name, error) from error


def check_resumable(content: Mapping[str, Any], name: object, epochs: int) -> None:
    """Raises UsageError, which names `name`, if a checkpoint lacks the optimizer's state or another entry that a run
    needs to continue, or if its run has begun more than `epochs` epochs."""
    lacking = {"epoch", "global_step", "loops", "optimizer_states", "lr_schedulers"} - content.keys()
    optimizer: dict[str, Any] = {}
    if RECORD in content:
        lacking |= {"random_states", "image_identity"} - content[RECORD].keys()
        optimizer = content[RECORD]["config"]["optimizer"]
    if lacking:
        raise of_another_version(name, KeyError(min(lacking)))
    begun = content["loops"]["fit_loop"]["epoch_progress"]["current"]["ready"]
    if begun > epochs:
        raise UsageError(f"{name} is from epoch {begun}: --epochs must be at least {begun}, not {epochs}")
    states = content["optimizer_states"]
    plain = optimizer.get("name") == "sgd" and not optimizer["options"]["momentum"]
    stateless = plain or not content["global_step"]
    if not states or not (stateless or any(each["state"] for each in states)):
        raise UsageError(
            f"{name} has no optimizer state: start a run from its weights with --weights {name} and without --resume"
        )


def of_another_version(name: object, error: Exception) -> UsageError:
    """Returns an error which says that the file `name` is damaged or of another version, with the reason from
    `error`."""
    why = f"it has no {error}" if isinstance(error, KeyError) else short(error)
    return UsageError(
        f"{name} is damaged, or another version of cifar-zero train wrote it ({why}): use the version that wrote it"
    )
