"""Runs the programs in forks of a process that has their imports, because imports take most of a short run's time.

`python -m tests.support.warm_start SOCKET` waits for requests at a Unix socket. A request is a list of a command line,
a working directory and the environment variables, with two file descriptors for standard output and error output. A
fork of this process becomes that program. The answers are its process id and its exit code, one line each.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback

import matplotlib.pyplot

from cifar_zero.core.console import quieten
from cifar_zero.training import build, results
from cifar_zero.training.callbacks import figures

IMPORTED = (matplotlib.pyplot, build, figures, results, quieten)
"""Modules that are imported before a fork. Nothing in them has been called, so that a fork begins like a program that
has just started."""

REQUEST_BYTES = 2**18
"""Size of the largest request."""


def main() -> None:
    """Serves one request after the other until it is killed."""
    gc.freeze()  # the forks share this memory until something writes to it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{sys.argv[1]}.part")
        listener.listen()
        os.rename(f"{sys.argv[1]}.part", sys.argv[1])  # the final name appears once it listens
        while True:
            connection, _ = listener.accept()
            with connection:
                request, descriptors, *_ = socket.recv_fds(connection, REQUEST_BYTES, 2)
                output, errors = descriptors
                process = os.fork()
                if not process:
                    listener.close()
                    connection.close()
                    become(output, errors, *json.loads(request))
                os.close(output)
                os.close(errors)
                connection.sendall(f"{process}\n".encode())
                _, status = os.waitpid(process, 0)
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def become(output: int, errors: int, command: list[str], cwd: str, environment: dict[str, str]) -> None:
    """Runs a script or `-c CODE` as `python <command>` does, or a command of cifar-zero, and then ends this process."""
    # As under a terminal, also if the tests ignore Ctrl-C, or SIGHUP under nohup.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.setpgrp()  # not a new session, which would not yield the CPU to others, see tests/conftest.py
    os.dup2(output, sys.stdout.fileno())
    os.dup2(errors, sys.stderr.fileno())
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    is_command = command[0] != "-c" and not command[0].endswith(".py")
    sys.argv = ["cifar-zero", *command] if is_command else [*command]
    # The launcher starts ranks with these arguments.
    sys.orig_argv = [sys.executable, *(["-m", "cifar_zero"] if is_command else []), *command]
    code = 0
    try:
        if is_command:
            runpy.run_module("cifar_zero", run_name="__main__")
        elif command[0] == "-c":
            exec(sys.argv.pop(1), {"__name__": "__main__"})
        else:
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
