"""Lets the ranks of a run meet in a key-value store, and names the ranks that are missing."""

import os
import socket
import threading
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from cifar_zero.core.console import say
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.launch import rank_environment

POLL_SECONDS = 0.1  # time between two looks for the other ranks

FIRST_NOTE_SECONDS = 15.0
"""Time after which rank 0 first prints which ranks are missing, and the other ranks print that rank 0 is missing. Rank
0 prints its next note when it has waited twice as long."""

NAMED = 8  # the most missing ranks that a message names


def open_store(patience: timedelta) -> Store:
    """Returns the store of torchrun's agents, or a store that rank 0 opens. Waits up to `patience` for a connection to
    it, and prints a note after FIRST_NOTE_SECONDS. Raises UsageError if the environment lacks the address of the store.

    In torch's "env://", rank 0 would wait for all ranks, and could not name the missing ones. If `local_launcher`
    started the ranks, rank 0 listens on a local address only. torch (2.15) would listen on all addresses, where other
    computers can change what the ranks exchange.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UsageError(f"the environment variable {name} is not set: set it on each rank, or use torchrun")
    rank = rank_environment.global_rank()
    of_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    opens = rank == 0 and not of_agents
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = None
    if opens and rank_environment.by_local_launcher():
        listener = socket.create_server((address, port)).detach()
    note = f"rank {rank} waits for rank 0, not connected after {FIRST_NOTE_SECONDS:g} s ({address}:{port})"
    notice = threading.Timer(FIRST_NOTE_SECONDS, say, [note])
    notice.daemon = True
    notice.start()
    try:
        tcp = TCPStore(
            address, port, is_master=opens, timeout=patience, wait_for_workers=False, master_listen_fd=listener
        )
    finally:
        notice.cancel()
    # The agents' store outlives a restart. The count of restarts separates the keys of two starts, as in torch (2.15,
    # rendezvous.py). A new store needs no prefix. There it could separate ranks of one start, because some agents count
    # less: a restart because another node has left or joined does not count.
    return PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", tcp) if of_agents else tcp


def await_ranks(store: Store, rank: int, ranks: int, patience: timedelta) -> None:
    """Makes rank 0 wait until all `ranks` ranks have called this function. Meanwhile rank 0 prints which ranks are
    missing. The other ranks return at once. After the time `patience`, rank 0 raises RunError, which names the missing
    ranks."""
    store.set(f"arrived {rank}", "")
    if rank:
        return
    started, missing, next_note = time.monotonic(), [*range(ranks)], FIRST_NOTE_SECONDS
    while True:
        missing = [other for other in missing if not store.check([f"arrived {other}"])]
        if not missing:
            return
        waited = time.monotonic() - started
        if waited > patience.total_seconds():
            limit = f"{patience.total_seconds():g} s"
            raise RunError(f"{_named(missing)} did not connect within {limit}: look at the output of these ranks")
        if waited > next_note:
            say(f"waiting for {_named(missing)} of {ranks} ranks, not connected after {waited:.0f} s")
            next_note = 2 * waited
        time.sleep(POLL_SECONDS)


def _named(ranks: list[int]) -> str:
    names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:NAMED]))}"
    return names if len(ranks) <= NAMED else f"{names} and {len(ranks) - NAMED} more"
