"""Reads the free memory and the peak memory of a rank."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from stepcheck.control_groups import left_in_groups

_peaks: dict[str, int] = {}  # of each type of device, before the last replay


def available(device: torch.device, ranks: int = 1) -> float | None:
    """Returns the free bytes of a GPU, including those that torch keeps, or else the free bytes of the machine, within
    the limits of its control groups, divided by the `ranks` that share it. None if unknown."""
    if device.type == "cuda":  # torch keeps freed memory for later tensors
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + kept)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min([*free, *left_in_groups()]) / ranks if free else None


def peak(device: torch.device) -> int:
    """Returns the peak memory of this rank in bytes, outside of replays: of the tensors on a GPU, or else of the
    process."""
    return max(_peaks.get(device.type, 0), _measured_peak(device))


def begin_replay(device: torch.device) -> None:
    """Saves the peak memory before a replay, because the replay will raise the measured peak."""
    _peaks[device.type] = peak(device)


def end_replay(device: torch.device) -> None:
    """Resets the measured peak, so that the memory of the replay does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # only Linux can forget a peak
            Path("/proc/self/clear_refs").write_text("5")


def _measured_peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        # getrusage is not used, because its peak of a process begins at the peak of the parent process.
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # getrusage(2) of macOS returns bytes
