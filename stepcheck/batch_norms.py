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
        self.seen: dict[str, Any] = {}  # the buffer and its version after the last call, by name
        self.counts: dict[str, Tensor] = {}
        self.calls: dict[str, int] = {}  # since `counts`
        for name, each in self.norms.items():
            before, after = Hook(partial(self._before, name)), Hook(partial(self._after, name))
            undo.callback(each.register_forward_pre_hook(before).remove)
            undo.callback(each.register_forward_hook(after).remove)

    def _before(self, name: str, module: Any, inputs: Any) -> None:
        count = module.num_batches_tracked
        if count is not None and self.seen.get(name) != _version(count):  # reset, loaded or broadcast in between
            self._begin(name, count)

    def _after(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        count = module.num_batches_tracked
        if count is not None:  # a script may remove it
            self.calls[name] = self.calls.get(name, 0) + (module.training and module.track_running_stats)
            self.seen[name] = _version(count)

    def _begin(self, name: str, count: Tensor) -> None:
        self.counts[name], self.calls[name] = count.clone(), 0

    def compare(self, add: Callable[..., None]) -> None:
        """Compares the batches that each batch norm has counted with its calls since the last comparison, or since
        something else has set the counter. Passes the results to `add`, which is `Audit.add`."""
        for name, module in self.norms.items():
            count: Any = module.num_batches_tracked
            if count is not None and name in self.counts and self.seen.get(name) == _version(count):
                text = f"the batch norm {name} has not counted each batch that it normalised"
                add("buffer", 2.0 * (count != self.counts[name] + self.calls[name]), text)
                self._begin(name, count)


def _version(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor._version
