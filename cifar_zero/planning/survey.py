"""Computes the memory of a rank under each strategy, part by part, and the bytes that it sends; recommends one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cifar_zero.config import rules
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.planning import overheads
from cifar_zero.planning.machine import Room
from cifar_zero.planning.model_states import Network, Prediction, predicted

if TYPE_CHECKING:
    from cifar_zero.planning.activations import Line

PLANNED = sorted(
    (name for name, spec in STRATEGIES.items() if not spec.one_replica and name != "fsdp"),  # fsdp is fsdp2
    key=lambda name: ("", "cpu", "nvme").index(STRATEGIES[name].offload_optimizer),
)
"""The strategies with a formula, in the order of recommendation: without offload, offload to the host, offload to disk;
within each group from the least sharding to the most."""

RULE = "the first row that fits; rows that keep states in the host's memory or on a disk come last, as they are slower"


@dataclass(frozen=True)
class Need:
    """Memory of the fullest rank under one strategy, in bytes."""

    strategy: str
    states: Prediction
    buckets: int  # communication buckets and temporarily gathered parameters
    activations: int | None  # activations of the run's micro-batch; None if they were not counted
    update: int  # copies of the gradients in the update, after activations and buckets are freed
    average: int  # the average of the weights (--ema, --swa_from) on the device
    host_buffers: int  # buffers of offloading on the host, and the average of weights that are stored there
    activation_offload: bool
    """Whether the host holds the activations too. The device is planned for all of them too: temporary ones stay."""
    built_on_host: int  # the model on the host while it is built
    sent_bytes: int  # bytes sent to other ranks per optimizer step
    refused: str = ""  # why train.py would refuse it; empty if it would not
    fits: bool = False
    most_images: int | None = None  # the largest micro-batch that fits

    @property
    def device(self) -> int:
        """The peak on the device, in the backward pass (activations and buckets) or in the update (neither)."""
        return self.states.device.total + self.average + max(self.buckets + (self.activations or 0), self.update)

    @property
    def _host_in_training(self) -> int:
        offloaded = (self.activations or 0) if self.activation_offload else 0
        return self.states.host.total + self.host_buffers + offloaded

    @property
    def host(self) -> int:
        """The peak in the host's memory, without the process itself."""
        return max(self.built_on_host, self._host_in_training)

    @property
    def disk(self) -> int:
        """The model states on the NVMe disk."""
        return self.states.disk.total

    def compared(self, room: Room) -> int:
        """Returns what must fit on the device, including the host's part if both are one memory."""
        return max(self.built_on_host, self.device + self._host_in_training) if room.shared else self.device

    def lacking(self, room: Room) -> dict[str, tuple[int, int]]:
        """Returns the needed and the available bytes of device, host and disk, for those that are too small."""
        host = None if room.shared else room.host
        sizes = {
            "device": (self.compared(room), room.device),
            "host": (self.host, host),
            "disk": (self.disk, room.disk),
        }
        return {place: (size, most) for place, (size, most) in sizes.items() if most is not None and size > most}


def survey(run: Run, network: Network, room: Room, lines: dict[str, Line] | None) -> list[Need]:
    """Returns the needs of a run under each strategy of PLANNED, whatever its own is. `lines` caches the activations by
    compute format, and is filled here; None: activations are not counted. Raises UsageError if the batch does not
    divide, ranks share a model, or activation checkpointing finds no blocks."""
    if run.config.tensor_parallel_size or run.config.pipeline_parallel_size:
        raise UsageError("--tensor_parallel_size and --pipeline_parallel_size cannot be planned: leave them out")
    return [_need(run.under(name), network, room, lines) for name in PLANNED]


def _need(run: Run, network: Network, room: Room, lines: dict[str, Line] | None) -> Need:
    config, spec, refused = run.config, run.spec, ""
    try:
        rules.check_strategy(run)
        if not room.elsewhere:
            rules.check_here(run)
    except UsageError as error:
        refused = str(error)
    line = None if lines is None or refused else _activations(run, lines)
    states = predicted(
        config.strategy, network.weights, config.world_size, config.precision, config.optimizer, config.zero
    )
    assert states is not None
    average = overheads.average(run, network)  # stored where the parameters are
    average_on_host = average if spec.offload_parameters else 0
    need = Need(
        config.strategy,
        states,
        buckets=overheads.buckets(run, network),
        activations=line and line.at(run.micro_batch),
        update=overheads.update(run, network),
        average=average - average_on_host,
        host_buffers=overheads.host_buffers(run, network) + average_on_host,
        activation_offload=config.activation_offload,
        built_on_host=overheads.built_on_host(run, network),
        sent_bytes=overheads.sent_bytes(run, network),
        refused=refused,
    )
    return replace(need, fits=not need.lacking(room), most_images=line and _most_images(need, line, room))


def _activations(run: Run, lines: dict[str, Line]) -> Line:
    """Returns the activations of a run by images, counted once for each compute format."""
    from cifar_zero.planning.activations import format_of, measure

    computes = format_of(run.spec, run.config.precision)
    if computes not in lines:
        lines[computes] = measure(run, computes)
    return lines[computes]


def _most_images(need: Need, line: Line, room: Room) -> int:
    sizes = range(10**7)  # the limit of the search
    first = bisect_left(sizes, True, key=lambda images: bool(replace(need, activations=line.at(images)).lacking(room)))
    return max(0, first - 1)


def recommended(needs: Sequence[Need], room: Room) -> tuple[Need | None, str]:
    """Returns what RULE recommends of needs in the order of PLANNED, and its figures; or None, and what is missing.
    Raises UsageError if train.py would refuse every strategy; the message is the one for the simplest strategy."""
    accepted = [need for need in needs if not need.refused]
    if not accepted:
        raise UsageError(needs[0].refused)
    too_large: list[str] = []
    for need in accepted:
        # SuperOffload is for the fast links of a GH200, which cannot be detected: only the user can choose it.
        if need.fits and not STRATEGIES[need.strategy].super_offload:
            sizes = f"{gigabytes(need.compared(room))} of the {gigabytes(room.device)} GB available to a rank"
            others = f"; {', '.join(too_large)} would not fit" if too_large else ""
            return need, f"{need.strategy} needs {sizes}{others}"
        too_large += [] if need.fits else [need.strategy]
    least = min(accepted, key=lambda need: ("device" in need.lacking(room), need.device))
    missing = (
        f"{gigabytes(size)} GB of {place} memory, of which {gigabytes(most)} GB are available"
        for place, (size, most) in least.lacking(room).items()
    )
    said = f"nothing fits: {least.strategy}, which needs the least, needs {' and '.join(missing)}; use more devices"
    smaller = ", a smaller --batch_size, a larger --accumulate or --activation_checkpointing"
    return None, said if least.activations is None else said + smaller


def gigabytes(size: int) -> str:
    """Returns a size in GB (10^9 bytes) with a suitable number of digits."""
    return f"{size / 1e9:,.{0 if size >= 100e9 else 1 if size >= 1e9 else 2}f}"
