"""Each measured run is a fresh process, with torch's default threads whatever the shell has set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cifar_zero.core import start_time

ROOT = Path(__file__).resolve().parent.parent

TIMEOUT_SECONDS = 1800.0
"""Of one run: at its first use DeepSpeed compiles its operators, which took 4 minutes on two busy cores."""

TAIL_LINES = 15
"""Lines shown of a run that failed."""

NOT_INHERITED = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
)
"""Environment variables that would make a run another one."""


class RunFailed(Exception):
    """A measured run ended otherwise than it should; the message says how, and has the end of what it printed."""


@dataclass(frozen=True)
class Finished:
    """A run that ended as it should."""

    stdout: str
    """All that it printed there."""

    seconds: float
    """Wall-clock time of the process, from its start to its end."""


def run(*arguments: str, exit_code: int = 0, environment: Mapping[str, str] | None = None) -> Finished:
    """Runs `python <arguments>` from the repository's root; what it prints is kept to itself.

    Args:
        arguments: of the interpreter.
        exit_code: that the run must end with.
        environment: variables added to this process's own.

    Raises:
        RunFailed: it ended with another exit code, or not at all.
    """
    started = time.perf_counter()
    with running(*arguments, environment=environment) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"did not end within {TIMEOUT_SECONDS:.0f} s") from error
    seconds = time.perf_counter() - started
    if process.returncode != exit_code:
        tail = "\n".join([line for line in (stderr or stdout).splitlines() if line.strip()][-TAIL_LINES:])
        raise RunFailed(f"ended with exit code {process.returncode}, not {exit_code}; its last lines:\n{tail}")
    return Finished(stdout, seconds)


@contextmanager
def running(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process of `python <arguments>`, its three streams pipes; it is ended with all that it has started when the
    context is left, as by Ctrl-C, from which a process group of its own keeps it."""
    inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**inherited, start_time.VARIABLE: str(time.time()), **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
