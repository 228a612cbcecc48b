"""Defines the resolved run: the user's settings, in which open options have been decided for this computer. Imports no
torch."""

import marshal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from cifar_zero.config import ds_config
from cifar_zero.config.settings import Consent, Settings, settings_of, tree_of
from cifar_zero.config.strategy_specs import Spec
from cifar_zero.core.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Run(Settings):
    """A run with its open options decided; `training.resolve.resolve` makes it. devices is a number, accelerator is cpu
    or gpu, precision is a number format, and resume and weights are paths. Two options may still be open, until
    `training.starting` decides them: data.source may be auto, and on several nodes or under torchrun resume may be last
    or auto."""

    num_classes: int  # width of the model's output

    @cached_property
    def spec(self) -> Spec:
        """The `Spec` of the strategy or of --ds_config. Raises UsageError if the configuration is refused."""
        return ds_config.spec_of(self.placement)

    @property
    def micro_batch(self) -> int:
        """Images per forward pass of one replica. Raises UsageError like `micro_batch_size`."""
        return micro_batch_size(self.recipe.batch_size, self.placement.replicas, self.placement.accumulate)

    @property
    def on_cpu(self) -> bool:
        return self.placement.accelerator == "cpu"

    def to_bytes(self) -> bytes:
        """Returns the run for `run_of_bytes`. Raises ValueError if an option is not plain data."""
        # Unlike JSON, marshal keeps tuples and the types of keys. Unlike pickle, it loads no code. Both sides are the
        # same Python.
        consent = (self.consent.trust, self.consent.callbacks)
        return marshal.dumps((tree_of(self), consent, self.named, self.num_classes))


def run_of_bytes(content: bytes) -> Run:
    """Returns the run that `Run.to_bytes` has written. It includes the user's consent to run code, so `content` must
    come from this program itself and never from a user's file."""
    tree, consent, named, num_classes = marshal.loads(content)
    settings = replace(settings_of(tree), consent=Consent(*consent), named=named)
    return Run(**vars(settings), num_classes=num_classes)


def micro_batch_size(batch_size: int, replicas: int, accumulate: int) -> int:
    """Returns the images per forward pass of one replica. Raises UsageError unless the batch size is a multiple of
    replicas x accumulate.

    Args:
        batch_size: images per optimizer step, over all ranks.
        replicas: number of copies of the model that train on different images.
        accumulate: micro-batches per optimizer step.
    """
    parts = replicas * accumulate
    if batch_size % parts:
        below = batch_size // parts * parts
        nearest = f"{below} or {below + parts}" if below else f"{parts}"
        ranks = "1 rank" if replicas == 1 else f"{replicas} ranks"
        raise UsageError(
            f"--batch_size {batch_size} is not a multiple of {ranks} x --accumulate {accumulate}: "
            f"use --batch_size {nearest}"
        )
    return batch_size // parts


def with_accelerator(settings: Settings, on_gpu: bool, has_bfloat16: Callable[[], bool] = lambda: True) -> Settings:
    """Returns the settings with the accelerator set, and precision auto replaced by a number format. `has_bfloat16` is
    called only for precision auto on GPUs, and returns whether the GPU computes in bfloat16."""
    precision = settings.placement.precision
    if precision == "auto":
        precision = "32-true"
        if on_gpu:
            precision = "bf16-mixed" if has_bfloat16() else "16-mixed"
    return settings.changed(accelerator="gpu" if on_gpu else "cpu", precision=precision)
