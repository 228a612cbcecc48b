"""Proportional set size (Linux): memory that a process has mapped, each page divided by the processes that share it."""

from __future__ import annotations

import re
from pathlib import Path


def mapped_bytes(pid: int, file: Path) -> int:
    """The share of a mapped file's pages in memory that falls to a process."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):  # the head of a mapping; the lines after it are about it
            inside = line.endswith(str(file))
        elif inside and line.startswith("Pss:"):
            total += 1024 * int(line.split()[1])  # in kB
    return total
