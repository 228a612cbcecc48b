"""Checks that the ranks of all nodes can connect, compute the right sum, and run the same software (cifar-zero doctor
--nodes). A launcher starts the doctor on every node, as it will start the run."""

import socket
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cifar_zero.core import hardware
from cifar_zero.core.console import command
from cifar_zero.core.errors import short
from cifar_zero.diagnosis import Finding, existing, failed, ok
from cifar_zero.launch import rank_environment
from cifar_zero.launch.collectives import connect, gather, ranks_on_another_disk

BANDWIDTH = "Bandwidth is not measured: run all_reduce_perf of https://github.com/NVIDIA/nccl-tests"

ELEMENTS = 2**18
"""Number of float32 elements of the all-reduce, 1 MiB in all. Large packets reveal a wrong MTU, with which only small
packets arrive."""


def examine(options: Namespace) -> dict[str, Finding]:
    """Connects to the other ranks, compares the nodes and returns the findings, keyed by the name of the check. Every
    rank must call it. Raises RunError, which names the missing ranks, if some ranks do not connect within --timeout."""
    rank, limit = rank_environment.global_rank(), timedelta(seconds=options.timeout)
    connect(on_cpu=True, patience=limit)
    hosts, lacks_gpu, software = zip(*gather((socket.gethostname(), _no_gpu(), versions())), strict=True)
    ranks, backend, device = len(hosts), "gloo", "cpu"
    if not any(lacks_gpu):
        backend, device = "nccl", "cuda"
    data = torch.full((ELEMENTS,), float(rank), device=device)
    group: Any = dist.new_group(backend=backend, timeout=limit)
    dist.all_reduce(data, group=group)
    sums = gather(bool((data == sum(range(ranks))).all()))
    folder = existing(Path(options.out)) if rank == 0 else None
    apart = ranks_on_another_disk(folder)
    dist.destroy_process_group()
    return {
        "ranks": ok(f"{ranks} ranks on {len({*hosts})} nodes are connected: {', '.join(dict.fromkeys(hosts))}"),
        "gpu": check_gpus(hosts, lacks_gpu),
        "all-reduce": check_sums(hosts, sums, backend),
        "versions": check_versions(hosts, software),
        "out": check_out(hosts, options.out, apart),
    }


def _no_gpu() -> str:
    """Sets this rank's GPU as the current device. Returns why the GPU cannot be used, or an empty string."""
    try:
        torch.cuda.set_device(rank_environment.local_rank())
        torch.ones(1, device="cuda").sum().item()
    except (RuntimeError, AssertionError) as error:  # no GPU, an old driver, or a GPU without kernels in this torch
        return short(error)
    return ""


def versions() -> dict[str, str]:
    """Returns the versions of software on this node that must be the same on all nodes: Python, packages, NCCL,
    NVIDIA's driver and this repository."""
    installed = {name: version or "none" for name, version in hardware.versions().items()}
    if torch.cuda.is_available():
        installed |= hardware.gpu_versions()
    return {**installed, "commit": hardware.git_commit() or "unknown"}


def check_gpus(hosts: Sequence[str], lacks: Sequence[str]) -> Finding:
    """Checks that either all ranks have a GPU or none has. `hosts` has the name of each rank's node. `lacks` has the
    reason why each rank cannot use its GPU, or "" if it can."""
    if not any(lacks):
        return ok("each rank has a GPU")
    if all(lacks):
        return ok("no rank has a GPU, so all run on the CPU")
    named = dict.fromkeys(f"{host} ({why})" for host, why in zip(hosts, lacks, strict=True) if why)
    fix = f"{command('doctor', 'gpu')}; under SLURM --gpus-per-node"
    return failed(f"not every rank has a GPU: {', '.join(named)}", fix)


def check_sums(hosts: Sequence[str], right: Sequence[bool], backend: str) -> Finding:
    wrong = [f"rank {rank} ({host})" for rank, host in enumerate(hosts) if not right[rank]]
    if wrong:
        return failed(f"the sum is wrong on {', '.join(wrong)}", "replace the network adapter or the GPU there")
    return ok(f"1 MiB over {backend}, with the correct sum on every rank")


def check_versions(hosts: Sequence[str], software: Sequence[Mapping[str, str]]) -> Finding:
    differ: list[str] = []
    for name in sorted(set[str]().union(*software)):
        versions = [installed.get(name, "none") for installed in software]
        if len({*versions}) > 1:  # also on one host, if its ranks run in different environments
            named = dict.fromkeys(f"{version} on {host}" for version, host in zip(versions, hosts, strict=True))
            differ.append(f"{name} {', '.join(named)}")
    if differ:
        return failed(f"not the same on all nodes: {' | '.join(differ)}", "install the same checkout on each node")
    return ok(f"the same on all nodes: {', '.join(f'{name} {version}' for name, version in software[0].items())}")


def check_out(hosts: Sequence[str], out: str, apart: Sequence[int]) -> Finding:
    if apart:
        named = ", ".join(sorted({hosts[rank] for rank in apart}))
        summary = f"{out} is not the same directory on {hosts[0]} and {named}"
        return failed(summary, "--out DIR on a disk that all nodes share")
    return ok(f"{out} is the same directory on all nodes")
