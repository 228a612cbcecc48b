"""Who has started this process as one rank of a run, told in torchrun's variables whoever it was; no torch."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from errors import UsageError

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Set by torchrun, and by our own launcher (docs.pytorch.org, elastic/run)."""

DEEPSPEED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK")
"""Set by DeepSpeed's launcher (0.19.8, deepspeed/launcher/launch.py)."""

SLURM_PORTS = 15_000
"""The ranks of a SLURM job meet at this port and the last four digits of the job's number, as Lightning has it."""


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """torchrun's variables of this rank; empty where no launcher has started this process.

    Raises:
        UsageError: the machines have different numbers of ranks.
    """
    if all(name in environment for name in TORCHRUN):
        # Where neither NODE_RANK nor torchrun's GROUP_RANK is there Lightning takes every machine for the first one.
        node = int(environment["RANK"]) // max(1, int(environment["LOCAL_WORLD_SIZE"]))
        return {name: environment[name] for name in TORCHRUN} | {"NODE_RANK": str(node)}
    if all(name in environment for name in DEEPSPEED):
        found = {name: environment[name] for name in DEEPSPEED[:3]}
        return found | {"LOCAL_WORLD_SIZE": environment["LOCAL_SIZE"], "NODE_RANK": environment["CROSS_RANK"]}
    # The shell of a batch script has SLURM_PROCID and the job's SLURM_NTASKS too, that of salloc a step of one task:
    # srun alone sets the variables of a step (slurm.schedmd.com/srun.html), and only one of several tasks starts ranks.
    if "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment and _tasks(environment) > 1:
        return _of_slurm(environment)
    return {}


def adopt() -> None:
    """Sets torchrun's variables where another launcher has started this rank: torch, Lightning, DeepSpeed and this
    program then have one account of the ranks."""
    os.environ.update(variables())


def arguments(given: Sequence[str]) -> list[str]:
    """The command line without the `--local_rank=N` that DeepSpeed's launcher adds to it: LOCAL_RANK says the same."""
    by_deepspeed = "CROSS_RANK" in os.environ
    return [argument for argument in given if not (by_deepspeed and argument.startswith("--local_rank="))]


def by_torchrun() -> bool:
    """Whether torchrun has started this rank, and starts it again where the run fails or machines come and go."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def starter() -> str:
    """What has started this process: its host, number and start, the same for as long as that starts it anew; empty in
    the first process of a container.

    On Linux the start is the boot's identity and ticks since then (proc(5)): psutil's create_time() is of the clock,
    and moves when that is set.
    """
    parent = os.getppid()
    try:
        if sys.platform == "linux":
            ticks = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]  # the name may have blanks
            began = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{ticks}"
        else:
            import psutil

            began = str(psutil.Process(parent).create_time())
    except OSError:
        return ""
    return f"{socket.gethostname()}:{parent}:{began}"


def _tasks(environment: Mapping[str, str]) -> int:
    return int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Of what srun sets for a task, the step's own before the job's (slurm.schedmd.com/srun.html)."""

    def told(*names: str) -> str:
        return next((environment[name] for name in names if environment.get(name)), "")

    tasks, number = _tasks(environment), int(environment["SLURM_PROCID"])
    if int(told("SLURM_HET_SIZE") or 1) > 1:
        raise UsageError(
            "the parts of a heterogeneous SLURM job count their tasks each by itself: submit one of one part"
        )
    nodes = int(told("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1)
    per_node = told("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")  # "2(x4)", or "2(x3),1"
    if tasks % nodes or "," in per_node:
        raise UsageError(
            f"SLURM runs {tasks} tasks on {nodes} machines ({per_node or 'not as many on each'}): "
            "give srun --ntasks-per-node, as many on each"
        )
    each = tasks // nodes
    node = int(told("SLURM_NODEID") or number // each)
    local = int(told("SLURM_LOCALID") or number % each)
    if not 0 <= node * each + local < tasks or local >= each:
        raise UsageError(
            f"SLURM's task {number} is number {local} of machine {node}, where {nodes} machines have {each} each: "
            "give srun --ntasks-per-node, as many on each"
        )
    hosts = told("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return {
        # Not SLURM_PROCID, which goes round the machines under --distribution=cyclic: ranks of one are neighbours here.
        "RANK": str(node * each + local),
        "LOCAL_RANK": str(local),
        "NODE_RANK": str(node),
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": told("MASTER_ADDR") or first_host(hosts) or "127.0.0.1",
        "MASTER_PORT": told("MASTER_PORT") or str(SLURM_PORTS + int(told("SLURM_JOB_ID") or 0) % 10_000),
    }


def first_host(hosts: str) -> str:
    """The first of SLURM's list of hosts, `gpu[03-07,12],login1` for instance."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts).split(",")[0]
