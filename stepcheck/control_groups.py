"""Reads the memory limits of Linux's control groups, which containers and batch systems set."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")  # version 2


def left_in_groups() -> list[int]:
    """Returns the unused bytes of each control group that limits the memory of this process, for example the group of a
    container. Cached files do not count as used, because the kernel frees them first (kernel.org,
    admin-guide/cgroup-v2)."""
    own, left = Path("/proc/self/cgroup"), list[int]()
    if own.exists():
        group = ROOT / own.read_text().rpartition("0::/")[2].strip()  # the line of cgroup version 2 is the last one
        for folder in (group, *group.parents):
            limit = folder / "memory.max"
            if limit.exists() and (most := limit.read_text().strip()) != "max":
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / "memory.current").read_text()) - int(counts.get("inactive_file", 0))
                left.append(int(most) - used)
    return left
