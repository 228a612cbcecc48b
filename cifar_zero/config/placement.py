"""The placement: where and how a run is trained. These options change only the rounding of what it computes, so
precision is one of them. Dropout, batch norms and experts also depend on how they split a batch. The docstring under
each field is its `--help` text; numbers are at least 0 unless `limited` sets other limits."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import limited

Precision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "auto"]


@dataclass(frozen=True)
class ZeROConfig:
    """ZeRO 1 to 3, under the names of DeepSpeed's configuration without the prefix stage3_"""

    overlap_comm: bool = False
    """Reduce gradients during the backward pass, on a separate CUDA stream; ZeRO 3 also gathers parameters this way.
    This option has a history of wrong losses (DeepSpeed issues 4298, 5347, 8061): check it with cifar-zero compare."""

    reduce_bucket_size: int = limited(50_000_000, at_least=1)
    """Gradient bucket size in elements, rounded up to an even number and clamped to the model size. Smaller: less
    memory, more messages."""

    round_robin_gradients: bool = False
    """ZeRO 1 and 2: assign parameters to ranks round-robin, so that all ranks offload gradients at the same time."""

    prefetch_bucket_size: int = 50_000_000
    """ZeRO 3, like all options below: parameter elements that are gathered ahead of their use. 0: none."""

    max_live_parameters: int = 1_000_000_000
    """Gathered parameter elements on a device beyond which no parameters are gathered ahead of their use."""

    sub_group_size: int = limited(1_000_000_000, at_least=1)
    """Elements that the optimizer updates at a time. Smaller sub-groups let SuperOffload overlap its updates with the
    backward pass at a finer grain."""

    param_persistence_threshold: int = 100_000
    """Size in elements up to which every rank keeps a full parameter. 0: no parameters, for less memory and more
    messages."""


@dataclass(frozen=True)
class OffloadConfig:
    """offload to the CPU, under the names of DeepSpeed's configuration"""

    pin_memory: bool = False
    """Keep offloaded tensors in pinned (page-locked) CPU memory, which makes copies faster and lets them overlap with
    computation."""

    cpuadam_cores_perc: float = limited(0.8, over=0, at_most=1)
    """Share of the process's CPU cores, above 0 and at most 1, on which SuperOffload runs its optimizer in a separate
    process."""


@dataclass(frozen=True)
class StrategyOptions:
    """strategy: a run resumed under another strategy does not keep these options"""

    strategy: str = "baseline"
    """How the run is spread over devices, and what is sharded or offloaded (names below). auto: the strategy that
    cifar-zero plan recommends for this machine; a resumed run keeps its strategy."""

    ds_config: str = ""
    """Your own DeepSpeed configuration (JSON file) instead of a strategy. Its batch, clipping, precision, optimizer and
    schedule become flags; "auto" leaves them to the flags."""

    nvme_path: str = ""
    """Directory on a local NVMe disk; required by deepspeed_stage_3_offload_nvme."""

    tensor_parallel_size: int = 0
    """Tensor parallelism (tensor_parallel, fsdp2): number of ranks over which each layer of a vit_* model is split. A
    group of these ranks computes the same images, and each group computes other images; fsdp2 also shards the model
    over the groups. 0: all ranks under tensor_parallel, 1 under fsdp2."""

    pipeline_parallel_size: int = 0
    """Pipeline parallelism (pipeline): number of ranks over which the blocks of a vit_* model are divided. A group of
    these ranks computes the same images, and each group computes other images. 0: all ranks."""

    zero: ZeROConfig = field(default_factory=ZeROConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class DeviceOptions:
    """devices and precision"""

    devices: int | Literal["auto"] = limited("auto", at_least=1)
    """Ranks per node: one per GPU, or processes on the CPU. auto: the largest number of GPUs that divides the batch
    into micro-batches of 32 images or more. Without a GPU, two CPU ranks if the strategy shards or splits the model,
    and one otherwise. Under torchrun and SLURM, it is the number of ranks that they start."""

    num_nodes: int = limited(1, at_least=1)
    """Number of nodes. For more than one, start the run on each node with torchrun, DeepSpeed's launcher or SLURM."""

    timeout: float = limited(600.0, over=0, at_most=7 * 24 * 3600)  # Python and torch cannot represent much more
    """Time limit of a collective, in seconds; when it expires, the waiting ranks end with an error. It must allow for a
    rank that compiles or writes a checkpoint while the others wait. Before training, other limits apply: at least 30
    minutes for data preparation, and until all ranks of one node or of torchrun have started TIMEOUT, but 1 to 5
    minutes."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Device type. auto: the GPU if there is one, otherwise the CPU."""

    accumulate: int = limited(1, at_least=1)
    """Micro-batches per optimizer step, whose gradients are accumulated."""

    precision: Precision = "32-true"
    """Number format. *-mixed: DeepSpeed and fsdp2 cast the model to 16 bits and keep float32 master weights; the other
    strategies use autocast. auto: on a GPU bf16-mixed, or 16-mixed if it has no bfloat16; 32-true on the CPU."""


@dataclass(frozen=True)
class ComputeOptions:
    """computation of this program's models; a user's own module decides this itself"""

    activation_checkpointing: bool = False
    """Discard each block's activations and recompute them in the backward pass: less memory, but a quarter to a third
    more computation."""

    activation_offload: bool = False
    """Store the tensors that the forward pass saves for the backward pass in pinned CPU memory instead of GPU memory.
    With --activation_checkpointing, these are only the inputs of the blocks."""

    compile: bool = False
    """Compile the model with torch.compile."""

    fast_loop: bool = True
    """Train with this project's loop, which has less overhead per batch. false: Lightning's own loop, with the same
    results."""

    cuda_graphs: bool = False
    """Compile the model and replay its forward and backward passes as one CUDA graph each. Speeds up small models,
    whose kernels finish before the CPU can launch the next one."""


@dataclass(frozen=True)
class Placement(ComputeOptions, DeviceOptions, StrategyOptions):
    """The options that decide where and how a run is trained."""

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes. `devices` must be a number, not auto."""
        assert self.devices != "auto"
        return self.devices * self.num_nodes

    @property
    def ranks_per_model(self) -> int:
        """Number of ranks that together hold one copy of the model and compute the same images."""
        spec = STRATEGIES[self.strategy]  # with a raw DeepSpeed configuration the default, baseline
        if spec.size and getattr(self, spec.size):
            return getattr(self, spec.size)
        if spec.one_replica:
            return self.world_size
        return 1

    @property
    def replicas(self) -> int:
        """Number of copies of the model that train on different images. Raises UsageError if the ranks cannot be
        divided into such replicas."""
        replicas, left = divmod(self.world_size, self.ranks_per_model)
        if left:
            given = f"--{STRATEGIES[self.strategy].size} {self.ranks_per_model}"
            raise UsageError(f"{given} must divide the {self.world_size} ranks of --devices")
        return replicas

    @property
    def strategy_name(self) -> str:
        """The strategy, or the file name of the raw DeepSpeed configuration that replaces it, without .json."""
        if self.ds_config:
            return Path(self.ds_config).stem
        return self.strategy
