"""The weights of a run's model, and a rank's model states (parameters, gradients, optimizer state) under each strategy.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3.1 and 5: with
Adam in mixed precision a parameter takes 2 bytes, its gradient 2, its float32 master weight and two moments 12; on each
of N ranks 16 bytes a parameter at stage 0, 4 + 12/N at stage 1, 2 + 14/N at stage 2, 16/N at stage 3. The formulas here
follow DeepSpeed 0.19.8 and torch 2.15 where these differ from the paper:

- DeepSpeed has master weights, a second copy, in float32 too; torch never has them. A float32 model under autocast
  takes 4 bytes for each number that takes 2 in a cast model.
- Stage 1 holds whole gradients only in the backward pass; then, until the update, only its own part, like stage 2.
- Stage 3 keeps parameters of up to --zero.param_persistence_threshold whole, in addition to its own part of them.
- An optimizer offloaded to the CPU has its gradients there in float32, at stage 3 also in the model's format.
- Frozen parameters have neither gradient nor state. Stages 0 to 2 keep them whole on each rank.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from cifar_zero.config.placement import ZeROConfig
from cifar_zero.config.recipe import Choice
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import STRATEGIES, Spec

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
"""Numbers that an optimizer keeps per parameter, from its options: torch.optim's classes and those of optimizers/.
DeepSpeed's C++ versions keep the same. adam8bit is not listed: it keeps two numbers of one byte (Dettmers et al. 2022;
their scales, one float32 per 256 numbers in bitsandbytes, are left out)."""


@dataclass(frozen=True)
class Weight:
    """One parameter of a model, before it is sharded."""

    elements: int
    rows: int  # size of its first dimension, along which fsdp2 shards
    trained: bool = True
    muon: bool = False  # whether Muon, if it is the optimizer, updates this weight
    ranks_that_share: int = 1  # ranks over which an expert's weights are spread (--model.ep_size); 1 for all others


@dataclass(frozen=True)
class Network:
    """What the formulas need to know about a model."""

    weights: tuple[Weight, ...]
    largest_block: int
    """Elements of the largest block that fsdp2 shards; all elements if there are no blocks, 0 if unknown."""

    @property
    def elements(self) -> int:
        return sum(weight.elements for weight in self.weights)

    @property
    def trained(self) -> int:
        """Elements that are not frozen."""
        return sum(weight.elements for weight in self.weights if weight.trained)


def network_of(run: Run) -> Network:
    """Returns the model of a run, with its adapters and frozen weights; built without values (torch's meta device).
    Raises UsageError if --lora.target or --trainable matches nothing in the model."""
    from cifar_zero.checkpoints.finetuning.network import check_patterns, on_meta
    from cifar_zero.models.moe import MixtureOfExperts
    from cifar_zero.optimizers.groups import hidden_matrices

    net = on_meta(run.recipe.model, run.num_classes, run.recipe.trainable, run.recipe.lora)
    ep_size = run.recipe.model.options.get("ep_size", 1)
    check_patterns(net, run.recipe.trainable, ep_size)
    mixtures = [module for module in net.modules() if isinstance(module, MixtureOfExperts)]
    experts = {id(parameter) for mixture in mixtures for parameter in mixture.experts.parameters()}
    by_muon = hidden_matrices({name: parameter.dim() for name, parameter in net.named_parameters()})
    weights = tuple(
        Weight(
            parameter.numel(),
            len(parameter) if parameter.dim() else 1,
            parameter.requires_grad,
            muon=name in by_muon,
            ranks_that_share=ep_size if id(parameter) in experts else 1,
        )
        for name, parameter in net.named_parameters()
    )
    children = getattr(net, "blocks", net).children() if hasattr(net, "blocks") else ()
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in children]
    return Network(weights, max(blocks, default=sum(weight.elements for weight in weights)))


def network_of_size(parameters: int) -> Network:
    """Returns a model of which only the number of parameters is known: one weight, blocks unknown."""
    return Network((Weight(parameters, parameters),), 0)


@dataclass(frozen=True)
class States:
    """A rank's model states in one place, in bytes."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Prediction:
    """Model states of the fullest rank, between the backward pass and the update."""

    device: States
    host: States = States()
    disk: States = States()

    @property
    def in_memory(self) -> States:
        """Bytes on the device and on the host together, as measured by `mem/*_rank_bytes` of a run."""
        both = zip(astuple(self.device), astuple(self.host), strict=True)
        return States(*(device + host for device, host in both))


def predicted(
    strategy: str,
    weights: Sequence[Weight],
    ranks: int,
    precision: str,
    optimizer: Choice,
    zero: ZeROConfig = ZeROConfig(),  # noqa: B008 - it is frozen
) -> Prediction | None:
    """Returns the model states of the fullest of all `ranks`; None for a strategy that splits layers, which has no
    formula. `precision` is settled: not "auto"."""
    spec = STRATEGIES[strategy]
    if spec.one_replica:
        return None
    size = parameter_size(spec, precision)
    # DeepSpeed updates float32 copies of the weights (zero/stage_1_and_2.py, zero/stage3.py). Stage 0 (fp16/) has them
    # only if the model itself is not float32.
    masters = spec.family == "deepspeed" and (spec.stage > 0 or size < FLOAT32)
    state = _state_size(optimizer, FLOAT32 if masters else size)
    resting = whole = trained = optimizer_bytes = 0  # elements of a rank's shards, kept whole, and trained; bytes
    for weight in weights:
        shard = _shard(spec, weight, ranks)
        kept = weight.elements // weight.ranks_that_share
        if spec.stage == 3 and weight.elements <= zero.param_persistence_threshold:
            whole += kept
        resting += kept if spec.stage in (1, 2) else shard
        if weight.trained:
            trained += shard
            optimizer_bytes += shard * (state(weight) + FLOAT32 * masters)
    whole, resting, gradients = whole * size, resting * size, trained * size
    if not spec.offload_optimizer:
        return Prediction(States(whole + resting, gradients, optimizer_bytes))
    if spec.offload_optimizer == "nvme":
        swapped = States(resting, trained * FLOAT32, optimizer_bytes)
        return Prediction(States(whole), States(0, gradients), swapped)
    # At stage 3 gradients arrive in the model's format and are copied to float32 for the update.
    on_host = States(
        resting if spec.offload_parameters else 0,
        trained * FLOAT32 + (gradients if spec.stage == 3 else 0),
        optimizer_bytes,
    )
    return Prediction(States(whole + resting - on_host.parameters), on_host)


def _shard(spec: Spec, weight: Weight, ranks: int) -> int:
    """Returns the elements of a weight whose gradient and optimizer state the fullest rank holds."""
    if spec.family == "fsdp2":  # sharded along the first dimension; the first ranks have more rows
        return weight.elements // weight.rows * math.ceil(weight.rows / ranks)
    if spec.stage == 0:
        return weight.elements // weight.ranks_that_share
    # Experts are sharded among the ranks that have the same ones, which takes as much.
    return math.ceil(weight.elements / ranks)


def parameter_size(spec: Spec, precision: str) -> int:
    """Returns the bytes of an element of the parameters that the model computes with."""
    cast = precision == "bf16-true" or (spec.family == "deepspeed" and precision != "32-true")
    return 2 if cast else FLOAT32


def _state_size(optimizer: Choice, size: int) -> Callable[[Weight], int]:
    """Returns the bytes that the optimizer keeps per element of a weight, whose elements have `size` bytes."""
    if optimizer.name == "adam8bit":
        return lambda weight: 2
    tensors = STATE_TENSORS[optimizer.name](optimizer.options)
    return lambda weight: (1 if weight.muon and optimizer.name == "muon" else tensors) * size
