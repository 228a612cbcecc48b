"""The settings that compared runs should share; no torch."""

from collections.abc import Sequence
from typing import Any

from cifar_zero.comparison.result import Difference, Run, Variant
from cifar_zero.config.flags import flat

MAY_DIFFER = (
    # What is compared, and where it runs: none of these may change the maths.
    *("strategy", "ds_config", "nvme_path", "devices", "num_nodes", "timeout", "accumulate"),
    *("activation_checkpointing", "activation_offload", "compile", "cuda_graphs", "model.ep_size"),
    "channels_last",
    # Runs are compared seed by seed.
    "seed",
    # How images are read, and what a run leaves behind.
    *("out", "name", "logger", "hparams", "log_interval", "plot_schedule", "debug", "trust", "resume"),
    *("save_every_n_steps", "save_every_minutes", "save_weights", "on_nan"),
    *("data.root", "data.cache", "data.loader", "data.workers", "data.url", "data.md5"),
)
"""Options of config.yaml that compared runs need not share; a difference in any other is reported."""

MEASURED = ("dataset", "num_train", "device_name", "git_commit")
"""Keys of metrics.json that they should share too, in addition to the versions of the packages."""

HARMLESS = ("precision", "accelerator", "device_name", "git_commit", "versions")
"""Settings that do not prevent a verdict: the bound accounts for them, or they are what is tested."""


def shared(run: Run) -> dict[str, Any]:
    """Returns all settings that a run should share with the runs that it is compared to, by dotted names."""
    settings = {key: value for key, value in run.settings.items() if key not in MAY_DIFFER}
    measured = {key: run.metrics.get(key) for key in (*MEASURED, "versions")}
    return {**settings, **flat(measured)}


def differences(variants: Sequence[Variant]) -> list[Difference]:
    """Returns the settings in which variants differ, according to the first run of each."""
    runs = {variant.name: shared(variant.runs[0]) for variant in variants if variant.runs}
    found = []
    for key in dict.fromkeys(key for settings in runs.values() for key in settings):
        values = {name: str(settings.get(key, "missing")) for name, settings in runs.items()}
        if len({*values.values()}) > 1:
            found.append(Difference(key, values))
    return found


def hinders(difference: Difference, reference: str, other: str) -> bool:
    """Whether a difference makes a verdict on a variant meaningless."""
    if difference.setting.split(".")[0] in HARMLESS:
        return False
    return difference.values.get(reference) != difference.values.get(other)
