"""Starts a run in its own process group, and ends it; without importing torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from cifar_zero.config.settings import FALLBACK_SUFFIX
from cifar_zero.core import exits
from cifar_zero.core.hardware import REPOSITORY
from cifar_zero.launch import local_launcher

POLL_SECONDS = 0.25  # time between two checks of a run
SAVING_SECONDS = 45.0  # time that a run has to end: the launcher gives the ranks 30 s to write a checkpoint

DEBUG = frozenset(["--debug"])  # which the runs of a program get from its command line, to show their tracebacks

TRAIN = ("cifar_zero", "train")
"""The module that trains a run, and its first argument."""

Run = subprocess.Popen[bytes]


@contextmanager
def start(
    program: Sequence[str],
    flags: Sequence[str],
    log: Path,
    extra_env: Mapping[str, str] | None = None,
    cores: Collection[int] = (),
    launcher: Sequence[str] = (),
) -> Iterator[Run]:
    """Starts a run, which prints into `log`. Python runs `program`, a module and its first arguments; modules in the
    user's directory do not replace others. The run and its ranks have the CPU `cores`, on Linux, without any all of
    this process. `launcher` is a command that starts the ranks (srun ...). The end of the context asks a live run to
    end, then kills its process group; a second Ctrl-C kills it at once."""
    # torchrun and DeepSpeed's launcher start Python themselves.
    python = [sys.executable, "-P", "-m"]
    if launcher and Path(launcher[0]).name in ("torchrun", "deepspeed"):
        python = ["--module"]
    with log.open("w") as output:
        run = subprocess.Popen(
            [*launcher, *python, *program, *flags, *DEBUG.intersection(sys.argv)],
            env={**_environment(), **(extra_env or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(local_launcher.prepare, cores),  # Ctrl-C works also in a shell's background job
        )
    try:
        yield run
    finally:
        try:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGINT)  # as Ctrl-C: the launcher and all ranks save a checkpoint and end
                with suppress(subprocess.TimeoutExpired):
                    run.wait(SAVING_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def failure(log: Path, code: int) -> str:
    """Returns the last line of a log that begins with error:, else how the run ended, and the last line; with --debug
    prints the whole log."""
    text = log.read_text(errors="replace")
    if DEBUG.intersection(sys.argv):
        sys.stderr.write(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    return ": ".join([local_launcher.how_ended(code), *lines[-1:]])


def folders(out: Path, name: str) -> list[Path]:
    """Returns the run folders of a name, the newest last, including those that fell back to the digits."""
    names = (name, name + FALLBACK_SUFFIX)
    found = [folder for each in names for folder in (out / each).glob("version_*")]
    return sorted(found, key=lambda folder: int(folder.name.removeprefix("version_")))


def _environment() -> dict[str, str]:
    """Returns this process's environment, without its start time and SLURM's count of restarts, in which Python finds
    this package from any directory."""
    left_out = (exits.STARTED, "SLURM_RESTART_COUNT")
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(REPOSITORY))))
    return {key: value for key, value in os.environ.items() if key not in left_out} | {"PYTHONPATH": path}
