"""Computes a rank's memory under each strategy, in bytes: its model states (parameters, gradients, optimizer state) and
everything else except activations.

The formulas follow Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sections 3.1 and 5. With Adam in mixed precision, a parameter takes 2 bytes, its gradient 2 bytes, and its float32
master weight and two moments 12 bytes. On each of N ranks, this is 16 bytes at stage 0, 4 + 12/N at stage 1, 2 + 14/N
at stage 2 and 16/N at stage 3. Where DeepSpeed 0.19.8 and torch 2.15 differ from the paper, the formulas follow the
software:

- At stages 1 to 3, DeepSpeed keeps float32 master weights as a second copy even if the model is float32. At stage 0
  it keeps them only if the model is not float32, and torch never keeps them. A
  float32 model under autocast takes 4 bytes for each number that takes 2 bytes in a cast model.
- Stage 1 holds full gradients only in the backward pass. From then until the update it holds only the rank's shard of
  the gradients, like stage 2.
- Stage 3 keeps parameters of up to --zero.param_persistence_threshold elements in full, in addition to the rank's shard
  of them.
- If the optimizer is offloaded to the CPU, the gradients are there too, in float32. Stage 3 also keeps a copy in the
  model's format there.
- Frozen parameters have neither gradients nor optimizer state. Stages 0 to 2 keep them in full on each rank.
"""

import math
from dataclasses import dataclass

from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import Spec
from cifar_zero.models import MODELS, ThirdParty
from cifar_zero.optimizers import OPTIMIZERS, SGD, Muon, MuonSGD, OptimizerOptions

FLOAT32 = 4

REUSE_ELEMENTS = 10**9
"""Default of DeepSpeed's stage3_max_reuse_distance: ZeRO 3 keeps a gathered parameter that is used again within this
number of elements (DeepSpeed 0.19.8, zero/config.py and partitioned_param_coordinator.py). The backward pass starts
where the forward pass ends, so the last REUSE_ELEMENTS / 2 elements are kept."""


@dataclass(frozen=True)
class Weight:
    """One parameter of a model, before it is sharded."""

    shape: tuple[int, ...]
    states: int  # numbers that the optimizer keeps for each element, 0 if the weight is frozen
    trained: bool = True
    ranks_that_share: int = 1  # ranks over which experts are distributed (--model.ep_size); 1 for other weights

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def kept(self) -> int:
        """Number of elements on a rank that does not shard the weight."""
        return self.elements // self.ranks_that_share

    def shard(self, ranks: int) -> int:
        """Returns the number of elements in the largest shard of ZeRO. A rank keeps 1 / `ranks_that_share` of the
        experts, and shards these among the ranks / `ranks_that_share` ranks that have the same ones, so they need no
        other formula."""
        return math.ceil(self.elements / ranks)

    def shard_of_rows(self, ranks: int) -> int:
        """Returns the number of elements in the largest shard of fsdp2, which has whole rows of the weight."""
        rows = self.shape[0] if self.shape else 1
        return math.ceil(rows / ranks) * (self.elements // max(1, rows))


@dataclass(frozen=True)
class Network:
    """The properties of a model that the formulas need."""

    weights: tuple[Weight, ...]
    blocks: tuple[int, ...]
    """Number of elements of each block, which fsdp2 shards separately."""
    built_unsharded: bool = False
    """Whether the full model is built on the host before ZeRO 3 shards it."""

    @property
    def largest_block(self) -> int:
        """Number of elements in the largest block, or in the full model if it has no blocks."""
        return max(self.blocks, default=self.elements)

    @property
    def elements(self) -> int:
        return sum(weight.elements for weight in self.weights)

    @property
    def trained(self) -> int:
        """Number of elements that are not frozen."""
        return sum(weight.elements for weight in self.weights if weight.trained)

    @property
    def trained_per_rank(self) -> int:
        """Number of elements that are not frozen, on a rank that shards none of them."""
        return sum(weight.kept for weight in self.weights if weight.trained)


def network_of(run: Run) -> Network:
    """Returns the properties of a run's model, with its adapters and frozen weights, which is built on torch's meta
    device. Raises UsageError for what `create_meta_model` and `check_patterns` refuse, such as a --lora.target or
    --trainable that matches nothing in the model."""
    from cifar_zero.build_model import blocks_of, check_patterns, create_meta_model
    from cifar_zero.models.moe import MixtureOfExperts
    from cifar_zero.optimizers.groups import parameter_groups

    net = create_meta_model(run.recipe, run.num_classes)
    ep_size = run.recipe.model.options.get("ep_size", 1)
    check_patterns(net, run.recipe.trainable, ep_size)
    experts: set[int] = set()
    for module in net.modules():
        if isinstance(module, MixtureOfExperts):
            experts |= {id(parameter) for parameter in module.experts.parameters()}
    optimizer = OPTIMIZERS[run.recipe.optimizer.name](**run.recipe.optimizer.options)
    states: dict[str, int] = {}
    for group in parameter_groups(optimizer, dict(net.named_parameters())):
        states |= dict.fromkeys(group["param_names"], _state_tensors(optimizer, "muon" in group))
    weights: list[Weight] = []
    for name, parameter in net.named_parameters():
        sharing = ep_size if id(parameter) in experts else 1
        weights.append(Weight(tuple(parameter.shape), states.get(name, 0), parameter.requires_grad, sharing))
    blocks: list[int] = []
    for block in blocks_of(net):
        blocks.append(sum(parameter.numel() for parameter in block.parameters()))
    return Network(tuple(weights), tuple(blocks), issubclass(MODELS[run.recipe.model.name], ThirdParty))


@dataclass(frozen=True)
class States:
    """A rank's model states in one place (device or host), in bytes."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Prediction:
    """Model states of the rank with the most bytes, between the backward pass and the update."""

    device: States
    host: States = States()


def predicted(run: Run, network: Network) -> Prediction:
    """Returns the model states of the rank with the most bytes, without bytes on a disk. The run's strategy must be one
    of `estimates.PLANNED`."""
    spec, ranks = run.spec, run.placement.world_size
    size = parameter_size(spec, run.placement.precision)
    # DeepSpeed updates float32 copies of the weights (zero/stage_1_and_2.py, zero/stage3.py). Stage 0 (fp16/) keeps
    # them only if the model itself is not float32.
    masters = spec.family == "deepspeed" and (spec.stage > 0 or size < FLOAT32)
    # elements of a rank's shards, of parameters that stay gathered, of trained shards, and of the optimizer's state
    stored = persistent = trained = states = 0
    for weight in network.weights:
        shard = weight.kept
        if spec.family == "fsdp2":
            shard = weight.shard_of_rows(ranks)
        elif spec.stage:
            shard = weight.shard(ranks)
        if spec.stage == 3 and weight.elements <= run.placement.zero.param_persistence_threshold:
            persistent += weight.kept
        stored += weight.kept if spec.stage in (1, 2) else shard
        trained += shard * weight.trained
        states += shard * weight.states
    persistent, stored, gradients = persistent * size, stored * size, trained * size
    update = states * (FLOAT32 if masters else size) + trained * FLOAT32 * masters
    if not spec.offload_optimizer:
        return Prediction(States(persistent + stored, gradients, update))
    if spec.offload_optimizer == "nvme":
        return Prediction(States(persistent), States(0, gradients))
    if spec.stage < 3:
        return Prediction(States(stored), States(0, trained * FLOAT32, update))
    # At stage 3 gradients arrive in the model's format and are copied to float32 for the update.
    gradients += trained * FLOAT32
    if spec.offload_parameters:
        return Prediction(States(persistent), States(stored, gradients, update))
    return Prediction(States(persistent + stored), States(0, gradients, update))


def parameter_size(spec: Spec, precision: str) -> int:
    """Returns how many bytes a rank stores for each element of a parameter. It is 2 with bf16-true, and also under
    DeepSpeed with any precision except 32-true. Autocast and fsdp2's mixed precision keep float32."""
    if precision == "bf16-true" or (spec.family == "deepspeed" and precision != "32-true"):
        return 2
    return FLOAT32


def _state_tensors(optimizer: OptimizerOptions, by_muon: bool) -> int:
    """Returns how many numbers an optimizer keeps for each element of a parameter. `by_muon` is whether Muon updates
    the parameter. torch's optimizers and DeepSpeed's C++ versions keep the same."""
    if isinstance(optimizer, Muon | MuonSGD):  # all other parameters are updated by AdamW, or by SGD with momentum
        return 2 if isinstance(optimizer, Muon) and not by_muon else 1
    more = sum(bool(getattr(optimizer, option, 0)) for option in ("momentum", "centered"))
    return optimizer.moments + more


def buckets(run: Run, network: Network) -> int:
    """Returns the bytes that the backward pass holds in addition to activations: buckets, temporarily gathered
    parameters and, at stage 1, full gradients. Stage 1 reduces these at the end of the last backward pass
    (zero/stage_1_and_2.py, without overlap_comm). They are counted in addition to all activations, which is more than
    stage 1 ever holds."""
    size = parameter_size(run.spec, run.placement.precision)
    if run.spec.family == "fsdp2":
        # The block that computes, the block that is gathered ahead, and the gradients of one block. In mixed precision
        # the gradients have a float32 copy, in which they are reduced (reduce_dtype in strategies/fsdp2.py;
        # foreach_reduce in torch 2.15's _fsdp_collectives.py). A model without blocks counts as one block.
        each = 3 * 2
        if run.placement.precision == "32-true":
            each = 3 * FLOAT32
        elif run.placement.precision == "bf16-mixed":
            each += FLOAT32
        return network.largest_block * each
    if run.spec.stage == 0:
        return 0
    zero = run.placement.zero
    bucket = min(zero.reduce_bucket_size, network.elements) * size
    if run.spec.stage < 3 and zero.overlap_comm:
        bucket *= 2  # one bucket is filled while the other is sent (zero/stage_1_and_2.py)
    if run.spec.stage == 1:
        return bucket + network.trained_per_rank * size
    if run.spec.stage == 2:
        return bucket
    return bucket + min(REUSE_ELEMENTS // 2 + zero.prefetch_bucket_size, network.elements) * size


def update(run: Run, network: Network) -> int:
    """Returns the bytes that the update takes on the device, after the activations are freed: copies of the gradients
    under DeepSpeed, and the optimizer's temporary tensors."""
    if run.spec.offload_optimizer:
        return 0
    size = parameter_size(run.spec, run.placement.precision)
    part = math.ceil(network.trained / run.placement.world_size)
    if run.spec.stage == 3:
        part = min(part, run.placement.zero.sub_group_size)
    elif run.spec.stage == 0 and run.spec.family != "fsdp2":
        part = network.trained_per_rank
    if run.spec.family != "deepspeed":
        return part * size * _temporaries(run)
    if run.spec.stage == 3 or size == FLOAT32:  # at stages 0 to 2 in float32, the flat copy that is sent
        copies = FLOAT32
    elif run.spec.stage > 0:  # a flat copy, then a float32 copy (zero/stage_1_and_2.py, step)
        copies = size + FLOAT32
    else:  # at most the gradients in float32, and once more in a flat tensor for the norm (fp16/unfused_optimizer.py)
        copies = 2 * FLOAT32
    return part * (copies + FLOAT32 * _temporaries(run))


def _temporaries(run: Run) -> int:
    """Returns how many temporary numbers the optimizer's update takes for each element. They are 0 where torch's fused
    optimizer is used (`optimizer_implementation` of the hooks in strategies/)."""
    optimizer = OPTIMIZERS[run.recipe.optimizer.name](**run.recipe.optimizer.options)
    if run.on_cpu:
        return 0 if optimizer.loops_on_cpu else optimizer.temporaries
    mixed = run.placement.precision in ("bf16-mixed", "16-mixed")
    scales_or_clips = run.placement.precision == "16-mixed" or run.recipe.gradient_clip_val > 0
    fused = run.spec.family == "deepspeed" or (run.spec.family == "baseline" and not (mixed and scales_or_clips))
    if optimizer.fused and fused:
        return 0
    if isinstance(optimizer, SGD) and not optimizer.weight_decay:
        return 0
    return optimizer.temporaries


def average(run: Run, network: Network) -> int:
    """Returns the bytes that a rank holds for the float32 average of the weights (callbacks/averaging.py), with a
    float32 copy of the weights if these are in a lower precision. Returns 0 if the run averages no weights."""
    if not run.recipe.ema:
        return 0
    elements = network.trained_per_rank
    if run.spec.stage == 3:
        elements //= run.placement.world_size
    if parameter_size(run.spec, run.placement.precision) < FLOAT32:
        elements *= 2
    return elements * FLOAT32


def host_buffers(run: Run, network: Network) -> int:
    """Returns the bytes of a rank's host memory that offloading needs in addition to the offloaded tensors."""
    part = math.ceil(network.trained / run.placement.world_size)
    if run.spec.offload_optimizer == "nvme":  # for the sub-group that is updated
        return min(part, run.placement.zero.sub_group_size) * 4 * FLOAT32
    if run.spec.offload_optimizer and run.spec.stage < 3:
        # Room for updated weights on their way back (param_buffer_of_bit16_for_cpu_offload_groups) and for the
        # gradients of several micro-batches (accumulated_grads_in_cpu, zero/stage_1_and_2.py).
        if run.placement.accumulate > 1:
            part *= 2
        return part * parameter_size(run.spec, run.placement.precision)
    return 0


def built_on_host(run: Run, network: Network) -> int:
    """Returns the bytes that the model takes on the host while it is built, in float32, or in bfloat16 with bf16-true,
    before it is cast and sharded. Returns 0 for strategies that build it on the device.

    fsdp2 builds it on the host. Stage 3 shards each layer right after it is built (deepspeed/strategy.py), but builds
    full models of other packages on the host. If stage 3 keeps the shards in the host's memory, the bytes are those of
    the rank's shard.
    """
    if run.spec.family != "fsdp2" and run.spec.stage < 3:
        return 0
    size = network.elements * (2 if run.placement.precision == "bf16-true" else FLOAT32)
    if run.spec.family == "fsdp2" or network.built_unsharded:
        return size
    if run.spec.offload_parameters == "cpu" or (run.on_cpu and not run.spec.offload_parameters):
        return math.ceil(size / run.placement.world_size)
    return 0
