"""How a model's mixtures of experts distribute their tokens: curves of a training, and a figure of a test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from cifar_zero.models.moe import Gate, Routing, gates
from cifar_zero.reports.figures import expert_figure
from cifar_zero.training.callbacks.curves import IntervalCallback, log_scalars
from cifar_zero.training.callbacks.figures import write_figure


@dataclass
class Seen:
    """What a gate of E experts did since the newest point, on this rank and its device."""

    tokens: list[Tensor] = field(default_factory=list)  # int64 (E,) of each micro-batch: tokens that each expert took
    load_balance_losses: list[Tensor] = field(default_factory=list)  # float32 scalars, one of each micro-batch
    newest: Routing | None = None  # of the last micro-batch, which is as large as the others


class Experts(IntervalCallback):
    """Writes the moe/* curves, and experts.png of a test. Between two points it only keeps references to tensors that
    the gates already have on the device."""

    def __init__(self) -> None:
        self._gates: Sequence[Gate] = ()
        self._seen: list[Seen] = []
        self._test_counts: list[Tensor] = []

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

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        shapes = [(pl_module.num_classes, gate.num_experts) for gate in gates(pl_module.net)]
        self._test_counts = [torch.zeros(shape, dtype=torch.int64, device=pl_module.device) for shape in shapes]

    def on_test_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        for gate, counts in zip(gates(pl_module.net), self._test_counts, strict=True):
            assert gate.routing is not None
            counts += experts_of_classes(batch[1], gate.routing.experts, *counts.shape)

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        counts = [trainer.strategy.reduce(each, reduce_op="sum").cpu().numpy() for each in self._test_counts]
        if trainer.is_global_zero:
            class_names = trainer.datamodule.classes  # pyright: ignore[reportAttributeAccessIssue]
            write_figure(trainer, expert_figure(counts, class_names), "experts")

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


def experts_of_classes(labels: Tensor, experts: Tensor, num_classes: int, num_experts: int) -> Tensor:
    """Returns how many tokens of the images of each class went to each expert, int64 (num_classes, num_experts). Labels
    (N,) are negative for padding. `experts` (k, S): see `Routing`; the tokens of an image are next to each other."""
    of_tokens = labels.repeat_interleave(experts.shape[1] // len(labels)).expand_as(experts)
    pairs = (of_tokens * num_experts + experts)[(of_tokens >= 0) & (experts >= 0)]
    return pairs.bincount(minlength=num_classes * num_experts).view(num_classes, num_experts)


def _summed(seen: Seen) -> Tensor:
    """Returns float64 (E + 2,): tokens of each expert, mean load-balancing loss, and the mean entropy of the gate's
    probabilities as a share of log(E), its maximum; 0 for one expert."""
    assert seen.newest is not None
    probabilities = seen.newest.probabilities
    entropy = torch.special.entr(probabilities).sum(dim=1).mean() / math.log(max(2, probabilities.shape[1]))
    means = torch.stack([torch.stack(seen.load_balance_losses).mean(), entropy])
    return torch.cat([torch.stack(seen.tokens).sum(dim=0).double(), means.double()])
