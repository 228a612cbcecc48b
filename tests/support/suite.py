"""What tests of both packages need. Imports neither Lightning nor cifar_zero, so stepcheck's tests run without them."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

WHOLE = "TEST_ALL" in os.environ
"""Whether `make test-all` runs the tests. It runs all tests in full, which takes hours."""

of_test_all = pytest.mark.skipif(not WHOLE, reason="of make test-all")

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

ROOT = Path(__file__).resolve().parents[2]

HANG_SECONDS = 1800
"""How long tests wait for the end of a program, or for another event, that takes a few seconds on an idle machine. Next
to 20 busy processes such an event takes less than this. The limit only ends a test that would never end."""


def environment(own: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment variables of a program that computes on one thread and is not a rank, also if this test
    is one, with the program's own variables."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {"OMP_NUM_THREADS": "1", **inherited, **(own or {})}


def run_python(
    *command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs `python <command>`, which reads `given` from its standard input. Returns its output and exit code."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment(env),
        input=given,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        # Ctrl-C has its effect as under a terminal. pytest-xdist's workers, and a shell's background jobs, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
