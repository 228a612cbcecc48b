"""Reads the environment variables by which a launcher describes a rank, and returns them under torchrun's names."""

import os
import re
import shlex
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

from cifar_zero.core.errors import UsageError

TORCHRUN = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
"""Variables that torchrun (docs.pytorch.org, elastic/run) and `local_launcher` set, with the least valid value of
each."""

DEEPSPEED_LOCAL_SIZE = "LOCAL_SIZE"
"""DeepSpeed's launcher sets this variable instead of LOCAL_WORLD_SIZE, and the other variables of TORCHRUN under their
own names (0.19.8, deepspeed/launcher/launch.py)."""

SLURM = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
SLURM += ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
"""Variables that srun sets for each task (slurm.schedmd.com/srun.html). The shell of a batch script lacks the variables
of a step."""

MOST_PORT = 65_535  # the largest port of TCP

RUN_FILE, FOLDER_FILE = "CIFAR_ZERO_RUN_FILE", "CIFAR_ZERO_FOLDER_FILE"
"""Environment variables in which `local_launcher` gives its ranks the descriptors of two open files. It has written the
resolved run into the first file, and rank 0 writes the path of the run folder into the second one.

The resolved run holds the user's consent to run code. The files have no name, so no other user can open them, and no
option in a user's file can name them."""

ADDRESS = "127.0.0.1"
"""Address of the ranks that `local_launcher` starts, which other computers cannot reach."""


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and NODE_RANK of this process, and under SLURM also
    MASTER_ADDR and MASTER_PORT. Returns an empty dict if no launcher has described this process as a rank. Raises
    UsageError if a value is invalid, or if SLURM's nodes have different numbers of tasks."""
    described = {name: environment[name] for name in TORCHRUN if name in environment}
    if DEEPSPEED_LOCAL_SIZE in environment:
        described.setdefault("LOCAL_WORLD_SIZE", environment[DEEPSPEED_LOCAL_SIZE])
    if len(described) < len(TORCHRUN):
        # The shell of salloc is a step with one task, so only a step with several tasks is taken as a launcher.
        several = "SLURM_STEP_NUM_TASKS"
        if all(name in environment for name in SLURM) and whole_number(several, environment[several]) > 1:
            return _of_slurm(environment)
        return {}
    rank, _, ranks, ranks_here = (whole_number(name, described[name], least) for name, least in TORCHRUN.items())
    if rank >= ranks:
        raise UsageError(
            f"the environment variable RANK is {rank}, and WORLD_SIZE {ranks}: ranks count from 0; start them with "
            "torchrun, or unset both"
        )
    if port := environment.get("MASTER_PORT"):
        whole_number("MASTER_PORT", port, most=MOST_PORT)
    # Without NODE_RANK or torchrun's GROUP_RANK, Lightning treats every node as the first one.
    return described | {"NODE_RANK": str(rank // ranks_here)}


def whole_number(name: str, value: str, least: int = 0, most: int | None = None) -> int:
    """Returns the value of the environment variable `name` as a number. Raises UsageError if it is not a whole number
    from `least` to `most`."""
    if not value.isdecimal() or int(value) < least or (most is not None and int(value) > most):
        limits = f"at least {least}" if most is None else f"at least {least} and at most {most}"
        fix = f"set it to a number of {limits}, or unset it"
        raise UsageError(f"the environment variable {name} is {value!r}: {fix}")
    return int(value)


def is_rank() -> bool:
    """Returns whether a launcher (`local_launcher`, torchrun, DeepSpeed's or SLURM) started this process as a rank."""
    return bool(variables())


def global_rank() -> int:
    """Returns the rank of this process over all nodes, 0 without a launcher."""
    return int(variables().get("RANK", "0"))


def local_rank() -> int:
    """Returns the rank of this process on its node, 0 without a launcher."""
    return int(variables().get("LOCAL_RANK", "0"))


def set_torchrun_variables() -> None:
    """Sets the environment variables that `variables` returns, if a launcher started this rank. torch, Lightning and
    DeepSpeed read them. Must be called before Lightning starts, whose DeepSpeedStrategy sets all but LOCAL_WORLD_SIZE.
    Raises UsageError if several ranks lack one of the variables."""
    own = variables()
    missing = [name for name in TORCHRUN if name not in os.environ]
    if not own and len(missing) == 1 and whole_number("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"), 1) > 1:
        others = ", ".join(name for name in TORCHRUN if name in os.environ)
        raise UsageError(
            f"the environment variable {missing[0]} is not set, but {others} are: set it on each rank, or start the "
            "ranks with torchrun"
        )
    os.environ.update(own)


def by_local_launcher() -> bool:
    return RUN_FILE in os.environ and is_rank()


def content_of(descriptor: int) -> bytes:
    """Returns the content of an open file. The position in the file, which processes share, is not moved."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def by_torchrun() -> bool:
    """Returns whether torchrun started this rank. torchrun restarts the ranks when one fails or a node joins."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def torchrun_agent() -> str:
    """Returns a name that identifies this node's torchrun process, over restarts of its ranks too, or an empty string
    without torchrun. It is the name of that process's temporary folder, in which each start has a file
    `attempt_<n>/<local rank>/error.json` (torch 2.15, DefaultLogsSpecs)."""
    parts = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parts
    if len(parts) > 4:
        return parts[-4]
    return ""


def slurm_job() -> str:
    """Returns a name of this process's command in its SLURM job, or an empty string without SLURM: the number of the
    job, which a requeued job keeps, and a checksum of the arguments, because a job may train several runs. The numbers
    of nodes and devices do not count, because a requeued job may get others."""
    number = os.environ.get("SLURM_JOB_ID", "")
    arguments = re.sub(r"--(num_nodes|devices)[ =]\S+", "", shlex.join(sys.argv[1:]))
    return number and f"{number}-{zlib.crc32(os.fsencode(arguments)):08x}"


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    names = ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_LOCALID")
    nodes, tasks, node, local_rank = (whole_number(name, environment[name], "NUM" in name) for name in names)
    each = tasks // nodes
    per_node = environment["SLURM_STEP_TASKS_PER_NODE"]  # "2(x4)", or "2(x3),1"
    if tasks % nodes or "," in per_node or local_rank >= each:
        raise UsageError(f"SLURM runs {tasks} tasks on {nodes} nodes ({per_node}): use srun --ntasks-per-node")
    job = whole_number("SLURM_JOB_ID", environment.get("SLURM_JOB_ID", "0"))
    # As in Lightning: the last four digits of the job's number.
    port = environment.get("MASTER_PORT") or str(15_000 + job % 10_000)
    whole_number("MASTER_PORT", port, most=MOST_PORT)
    return {
        # Not SLURM_PROCID, because with --distribution=cyclic neighbouring tasks are on different nodes.
        "RANK": str(node * each + local_rank),
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(node),
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": port,
    }


def first_host(hosts: str) -> str:
    """Returns the first host in SLURM's list of hosts, for example `gpu03` for `gpu[03-07,12],login1`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts).split(",")[0]
