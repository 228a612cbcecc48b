"""The options of a run by the names of their flags; plain Python."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cifar_zero.config.flags import Config


def flat(config: Config | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns every option and its value by its flag: data.root, optimizer.lr, seed; model is the model's name.

    Args:
        config: a configuration, or the content of config.yaml or of a checkpoint's record.
        prefix: of the flags.
    """
    found: dict[str, Any] = {}
    for key, value in (asdict(config) if isinstance(config, Config) else config).items():
        if not isinstance(value, Mapping):
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
            continue
        inner = dict(value)
        if "name" in inner:  # a choice: {name, options} in a configuration, {name, its options} in config.yaml
            found[prefix + key] = inner.pop("name")
            inner = inner.pop("options", inner)
        found |= flat(inner, f"{prefix}{key}.")
    return found
