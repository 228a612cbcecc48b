"""Settings that compared runs ought to share and do not; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comparison.reading import Loaded
from comparison.result import Difference
from options import flat

FREE = (
    # What is compared, and where it runs: none of it may change the maths.
    *("strategy", "ds_config", "nvme_path", "devices", "num_nodes", "timeout", "accumulate"),
    *("activation_checkpointing", "activation_offload", "compile", "cuda_graphs", "model.ep_size"),
    "channels_last",
    # Seeds are compared one with the same one.
    "seed",
    # What is read, in which way, and left behind.
    *("out", "name", "logger", "hparams", "log_interval", "plot_schedule", "debug", "trust", "resume"),
    *("save_every_n_steps", "save_every_minutes", "save_weights", "on_nan"),
    *("data.root", "data.cache", "data.loader", "data.workers", "data.url", "data.md5"),
)
"""Options of config.yaml that compared runs need not share; any other is named."""

MEASURED = ("dataset", "num_train", "device_name", "git_commit")
"""Keys of metrics.json that they ought to share too; and the versions of the packages."""

HARMLESS = ("precision", "accelerator", "device_name", "git_commit", "versions")
"""What verdicts are given across: rounding explains a difference, or the difference is what is looked for."""


def differences(runs: Mapping[str, Loaded]) -> list[Difference]:
    """The settings in which runs differ.

    Args:
        runs: a run of each variant, by the variant's name.
    """
    shared = {name: shared_settings(loaded) for name, loaded in runs.items()}
    keys = dict.fromkeys(key for settings in shared.values() for key in settings)
    found = []
    for key in keys:
        values = {name: str(settings.get(key, "not there")) for name, settings in shared.items()}
        if len({*values.values()}) > 1:
            found.append(Difference(key, values))
    return found


def shared_settings(loaded: Loaded) -> dict[str, Any]:
    """All that a run ought to share with those that it is compared to, by dotted names."""
    settings = {key: value for key, value in flat(loaded.settings).items() if key not in FREE}
    measured = {key: loaded.metrics.get(key) for key in MEASURED}
    return {**settings, **measured, **flat({"versions": loaded.metrics.get("versions", {})})}


def hinder(difference: Difference, one: str, other: str) -> bool:
    """Whether for a difference no verdict on variant `other` against variant `one` makes sense."""
    harmless = difference.setting.split(".")[0] in HARMLESS
    return not harmless and difference.values[one] != difference.values[other]
