"""Names the strategies with DeepSpeed, and finds DeepSpeed and GPUs. Imports no DeepSpeed, and torch only to
count GPUs."""

import importlib.util
import re
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
    spec = importlib.util.find_spec("deepspeed")
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def deepspeed_words(word: str, *files: str) -> set[str]:
    """Returns the matches of a regular expression in files of the installed DeepSpeed, or an empty set without
    DeepSpeed.

    Args:
        word: The expression. Its ^ matches at each line.
        files: Patterns of paths in DeepSpeed's folder, as `Path.glob` takes them.
    """
    folder = deepspeed_folder()
    found = [file for pattern in files for file in folder.glob(pattern)] if folder else []
    return {match for file in found for match in re.findall(word, file.read_text(), re.MULTILINE)}


def config_keys(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        yield key
        if isinstance(value, dict):
            yield from config_keys(value)


def has_gpu() -> bool:
    """Returns whether there is a driver of GPUs (NVIDIA's, that of WSL, AMD's). Does not import torch."""
    return any(Path(file).exists() for file in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def uses_gpus(ranks: int) -> bool:
    """Returns whether ranks on this machine train on GPUs. If there is not one for each rank, all train on the CPU.
    Imports torch only if there is a driver of GPUs."""
    if not has_gpu():
        return False
    import torch

    return torch.cuda.device_count() >= ranks
