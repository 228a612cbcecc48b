"""Names the strategies with DeepSpeed, and finds the installed DeepSpeed without importing it."""

import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ZERO = {
    "deepspeed_stage_0": (0, False),
    "deepspeed_stage_1": (1, False),
    "deepspeed_stage_1_offload": (1, True),
    "deepspeed_stage_2": (2, False),
    "deepspeed_stage_2_offload": (2, True),
    "deepspeed_stage_3": (3, False),
    "deepspeed_stage_3_offload": (3, True),
}
"""The ZeRO stage of each strategy with DeepSpeed, and whether the CPU updates the weights."""


@cache
def deepspeed_folder() -> Path | None:
    """Returns the folder of the installed DeepSpeed, or None."""
    spec = importlib.util.find_spec("deepspeed")
    return Path(spec.origin).parent if spec and spec.origin else None


def config_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the keys of a configuration of DeepSpeed and of its sections."""
    for key, value in config.items():
        yield key
        if isinstance(value, dict):
            yield from config_keys(value)
