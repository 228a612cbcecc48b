"""doctor.py --nodes: is a run over several machines fit? Each of its ranks runs this, and rank 0 tells.

It is started as the run will be, by torchrun or srun on every machine.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import interface
import launch
import launchers
from diagnosis.deadline import Deadline
from diagnosis.finding import Finding, Options, ok, warning
from diagnosis.finding import failed as fail
from errors import UsageError

if TYPE_CHECKING:
    from torch import device
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from diagnosis.links import Measured, Pair
    from diagnosis.machines import Machine

START = launch.TORCHRUN.replace("train.py", "doctor.py --nodes")

CLOCK_SECONDS = 1.0
"""Clocks further apart than this are a warning: --resume last takes the checkpoint that the clock calls the newest."""

SLOW = 0.5
"""A pair of machines with less than this of the median pair's bandwidth is named."""

SHARED_SECONDS = 3.0
"""How long a machine looks for a file that another has just written, as Lightning's is_shared_filesystem does
(2.6.6, lightning/fabric/utilities/distributed.py)."""

STORE_SECONDS = 2.0
"""How long a rank that gives up asks who is behind."""

MEETING = "meeting the others"
"""The step in which a rank waits for all others to be there."""

T = TypeVar("T")


@dataclass(frozen=True)
class Network:
    """What was found, on rank 0.

    Attributes:
        backend: nccl or gloo.
        machines: what each rank has told, in their order.
        findings: by name.
        ladder: all-reduces of all ranks.
        within: the largest all-reduce within each machine, by node; none where each has one rank.
        pairs: of machines.
    """

    backend: str
    machines: list[Machine]
    findings: dict[str, Finding]
    ladder: list[Measured]
    within: dict[int, Measured]
    pairs: list[Pair]


def examine(options: Options) -> Network | None:
    """Measures with all other ranks; what came of it on rank 0, None on the others.

    Ends the process, with one line from the first rank of each machine, where a rank does not answer for
    `options.timeout` seconds.

    Raises:
        UsageError: this process is not one of several ranks.
    """
    launchers.adopt()
    if not launch.is_rank() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UsageError(
            f"--nodes measures between ranks that are there already: start it on each machine with {START}"
        )
    interface.settle(os.environ["MASTER_ADDR"])
    import torch
    import torch.distributed as dist

    from diagnosis import links

    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    node = int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", str(launch.global_rank() // local_ranks))))
    on_gpu = torch.cuda.device_count() >= local_ranks
    if on_gpu:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    deadline = Deadline(options.timeout, _Presence().behind, speaks=local_rank == 0)
    store = _meet(options, deadline, on_gpu)
    presence = _Presence(store.clone())
    deadline.lacking = presence.behind

    def step(doing: str) -> None:
        presence.at(doing)
        deadline.step(doing)

    step("telling the others about its machine")
    dist.all_reduce(torch.zeros(1, device=device))  # all are there
    machines = _told(_look(node, local_rank, on_gpu, options))
    step("looking for the files of the others")
    shared = {name: _shared(Path(folder)) for name, folder in (("out", options.out), ("data", options.data_root))}
    step("measuring all-reduces of all ranks")
    ladder = links.ladder(device)
    step("measuring all-reduces within each machine")
    within = _within(machines, device, ladder[-1].size)
    step("measuring between pairs of machines")
    leaders = [next(m.rank for m in machines if m.node == at) for at in sorted({m.node for m in machines})]
    nodes = sorted({machine.node for machine in machines})
    size = int(min(2**26, max(2**16, ladder[-1].bus * links.PAIR_SECONDS))) // 4 * 4
    mine = links.pairs(device, nodes.index(machines[dist.get_rank()].node), leaders, size)
    pairs = sorted({pair.nodes: pair for told in _told(mine) for pair in told}.values(), key=lambda pair: pair.nodes)
    step("leaving")
    dist.barrier()
    dist.destroy_process_group()
    deadline.over()
    if launch.global_rank():
        return None
    findings = {
        "versions": versions(machines),
        "clock": clock(machines),
        "links": slow_links(pairs, machines),
        "out": on_one_disk(Path(options.out), shared["out"], machines),
        "data": images(Path(options.data_root), shared["data"], machines),
    }
    return Network("nccl" if on_gpu else "gloo", machines, findings, ladder, within, pairs)


class _Presence:
    """Where each rank is, in the store through which they have found each other.

    Args:
        store: one of this object's own, since another thread asks it; none before there is one.
    """

    def __init__(self, store: Store | None = None):
        self._store = store
        self._ranks = int(os.environ["WORLD_SIZE"])
        if store is not None:
            store.set_timeout(timedelta(seconds=STORE_SECONDS))

    def at(self, doing: str) -> None:
        """Notes that this rank has come so far."""
        assert self._store is not None
        self._store.set(self.key(launch.global_rank(), doing), "")

    def key(self, rank: int, doing: str) -> str:
        """Of a rank that has come so far; torchrun's store is the same one after a restart."""
        return f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}/{doing}"

    def behind(self, doing: str) -> str:
        """The ranks that have not come so far; those that cannot be asked about are behind the store's own machine."""
        master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if self._store is None:
            return f"MASTER_ADDR {master}"
        try:
            missing = [rank for rank in range(self._ranks) if not self._store.check([self.key(rank, doing)])]
        except RuntimeError:
            return f"the machine of rank 0 ({master})"
        return f"rank {', '.join(map(str, missing))}" if missing else "another rank"


def _meet(options: Options, deadline: Deadline, on_gpu: bool) -> Store:
    """Starts the process group; returns the store by which the ranks found each other."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    rank, ranks = launch.global_rank(), int(os.environ["WORLD_SIZE"])
    patience = timedelta(seconds=3 * options.timeout)  # the deadline speaks first
    deadline.step("looking for rank 0")
    # torch's own "env://" has rank 0 wait for all others, and does not say for whom.
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not by_torchrun,
        timeout=patience,
        wait_for_workers=False,
    )
    presence = _Presence(store.clone())
    deadline.lacking = presence.behind
    presence.at(MEETING)
    deadline.step(MEETING)
    store.wait([presence.key(other, MEETING) for other in range(ranks)], patience)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=ranks,
        timeout=patience,
    )
    return store


def _look(node: int, local_rank: int, on_gpu: bool, options: Options) -> Machine:
    from diagnosis import machines

    return machines.look(launch.global_rank(), node, machines.device_name(local_rank, on_gpu), options)


def _told(mine: T) -> list[T]:
    """What every rank has, in their order."""
    import torch.distributed as dist

    told: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told  # pyright: ignore[reportReturnType]


def _within(machines: Sequence[Machine], device: device, size: int) -> dict[int, Measured]:
    """The all-reduce of each machine's ranks, all machines at once; each rank makes all groups, as torch wants it."""
    import torch.distributed as dist

    from diagnosis import links

    mine: dict[int, Measured] = {}
    for node in sorted({machine.node for machine in machines}):
        ranks = [machine.rank for machine in machines if machine.node == node]
        group = dist.new_group(ranks)
        if len(ranks) > 1 and isinstance(group, dist.ProcessGroup):  # that of another machine's ranks is a number
            mine[node] = links.ladder(device, group, [size])[0]
    return {node: measured for told in _told(mine) for node, measured in told.items()}


def _shared(folder: Path) -> list[bool]:
    """For each rank, whether it sees a file that rank 0 writes for a moment into a folder, or beside it before it is
    made."""
    import torch.distributed as dist

    probe = ""
    if dist.get_rank() == 0:
        there = folder.absolute()
        while not there.exists():
            there = there.parent
        with suppress(OSError):  # `doctor.py out` says of a folder that cannot be written
            file = there / f".doctor-{secrets.token_hex(8)}"
            file.touch()
            probe = str(file)
    probe = _told(probe)[0]
    over = time.monotonic() + SHARED_SECONDS
    while not (seen := bool(probe) and Path(probe).exists()) and probe and time.monotonic() < over:
        time.sleep(0.1)
    told = _told(seen)
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


def slow_links(pairs: Sequence[Pair], machines: Sequence[Machine]) -> Finding:
    """Whether one pair of machines is slower than the others."""
    if not pairs:
        return ok("one machine only")
    names = hosts(machines)
    rates = sorted(pair.bus for pair in pairs)
    usual = rates[len(rates) // 2]
    slow = [pair for pair in pairs if pair.bus < SLOW * usual]
    if slow:
        named = ", ".join(f"{' - '.join(names[at] for at in pair.nodes)} {gigabytes(pair.bus)}" for pair in slow)
        return warning(
            f"{named}, where the middle pair of machines has {gigabytes(usual)}",
            "look at the cable, the port and the interface there (NCCL_SOCKET_IFNAME, NCCL_IB_HCA)",
        )
    return ok(f"{gigabytes(rates[0])} to {gigabytes(rates[-1])} in each direction between any two machines")


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
