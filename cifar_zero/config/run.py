"""The resolved run: what the user asked for, and what it came to on this computer; no torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from cifar_zero.config.flags import Config
from cifar_zero.config.strategy_specs import STRATEGIES, Spec
from cifar_zero.core.errors import UsageError


@dataclass(frozen=True)
class Consent:
    """What may run code: only the command line can allow it, no recipe, run folder or checkpoint."""

    trust: bool = False  # load checkpoints that could run code (--trust)
    callbacks: tuple[str, ...] = ()  # the flags --trainer.callbacks, which name classes to import


NO_CONSENT = Consent()


@dataclass(frozen=True)
class Run:
    """A run with nothing left open; `training.resolve.resolve` makes it, once per process. In its options devices is a
    number, accelerator cpu or gpu, precision a format, resume and weights are paths."""

    config: Config
    spec: Spec  # of the strategy, or of the raw DeepSpeed configuration
    num_classes: int  # width of the model's output
    consent: Consent = NO_CONSENT

    @property
    def ranks_per_model(self) -> int:
        """Ranks that together hold one model and compute the same images."""
        given = getattr(self.config, self.spec.size) if self.spec.size else 1
        return given or (self.config.world_size if self.spec.one_replica else 1)

    @property
    def replicas(self) -> int:
        """Models that train on images of their own; raises UsageError if the ranks cannot be divided so."""
        replicas, left = divmod(self.config.world_size, self.ranks_per_model)
        if left:
            given = f"--{self.spec.size} {self.ranks_per_model}"
            raise UsageError(f"{given} must divide the {self.config.world_size} ranks of --devices")
        return replicas

    @property
    def micro_batch(self) -> int:
        """Images in one forward pass of a replica; raises UsageError if the batch size cannot be divided so."""
        return micro_batch_size(self.config.batch_size, self.replicas, self.config.accumulate)

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks are CPU processes."""
        return self.config.accelerator == "cpu"

    def under(self, strategy: str) -> "Run":
        """Returns the same run under a named strategy."""
        return replace(self, config=replace(self.config, strategy=strategy, ds_config=""), spec=STRATEGIES[strategy])


def micro_batch_size(batch_size: int, world_size: int, accumulate: int) -> int:
    """Returns the images per forward pass of one rank; `batch_size` is images per optimizer step, over all ranks.
    Raises UsageError if batch_size = micro-batch x world_size x accumulate has no solution in whole images."""
    if batch_size < 1 or accumulate < 1:
        raise UsageError(f"--batch_size {batch_size} and --accumulate {accumulate} must both be at least 1")
    parts = world_size * accumulate
    if batch_size % parts:
        below, above = batch_size // parts * parts, (batch_size // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        raise UsageError(
            f"--batch_size {batch_size} = micro-batch x {ranks} x --accumulate {accumulate} "
            f"gives no whole micro-batch; the nearest that divide: {nearest}"
        )
    return batch_size // parts


def with_accelerator(config: Config, on_gpu: bool, has_bfloat16: Callable[[], bool] = lambda: True) -> Config:
    """Returns the configuration for GPUs or for the CPU, with auto precision replaced. `has_bfloat16` is asked only for
    auto precision on GPUs."""
    precision = config.precision
    if precision == "auto":
        precision = "32-true" if not on_gpu else "bf16-mixed" if has_bfloat16() else "16-mixed"
    return replace(config, accelerator="gpu" if on_gpu else "cpu", precision=precision)
