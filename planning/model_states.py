"""The model states of a rank (parameters, gradients, optimizer state) under each strategy, by formula; no torch.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3.1 and 5: with
Adam in mixed precision a parameter takes 2 bytes, its gradient 2, its float32 master weight and two moments 12; on each
of N ranks 16 bytes a parameter at stage 0, 4 + 12/N at stage 1, 2 + 14/N at stage 2, 16/N at stage 3. The formulas here
are these, with what DeepSpeed 0.19.8 and torch 2.15 really hold where that is something else:

- Number formats. In float32 DeepSpeed has master weights too, a second copy; torch has none anywhere. A network that is
  float32 under autocast takes 4 bytes for what is 2 in a network that is cast.
- Stage 1 holds whole gradients in the backward pass alone, and between it and the update this rank's part, as stage 2.
- Stage 3 keeps layers up to `PERSISTENT_ELEMENTS` whole beside this rank's part of them.
- An optimizer offloaded to the CPU has its gradients there in float32, at stage 3 beside those in the network's format.
- What is frozen has neither gradient nor state. Stages 0 to 2 keep it whole on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from config import Choice
from strategies import STRATEGIES, Spec

PERSISTENT_ELEMENTS = 100_000
"""Largest parameter that ZeRO-3 keeps whole: stage3_param_persistence_threshold (DeepSpeed 0.19.8, zero/config.py)."""

FLOAT32 = 4

STATE_TENSORS: dict[str, Callable[[dict[str, Any]], int]] = {
    "sgd": lambda options: int(options.get("momentum", 0.9) > 0),
    "adam": lambda options: 2,
    "adamw": lambda options: 2,
    "rmsprop": lambda options: 1 + (options.get("momentum", 0) > 0) + bool(options.get("centered")),
    "adagrad": lambda options: 1,
    "adadelta": lambda options: 2,
    "lion": lambda options: 1,
    "muon": lambda options: 2,  # of what is AdamW's; of a hidden matrix, `Weight.muon`, 1
    "muon_sgd": lambda options: 1,
}
"""Numbers that an optimizer keeps of each parameter, from its options: torch.optim's classes, and ours in optimizers/,
whose state DeepSpeed's C++ forms have too. adam8bit is apart: its two numbers take a byte each (Dettmers et al. 2022;
their scales, a float32 for 256 of them in bitsandbytes, are left out)."""


@dataclass(frozen=True)
class Weight:
    """One parameter of a network, before it is cut."""

    elements: int
    rows: int
    """Length of its first dimension, along which fsdp2 cuts."""
    trained: bool = True
    muon: bool = False
    """Whether Muon updates it, where that is the optimizer."""
    ranks_that_share: int = 1
    """Ranks among which it is spread, each holding its own ones: --model.ep_size for the weights of experts."""


@dataclass(frozen=True)
class States:
    """Bytes of one rank in one place."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """Of all three."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Prediction:
    """Model states of the rank that holds the most, between the backward pass and the update."""

    device: States
    host: States = States()
    disk: States = States()

    @property
    def parameters(self) -> int:
        """Bytes, wherever they lie but on disk: `mem/parameter_rank_bytes` of a run."""
        return self.device.parameters + self.host.parameters

    @property
    def gradients(self) -> int:
        """Bytes: `mem/gradient_rank_bytes` of a run."""
        return self.device.gradients + self.host.gradients

    @property
    def optimizer(self) -> int:
        """Bytes, master weights among them: `mem/optimizer_rank_bytes` of a run."""
        return self.device.optimizer + self.host.optimizer

    @property
    def total(self) -> int:
        """Bytes of all three: `mem/model_state_rank_bytes` of a run."""
        return self.device.total + self.host.total


def predicted(
    strategy: str, weights: Iterable[Weight], ranks: int, precision: str, optimizer: Choice
) -> Prediction | None:
    """The model states of the fullest rank; None for a strategy without a formula, which cuts layers in its own way.

    Args:
        strategy: a key of STRATEGIES.
        weights: of the network (`planning.network.of`).
        ranks: over all machines.
        precision: of the run, settled: no "auto".
        optimizer: name and options.
    """
    spec, weights = STRATEGIES[strategy], [*weights]
    size = parameter_size(spec, precision)
    if spec.one_replica:
        return None
    if spec.family == "baseline":
        return Prediction(_held([(weight, weight.elements) for weight in weights], size, _state_size(optimizer, size)))
    if spec.family != "deepspeed":
        # Each parameter along its first dimension, the first ranks having the more rows.
        mine = [(weight, weight.elements // weight.rows * math.ceil(weight.rows / ranks)) for weight in weights]
        return Prediction(_held(mine, size, _state_size(optimizer, size)))
    # The engine updates float32 copies of the weights (zero/stage_1_and_2.py, zero/stage3.py; of stage 0 fp16/ and only
    # where the network is not float32 itself).
    state = _state_size(optimizer, FLOAT32)

    def updated(weight: Weight) -> int:
        return FLOAT32 + state(weight)

    if spec.stage == 0:
        mine = [(weight, weight.elements // weight.ranks_that_share) for weight in weights]
        return Prediction(_held(mine, size, state if size == FLOAT32 else updated))
    if spec.stage == 3:
        return _stage_3(spec, weights, ranks, size, updated)
    held = sum(weight.elements // weight.ranks_that_share for weight in weights) * size
    trained = [weight for weight in weights if weight.trained]
    # Laid end to end and cut evenly; experts among the ranks that have the same ones, which comes to the same.
    part = math.ceil(sum(weight.elements for weight in trained) / ranks)
    optimizer_bytes = math.ceil(sum(weight.elements * updated(weight) for weight in trained) / ranks)
    if spec.offload_optimizer:
        return Prediction(States(held), host=States(0, part * FLOAT32, optimizer_bytes))
    return Prediction(States(held, part * size, optimizer_bytes))


def parameter_size(spec: Spec, precision: str) -> int:
    """Bytes of an element of what a network's parameters are kept in."""
    cast = precision == "bf16-true" or (spec.family == "deepspeed" and precision != "32-true")
    return 2 if cast else FLOAT32


def _state_size(optimizer: Choice, size: int) -> Callable[[Weight], int]:
    """Bytes that the optimizer keeps of an element, whose weights have `size` bytes."""
    if optimizer.name == "adam8bit":
        return lambda weight: 2
    tensors = STATE_TENSORS[optimizer.name](optimizer.options)
    return lambda weight: (1 if weight.muon and optimizer.name == "muon" else tensors) * size


def _held(mine: list[tuple[Weight, int]], size: int, state: Callable[[Weight], int]) -> States:
    """Of the elements of each weight that this rank has."""
    trained = [(weight, elements) for weight, elements in mine if weight.trained]
    return States(
        sum(elements for _, elements in mine) * size,
        sum(elements for _, elements in trained) * size,
        sum(elements * state(weight) for weight, elements in trained),
    )


def _stage_3(spec: Spec, weights: list[Weight], ranks: int, size: int, updated: Callable[[Weight], int]) -> Prediction:
    """Each parameter cut by itself, the first ranks having one element more where it does not come out even."""
    parts = [(weight, math.ceil(weight.elements / ranks)) for weight in weights]
    whole = sum(weight.elements for weight in weights if weight.elements <= PERSISTENT_ELEMENTS) * size
    resting = sum(part for _, part in parts) * size
    gradients = sum(part for weight, part in parts if weight.trained)
    optimizer = sum(part * updated(weight) for weight, part in parts if weight.trained)
    if not spec.offload_optimizer:
        return Prediction(States(whole + resting, gradients * size, optimizer))
    # In the network's format as they come in, in float32 for the update.
    host = States(0, gradients * (size + FLOAT32), optimizer)
    if spec.offload_optimizer == "nvme":
        swapped = States(resting, gradients * FLOAT32, optimizer)
        return Prediction(States(whole), States(0, gradients * size), swapped)
    if spec.offload_parameters:
        return Prediction(States(whole), States(resting, host.gradients, host.optimizer))
    return Prediction(States(whole + resting), host)
