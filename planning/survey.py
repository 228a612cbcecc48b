"""What a run needs of a rank's memory under every strategy, part by part, and the bytes that each moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import checks
from batch import micro_batch_size
from config import Config
from errors import UsageError
from planning import beside
from planning.communication import Traffic, traffic
from planning.model_states import FLOAT32, Prediction, parameter_size, predicted
from planning.network import Network
from strategies import STRATEGIES, Spec, replicas

if TYPE_CHECKING:
    from planning.activations import Line, Lines


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
    """Gradients that are whole in the backward pass only, or copies in the update only: the larger of both."""
    buckets: int = 0
    """Communication buckets, and parameters that are gathered for a while."""
    activations: int | None = None
    """Of the run's micro-batch, at stage 1 with the whole gradients beside them; None where they were not counted."""
    average: int = 0
    """Of the weights: --ema, --swa_from."""
    starting: int = 0
    """The network as it is built, before the strategy has cast and cut it."""
    host_buffers: int = 0
    host_activations: int = 0
    host_starting: int = 0
    most_images: int | None = None
    """The largest micro-batch that fits."""
    moved: Moved = Moved()
    traffic: Traffic | None = None
    """What it sends to other ranks; None where there is no formula."""
    refused: str = ""
    """Why train.py would not run it."""
    wanted: str = ""
    """What it needs that this machine lacks, where another one is planned for."""
    fits: bool = False

    @property
    def device(self) -> int:
        """The most on the device."""
        return max(self.starting, self.in_training)

    @property
    def host(self) -> int:
        """The most in the CPU's memory, beside the process itself."""
        return max(self.host_starting, self._host_in_training)

    @property
    def both(self) -> int:
        """The most of the two together, where they are one memory."""
        return max(self.starting + self.host_starting, self.in_training + self._host_in_training)

    @property
    def disk(self) -> int:
        """All of it on the NVMe disk."""
        assert self.states is not None
        return self.states.disk.total

    def seconds(self, bandwidth: float | None) -> float | None:
        """Returns how long it communicates in an optimizer step at so many bytes per second; None if either is not
        known."""
        return None if bandwidth is None or self.traffic is None else self.traffic.seconds(bandwidth)

    @property
    def in_training(self) -> int:
        """The most on the device once training goes: the backward pass has activations and buckets, the update
        neither."""
        assert self.states is not None
        return self.states.device.total + self.average + max(self.buckets + (self.activations or 0), self.passing)

    @property
    def _host_in_training(self) -> int:
        assert self.states is not None
        return self.states.host.total + self.host_buffers + self.host_activations


@dataclass(frozen=True)
class Room:
    """Bytes that a rank may take."""

    device: int
    host: int | None
    """None: not known, and so not looked at."""
    shared: bool = False
    """Whether the device is the CPU, so that what is offloaded takes of the same memory."""
    disk: int | None = None
    """Of --nvme_path; None as above."""
    elsewhere: bool = False
    """Whether it is another machine's: then what this one lacks is told, and refuses nothing."""

    def lacking(self, need: Need) -> list[str]:
        """What is too small for it, in words; empty where it fits."""
        sizes = [("the device", need.both if self.shared else need.device, self.device)]
        sizes += [
            ("the CPU's memory", need.host, None if self.shared else self.host),
            ("the disk", need.disk, self.disk),
        ]
        return [name for name, size, room in sizes if room is not None and size > room]


def survey(
    config: Config,
    network: Network,
    room: Room,
    lines: dict[str, Lines] | None,
    strategies: Iterable[str] = STRATEGIES,
) -> list[Need]:
    """The needs of a run under each strategy, in the registry's order.

    Args:
        config: of the run, its devices a number, accelerator and precision settled; its strategy does not matter.
        network: of the run.
        room: of a rank.
        lines: the activations by format of computing, filled in as they are measured; None: they are not told.
        strategies: those that are looked at.

    Raises:
        UsageError: the batch does not divide, or activation checkpointing finds no blocks.
    """
    runs = [replace(config, strategy=name, ds_config="") for name in strategies]
    refusals = [_refusal(run, here=not room.elsewhere) for run in runs]
    if lines is not None:
        _measure([run for run, refused in zip(runs, refusals, strict=True) if not refused], lines)
    return [_need(run, refused, network, room, lines) for run, refused in zip(runs, refusals, strict=True)]


def micro_batch(config: Config) -> int:
    """Images of a rank and micro-batch. Raises UsageError where the batch does not divide."""
    return micro_batch_size(config.batch_size, replicas(config), config.accumulate)


def _measure(runs: list[Config], lines: dict[str, Lines]) -> None:
    """Counts what the formats of some runs take beside parameters, each once."""
    from planning.activations import format_of, measure

    for run in runs:
        spec = STRATEGIES[run.strategy]
        if not spec.one_replica and (kind := format_of(spec, run.precision)) not in lines:
            lines[kind] = measure(run, micro_batch(run), kind)


def _need(config: Config, refused: str, network: Network, room: Room, lines: dict[str, Lines] | None) -> Need:
    spec = STRATEGIES[config.strategy]
    states = predicted(config.strategy, network.weights, config.world_size, config.precision, config.optimizer)
    if states is None:
        # What cuts layers asks which network it is.
        return Need(config.strategy, None, refused=refused if lines is not None else "")
    if spec.offload_optimizer == "cpu" and config.offload.ratio < 1:
        states = _twin_flow(states, spec, config, network)
    line = _line(spec, config, lines)
    activations = None if line is None else line.at(micro_batch(config))
    on_device, on_host = beside.average(spec, config, network)
    first, first_on_host = beside.starting(spec, config, network)
    need = Need(
        config.strategy,
        states,
        passing=beside.passing(spec, config, network),
        buckets=beside.buckets(spec, config, network),
        activations=activations,
        average=on_device,
        starting=first,
        host_buffers=beside.host_buffers(spec, config, network) + on_host,
        # On the device too: what of them is not saved stays there, and no less is known of it.
        host_activations=(activations or 0) if config.activation_offload else 0,
        host_starting=first_on_host,
        moved=_moved(spec, config, network),
        traffic=traffic(spec, config, network),
        refused=refused,
        wanted=_said_by(checks.check_here, config) if room.elsewhere else "",
    )
    most = None if line is None or refused else _most_images(need, line, room)
    return replace(need, fits=not room.lacking(need), most_images=most)


def _twin_flow(states: Prediction, spec: Spec, config: Config, network: Network) -> Prediction:
    """What --offload.ratio leaves on the device: the first sub-groups of the optimizer, as many as come out whole, with
    the float32 gradients of their update (DeepSpeed 0.19.8, `_create_fp32_partitions` in zero/stage3.py)."""
    sizes = sub_groups(network, config.world_size, config.zero.sub_group_size)
    share = sum(sizes[: int((1 - config.offload.ratio) * len(sizes))]) / max(1, sum(sizes))
    float32 = FLOAT32 / (FLOAT32 + parameter_size(spec, config.precision))
    optimizer = round(share * states.host.optimizer)
    gradients = round(share * float32 * states.host.gradients)
    device, host = states.device, states.host
    return Prediction(
        replace(device, gradients=device.gradients + gradients, optimizer=device.optimizer + optimizer),
        replace(host, gradients=host.gradients - gradients, optimizer=host.optimizer - optimizer),
    )


def sub_groups(network: Network, ranks: int, size: int) -> list[int]:
    """Elements of each sub-group on a rank: of each of the optimizer's groups by itself, ended by the parameter with
    which it is large enough (`_create_fp16_sub_groups` in DeepSpeed's zero/stage3.py). Of a network whose parameters
    are not known, evenly."""
    if not network.groups:
        part = math.ceil(network.trained / ranks)
        return [min(size, part - first) for first in range(0, part, size)]
    made = []
    for group in network.groups:
        parts = [math.ceil(elements / ranks) for elements in group]
        open_group = 0
        for number, part in enumerate(parts, start=1):
            open_group += part
            if open_group >= size or number == len(parts):
                made.append(open_group)
                open_group = 0
    return made


def _line(spec: Spec, config: Config, lines: dict[str, Lines] | None) -> Line | None:
    """Of what the backward pass holds; None where it has not been counted.

    Stage 1 reduces its gradients at the end of the last backward pass (DeepSpeed 0.19.8, zero/stage_1_and_2.py, without
    overlap_comm); of several micro-batches all of them are counted as buckets.
    """
    if not lines:
        return None
    from planning.activations import format_of

    measured = lines.get(format_of(spec, config.precision))
    if measured is None:
        return None
    return measured.with_gradients if spec.stage == 1 and config.accumulate == 1 else measured.activations


def _most_images(need: Need, line: Line, room: Room) -> int:
    empty = replace(need, activations=0, host_activations=0)
    if room.lacking(empty):
        return 0
    assert empty.states is not None
    taken = empty.states.device.total + empty.average + empty.buckets
    if room.shared:
        return line.most_images(room.device - taken - empty.states.host.total - empty.host_buffers)
    most = line.most_images(room.device - taken)
    if not need.host_activations or room.host is None:
        return most
    return min(most, line.most_images(room.host - empty.states.host.total - empty.host_buffers))


def _moved(spec: Spec, config: Config, network: Network) -> Moved:
    """Over the network each rank sends (N - 1)/N of what is counted, to the host and to a disk its own part."""
    ranks, micro_batches = config.world_size, config.accumulate
    whole, trained = network.elements, network.trained
    if spec.stage == 3 or spec.family == "fsdp2":
        over_network = micro_batches * (2 * whole + trained)
    else:
        over_network = (micro_batches if spec.stage == 2 else 1) * trained + trained
    update = 2 * trained // ranks if spec.offload_optimizer else 0  # gradients there, weights back
    parameters = 2 * micro_batches * whole // ranks if spec.offload_parameters else 0
    state = 6 * trained // ranks  # master weights and two moments, read and written
    on_disk = parameters + update + state if spec.offload_optimizer == "nvme" else 0
    return Moved(on_disk, parameters + update, over_network * (ranks - 1) // ranks)


def _refusal(config: Config, here: bool) -> str:
    return _said_by(checks.check_strategy if here else checks.check_possible, config)


def _said_by(check: Callable[[Config, dict[str, Any]], None], config: Config) -> str:
    try:
        check(config, {})
    except UsageError as error:
        return str(error)
    return ""
