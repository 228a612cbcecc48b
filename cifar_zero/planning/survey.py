"""The memory that a rank needs under each strategy, part by part, the bytes that it sends, and the memory that it has.
Recommends a strategy, also for `--strategy auto`."""

from __future__ import annotations

import re
import shutil
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cifar_zero.config import rules
from cifar_zero.config.placement import Placement
from cifar_zero.config.rules import CPU_RANK_BYTES
from cifar_zero.config.run import Run
from cifar_zero.config.settings import Settings
from cifar_zero.config.strategy_specs import AUTO, STRATEGIES
from cifar_zero.core.console import say
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import free_memory_bytes
from cifar_zero.launch import rank_environment
from cifar_zero.planning import overheads
from cifar_zero.planning.model_states import Network, Prediction, network_of, predicted
from cifar_zero.training.resolve import make_run, resolve_devices

if TYPE_CHECKING:
    from cifar_zero.planning.activations import LinearFit

PLANNED = sorted(
    (name for name, spec in STRATEGIES.items() if not spec.one_replica and name != "fsdp"),  # fsdp is fsdp2
    key=lambda name: ("", "cpu", "nvme").index(STRATEGIES[name].offload_optimizer),
)
"""The strategies with a formula, in the order of recommendation: without offload, offload to the host, offload to disk;
within each group from the least sharding to the most."""

RULE = "the first row that fits; rows that keep states in the host's memory or on a disk come last, as they are slower"

UNITS = {"": 10**9, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

USABLE = 0.9
"""Share of a device's memory that a plan uses. The rest is for the CUDA context, the workspaces of cuBLAS and NCCL, and
fragmentation of the allocator: vLLM's gpu_memory_utilization leaves as much by default (vLLM 0.11,
vllm/config/cache.py)."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes available to a rank; None: unknown, and not checked."""

    device: int
    host: int | None
    shared: bool = False  # whether the device is the CPU, so that offloaded tensors stay in the same memory
    disk: int | None = None  # free space of --nvme_path
    elsewhere: bool = False
    """Whether this is another machine, which may have what this one lacks (a compiler, bitsandbytes, --nvme_path)."""


def available(settings: Settings, device_memory: str | None = None, host_memory: str | None = None) -> MemoryBudget:
    """Returns what is available to a rank on the machine with this --device_memory, None: on this machine now. Without
    `host_memory`, of a node, it is what is free here. Raises UsageError: a memory is no size."""
    assert settings.placement.devices != "auto"
    on_cpu = settings.placement.accelerator == "cpu"
    ranks = settings.placement.devices  # of a node
    host = disk = None
    if host_memory is not None:
        host = max(0, size_in_bytes(host_memory, "--host_memory") // ranks - CPU_RANK_BYTES)
    if device_memory is not None:
        size = size_in_bytes(device_memory, "--device_memory")
        usable = max(0, size - CPU_RANK_BYTES) if on_cpu else round(USABLE * size)
        return MemoryBudget(usable, host, shared=on_cpu, elsewhere=True)
    if host is None:
        host = max(0, free_memory_bytes() // ranks - CPU_RANK_BYTES)
    path = settings.placement.nvme_path
    if path and Path(path).is_dir():
        disk = shutil.disk_usage(path).free // ranks
    return MemoryBudget(host if on_cpu else free_gpu_bytes(ranks), host, on_cpu, disk)


def size_in_bytes(text: str, flag: str) -> int:
    """Returns the bytes of `80GB`, `24GiB`, `512MiB` or `80`, which is gigabytes. Raises UsageError: it is no size."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] not in UNITS or not 1 <= (size := float(match[1]) * UNITS[match[2]]) < 1e18:
        raise UsageError(f"{flag} {text}: give a size such as 80GB (10^9 bytes), 24GiB (2^30) or 80, which is 80GB")
    return round(size)


def free_gpu_bytes(devices: int) -> int:
    """Returns what a rank may use on the fullest of the first `devices` GPUs, without what others use there now, which
    is unknown without NVIDIA's pynvml: asking CUDA itself would take GPU memory."""
    import torch

    def free(gpu: int) -> int:
        total = torch.cuda.get_device_properties(gpu).total_memory
        try:
            return round(USABLE * total) - torch.cuda.device_memory_used(gpu)
        except (ModuleNotFoundError, RuntimeError):
            return round(USABLE * total)

    return max(0, min(map(free, range(min(devices, torch.cuda.device_count())))))


@dataclass(frozen=True)
class MemoryEstimate:
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
    refused: str = ""  # why `train` would refuse it; empty if it would not
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

    def compared(self, room: MemoryBudget) -> int:
        """Returns what must fit on the device, including the host's part if both are one memory."""
        return max(self.built_on_host, self.device + self._host_in_training) if room.shared else self.device

    def lacking(self, room: MemoryBudget) -> dict[str, tuple[int, int]]:
        """Returns the needed and the available bytes of device, host and disk, for those that are too small."""
        host = None if room.shared else room.host
        sizes = {
            "device": (self.compared(room), room.device),
            "host": (self.host, host),
            "disk": (self.disk, room.disk),
        }
        return {place: (size, most) for place, (size, most) in sizes.items() if most is not None and size > most}


def survey(run: Run, network: Network, room: MemoryBudget, lines: dict[str, LinearFit] | None) -> list[MemoryEstimate]:
    """Returns the needs of a run under each strategy of PLANNED, whatever its own is. `lines` caches the activations by
    compute format, and is filled here; None: activations are not counted. Raises UsageError if the batch does not
    divide, ranks share a model, or activation checkpointing finds no blocks."""
    if run.placement.tensor_parallel_size or run.placement.pipeline_parallel_size:
        raise UsageError("--tensor_parallel_size and --pipeline_parallel_size cannot be planned: leave them out")
    return [_need(run.under(name), network, room, lines) for name in PLANNED]


def _need(run: Run, network: Network, room: MemoryBudget, lines: dict[str, LinearFit] | None) -> MemoryEstimate:
    spec, refused = run.spec, ""
    try:
        rules.check_strategy(run)
        if not room.elsewhere:
            rules.check_here(run)
    except UsageError as error:
        refused = str(error)
    line = None if lines is None or refused else _activations(run, lines)
    states = predicted(
        run.placement.strategy,
        network.weights,
        run.placement.world_size,
        run.placement.precision,
        run.recipe.optimizer,
        run.placement.zero,
    )
    assert states is not None
    average = overheads.average(run, network)  # stored where the parameters are
    average_on_host = average if spec.offload_parameters else 0
    need = MemoryEstimate(
        run.placement.strategy,
        states,
        buckets=overheads.buckets(run, network),
        activations=line and line.at(run.micro_batch),
        update=overheads.update(run, network),
        average=average - average_on_host,
        host_buffers=overheads.host_buffers(run, network) + average_on_host,
        activation_offload=run.placement.activation_offload,
        built_on_host=overheads.built_on_host(run, network),
        sent_bytes=overheads.sent_bytes(run, network),
        refused=refused,
    )
    return replace(need, fits=not need.lacking(room), most_images=line and _most_images(need, line, room))


def _activations(run: Run, lines: dict[str, LinearFit]) -> LinearFit:
    """Returns the activations of a run by images, counted once for each compute format."""
    from cifar_zero.planning.activations import format_of, measure

    computes = format_of(run.spec, run.placement.precision)
    if computes not in lines:
        lines[computes] = measure(run, computes)
    return lines[computes]


def _most_images(need: MemoryEstimate, line: LinearFit, room: MemoryBudget) -> int:
    sizes = range(10**7)  # the limit of the search
    first = bisect_left(sizes, True, key=lambda images: bool(replace(need, activations=line.at(images)).lacking(room)))
    return max(0, first - 1)


def recommended(needs: Sequence[MemoryEstimate], room: MemoryBudget) -> tuple[MemoryEstimate | None, str]:
    """Returns what RULE recommends of needs in the order of PLANNED, and its figures; or None, and what is missing.
    Raises UsageError if `train` would refuse every strategy; the message is the one for the simplest strategy."""
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


def without_auto(settings: Settings) -> Settings:
    """Returns the settings with the strategy that replaces auto, and prints which one and why. Raises UsageError if no
    strategy fits, or a launcher started the ranks, so that each would choose; to those of our own launcher `train`
    names the choice."""
    if settings.placement.strategy != AUTO:
        return settings
    if rank_environment.is_rank():
        raise UsageError(
            "--strategy auto cannot be used with torchrun, srun or DeepSpeed's launcher, whose ranks would each "
            "choose: name the strategy that cifar-zero plan recommends"
        )
    say("--strategy auto: predicts the memory that each strategy needs on this machine")
    run = make_run(resolve_devices(settings.changed(strategy=Placement.strategy)))
    rules.check_model(run)
    room = available(run)
    choice, reason = recommended(survey(run, network_of(run), room, {}), room)
    if choice is None:
        raise UsageError(f"--strategy auto: {reason}; or choose a strategy to try it anyway")
    say(f"--strategy auto: {reason}")
    return settings.changed(strategy=choice.strategy)
