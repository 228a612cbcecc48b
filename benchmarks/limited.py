"""Runs a program in a process that may take so much memory, and says how much it took.

`python -m benchmarks.limited BYTES PROGRAM.py [ARGUMENT ...]`; BYTES 0: no limit. The last line that it prints is a
JSON object with host_peak_bytes.
"""

from __future__ import annotations

import json
import resource
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Runs it, and ends as it ends."""
    limit, program = int(sys.argv[1]), sys.argv[2]
    if limit:
        # Data and private mappings (setrlimit(2), Linux 4.7): torch's tensors among them, its libraries not.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.argv = sys.argv[2:]
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        print(json.dumps({"host_peak_bytes": _peak_bytes()}))


def _peak_bytes() -> int:
    """Of this process, all that was resident at a time (not getrusage: it begins with the peak of the parent)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    main()
