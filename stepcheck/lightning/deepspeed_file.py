"""Reads a user's own configuration of DeepSpeed."""

import json
from pathlib import Path
from typing import Any

from stepcheck.strategies import config_keys, deepspeed_words
from stepcheck.usage import UsageError, nearest, short

DEFINED = r"""(?<=^    )\w+(?= ?:)|(?<=["'])\w+(?=["'])"""
"""Regular expression for a key that DeepSpeed's sources may read: a field of a class, or a word in quotation marks."""

REFUSED = {
    "optimizer": "it would replace the module's configure_optimizers: remove it, and set it in the module",
    "scheduler": "it would replace the module's configure_optimizers: remove it, and set it in the module",
    # These two could run code that the file names: the first imports modules, the second unpickles checkpoints.
    "torch_autocast": "use --precision bf16-mixed",
    "checkpoint": "remove it",
}
"""Sections that are refused, and why or what to use instead."""

OF_LOADER = ("train_batch_size", "train_micro_batch_size_per_gpu")
"""Keys without an effect, because the module's loader decides the batch size."""

PRECISION_OF_SECTION = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


def read_config(file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the configuration for Lightning's strategy, and the fields of a case that the file sets (`accumulate`,
    `clip` and `precision`). Leaves out values that are "auto" or null, and the keys in OF_LOADER. Allows untested
    optimizers, unless the file forbids them. Raises UsageError if the file cannot be read, is no JSON object, or has a
    section in REFUSED or a key that DeepSpeed does not read."""
    what = f"--strategies {file}"
    try:
        tree = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{what} cannot be read: {short(error)}") from error
    if not isinstance(tree, dict):
        raise UsageError(f"{what} must hold a JSON object")
    config = _without_auto(tree)
    for key, why in REFUSED.items():
        if config.get(key):
            raise UsageError(f"{what}: {key}: {why}")
    keys = deepspeed_words(DEFINED, "**/*config*.py", "**/*constants.py")
    for key in config_keys(config):
        if key not in keys:
            raise UsageError(
                f"{what}: DeepSpeed does not read {key!r}: {nearest(key, keys, cutoff=0.65, otherwise='remove it')}"
            )
    fields: dict[str, Any] = {}
    for key, name in (("gradient_accumulation_steps", "accumulate"), ("gradient_clipping", "clip")):
        if key in config:
            fields[name] = config.pop(key)
    enabled = [key for key in PRECISION_OF_SECTION if isinstance(config.get(key), dict) and config[key].get("enabled")]
    if len(enabled) > 1:
        raise UsageError(f"{what}: {' and '.join(enabled)} are both enabled: switch one of them off")
    for key in enabled:
        fields["precision"] = PRECISION_OF_SECTION[key]
    for key in OF_LOADER:
        config.pop(key, None)
    return {"zero_allow_untested_optimizer": True, **config}, fields


def _without_auto(value: Any) -> Any:
    """Returns a section without the values that are "auto" or null, which leave an option to its default."""
    if not isinstance(value, dict):
        return value
    return {key: _without_auto(inner) for key, inner in value.items() if inner not in ("auto", None)}
