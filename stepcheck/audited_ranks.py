"""Finds ranks that run without stepcheck, such as those of a launcher on another node."""

import importlib
from contextlib import suppress
from datetime import timedelta
from typing import Any

RANKS_SECONDS = 60.0
"""How long the first audit waits for other ranks to start under stepcheck."""


def init_process_group(initialize: Any, *args: Any, **kwargs: Any) -> None:
    """Calls `initialize`, torch's own function, and announces to the other ranks that stepcheck audits this rank."""
    initialize(*args, **kwargs)
    with suppress(Exception):  # of the store: the script must not end
        _announce_rank()


def _announce_rank() -> Any:
    """Writes to the process group's store that stepcheck audits this rank. Returns the store, or None, as with MPI."""
    distributed = importlib.import_module("torch.distributed.distributed_c10d")
    store = distributed._get_default_store()
    if store is not None:
        store.set(f"stepcheck audits rank {distributed.get_rank()}", "yes")
    return store


def count_unaudited_ranks() -> int:
    """Returns the number of ranks that run without stepcheck, and thus would take no part in a collective that counts
    them. Waits up to RANKS_SECONDS for ranks that start later. All ranks get the number that the first of them has
    counted, because they must all audit or all not audit."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return 0
    store = _announce_rank()  # not announced yet if the script called another name of init_process_group
    if store is None:
        return 0
    result = "ranks without stepcheck"
    ranks = [f"stepcheck audits rank {rank}" for rank in range(dist.get_world_size())]
    if not store.check([result]):
        with suppress(RuntimeError):  # a timeout
            store.wait(ranks, timedelta(seconds=RANKS_SECONDS))
        missing = 0 if store.check(ranks) else sum(not store.check([each]) for each in ranks)
        store.compare_set(result, "", str(missing))
    return int(store.get(result))
