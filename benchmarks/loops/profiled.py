"""train.py with a clock on the parts of DeepSpeed's step; rank 0 prints the seconds of each as a line of JSON.

`python -m benchmarks.loops.profiled RANKS STEPS <train.py's flags>`. The clock always runs for one part, the innermost
of those that are at work, so that the parts add up to the step. It costs a microsecond a change of part; on a GPU it
waits at each change for the work that was queued.
"""

from __future__ import annotations

import functools
import json
import runpy
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks.contenders import WARMUP_STEPS
from benchmarks.processes import ROOT
from cifar_zero.launch import local_launcher, rank_environment

REST = "Lightning, callbacks, loader"
ENGINE = "deepspeed.runtime.engine"
STAGE_12 = "deepspeed.runtime.zero.stage_1_and_2"
STAGE_3 = "deepspeed.runtime.zero.stage3"

PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "forward": ((ENGINE, "DeepSpeedEngine.forward"),),
    "backward": ((ENGINE, "DeepSpeedEngine.backward"),),
    "engine's step, but for the following": ((ENGINE, "DeepSpeedEngine.step"),),
    "parameters fetched and released (stage 3)": (
        ("deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator.fetch_sub_module"),
        ("deepspeed.runtime.zero.partitioned_param_coordinator", "PartitionedParameterCoordinator.release_sub_module"),
    ),
    "gradients put into buckets": (
        (STAGE_12, "DeepSpeedZeroOptimizer.reduce_ready_partitions_and_remove_grads"),
        (STAGE_12, "DeepSpeedZeroOptimizer.overlapping_partition_gradients_reduce_epilogue"),
        (STAGE_3, "DeepSpeedZeroOptimizer_Stage3.reduce_ready_partitions_and_remove_grads"),
        (STAGE_3, "DeepSpeedZeroOptimizer_Stage3.overlapping_partition_gradients_reduce_epilogue"),
    ),
    "gradient norm and clipping": (
        (STAGE_12, "DeepSpeedZeroOptimizer.scaled_global_norm"),
        (STAGE_12, "DeepSpeedZeroOptimizer.unscale_and_clip_grads"),
        (STAGE_3, "DeepSpeedZeroOptimizer_Stage3._get_norm_groups"),
        (STAGE_3, "DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads"),
    ),
    "optimizer": (("torch.optim", "Adam.step"),),
    "all-gather": (("torch.distributed", "all_gather_into_tensor"), ("torch.distributed", "all_gather")),
    "reduce-scatter": (("torch.distributed", "reduce_scatter_tensor"), ("torch.distributed", "reduce_scatter")),
    "all-reduce": (("torch.distributed", "all_reduce"),),
    "other collectives": (("torch.distributed", "reduce"), ("torch.distributed", "broadcast")),
}
"""Module and name of the functions of each part, in DeepSpeed 0.19.8 and torch 2.15. The wait for a collective that
was only started counts as its own."""


class PartClock:
    """Seconds of each part of the step, from the end of the warm-up to the end of the last timed step.

    Args:
        steps: timed optimizer steps.
    """

    def __init__(self, steps: int):
        self.seconds = dict.fromkeys((*PARTS, REST), 0.0)
        self._steps = steps
        self._done = 0
        self._part = REST
        self._since = 0.0
        self._started: dict[int, str] = {}  # by the id of the handle of a collective

    def install(self) -> None:
        """Puts the clock around every function of PARTS."""
        for part, functions in PARTS.items():
            for module, name in functions:
                self._replace(module, name, functools.partial(self._around, part))
        self._replace("torch.distributed", "Work.wait", self._waiting)
        self._replace(ENGINE, "DeepSpeedEngine.step", self._counting)

    def _replace(self, module: str, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        *classes, name = name.split(".")
        owner: Any = functools.reduce(getattr, classes, import_module(module))
        setattr(owner, name, by(getattr(owner, name)))

    def _around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = self._change(part)
            try:
                result = function(*args, **kwargs)
            finally:
                self._change(outer)
            if isinstance(result, torch.distributed.Work):
                self._started[id(result)] = part
            return result

        return timed

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            outer = self._change(self._started.pop(id(work), self._part))
            try:
                return wait(work, *args, **kwargs)
            finally:
                self._change(outer)

        return waited

    def _counting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._change(self._part)
            self._done += 1
            if self._done == WARMUP_STEPS:
                self.seconds = dict.fromkeys(self.seconds, 0.0)
            return result

        return counted

    def _change(self, part: str) -> str:
        """Goes on with another part; returns the last one."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._done < WARMUP_STEPS + self._steps:
            self.seconds[self._part] += now - self._since
        last, self._part, self._since = self._part, part, now
        return last


def main() -> int:
    """Runs train.py as one rank, or starts the ranks that do; returns the exit code."""
    ranks, steps, *flags = sys.argv[1:]
    if not rank_environment.is_rank():
        return local_launcher.run(int(ranks), on_cpu="cpu" in flags)
    clock = PartClock(int(steps))
    clock.install()
    sys.argv = ["train.py", *flags]
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    if rank_environment.global_rank() == 0:
        print(json.dumps(clock.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
