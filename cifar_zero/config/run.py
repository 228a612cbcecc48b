"""The resolved run: what the user asked for, and what it came to on this computer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cifar_zero.config.batch import micro_batch_size
from cifar_zero.config.flags import Config
from cifar_zero.config.strategy_specs import STRATEGIES, Spec


@dataclass(frozen=True)
class Consent:
    """What may run code: only the command line can allow it, no recipe, run folder or checkpoint.

    Attributes:
        trust: whether checkpoints that could run code are loaded (--trust).
        callbacks: the flags --trainer.callbacks, which name classes to import.
    """

    trust: bool = False
    callbacks: tuple[str, ...] = ()


NO_CONSENT = Consent()


@dataclass(frozen=True)
class Run:
    """A run with nothing left open; `training.resolve.resolve` makes it, once per process.

    Attributes:
        config: the options. devices is a number, accelerator cpu or gpu, precision a format, resume and weights the
            paths of checkpoints.
        spec: what the strategy, or the raw DeepSpeed configuration, does and can do.
        num_classes: width of the model's output.
        consent: what the command line allows.
    """

    config: Config
    spec: Spec
    num_classes: int
    consent: Consent = NO_CONSENT

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.config.world_size

    @property
    def replicas(self) -> int:
        """Models that train on images of their own: one per rank, or one in all."""
        return 1 if self.spec.one_replica else self.world_size

    @property
    def micro_batch(self) -> int:
        """Images in one forward pass of a replica.

        Raises:
            UsageError: the batch size cannot be divided so.
        """
        return micro_batch_size(self.config.batch_size, self.replicas, self.config.accumulate)

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks are CPU processes."""
        return self.config.accelerator == "cpu"

    def under(self, strategy: str) -> Run:
        """Returns the same run under a named strategy."""
        return replace(self, config=replace(self.config, strategy=strategy, ds_config=""), spec=STRATEGIES[strategy])
