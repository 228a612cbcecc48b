"""The commands that a user should run, so that they work where and how this program was started."""

import os
import shlex
import shutil
import sys
from pathlib import Path

INSTALLED = "CIFAR_ZERO_INSTALLED"
"""Environment variable: this process, or the one that started it, is `cifar-zero COMMAND`."""


def command(name: str, *arguments: object) -> str:
    """Returns the line for a shell that starts a command: `python train.py ...`, or `cifar-zero train ...`. The paths
    are those of the running interpreter, seen from the current directory."""
    script = Path(__file__).parents[2] / f"{name}.py"
    start = [next_to_python(Path(sys.executable).name), _short(script)]
    if INSTALLED in os.environ:
        start = [next_to_python("cifar-zero"), name]
    return shlex.join([*start, *map(str, arguments)])


def torchrun(name: str, nodes: object = "N", ranks: object = "M") -> str:
    """Returns the command that starts a program on several nodes, with so many ranks each; to be run on each node."""
    script = f"-m cifar_zero {name}" if INSTALLED in os.environ else f"{name}.py"
    start = f"{shlex.quote(next_to_python('torchrun'))} --nnodes {nodes} --nproc_per_node {ranks}"
    return f"{start} --rdzv_backend c10d --rdzv_endpoint HOST:PORT {script}"


def next_to_python(name: str) -> str:
    """Returns how a shell starts a program of the running interpreter's environment, which may not be activated: its
    name if PATH leads to it or it does not exist there, otherwise its path."""
    program, found = Path(sys.executable).with_name(name), shutil.which(name)
    known = found is not None and os.path.samefile(os.path.dirname(found), program.parent)
    return name if known or not program.exists() else _short(program)


def _short(path: Path) -> str:
    """Returns the relative or the absolute path, whichever is shorter."""
    return min(os.path.relpath(path), str(path), key=len)
