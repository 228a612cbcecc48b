"""The start of a program, from whose first moment Ctrl-C is one line and exit code 130; imports nothing slow."""

import os
import signal
import sys
from importlib import import_module
from typing import Any, NoReturn

expected = False  # whether `exits.guarded` is there to catch a KeyboardInterrupt


def start(module: str, *arguments: Any) -> NoReturn:
    """Imports a module, runs its `main` with these arguments as `exits.guarded` does, and ends the process."""
    install()
    from cifar_zero.core.exits import guarded

    sys.exit(guarded(lambda: import_module(module).main(*arguments)))


def install() -> None:
    """Handles Ctrl-C from now on. A process in which it is ignored stays so: a background job, or a rank of our
    launcher, which ends its ranks itself."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def interrupt(number: int, frame: object) -> None:
    """Raises KeyboardInterrupt, or ends the process if that could get lost: during an import libraries catch it, and
    Python prints what is raised in a callback of the import system and goes on."""
    if expected and not _importing():
        raise KeyboardInterrupt
    os.write(2, b"stopped by Ctrl-C\n")
    os._exit(128 + number)


def _importing() -> bool:
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
