"""cifar-zero doctor --nodes: checks that the ranks of all nodes meet, compute the right sum, and run the same software.

A launcher starts it on every node, as it will start the run. Each rank runs `examine`, and rank 0 reports.
"""

import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from cifar_zero import models
from cifar_zero.core.console import command, say
from cifar_zero.core.errors import short
from cifar_zero.core.hardware import cpu_name
from cifar_zero.diagnosis.check import Finding, Options, failed, ok
from cifar_zero.launch import rank_environment
from cifar_zero.launch.collectives import gather, ranks_on_another_disk
from cifar_zero.models import IMAGE_SHAPE
from cifar_zero.reports import summary

BANDWIDTH = "Bandwidth is not measured: run all_reduce_perf of https://github.com/NVIDIA/nccl-tests"

ELEMENTS = 2**18
"""Size of the all-reduce in float32, 1 MiB: with a wrong MTU small packets arrive and large ones get lost."""

STEPS = 10  # steps that each rank trains alone

DRIVER = Path("/sys/module/nvidia/version")  # file in which Linux shows the version of NVIDIA's driver, if it is loaded


def examine(options: Options) -> dict[str, Finding] | None:
    """Meets the other ranks and compares the nodes; returns the findings on rank 0, None on the others. Ends the
    process, with one line from the first rank of each node, if a step takes longer than `options.timeout` seconds."""
    patience = timedelta(seconds=3 * options.timeout)  # so that the watchdog reports first
    # The store of torchrun's agents, or one that rank 0 opens. Not torch's "env://": with it rank 0 waits here for the
    # others, and cannot name who is missing.
    opens = rank_environment.global_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, limit = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=options.timeout)
    tcp = TCPStore(*address, is_master=opens, timeout=limit, wait_for_workers=False)
    store = PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", tcp)
    store.set_timeout(patience)
    watchdog = Watchdog(store.clone(), options.timeout)
    rank, ranks = rank_environment.global_rank(), int(os.environ["WORLD_SIZE"])
    watchdog.begin("testing the GPU")
    no_gpu = _no_gpu()
    store.set(f"arrival/{rank}", json.dumps([socket.gethostname(), no_gpu]))
    watchdog.begin("meeting the others")
    arrivals = [json.loads(store.get(f"arrival/{other}")) for other in range(ranks)]
    hosts = watchdog.hosts = [host for host, _ in arrivals]
    on_gpu = not any(why for _, why in arrivals)
    backend = "nccl" if on_gpu else "gloo"
    group = PrefixStore("group", store)
    device = torch.device("cuda", rank_environment.local_rank()) if on_gpu else None
    dist.init_process_group(backend, store=group, rank=rank, world_size=ranks, timeout=patience, device_id=device)
    watchdog.begin(f"an all-reduce of 1 MiB over {backend}")
    data = torch.full((ELEMENTS,), float(rank), device="cuda" if on_gpu else "cpu")
    dist.all_reduce(data)
    right = bool((data == sum(range(ranks))).all())
    watchdog.begin("training alone")
    alone = gather((torch.cuda.get_device_name() if on_gpu else cpu_name(), losses_alone("cuda" if on_gpu else "cpu")))
    watchdog.begin("comparing the nodes")
    sums, software = gather(right), gather(versions())
    out = Path(options.out)
    existing = next(parent for parent in (out, *out.parents) if parent.exists())  # a relative path stays relative
    apart = ranks_on_another_disk(existing if rank == 0 else None)
    dist.destroy_process_group()
    watchdog.end()
    if rank:
        return None
    return {
        "ranks": ok(f"{ranks} ranks on {len({*hosts})} nodes have met: {', '.join(dict.fromkeys(hosts))}"),
        "gpu": check_gpus(arrivals),
        "all-reduce": check_sums(hosts, sums, backend),
        "training": check_losses(hosts, alone),
        "versions": check_versions(hosts, software),
        "out": check_out(hosts, options.out, apart),
    }


def losses_alone(device: str) -> list[float]:
    """Returns the loss of each step of a short training, which all devices of a kind compute bit for bit, as in
    SuperBench's test of determinism (Xiong et al. 2024, "SuperBench")."""
    torch.manual_seed(0)
    net = models.build("net", 10)
    images, labels = torch.randn(STEPS, 64, *IMAGE_SHAPE), torch.randint(0, 10, (STEPS, 64))
    net = net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
        for batch, expected in zip(images.to(device), labels.to(device), strict=True):
            loss = torch.nn.functional.cross_entropy(net(batch), expected)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).tolist()


class Watchdog:
    """Ends this process with one line and exit code 1 if a step takes longer than `seconds`; by a thread, because a
    rank may hang in calls without a time limit: NCCL's kernels, a host name, a disk."""

    def __init__(self, store: Store, seconds: float):
        self.store = store  # of the steps that each rank has begun; a connection of its own, as another may be blocked
        self.hosts: list[str] = []  # of each rank; empty until they are known
        self._seconds = seconds
        self._timer = threading.Timer(0, self._give_up)

    def begin(self, step: str) -> None:
        """Starts a step, such as `meeting the others`, and ends the one before."""
        self.end()
        self.store.set(f"{step}/{rank_environment.global_rank()}", "")
        self._timer = threading.Timer(self._seconds, self._give_up, [step])
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        self._timer.cancel()

    def _give_up(self, step: str) -> None:
        if rank_environment.local_rank() == 0:
            say(f"error: {step} took longer than {self._seconds:g} s: {self._missing(step)}")
        os._exit(1)

    def _missing(self, step: str) -> str:
        ranks = range(int(os.environ["WORLD_SIZE"]))
        try:
            missing = [rank for rank in ranks if not self.store.check([f"{step}/{rank}"])]
        except RuntimeError:
            return f"the node of rank 0, {os.environ['MASTER_ADDR']}, does not answer"
        named = [f"rank {rank}" + (f" ({self.hosts[rank]})" if self.hosts else "") for rank in missing]
        return f"{', '.join(named)} did not get this far" if named else "all ranks have begun it"


def _no_gpu() -> str:
    """Sets this rank's GPU as the current device; returns why it cannot be used, or an empty string."""
    try:
        torch.cuda.set_device(rank_environment.local_rank())
        torch.ones(1, device="cuda").sum().item()
    except (RuntimeError, AssertionError) as error:  # no GPU, an old driver, a GPU that this torch has no kernels for
        return short(error)
    return ""


def versions() -> dict[str, str]:
    """Returns the versions that must be the same on all nodes: Python, packages, NCCL, NVIDIA's driver, the commit."""
    found = {name: version or "none" for name, version in summary.versions().items()}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, nccl.version()))
        found["driver"] = DRIVER.read_text().strip() if DRIVER.is_file() else "unknown"
    return {**found, "commit": summary.git_commit() or "unknown"}


def check_gpus(arrivals: Sequence[tuple[str, str]]) -> Finding:
    """Whether all ranks have a GPU, or none has; `arrivals` holds each rank's host, and why it cannot use its GPU."""
    lacking = {host: why for host, why in arrivals if why}
    if not lacking:
        return ok("each rank has one")
    if all(why for _, why in arrivals):
        return ok("no rank has one, they run on the CPU")
    named = ", ".join(f"{host} ({why})" for host, why in lacking.items())
    return failed(f"not every rank has one: {named}", f"{command('doctor', 'gpu')}; under SLURM --gpus-per-node")


def check_sums(hosts: Sequence[str], right: Sequence[bool], backend: str) -> Finding:
    wrong = [f"rank {rank} ({host})" for rank, host in enumerate(hosts) if not right[rank]]
    if wrong:
        return failed(f"a wrong sum on {', '.join(wrong)}", "replace the network adapter or the GPU there")
    return ok(f"1 MiB over {backend}, the right sum on every rank")


def check_losses(hosts: Sequence[str], alone: Sequence[tuple[str, list[float]]]) -> Finding:
    """Whether devices of a kind compute the same; `alone` holds each rank's device and losses."""
    wrong: list[str] = []
    for device in dict.fromkeys(device for device, _ in alone):
        losses = {rank: tuple(own) for rank, (kind, own) in enumerate(alone) if kind == device}
        ((most, _),) = Counter(losses.values()).most_common(1)
        wrong += [f"rank {rank} ({hosts[rank]})" for rank, own in losses.items() if own != most]
    if wrong:
        fix = "replace that node: it computes wrongly (of two equal devices either may)"
        return failed(f"other losses than most devices of the kind on {', '.join(wrong)}", fix)
    return ok(f"{STEPS} steps alone, the same losses on all devices of a kind")


def check_versions(hosts: Sequence[str], software: Sequence[Mapping[str, str]]) -> Finding:
    differ: list[str] = []
    for name in sorted({name for found in software for name in found}):
        versions = {host: found.get(name, "none") for host, found in zip(hosts, software, strict=True)}
        if len({*versions.values()}) > 1:
            differ.append(f"{name} {', '.join(f'{version} on {host}' for host, version in versions.items())}")
    if differ:
        return failed(f"not the same on all nodes: {' | '.join(differ)}", "install the same on each, from one checkout")
    return ok(f"the same on all nodes: {', '.join(f'{name} {version}' for name, version in software[0].items())}")


def check_out(hosts: Sequence[str], out: str, apart: Sequence[int]) -> Finding:
    if apart:
        named = ", ".join(sorted({hosts[rank] for rank in apart}))
        return failed(f"{named} cannot see what {hosts[0]} writes to {out}", "--out DIR on a disk that all nodes share")
    return ok(f"{out} is the same directory on all nodes")
