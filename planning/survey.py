"""What a run needs of a rank's memory under every strategy, part by part, and the bytes that each moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import checks
from batch import micro_batch_size
from config import Config
from errors import UsageError
from planning.model_states import FLOAT32, Prediction, parameter_size, predicted
from planning.network import Network
from strategies import STRATEGIES, Spec, replicas
from strategies.deepspeed import BUCKET_ELEMENTS

if TYPE_CHECKING:
    from planning.activations import Line

REUSE_ELEMENTS = 10**9
"""ZeRO-3 keeps a gathered parameter whose next use lies within so many elements: stage3_max_reuse_distance (DeepSpeed
0.19.8, zero/config.py and partitioned_param_coordinator.py). At the end of a forward pass that is true of the last
half of them, through which the backward pass goes in the opposite direction."""

PREFETCH_ELEMENTS = 50_000_000
"""ZeRO-3 gathers so many elements ahead: stage3_prefetch_bucket_size (zero/config.py)."""


SWAPPED_ELEMENTS = 5 * 10**8
"""Parameters on a disk pass through so much of the CPU's memory: 5 buffers of 10^8 (buffer_count and buffer_size of
offload_param in DeepSpeed 0.19.8, zero/offload_config.py)."""

SUB_GROUP_ELEMENTS = 10**9
"""What ZeRO-3 updates at a time, on a disk too: sub_group_size (zero/config.py)."""


@dataclass(frozen=True, order=True)
class Moved:
    """Numbers that a rank moves for one optimizer step, by the link, the slowest first; they compare in this order.

    Numbers and not bytes, so that a format does not decide: the network's as the ZeRO paper counts them (section 7),
    twice the parameters for an all-reduce, or a reduce-scatter and an all-gather; three times at stage 3.
    """

    disk: int = 0
    host: int = 0
    network: int = 0


@dataclass(frozen=True)
class Need:
    """Of one strategy, in bytes on the fullest rank."""

    strategy: str
    states: Prediction | None
    """None where there is no formula; then nothing else is told either."""
    passing: int = 0
    """Gradients that are whole in the backward pass only, or in float32 in the update only: the larger of both."""
    buckets: int = 0
    """Communication buckets, and parameters that are gathered for a while."""
    activations: int | None = None
    """Of the run's micro-batch; None where only the number of parameters is known."""
    host_buffers: int = 0
    host_activations: int = 0
    most_images: int | None = None
    """The largest micro-batch that fits."""
    moved: Moved = Moved()
    refused: str = ""
    """Why train.py would not run it."""
    fits: bool = False

    @property
    def device(self) -> int:
        """All of it on the device: the backward pass has activations and buckets, the update neither."""
        assert self.states is not None
        return self.states.device.total + max(self.buckets + (self.activations or 0), self.passing)

    @property
    def host(self) -> int:
        """All of it in the CPU's memory, beside the process itself."""
        assert self.states is not None
        return self.states.host.total + self.host_buffers + self.host_activations

    @property
    def disk(self) -> int:
        """All of it on the NVMe disk."""
        assert self.states is not None
        return self.states.disk.total


@dataclass(frozen=True)
class Room:
    """Bytes that a rank may take."""

    device: int
    host: int | None
    """None: not known, and so not looked at."""
    shared: bool = False
    """Whether the device is the CPU, so that what is offloaded takes of the same memory."""


def survey(config: Config, network: Network, room: Room, lines: dict[str, Line] | None) -> list[Need]:
    """The needs of a run under each strategy, in the registry's order.

    Args:
        config: of the run, its devices a number, accelerator and precision settled; its strategy does not matter.
        network: of the run.
        room: of a rank.
        lines: the activations by format, filled in as they are measured; None: they are not told.

    Raises:
        UsageError: the batch does not divide, or activation checkpointing finds no blocks.
    """
    needs: list[Need] = []
    for name in STRATEGIES:
        run = replace(config, strategy=name, ds_config="")
        states = predicted(name, network.weights, run.world_size, run.precision, run.optimizer)
        if states is None:
            needs.append(Need(name, None, refused=_refusal(run)))
        else:
            needs.append(_need(run, states, network, room, None if lines is None else _line(run, lines)))
    return needs


def micro_batch(config: Config) -> int:
    """Images of a rank and micro-batch. Raises UsageError where the batch does not divide."""
    return micro_batch_size(config.batch_size, replicas(config), config.accumulate)


def _line(config: Config, lines: dict[str, Line]) -> Line:
    """Of the activations, measured once for each format."""
    from planning.activations import format_of, line

    kind = format_of(STRATEGIES[config.strategy], config.precision)
    if kind not in lines:
        lines[kind] = line(config, micro_batch(config), kind)
    return lines[kind]


def _need(config: Config, states: Prediction, network: Network, room: Room, line: Line | None) -> Need:
    spec = STRATEGIES[config.strategy]
    activations = None if line is None else line.at(micro_batch(config))
    need = Need(
        config.strategy,
        states,
        passing=_passing(spec, config, network),
        buckets=_buckets(spec, config, network),
        activations=activations,
        host_buffers=_host_buffers(spec, config, network),
        moved=_moved(spec, config, network),
        refused=_refusal(config),
    )
    if config.activation_offload and activations:
        need = replace(need, activations=0, host_activations=activations)
    # The CPU's memory is one, wherever a strategy would have it.
    most = room.device - need.host if room.shared else room.device
    fits = need.device <= most and (room.shared or room.host is None or need.host <= room.host)
    images = None
    if line is not None and not config.activation_offload:
        states_fit = states.device.total + need.passing <= most
        images = line.most_images(most - states.device.total - need.buckets) if states_fit else 0
    return replace(need, fits=fits, most_images=images)


def _buckets(spec: Spec, config: Config, network: Network) -> int:
    """What lies beside the activations in the backward pass."""
    size = parameter_size(spec, config.precision)
    bucket = min(BUCKET_ELEMENTS, network.elements) * size
    if spec.stage == 1:  # whole gradients, from one micro-batch to the next
        return bucket + (network.trained * size if config.accumulate > 1 else 0)
    if spec.stage == 2:
        return bucket
    if spec.stage == 3:
        return bucket + min(REUSE_ELEMENTS // 2 + PREFETCH_ELEMENTS, network.elements) * size
    computed_in = 2 if config.precision != "32-true" else FLOAT32
    if spec.family == "fsdp2":  # a block, the one that is gathered ahead, and the gradients of one
        return 3 * network.largest_block * computed_in
    if spec.family == "fsdp":  # the whole network is one unit here, and so are its gradients
        return (network.elements + network.trained) * computed_in
    return 0


def _passing(spec: Spec, config: Config, network: Network) -> int:
    """What is there after the activations are gone: whole gradients that are sent in one piece or wait for it, or the
    float32 copy of the gradients that the update takes."""
    if spec.family != "deepspeed":
        return 0
    ranks, size = config.world_size, parameter_size(spec, config.precision)
    if spec.stage == 0:
        flat = network.trained * size if ranks > 1 else 0
        return max(flat, network.trained * FLOAT32 if size < FLOAT32 else 0)
    part = math.ceil(network.trained / ranks)
    updated_at_once = min(part, SUB_GROUP_ELEMENTS) if spec.stage == 3 else part
    copy = 0 if spec.offload_optimizer else updated_at_once * FLOAT32
    whole = min(BUCKET_ELEMENTS, network.elements) + network.trained if spec.stage == 1 else 0
    return max(copy, whole * size)


def _host_buffers(spec: Spec, config: Config, network: Network) -> int:
    """What an offloaded optimizer or parameters take beside themselves."""
    part, size = math.ceil(network.trained / config.world_size), parameter_size(spec, config.precision)
    if spec.offload_optimizer == "nvme":
        return SWAPPED_ELEMENTS * size + min(part, SUB_GROUP_ELEMENTS) * 4 * FLOAT32
    if spec.offload_optimizer and spec.stage < 3:
        return part * size  # updated weights on their way back (param_buffer_of_bit16_for_cpu_offload_groups)
    return 0


def _moved(spec: Spec, config: Config, network: Network) -> Moved:
    """Over the network each rank sends (N - 1)/N of what is counted, to the host and to a disk its own part."""
    ranks, micro_batches = config.world_size, config.accumulate
    whole, trained = network.elements, network.trained
    if spec.stage == 3 or spec.family in ("fsdp", "fsdp2"):
        over_network = micro_batches * (2 * whole + trained)
    else:
        over_network = (micro_batches if spec.stage == 2 else 1) * trained + trained
    update = 2 * trained // ranks if spec.offload_optimizer else 0  # gradients there, weights back
    parameters = 2 * micro_batches * whole // ranks if spec.offload_parameters else 0
    state = 6 * trained // ranks  # master weights and two moments, read and written
    on_disk = parameters + update + state if spec.offload_optimizer == "nvme" else 0
    return Moved(on_disk, parameters + update, over_network * (ranks - 1) // ranks)


def _refusal(config: Config) -> str:
    try:
        checks.check_strategy(config, {})
    except UsageError as error:
        return str(error)
    return ""
