"""Adds up the memory that a rank needs under each strategy, compares it with the available memory, and recommends a
strategy, both for `cifar-zero plan` and for `--strategy auto`."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cifar_zero.config import rules, strategy_rules
from cifar_zero.config.placement import Placement
from cifar_zero.config.rules import CPU_RANK_BYTES
from cifar_zero.config.run import Run
from cifar_zero.config.settings import Settings
from cifar_zero.config.strategy_specs import AUTO, STRATEGIES
from cifar_zero.core.console import say
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import free_memory_bytes, gpu_memory_bytes
from cifar_zero.launch import rank_environment
from cifar_zero.planning import formulas
from cifar_zero.planning.formulas import Network, Prediction, network_of, predicted
from cifar_zero.training.resolve import make_run, resolve_devices

if TYPE_CHECKING:
    from cifar_zero.planning.activations import LinearFit

PLANNED = sorted(
    (name for name, spec in STRATEGIES.items() if not spec.one_replica and name != "fsdp"),  # fsdp is fsdp2
    key=lambda name: ("", "cpu", "nvme").index(STRATEGIES[name].offload_optimizer),
)
"""The strategies with a formula, in the order of recommendation: without offload, with offload to the host, with
offload to a disk. Within each group, the strategy that shards least comes first."""

RULE = "the first row that fits; rows that keep states in the host's memory or on a disk come last, as they are slower"

UNITS = {"": 10**9, "mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 2**20, "gib": 2**30, "tib": 2**40}

USABLE = 0.9
"""Share of a device's memory that a plan uses. The rest is for the CUDA context, the workspaces of cuBLAS and NCCL, and
fragmentation. vLLM's gpu_memory_utilization has the same default (vLLM 0.11, vllm/config/cache.py)."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes available to a rank."""

    device: int
    host: int | None  # None if it is unknown and not checked
    shared: bool = False  # whether the device is the CPU, so that offloaded tensors stay in the same memory
    elsewhere: bool = False
    """Whether the plan is for another machine. Then it is not checked whether this machine has a compiler and
    --nvme_path."""


def available(settings: Settings, device_memory: str | None = None, host_memory: str | None = None) -> MemoryBudget:
    """Returns the memory that is available to a rank. On a GPU, it is the GPU's memory times USABLE. The host memory of
    a rank is the node's memory divided by the number of its ranks, minus CPU_RANK_BYTES. A rank on the CPU has its host
    memory or, if `device_memory` is given, this minus CPU_RANK_BYTES. Raises UsageError if a text is not a size.

    Args:
        device_memory: Memory of one device (--device_memory). The default is what this machine has.
        host_memory: Memory of a node (--host_memory). The default is the memory that is free on this machine, or
            unknown if `device_memory` is given.
    """
    assert settings.placement.devices != "auto"
    on_cpu = settings.placement.accelerator == "cpu"
    host = None
    if host_memory is not None:
        host = size_in_bytes(host_memory, "--host_memory")
    elif device_memory is None:
        host = free_memory_bytes()
    if host is not None:
        host = max(0, host // settings.placement.devices - CPU_RANK_BYTES)
    if device_memory is not None:
        size = size_in_bytes(device_memory, "--device_memory")
        usable = max(0, size - CPU_RANK_BYTES) if on_cpu else round(USABLE * size)
        return MemoryBudget(usable, host, shared=on_cpu, elsewhere=True)
    if on_cpu:
        assert host is not None
        return MemoryBudget(host, host, shared=True)
    return MemoryBudget(round(USABLE * min(gpu_memory_bytes()[: settings.placement.devices])), host)


def size_in_bytes(text: str, flag: str) -> int:
    """Returns the bytes of a size such as `80GB` (80 x 10^9), `24GiB` (24 x 2^30) or `512MiB`. A number without a unit,
    such as `80`, is in GB. Raises UsageError if the text is not a size."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", text.lower())
    if not match or match[2] not in UNITS:
        raise UsageError(f"{flag} {text}: give a size such as 80GB (10^9 bytes), 24GiB (2^30) or 80, which is 80GB")
    return round(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of the rank with the most bytes under one strategy, in bytes."""

    strategy: str
    states: Prediction
    buckets: int  # communication buckets and temporarily gathered parameters
    activations: int  # activations of the run's micro-batch; 0 if `train` would refuse the strategy
    update: int  # temporary tensors in the update, after activations and buckets are freed
    average: int  # the average of the weights (--ema) on the device
    host_buffers: int  # buffers of offloading on the host, and the average of weights that are stored there
    activation_offload: bool
    """Whether the host holds the activations too. The device is still planned for all activations, because temporary
    ones stay on it."""
    built_on_host: int  # the model on the host while it is built
    refused: str = ""  # why `train` would refuse the strategy; empty if it would accept it
    fits: bool = False
    most_images: int = 0  # the largest micro-batch that fits

    @property
    def device(self) -> int:
        """The peak of the memory on the device, either in the backward pass or in the optimizer's update. Activations
        and buckets are freed before the update."""
        return self.states.device.total + self.average + max(self.buckets + self.activations, self.update)

    @property
    def _host_in_training(self) -> int:
        return self.states.host.total + self.host_buffers + self.activations * self.activation_offload

    @property
    def host(self) -> int:
        """The rank's peak host memory, without the memory of the bare process, which `available` subtracts as
        CPU_RANK_BYTES."""
        return max(self.built_on_host, self._host_in_training)

    def bytes_to_compare(self, budget: MemoryBudget) -> int:
        """Returns the bytes to compare with `budget.device`, with those on the host if device and host share one
        memory."""
        if budget.shared:
            return max(self.built_on_host, self.device + self._host_in_training)
        return self.device

    def shortages(self, budget: MemoryBudget) -> dict[str, tuple[int, int]]:
        """Returns the needed and the available bytes of each memory that is too small. The keys are `device` and
        `host`."""
        shortages: dict[str, tuple[int, int]] = {}
        if self.bytes_to_compare(budget) > budget.device:
            shortages["device"] = (self.bytes_to_compare(budget), budget.device)
        if not budget.shared and budget.host is not None and self.host > budget.host:
            shortages["host"] = (self.host, budget.host)
        return shortages


def estimate_all(
    run: Run, network: Network, budget: MemoryBudget, fits_by_format: dict[str, LinearFit]
) -> list[MemoryEstimate]:
    """Returns the memory that a run needs under each strategy of PLANNED, in this order, whatever strategy the run
    names. `fits_by_format` maps a compute format to the run's activations. Missing formats are added to it. Raises
    UsageError if the batch size cannot be divided, if a model is split over ranks (--tensor_parallel_size,
    --pipeline_parallel_size), or if activation checkpointing finds no blocks."""
    if run.placement.tensor_parallel_size or run.placement.pipeline_parallel_size:
        raise UsageError("--tensor_parallel_size and --pipeline_parallel_size cannot be planned: leave them out")
    return [_estimate(run.changed(strategy=name, ds_config=""), network, budget, fits_by_format) for name in PLANNED]


def _estimate(run: Run, network: Network, budget: MemoryBudget, fits_by_format: dict[str, LinearFit]) -> MemoryEstimate:
    placement = run.placement
    average, average_on_host = formulas.average(run, network), 0
    if run.spec.offload_parameters:  # the average is stored where the parameters are
        average, average_on_host = 0, average
    estimate = MemoryEstimate(
        placement.strategy,
        predicted(run, network),
        buckets=formulas.buckets(run, network),
        activations=0,
        update=formulas.update(run, network),
        average=average,
        host_buffers=formulas.host_buffers(run, network) + average_on_host,
        activation_offload=placement.activation_offload,
        built_on_host=formulas.built_on_host(run, network),
    )
    try:
        strategy_rules.check_strategy(run)
        if not budget.elsewhere:
            rules.check_here(run)
    except UsageError as error:
        return replace(estimate, refused=str(error))
    activation_fit = _activations(run, fits_by_format)
    estimate = replace(estimate, activations=activation_fit.at(run.micro_batch))
    return replace(
        estimate, fits=not estimate.shortages(budget), most_images=_most_images(estimate, activation_fit, budget)
    )


def _activations(run: Run, fits_by_format: dict[str, LinearFit]) -> LinearFit:
    from cifar_zero.planning.activations import format_of, measure

    computes = format_of(run.spec, run.placement.precision)
    if computes not in fits_by_format:
        fits_by_format[computes] = measure(run, computes)
    return fits_by_format[computes]


def _most_images(estimate: MemoryEstimate, activation_fit: LinearFit, budget: MemoryBudget) -> int:
    def is_too_large(images: int) -> bool:
        return bool(replace(estimate, activations=activation_fit.at(images)).shortages(budget))

    first = bisect_left(range(10**7), True, key=is_too_large)  # at most ten million images
    return max(0, first - 1)


def recommended(estimates: Sequence[MemoryEstimate], budget: MemoryBudget) -> tuple[MemoryEstimate | None, str]:
    """Returns the estimate of the strategy that RULE recommends, and a sentence with its figures. SuperOffload is never
    recommended. If no other strategy fits, returns None and a sentence that says what is missing. `estimates` are in
    the order of PLANNED. Raises UsageError if `train` would refuse every strategy, with the reason for the first."""
    accepted = [estimate for estimate in estimates if not estimate.refused]
    if not accepted:
        raise UsageError(estimates[0].refused)
    for estimate in accepted:
        # SuperOffload is for the fast links of a GH200, which cannot be detected, so only the user can choose it.
        if estimate.fits and not STRATEGIES[estimate.strategy].super_offload:
            size, available_size = map(gigabytes, (estimate.bytes_to_compare(budget), budget.device))
            return estimate, f"{estimate.strategy} needs {size} of the {available_size} GB available to a rank"
    for_device = [estimate for estimate in accepted if "device" not in estimate.shortages(budget)]
    least = min(for_device or accepted, key=lambda estimate: estimate.device)
    missing: list[str] = []
    for memory, (size, most) in least.shortages(budget).items():
        missing.append(f"{gigabytes(size)} GB of {memory} memory, of which {gigabytes(most)} GB are available")
    return None, (
        f"no strategy fits: {least.strategy}, which needs the least device memory, needs {' and '.join(missing)}; use "
        "more devices, a smaller --batch_size, a larger --accumulate or --activation_checkpointing"
    )


def gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f}"


def without_auto(settings: Settings) -> Settings:
    """Returns the settings with the recommended strategy, and prints it and the reason, if their strategy is auto.
    Otherwise returns them unchanged. Raises UsageError if no strategy fits, or if `train` would refuse every strategy.
    Also if torchrun, srun or DeepSpeed's launcher started this process, because the choices of the ranks could
    differ."""
    if settings.placement.strategy != AUTO:
        return settings
    if rank_environment.is_rank():
        raise UsageError(
            "--strategy auto cannot be used with torchrun, srun or DeepSpeed's launcher, because each rank "
            "would choose separately: name the strategy that cifar-zero plan recommends"
        )
    say("--strategy auto: predicts the memory that each strategy needs on this machine")
    run = make_run(resolve_devices(settings.changed(strategy=Placement.strategy), PLANNED))
    rules.check_model(run)
    budget = available(run)
    choice, reason = recommended(estimate_all(run, network_of(run), budget, {}), budget)
    if choice is None:
        raise UsageError(f"--strategy auto: {reason}; or choose a strategy to try it anyway")
    say(f"--strategy auto: {reason}")
    return settings.changed(strategy=choice.strategy, devices=run.placement.devices)
