"""Checks CPU cores and memory."""

from cifar_zero.config.rules.devices import CPU_RANK_BYTES
from cifar_zero.core.hardware import core_count, free_memory_bytes
from cifar_zero.diagnosis.finding import Finding, Options, failed, ok, warning


def cores(options: Options) -> Finding:
    """Checks whether each rank has its own CPU core."""
    count = core_count()
    if count < options.ranks:
        return warning(f"{count} for {options.ranks} ranks, which take turns", f"train.py --devices {count}")
    return ok(f"{count}, {count // options.ranks} for each of {options.ranks} ranks")


def memory(options: Options) -> Finding:
    """Whether the ranks fit into memory: one that trains on the CPU takes about 1 GB."""
    free = free_memory_bytes() / 1e9
    found = f"{free:.1f} GB are free"
    if (fit := ranks_in_memory()) < options.ranks:
        fix = f"train.py --devices {fit}" if fit else "end other programs"
        return failed(f"{found}, and {options.ranks} ranks take about 1 GB each", fix)
    return ok(f"{found}, {free / options.ranks:.1f} GB for each of {options.ranks} ranks")


def ranks_in_memory() -> int:
    """Returns how many CPU ranks fit into the free memory, possibly 0."""
    return free_memory_bytes() // CPU_RANK_BYTES
