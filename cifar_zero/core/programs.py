"""The commands that a user should run, in the way in which he has started this one."""

import os
import shlex

INSTALLED = "CIFAR_ZERO_INSTALLED"
"""Environment variable: this process, or the one that started it, is `cifar-zero COMMAND`."""


def command(name: str, *arguments: object) -> str:
    """Returns the line for a shell that starts a program: `python train.py ...`, or `cifar-zero train ...`."""
    program = ["cifar-zero", name] if INSTALLED in os.environ else ["python", f"{name}.py"]
    return shlex.join([*program, *map(str, arguments)])


def torchrun(name: str, nodes: object = "N", ranks: object = "M") -> str:
    """Returns the command that starts a program on several nodes, with so many ranks each; to be run on each node."""
    script = f"-m cifar_zero {name}" if INSTALLED in os.environ else f"{name}.py"
    return f"torchrun --nnodes {nodes} --nproc_per_node {ranks} --rdzv_backend c10d --rdzv_endpoint HOST:PORT {script}"
