"""How many runs train at the same time, and which devices each gets; torch only where there is a GPU driver."""

import os

from cifar_zero.config.rules.devices import CPU_RANK_BYTES
from cifar_zero.config.run import Run
from cifar_zero.core.hardware import core_count, free_memory_bytes, gpu_count, share_of_cores

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The GPUs that CUDA shows a process, and torch on ROCm too."""

Slot = tuple[dict[str, str], set[int]]
"""The devices of one run: extra environment variables, and the cores that it is bound to (none: all)."""


def slots(planned: list[Run], parallel: int | None, runs: int) -> list[Slot]:
    """Returns `parallel` slots (None: as many as there are devices for), at most one for each run."""
    ranks = max(run.world_size for run in planned)
    if any(run.spec.offload_optimizer == "nvme" for run in planned):
        parallel = 1  # DeepSpeed (0.19.8, partitioned_param_swapper.py) clears a folder that two runs would share
    if not all(run.on_cpu for run in planned):
        gpus = os.environ.get(VISIBLE, ",".join(map(str, range(gpu_count())))).split(",")[: gpu_count()]
        groups = [gpus[first : first + ranks] for first in range(0, len(gpus) - ranks + 1, ranks)]
        numbers = range(min(parallel or len(groups), runs))  # more slots than groups share them
        return [({VISIBLE: ",".join(groups[number % len(groups)])}, set()) for number in numbers]
    room = min(core_count() // ranks, free_memory_bytes() // (ranks * CPU_RANK_BYTES))
    count = min(parallel or max(1, room), runs)
    return [({}, share_of_cores(number, count)) for number in range(count)]
