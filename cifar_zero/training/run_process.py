"""Starts a run in a separate process group, and ends the process group. Does not import torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from cifar_zero.config.settings import FALLBACK_SUFFIX
from cifar_zero.core import exits
from cifar_zero.core.hardware import REPOSITORY
from cifar_zero.launch import local_launcher

SAVING_SECONDS = 45.0  # time for a run to end; the launcher gives the ranks 30 s to write a checkpoint

TRAIN = ("cifar_zero", "train")  # the Python module that trains a run, and its first argument


@contextmanager
def start(flags: Sequence[str], log: Path, launcher: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Context manager that starts a training run. Python runs with -P, so that modules in the user's directory cannot
    shadow other modules. At the end of the context, a run that is still alive receives SIGINT, as from Ctrl-C. Its
    process group is killed if the run has not ended SAVING_SECONDS later, or at once if the user presses Ctrl-C again.

    Args:
        flags: Flags of train.
        log: File for the output of the run.
        launcher: Command that starts the ranks (srun ...).
    """
    # torchrun and DeepSpeed's launcher start Python themselves.
    python = [sys.executable, "-P", "-m"]
    if launcher and Path(launcher[0]).name in ("torchrun", "deepspeed"):
        python = ["--module"]
    debug = ["--debug"] if exits.wants_traceback() else []
    with log.open("w") as output:
        run = subprocess.Popen(
            [*launcher, *python, *TRAIN, *flags, *debug],
            env=_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(local_launcher.prepare, cores=()),  # so that Ctrl-C works in a background job too
        )
    try:
        yield run
    finally:
        try:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGINT)  # like Ctrl-C: the ranks save a checkpoint, then all end
                with suppress(subprocess.TimeoutExpired):
                    run.wait(SAVING_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def failure(log: Path, code: int) -> str:
    """Returns why a run failed: the text of the last line in its log that begins with `error:`. If there is no such
    line, returns how the run ended (by its exit code) and the last line of the log. With --debug, also prints the full
    log to standard error."""
    text = log.read_text(errors="replace")
    if exits.wants_traceback():
        sys.stderr.write(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    return ": ".join([local_launcher.how_ended(code), *lines[-1:]])


def folders(out: Path, name: str) -> list[Path]:
    """Returns the run folders in `out` of all runs with this name, the newest last. Runs that fell back to the embedded
    digits are included."""
    names = (name, name + FALLBACK_SUFFIX)
    run_folders = [folder for each in names for folder in (out / each).glob("version_*")]
    return sorted(run_folders, key=lambda folder: int(folder.name.removeprefix("version_")))


def _environment() -> dict[str, str]:
    """Returns this process's environment, changed so that Python finds this package from any directory. The start time
    of this process and SLURM's count of restarts are left out."""
    left_out = (exits.STARTED, "SLURM_RESTART_COUNT")
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(REPOSITORY))))
    return {key: value for key, value in os.environ.items() if key not in left_out} | {"PYTHONPATH": path}
