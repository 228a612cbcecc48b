"""Checks that the `num_batches_tracked` of each batch norm counts all batches that the batch norm has normalised."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from stepcheck.engines.adapter import Hook


class BatchNormCounts:
    """Compares the `num_batches_tracked` of each batch norm of torch.nn with its calls in training mode. A batch norm
    counts a batch whenever it updates its running statistics."""

    def __init__(self, module: nn.Module, undo: ExitStack):
        self.norms = {
            name: each
            for name, each in module.named_modules()
            if isinstance(each, nn.modules.batchnorm._BatchNorm)
            and type(each).__module__.startswith("torch.nn.")  # a user's class may count in another way
            and each.num_batches_tracked is not None
        }
        # By name: the version of the counter after the last call, the counter at the last comparison or after something
        # else has set it (a load, a reset, a broadcast), and the calls in training mode since then.
        self.last: dict[str, tuple[tuple[int, int], Tensor, int]] = {}
        for name, each in self.norms.items():
            before, after = Hook(partial(self._before, name)), Hook(partial(self._after, name))
            undo.callback(each.register_forward_pre_hook(before).remove)
            undo.callback(each.register_forward_hook(after).remove)

    def _before(self, name: str, module: Any, inputs: Any) -> None:
        count = module.num_batches_tracked
        if count is not None and (name not in self.last or self.last[name][0] != _version(count)):
            self.last[name] = _version(count), count.clone(), 0

    def _after(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        count = module.num_batches_tracked
        if count is not None and name in self.last:  # a script may remove it
            _, before, calls = self.last[name]
            self.last[name] = _version(count), before, calls + (module.training and module.track_running_stats)

    def compare(self, add: Callable[..., None]) -> None:
        """Compares the batches that each batch norm has counted with its calls since the last comparison, or since
        something else has set the counter. Passes the results to `add`, which is `Audit.add`."""
        for name, (version, before, calls) in [*self.last.items()]:
            count: Any = self.norms[name].num_batches_tracked
            if count is not None and _version(count) == version:
                text = f"the batch norm {name} has not counted each batch that it normalised"
                add("buffer", 2.0 * (count != before + calls), text)
                self.last[name] = version, count.clone(), 0


def _version(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor._version
