"""The start of a program, from whose first moment Ctrl-C, SIGTERM and SIGHUP are one line and exit code 128 + the
signal's number; imports nothing slow."""

import os
import signal
import sys
from importlib import import_module
from typing import Any, NoReturn

from cifar_zero.core.errors import Stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a program: Ctrl-C, a cluster or container, a closed terminal."""

SPINS = "10000"
"""How often a thread of a parallel loop looks for the others before it sleeps: libgomp's GOMP_SPINCOUNT, which it reads
when torch is imported. While another program runs, its default, 300,000, keeps a core from the thread that the others
wait for: steps took up to twice as long. A smaller number costs more on an idle machine (docs/performance.md)."""

expected = False  # whether `exits.guarded` is there to catch Stopped


def start(module: str, *arguments: Any) -> NoReturn:
    """Imports a module, runs its `main` with these arguments as `exits.guarded` does, and ends the process."""
    install()
    if "OMP_WAIT_POLICY" not in os.environ:  # the user's choice, which has its own number
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from cifar_zero.core.exits import guarded

    sys.exit(guarded(lambda: import_module(module).main(*arguments)))


def install() -> None:
    """Handles the signals from now on. A process that ignores one of them continues to: a background
    job ignores Ctrl-C, and nohup SIGHUP."""
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)


def ignore() -> None:
    """Ignores the signals from now on, because the program already ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def interrupt(number: int, frame: object) -> None:
    """Raises Stopped, or ends the process if that could get lost: Python prints what is raised in a callback of the
    import system and continues."""
    stop = Stopped(number)
    if expected and not _importing():
        raise stop
    os.write(2, f"stopped by {stop.name}\n".encode())
    os._exit(stop.exit_code)


def _importing() -> bool:
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
