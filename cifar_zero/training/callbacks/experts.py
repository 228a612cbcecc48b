"""How a model's mixtures of experts distribute their tokens: curves of a training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from cifar_zero.models.moe import Gate, Routing, gates
from cifar_zero.training.callbacks.curves import IntervalCallback, log_scalars


@dataclass
class Seen:
    """What a gate of E experts did since the newest point, on this rank and its device."""

    tokens: list[Tensor] = field(default_factory=list)  # int64 (E,) of each micro-batch: tokens that each expert took
    load_balance_losses: list[Tensor] = field(default_factory=list)  # float32 scalars, one of each micro-batch
    newest: Routing | None = None  # of the last micro-batch, which is as large as the others


class Experts(IntervalCallback):
    """Writes the moe/* curves. Between two points it only keeps references to tensors that
    the gates already have on the device."""

    def __init__(self) -> None:
        self._gates: Sequence[Gate] = ()
        self._seen: list[Seen] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._gates = gates(pl_module.net)  # as the strategy has made them
        self._seen = [Seen() for _ in self._gates]

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        for gate, seen in zip(self._gates, self._seen, strict=True):
            routing = gate.routing
            assert routing is not None
            seen.tokens.append(routing.tokens)
            seen.load_balance_losses.append(routing.load_balance_loss.detach())
            seen.newest = routing
        super().on_train_batch_end(trainer, *arguments)

    def _log(self, trainer: Trainer) -> None:
        # One reduction and one copy to the host for all curves of all mixtures.
        own = [_summed(seen) for seen in self._seen]
        summed = trainer.strategy.reduce(torch.cat(own), reduce_op="sum").cpu()
        scalars: dict[str, float] = {}
        for number, (seen, values) in enumerate(
            zip(self._seen, summed.split([len(each) for each in own]), strict=True)
        ):
            assert seen.newest is not None
            *tokens, load_balance_loss, entropy = values.tolist()
            micro_batches = len(seen.tokens)
            for expert, count in enumerate(tokens):
                of_step = count / micro_batches * trainer.accumulate_grad_batches
                scalars[f"moe/tokens/mixture_{number}/expert_{expert}"] = of_step
            routes = micro_batches * seen.newest.experts.numel() * trainer.world_size
            scalars[f"moe/dropped/mixture_{number}"] = 1 - sum(tokens) / routes
            scalars[f"moe/load_balance_loss/mixture_{number}"] = load_balance_loss / trainer.world_size
            scalars[f"moe/gate_entropy/mixture_{number}"] = entropy / trainer.world_size
        log_scalars(trainer, scalars)
        self._seen = [Seen() for _ in self._gates]


def _summed(seen: Seen) -> Tensor:
    """Returns float64 (E + 2,): tokens of each expert, mean load-balancing loss, and the mean entropy of the gate's
    probabilities as a share of log(E), its maximum; 0 for one expert."""
    assert seen.newest is not None
    probabilities = seen.newest.probabilities
    entropy = torch.special.entr(probabilities).sum(dim=1).mean() / math.log(max(2, probabilities.shape[1]))
    means = torch.stack([torch.stack(seen.load_balance_losses).mean(), entropy])
    return torch.cat([torch.stack(seen.tokens).sum(dim=0).double(), means.double()])
