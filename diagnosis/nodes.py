"""doctor.py --nodes: is a run over several machines fit? Each of its ranks runs this, and rank 0 tells.

It is started as the run will be, by torchrun or srun on every machine.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import interface
import launch
import launchers
from diagnosis.deadline import Deadline
from diagnosis.finding import Finding, Options, ok, warning
from diagnosis.finding import failed as fail
from errors import UsageError

if TYPE_CHECKING:
    from torch import device

    from diagnosis.gathering import Arrival
    from diagnosis.links import Measured, Pair, Progress
    from diagnosis.machines import Machine

START = launch.TORCHRUN.replace("train.py", "doctor.py --nodes")

CLOCK_SECONDS = 1.0
"""Clocks further apart than this are a warning: --resume last takes the checkpoint that the clock calls the newest."""

SLOW = 0.5
"""A pair of machines with less than this of the fastest pair's bandwidth is named: of three machines, one of which is
slow, the middle pair is slow too."""

SHARED_SECONDS = 3.0
"""How long a machine looks for a file that another has just written, as Lightning's is_shared_filesystem does
(2.6.6, lightning/fabric/utilities/distributed.py)."""

NAMED = 8
"""Slow pairs that are named at most."""


@dataclass(frozen=True)
class Network:
    """What was found, on rank 0.

    Attributes:
        backend: nccl or gloo.
        machines: what each rank has told, in their order.
        findings: by name.
        ladder: all-reduces of all ranks.
        within: the largest all-reduce within each machine, by node; none where each has one rank.
        pairs: of machines, those that were measured.
    """

    backend: str
    machines: list[Machine]
    findings: dict[str, Finding]
    ladder: list[Measured]
    within: dict[int, Measured]
    pairs: list[Pair]


def examine(options: Options, refused: Callable[[], str] = str) -> Network | None:
    """Measures with all other ranks; what came of it on rank 0, None on the others.

    Ends the process, with one line from the first rank of each machine, where a rank does not answer for
    `options.timeout` seconds.

    Args:
        options: of the command line.
        refused: asked on rank 0 before anything is measured; a reason ends all ranks.

    Raises:
        UsageError: this process is not one of several ranks.
        RunError: there is a reason, or some machines lack the GPUs that others have.
    """
    launchers.adopt()
    if not launch.is_rank() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UsageError(
            f"--nodes measures between ranks that are there already: start it on each machine with {START}"
        )
    interface.settle(os.environ["MASTER_ADDR"])
    import torch
    import torch.distributed as dist

    from diagnosis import gathering, links
    from ranks import gather

    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    node = int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", str(launch.global_rank() // local_ranks))))
    deadline = Deadline(options.timeout, lambda doing: "this machine", speaks=local_rank == 0)
    deadline.step("trying its GPUs")
    gpus, why = gathering.usable_gpus(local_rank)
    refusal = refused() if launch.global_rank() == 0 else ""
    arrival = gathering.Arrival(socket.gethostname(), local_ranks, gpus, why, refusal)
    device = torch.device("cuda", local_rank) if arrival.on_gpu else torch.device("cpu")
    presence, arrivals = gathering.meet(options.timeout, deadline, arrival)

    def step(doing: str) -> None:
        presence.at(doing)
        deadline.step(doing)

    step("telling the others about its machine")
    links.together(device)
    machines = gather(_look(node, local_rank, arrival.on_gpu, time.time(), options))
    step("looking for the files of the others")
    shared = {name: _shared(Path(folder)) for name, folder in (("out", options.out), ("data", options.data_root))}
    progress = links.Progress(step, deadline.again, min(links.LONGEST_SECONDS, options.timeout / 4))
    ladder = links.ladder(device, "all ranks", progress)
    within = _within(machines, device, ladder[-1].size, progress)
    leaders = [next(m.rank for m in machines if m.node == at) for at in sorted({m.node for m in machines})]
    nodes = sorted({machine.node for machine in machines})
    size = int(min(2**26, max(2**16, ladder[-1].bus * links.PAIR_SECONDS))) // 4 * 4
    mine = links.pairs(device, nodes.index(machines[dist.get_rank()].node), leaders, size, progress)
    pairs = sorted({pair.nodes: pair for told in gather(mine) for pair in told}.values(), key=lambda pair: pair.nodes)
    step("leaving")
    dist.barrier()
    dist.destroy_process_group()
    deadline.over()
    if launch.global_rank():
        return None
    findings = {
        "versions": versions(machines),
        "clock": clock(machines),
        "devices": devices(arrivals),
        "links": slow_links(pairs, machines),
        "out": on_one_disk(Path(options.out), shared["out"], machines),
        "data": images(Path(options.data_root), shared["data"], machines),
    }
    return Network("nccl" if arrival.on_gpu else "gloo", machines, findings, ladder, within, pairs)


def _look(node: int, local_rank: int, on_gpu: bool, clock: float, options: Options) -> Machine:
    from diagnosis import machines

    return machines.look(launch.global_rank(), node, machines.device_name(local_rank, on_gpu), clock, options)


def _within(machines: Sequence[Machine], device: device, size: int, progress: Progress) -> dict[int, Measured]:
    """The all-reduce of each machine's ranks, all machines at once; each rank makes all groups, as torch wants it."""
    import torch.distributed as dist

    from diagnosis import links
    from ranks import gather

    mine: dict[int, Measured] = {}
    for node in sorted({machine.node for machine in machines}):
        ranks = [machine.rank for machine in machines if machine.node == node]
        progress.step(f"making the group of machine {node}")
        group = dist.new_group(ranks)
        if len(ranks) > 1 and isinstance(group, dist.ProcessGroup):  # that of another machine's ranks is a number
            mine[node] = links.ladder(device, "each machine", progress, group, [size])[0]
    progress.step("waiting for the other machines")
    return {node: measured for told in gather(mine) for node, measured in told.items()}


def _shared(folder: Path) -> list[bool]:
    """For each rank, whether it sees a file that rank 0 writes for a moment into a folder, or beside it before it is
    made."""
    import torch.distributed as dist

    from ranks import gather

    probe = ""
    if dist.get_rank() == 0:
        there = folder.absolute()
        while not there.exists():
            there = there.parent
        with suppress(OSError):  # `doctor.py out` says of a folder that cannot be written
            file = there / f".doctor-{secrets.token_hex(8)}"
            file.touch()
            probe = str(file)
    probe = gather(probe)[0]
    over = time.monotonic() + SHARED_SECONDS
    while not (seen := bool(probe) and Path(probe).exists()) and probe and time.monotonic() < over:
        time.sleep(0.1)
    told = gather(seen)
    if dist.get_rank() == 0 and probe:
        Path(probe).unlink(missing_ok=True)
    return told


def versions(machines: Sequence[Machine]) -> Finding:
    """Whether all machines have the same software."""
    names = {name: None for machine in machines for name in machine.versions}
    differ: list[str] = []
    for name in names:
        by_version: dict[str, dict[str, None]] = {}
        for machine in machines:
            by_version.setdefault(machine.versions.get(name, "none"), {})[machine.host] = None
        if len(by_version) > 1:
            told = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in by_version.items())
            differ.append(f"{name} {told}")
    if differ:
        return fail(
            f"not the same on all machines: {' | '.join(differ)}", "install the same on each, from one checkout"
        )
    return ok(
        f"the same everywhere: {', '.join(f'{name} {version}' for name, version in machines[0].versions.items())}"
    )


def clock(machines: Sequence[Machine]) -> Finding:
    """Whether the machines' clocks agree."""
    first, last = (choose(machines, key=lambda machine: machine.clock) for choose in (min, max))
    apart = last.clock - first.clock
    if apart > CLOCK_SECONDS:
        mend = "let chrony or systemd-timesyncd set the clocks"
        return warning(f"that of {first.host} is {apart:.1f} s behind that of {last.host}", mend)
    return ok(f"{apart * 1e3:.0f} ms apart at most")


def devices(arrivals: Sequence[Arrival]) -> Finding:
    """Whether GPUs that are there are used."""
    first = arrivals[0]
    if first.on_gpu:
        return ok("a GPU for each rank")
    idle = dict.fromkeys(
        f"{arrival.host} {arrival.why or f'has {arrival.gpus} for {arrival.ranks}'}"
        for arrival in arrivals
        if arrival.gpus or arrival.why
    )
    if idle:
        return warning(
            f"measured over gloo between CPUs, no machine has a GPU for each rank: {', '.join(idle)}",
            "fewer ranks; under SLURM --gpus-per-node, not --gpus-per-task: each task has to see all GPUs",
        )
    return ok("no GPUs, ranks run on the CPU")


def slow_links(pairs: Sequence[Pair], machines: Sequence[Machine]) -> Finding:
    """Whether some pairs of machines are slower than others."""
    if not pairs:
        return ok("one machine only")
    names = hosts(machines)
    by_rate = sorted(pairs, key=lambda pair: pair.bus)
    fastest = by_rate[-1].bus
    measured = of_how_many(len(pairs), len(names))
    slow = [pair for pair in by_rate if pair.bus < SLOW * fastest]
    if slow:
        named = ", ".join(
            f"{' - '.join(names[at] for at in pair.nodes)} {gigabytes(pair.bus)}" for pair in slow[:NAMED]
        )
        named += f" and {len(slow) - NAMED} other pairs" if len(slow) > NAMED else ""
        return warning(
            f"{named}, where the fastest pair of machines has {gigabytes(fastest)}{measured}",
            "look at the cable, the port and the interface there (NCCL_SOCKET_IFNAME, NCCL_IB_HCA)",
        )
    rates = f"{gigabytes(by_rate[0].bus)} to {gigabytes(fastest)}"
    return ok(f"{rates} in each direction between any two machines{measured}")


def of_how_many(measured: int, machines: int) -> str:
    """Says that not every pair of so many machines was measured; empty where every one was."""
    pairs = machines * (machines - 1) // 2
    return f" ({measured:,} of {pairs:,} pairs measured)" if measured < pairs else ""


def on_one_disk(folder: Path, seen: Sequence[bool], machines: Sequence[Machine]) -> Finding:
    """Whether all machines keep the run in the same place."""
    apart = sorted({machine.host for machine in machines if not seen[machine.rank]})
    if apart:
        return warning(
            f"{folder} of {machines[0].host} is not what {', '.join(apart)} has there: DeepSpeed's checkpoints would "
            "lie in pieces",
            "--out DIR on a disk that all share, or --strategy ddp or fsdp2, which write one file",
        )
    return ok(f"{folder} is the same on all machines")


def images(folder: Path, seen: Sequence[bool], machines: Sequence[Machine]) -> Finding:
    """Whether each machine has images."""
    lacking = sorted({machine.host for machine in machines if not machine.has_images})
    place = "the same on all machines" if all(seen) else "a place of each machine's own"
    if lacking:
        return warning(f"{folder}, {place}: no images on {', '.join(lacking)}", "put them there, or --data.root DIR")
    return ok(f"{folder}, {place}: {machines[0].images}")


def gigabytes(rate: float) -> str:
    """A bandwidth, 10^9 bytes a second."""
    return f"{rate / 1e9:.3g} GB/s"


def hosts(machines: Sequence[Machine]) -> list[str]:
    """Of each pair's numbers: the machines in the order of their nodes, those of one name with their number."""
    nodes = {machine.node: machine.host for machine in sorted(machines, key=lambda machine: machine.node)}
    names = [*nodes.values()]
    return [f"{host}({node})" if names.count(host) > 1 else host for node, host in nodes.items()]
