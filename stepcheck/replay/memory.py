"""Reads how much memory a rank may take."""

import os
from pathlib import Path

import torch


def available(device: torch.device) -> float | None:
    """Returns the free bytes of a GPU, or this rank's share of the free bytes of the machine. None if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    free = next((line for line in lines if line.startswith("MemAvailable:")), "")
    return 1024.0 * int(free.split()[1]) / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if free else None
