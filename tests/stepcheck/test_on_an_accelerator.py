"""Runs on_an_accelerator.py in a process of its own, because a process cannot lose a device again."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.suite import HANG_SECONDS, ROOT


@pytest.mark.distributed
def test_the_audit_on_a_device_that_fails_as_a_gpu_does() -> None:
    file = Path(__file__).with_name("on_an_accelerator.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout[-5000:]
