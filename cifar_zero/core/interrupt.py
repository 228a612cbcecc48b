"""The start of a program, from whose first moment Ctrl-C is one line and exit code 130; imports nothing slow."""

import os
import signal
import sys
from importlib import import_module
from typing import Any, NoReturn

SPINS = "10000"
"""How often a thread of a parallel loop looks for the others before it sleeps: libgomp's GOMP_SPINCOUNT, which it reads
when torch is imported. While another program runs, its default, 300,000, keeps a core from the thread that the others
wait for: steps took up to twice as long. A smaller number costs more on an idle machine (docs/performance.md)."""

expected = False  # whether `exits.guarded` is there to catch a KeyboardInterrupt


def start(module: str, *arguments: Any) -> NoReturn:
    """Imports a module, runs its `main` with these arguments as `exits.guarded` does, and ends the process."""
    install()
    if "OMP_WAIT_POLICY" not in os.environ:  # the user's choice, which has its own number
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    from cifar_zero.core.exits import guarded

    sys.exit(guarded(lambda: import_module(module).main(*arguments)))


def install() -> None:
    """Handles Ctrl-C from now on. A process in which it is ignored stays so: a script's background job."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def interrupt(number: int, frame: object) -> None:
    """Raises KeyboardInterrupt, or ends the process if that could get lost: during an import libraries catch it, and
    Python prints what is raised in a callback of the import system and continues."""
    if expected and not _importing():
        raise KeyboardInterrupt
    os.write(2, b"stopped by Ctrl-C\n")
    os._exit(128 + number)


def _importing() -> bool:
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
