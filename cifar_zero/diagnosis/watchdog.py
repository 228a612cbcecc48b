"""Ends a rank that waits too long for another one, and names the ranks that are missing."""

import os
import sys
import threading

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from cifar_zero.launch import rank_environment


class Watchdog:
    """Ends this process with one line and exit code 1 if a step takes too long.

    It uses a thread, because a rank may hang in calls without a time limit: NCCL's kernels, a host name, a disk.

    Attributes:
        store: holds the steps that each rank has begun. Needs its own connection, as another may be blocked.
        hosts: host of each rank; empty until they are known.

    Args:
        store: as above.
        seconds: time limit of each step.
    """

    def __init__(self, store: Store, seconds: float):
        self.store, self.hosts = store, list[str]()
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
        """Ends the last step."""
        self._timer.cancel()

    def _give_up(self, step: str) -> None:
        if rank_environment.local_rank() == 0:
            print(f"error: {step} took longer than {self._seconds:g} s: {self._missing(step)}", file=sys.stderr)
            sys.stderr.flush()
        os._exit(1)

    def _missing(self, step: str) -> str:
        ranks = range(int(os.environ["WORLD_SIZE"]))
        try:
            missing = [rank for rank in ranks if not self.store.check([f"{step}/{rank}"])]
        except RuntimeError:
            return f"the node of rank 0, {os.environ['MASTER_ADDR']}, does not answer"
        named = [f"rank {rank}" + (f" ({self.hosts[rank]})" if self.hosts else "") for rank in missing]
        return f"{', '.join(named)} did not get this far" if named else "all ranks have begun it"
