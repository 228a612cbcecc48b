"""How the doctor's ranks find each other, agree on a backend, and know who is behind."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import launch
from diagnosis.deadline import Deadline
from errors import RunError

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

STORE_SECONDS = 2.0
"""How long a rank that gives up asks who is behind."""

MEETING = "meeting the others"
"""The step in which a rank waits for all others to be there."""

READING = "reading what the others have said"


@dataclass(frozen=True)
class Arrival:
    """What a rank says at the meeting, before there is a backend.

    Attributes:
        host: its machine.
        ranks: on that machine.
        gpus: that it can use there.
        why: GPUs that are there cannot be used.
        refusal: why nothing has to be measured; empty where all is well.
    """

    host: str
    ranks: int
    gpus: int
    why: str = ""
    refusal: str = ""

    @property
    def on_gpu(self) -> bool:
        """Whether each rank of the machine has a GPU."""
        return self.gpus >= self.ranks


class Presence:
    """Where each rank is, in the store through which they have found each other.

    Args:
        store: one of this object's own, since another thread asks it; none before there is one.
    """

    def __init__(self, store: Store | None = None):
        self._store = store
        self._ranks = int(os.environ["WORLD_SIZE"])
        if store is not None:
            store.set_timeout(timedelta(seconds=STORE_SECONDS))

    def at(self, doing: str, saying: str = "") -> None:
        """Notes that this rank has come so far, and what it has to say."""
        assert self._store is not None
        self._store.set(self.key(launch.global_rank(), doing), saying)

    def key(self, rank: int, doing: str) -> str:
        """Of a rank that has come so far; torchrun's store is the same one after a restart."""
        return f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}/{doing}"

    def keys(self, doing: str) -> list[str]:
        """Of all ranks, in their order."""
        return [self.key(rank, doing) for rank in range(self._ranks)]

    def behind(self, doing: str) -> str:
        """The ranks that have not come so far; those that cannot be asked about are behind the store's own machine."""
        master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if self._store is None:
            return f"MASTER_ADDR {master}"
        try:
            missing = [rank for rank, key in enumerate(self.keys(doing)) if not self._store.check([key])]
        except RuntimeError:
            return f"the machine of rank 0 ({master})"
        return f"rank {', '.join(map(str, missing))}" if missing else "another rank"


def meet(seconds: float, deadline: Deadline, mine: Arrival) -> tuple[Presence, list[Arrival]]:
    """Starts the process group; returns where all ranks are from then on, and what each has said.

    Args:
        seconds: after which the deadline speaks.
        deadline: of this rank.
        mine: what it has to say.

    Raises:
        RunError: the ranks cannot talk over one backend, or one of them refuses; on the first rank of each machine,
            the others end without a word.
    """
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    rank, ranks = launch.global_rank(), int(os.environ["WORLD_SIZE"])
    patience = timedelta(seconds=3 * seconds)  # the deadline speaks first
    deadline.lacking = Presence().behind
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
    presence = Presence(store.clone())
    deadline.lacking = presence.behind
    presence.at(MEETING, json.dumps(asdict(mine)))
    deadline.step(MEETING)
    store.wait(presence.keys(MEETING), patience)
    arrivals = [Arrival(**json.loads(said)) for said in store.multi_get(presence.keys(MEETING))]
    if refusal := disagreement(arrivals):
        presence.at(READING)
        deadline.step(READING)
        if rank == 0:  # whose end is the store's
            store.wait(presence.keys(READING), patience)
        deadline.over()
        if launch.local_rank():
            raise SystemExit(RunError.exit_code)
        raise RunError(refusal)
    dist.init_process_group(
        "nccl" if mine.on_gpu else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=ranks,
        timeout=patience,
    )
    return presence, arrivals


def disagreement(arrivals: Sequence[Arrival]) -> str:
    """Why these ranks cannot measure together; empty where they can."""
    if refusal := next((arrival.refusal for arrival in arrivals if arrival.refusal), ""):
        return refusal
    lacking = {arrival.host for arrival in arrivals if not arrival.on_gpu}
    with_gpus = dict.fromkeys(arrival.host for arrival in arrivals if arrival.on_gpu)
    without = dict.fromkeys(
        f"{arrival.host} has {arrival.gpus} for {arrival.ranks} rank{'s'[: arrival.ranks != 1]}"
        + (f" ({arrival.why})" if arrival.why else "")
        for arrival in arrivals
        if not arrival.on_gpu
    )
    if not with_gpus or not without:
        return ""
    others = [host for host in with_gpus if host not in lacking]
    elsewhere = f", where {', '.join(others)} has one for each" if others else ""
    return (
        f"not every rank has a GPU: {', '.join(without)}{elsewhere}; "
        "python doctor.py gpu says what is wrong there; under SLURM each task has to see all GPUs of its machine "
        "(--gpus-per-node, not --gpus-per-task)"
    )


def usable_gpus(local_rank: int) -> tuple[int, str]:
    """How many GPUs torch can use, and why none of those that it sees; chooses this rank's where there is one."""
    import torch

    from diagnosis.examination import one_line

    count = torch.cuda.device_count()
    if local_rank >= count:
        return count, ""
    try:
        torch.cuda.set_device(local_rank)
        torch.cuda.init()
        torch.ones(1, device="cuda").sum().item()
    except (RuntimeError, AssertionError) as error:  # an old driver; a GPU that this torch has no kernels for
        return 0, one_line(error)
    return count, ""
