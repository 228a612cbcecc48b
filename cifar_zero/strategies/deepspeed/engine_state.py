"""Names and overwrites the parameters of a DeepSpeed engine."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch.nn import Module, Parameter

from cifar_zero.checkpoints.zero_folder import plain_names
from cifar_zero.strategies.deepspeed.experts import ep_size


def plain_names_of(engine: Any, names: Iterable[str]) -> dict[str, str]:
    """Maps the name of each weight on this rank to its name in the plain model. The rank may have only some of all
    experts."""
    return plain_names(names, engine.global_rank % ep_size(engine.module))


def names_of_parameters(engine: Any) -> dict[Parameter, str]:
    """Maps each parameter on this rank to its name in the plain model."""
    own = dict(engine.module.named_parameters())
    plain = plain_names_of(engine, own)
    return {parameter: plain[name] for name, parameter in own.items()}


@contextmanager
def rewriting(engine: Any) -> Generator[None, None, None]:
    """Returns a context manager. On entry, ZeRO 3 shards the small parameters that it keeps gathered. On exit, it
    gathers them again."""
    shards = engine.zero_optimization_partition_weights()
    if shards:
        engine.optimizer.checkpoint_event_prologue()
    yield
    if shards:
        engine.optimizer.checkpoint_event_epilogue()
        forget_second_copies(engine.module)


def forget_second_copies(module: Module) -> None:
    """Drops the secondary copies of the parameters, which ZeRO 3 keeps with zero_hpz_partition_size. It is called after
    the parameters were overwritten. Otherwise the old copies would be gathered until the next step (DeepSpeed 0.19.8,
    partition_parameters.py)."""
    for parameter in module.parameters():
        parameter.ds_secondary_tensor = None  # pyright: ignore[reportAttributeAccessIssue]
