"""The typed configuration of a run. Plain Python: `--help` and usage errors need neither torch nor Lightning.

The docstring under each field is its text in `--help`, so it names the unit, the scope and what the default means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cifar_zero.core.errors import UsageError

SourceName = Literal["auto", "cifar10", "cifar100", "folder", "digits", "synthetic"]
Precision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "auto"]
LoggerName = Literal["tensorboard", "wandb", "none"]
Padding = Literal["black", "reflect"]
Views = Literal["none", "mirror", "mirror_translate"]


@dataclass(frozen=True)
class DeviceConfig:
    """where the run goes"""

    strategy: str = "baseline"
    """How the run is spread over devices and what of it is sharded or offloaded (names below). auto: the one
    that plan.py recommends for this machine; a resumed run keeps its own."""

    devices: int | Literal["auto"] = 1
    """Ranks on this machine: GPUs, or processes on the CPU. auto: every GPU, or one CPU process."""

    num_nodes: int = 1
    """Machines; more than one is started by torchrun, DeepSpeed's launcher or SLURM on each of them."""

    timeout: float = 600.0
    """Seconds that a rank waits for the others in a collective before it ends with an error: more than one of them may
    be busy by itself with compiling or writing a checkpoint. Until the images are there it waits for 30 minutes at
    least, for torchrun's ranks to meet for 5."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to train; auto: the GPU where there is one."""

    precision: Precision = "32-true"
    """Number format. *-mixed under DeepSpeed and fsdp2: a network cast to that type with float32 master weights;
    elsewhere: autocast. auto: 16-mixed where there is a GPU, else 32-true."""

    ds_config: str = ""
    """Raw DeepSpeed configuration (a JSON file) instead of a strategy; batch size, accumulation, clipping, precision
    and learning rate stay those of this command."""

    nvme_path: str = ""
    """Directory on a local NVMe disk, for deepspeed_stage_3_offload_nvme."""

    activation_checkpointing: bool = False
    """Of each block of the network keep the input alone in the forward pass, and compute its activations a second time
    in the backward pass: less memory, about a third more computing, the same result."""

    activation_offload: bool = False
    """Keep what the forward pass saves for the backward pass in the CPU's memory (pinned) instead of the GPU's; with
    --activation_checkpointing the inputs of the blocks alone."""

    compile: bool = False
    """Compile the network with torch.compile."""

    channels_last: bool = False
    """On a GPU too lay the images and the filters with channels last in memory, for convolutions in half precision."""

    fast_loop: bool = True
    """Train in this project's loop, which does less work per batch; false: in Lightning's, with the same results."""

    cuda_graphs: bool = False
    """Compile the network and replay its forward and backward as CUDA graphs, one launch each: for small networks,
    whose kernels end before the next one is launched."""


@dataclass(frozen=True)
class TrainingConfig:
    """what is trained and for how long"""

    epochs: int = 2
    """Passes over the training images."""

    max_steps: int = -1
    """Stop after this many optimizer steps, where that comes before the last epoch; -1: no limit."""

    batch_size: int = 4
    """Images per optimizer step, over all ranks and accumulated micro-batches (DeepSpeed's train_batch_size). The
    micro-batch of a rank follows: batch_size / (ranks x accumulate), where ranks that hold one network together
    (tensor_parallel, pipeline) count as one."""

    accumulate: int = 1
    """Micro-batches whose gradients are added up before an optimizer step."""

    gradient_clip_val: float = 0.0
    """Largest global L2 norm of the gradient; 0: no clipping."""

    seed: int = 0
    """Seed of the initial weights, the data order, the augmentation and the validation split."""

    init: Literal["default", "xavier", "he"] = "default"
    """Initial weights of convolutions and linear layers, whose biases become 0. xavier: uniform, for tanh and sigmoid
    (Glorot and Bengio 2010). he: normal, for ReLU (He et al. 2015). default: as torch's layers draw them."""

    resume: str = ""
    """Continue from a checkpoint: its path, a run's directory, last (the newest run of this name), or auto (last where
    there is a checkpoint of this name, else from the start). Another strategy and number of ranks may go on with it."""

    save_every_n_steps: int = 0
    """Write a checkpoint every so many optimizer steps as well; 0: at the end of each epoch only."""

    save_every_minutes: float = 0.0
    """Renew last.ckpt every so many minutes as well; 0: at the end of each epoch only."""

    save_weights: bool = False
    """Write the network's float32 weights beside each checkpoint, as one safetensors file that needs no DeepSpeed."""

    on_nan: Literal["stop", "skip"] = "stop"
    """A loss that is no number or infinite. stop: end the run and say where it came from. skip: leave the micro-batch
    out, which costs a wait for the device in each step."""

    bench_steps: int = 0
    """Measure: stop after this many timed steps (a warm-up goes before), print the figures, skip the test; 0: train."""

    find_lr: bool = False
    """Try learning rates out: 200 steps (or --max_steps) with ever larger ones in place of the schedule, from 1e-6 to 1
    (--schedule range_test has others); print a suggestion, draw the losses in lr_find.png in the run folder, end."""


@dataclass(frozen=True)
class RegularizationConfig:
    """against overfitting: nothing by default"""

    label_smoothing: float = 0.0
    """Share of each training label that is spread evenly over all classes, from 0 to under 1; 0: none. The loss of an
    evaluation is of the labels as they are."""

    early_stopping: int = 0
    """End the training after this many validations in a row (one an epoch) without a better val/acc; 0: never."""

    ema: float = 0.0
    """Decay of an exponential moving average of the weights, over about 1 / (1 - decay) optimizer steps: 0.999 for a
    thousand. Validation, test, the best checkpoint and exports use the average. 0: none."""

    swa_from: float = 0.0
    """Stochastic weight averaging: share of the training, from 0 to under 1, after which the weights at the end of each
    epoch, and of the training, are averaged equally. Used as that of --ema, from its first epoch on. 0: none."""

    tta: Views = "none"
    """Test-time augmentation: average the scores of several views of each image in the test, not in validation. mirror:
    of the image and its mirror image. mirror_translate: 6 views, these also moved by a pixel up and left, and down and
    right, the unmoved ones counting half."""


@dataclass(frozen=True)
class FineTuneConfig:
    """where the weights come from and which of them are trained"""

    weights: str = ""
    """Start from weights that are there: a run's directory, a checkpoint of any strategy, a safetensors file, or a
    state_dict of torch. What differs in name or shape is initialised, and listed. Optimizer and steps begin anew."""

    delta: str = ""
    """Lay what another run has trained over --weights: a file that export.py --to delta wrote."""

    trainable: list[str] = field(default_factory=list)
    """Names of the parameters that are trained, one or more, with * and ? as for files ('blocks.11.*' 'head.*'); the
    others are frozen. Empty: all of them; with LoRA the adapters alone."""


@dataclass(frozen=True)
class LoRAConfig:
    """LoRA: in place of a layer's weights, a product of two small matrices beside them is trained (Hu et al. 2022)"""

    rank: int = 0
    """Width between the two matrices of an adapter; 0: no adapters."""

    alpha: float = 16.0
    """What an adapter adds is multiplied by alpha / rank."""

    target: list[str] = field(default_factory=list)
    """Names of the linear layers that get an adapter, one or more, with * and ? ('blocks.*.attention.qkv')."""

    dropout: float = 0.0
    """Share of an adapter's inputs that is set to 0 in training."""


@dataclass(frozen=True)
class ZeROConfig:
    """DeepSpeed's switches for ZeRO 3, by the names of its configuration"""

    sub_group_size: int = 1_000_000_000
    """Elements that the optimizer updates at a time; a smaller number gives the update that overlaps with the backward
    pass (SuperOffload) and the share of --offload.ratio a finer grain."""

    hpz_partition_size: int = 1
    """ZeRO++: each so many ranks keep a second copy of the parameters among them, from which the backward pass gathers;
    the GPUs of a machine, for less traffic between machines (Wang et al. 2023, arXiv 2306.10209). 1: no copy."""

    quantized_weights: bool = False
    """ZeRO++: gather parameters as 8-bit integers. CUDA, two ranks or more; it changes the maths."""

    quantized_gradients: bool = False
    """ZeRO++: reduce gradients as 4-bit integers. CUDA, two machines or more; it changes the maths."""


@dataclass(frozen=True)
class OffloadConfig:
    """how the strategies that offload to the CPU do it, by the names of DeepSpeed's configuration"""

    ratio: float = 1.0
    """Share of the optimizer that is on the CPU, the rest staying on the GPU (Twin-Flow of ZeRO-Offload++), in whole
    sub-groups of --zero.sub_group_size; for ZeRO 3, AdamW and a constant learning rate."""

    pin_memory: bool = False
    """Keep what is offloaded in page-locked memory, to and from which a GPU copies faster, and beside computing."""

    cpuadam_cores_perc: float = 0.8
    """Share of the process's cores, over 0 to 1, on which SuperOffload's optimizer runs, in a process of its own."""


@dataclass(frozen=True)
class OutputConfig:
    """what is left behind"""

    out: str = "runs"
    """Directory under which runs are kept."""

    name: str = ""
    """Name of the run, kept in <out>/<name>/version_N; empty: <model>-<strategy>."""

    logger: list[LoggerName] = field(default_factory=lambda: ["tensorboard"])
    """Where the curves go, one or more: tensorboard, wandb; none: nowhere."""

    hparams: list[str] = field(default_factory=list)
    """More options of this run for TensorBoard's HPARAMS table, one or more, beside those that it always has
    (optimizer.momentum model.width)."""

    log_interval: int = 100
    """Optimizer steps between two points of the training curves."""

    plot_schedule: str = ""
    """Draw the learning rate over the run's steps into this PNG file, and end; without a value: schedule.png."""

    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class DataConfig:
    """the images"""

    source: SourceName = "auto"
    """auto: CIFAR-10 where it is on disk, else downloaded, else the embedded digits (said loudly); a named source never
    falls back. folder: <root>/train/<class>/*.png|jpg and <root>/test/<class>/*. digits: real handwritten digits in
    CIFAR-10's shape. synthetic: random images, for measuring."""

    root: str = "data"
    """Directory of the dataset: downloads go there, a folder source is read there."""

    cache: str = ""
    """Directory for the decoded images, shared by all ranks and runs; empty: <root>/.cifar-zero."""

    loader: Literal["memory", "torch"] = "memory"
    """memory: whole batches cut from uint8 images in shared memory. torch: the tutorial's torchvision transforms and
    DataLoader. Both give the same images in the same order."""

    workers: int = 2
    """Worker processes of the torch loader, per rank."""

    val_fraction: float = 0.1
    """Share of the training images held out for validation (seeded, stratified by class); 0 trains on all of them."""

    url: str = ""
    """Mirror to download the CIFAR archive from; empty: the address that torchvision publishes."""

    md5: str = ""
    """MD5 of the archive at --data.url, if it was packed anew (the files in it must be the published ones); empty: the
    sum that torchvision publishes."""

    synthetic_size: int = 50_000
    """Training images of the synthetic source."""


@dataclass(frozen=True)
class AugmentConfig:
    """augmentation of the training images: nothing by default, the same under every strategy and number of ranks"""

    flip: Literal["none", "random", "alternating"] = "none"
    """Mirror images left to right. random: each with probability 1/2, anew in every epoch. alternating: a random half
    of them in even epochs, the other half in odd ones. none: never."""

    crop: int = 0
    """Pixels put around each side of an image, out of which its size is cut at random; 0: no cropping."""

    padding: Padding = "black"
    """What the pixels of crop are: black, or the image mirrored at its edges (reflect)."""

    cutout: int = 0
    """Side in pixels of a square anywhere in the image that is blanked out (mean grey); 0: none."""

    mixup: float = 0.0
    """Blend each image and its label with those of another image, whose share is drawn from Beta(ALPHA, ALPHA); 0: no
    blending. With cutmix as well, each image gets one of the two, with probability 1/2."""

    cutmix: float = 0.0
    """Paste a rectangle of another image into each image: its share of the area is drawn from Beta(ALPHA, ALPHA), what
    sticks out is cut off, and the labels are shared as the pixels are; 0: no pasting."""

    brightness: float = 0.0
    """Add a number from -BRIGHTNESS to BRIGHTNESS to all pixels of an image, which lie between -1 and 1; 0: none."""

    contrast: float = 0.0
    """Multiply all pixels of an image, 0 being grey, by a number from 1 - CONTRAST to 1 + CONTRAST; 0: none."""

    low_resolution: int = 0
    """Side in pixels to which the images of the first epochs are scaled down, for a network that takes any size; 0:
    none. FLOPs are counted as if they were whole."""

    low_epochs: int = 0
    """Number of these epochs."""


@dataclass(frozen=True)
class Choice:
    """A name from a registry (models, optimizers, schedules) with its options, all of them filled in."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Config(DeviceConfig, TrainingConfig, RegularizationConfig, FineTuneConfig, OutputConfig):
    """Everything that a run depends on. The defaults are the PyTorch tutorial's recipe with a validation split."""

    lora: LoRAConfig = field(default_factory=LoRAConfig)
    zero: ZeROConfig = field(default_factory=ZeROConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: Choice = field(default_factory=lambda: Choice("net"))
    optimizer: Choice = field(default_factory=lambda: Choice("sgd"))
    schedule: Choice = field(default_factory=lambda: Choice("constant"))
    trainer: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks over all nodes, once devices is a number."""
        assert self.devices != "auto"
        return self.devices * self.num_nodes

    @property
    def only_measures(self) -> bool:
        """Whether the run ends after a few steps, without a checkpoint and a test."""
        return bool(self.bench_steps or self.find_lr)

    @property
    def strategy_name(self) -> str:
        """The strategy, or the name of the raw DeepSpeed configuration that stands in for it."""
        return Path(self.ds_config).stem if self.ds_config else self.strategy

    @property
    def run_name(self) -> str:
        """The run's name, made from the network and the strategy where none is given."""
        network = self.model.name.replace(":", "-")  # torchvision:resnet50 is no name for a folder everywhere
        return self.name or f"{network}-{self.strategy_name}"


def config_of(tree: dict[str, Any]) -> Config:
    """The configuration that `dataclasses.asdict` made this of.

    Raises:
        TypeError: it has fields that are not known here, of another version of the program.
        UsageError: it asks for `trust`.
    """
    check_no_consent(tree, "the checkpoint's configuration")
    sections: dict[str, type] = {"lora": LoRAConfig, "data": DataConfig, "augment": AugmentConfig}
    sections |= {"zero": ZeROConfig, "offload": OffloadConfig}
    sections |= dict.fromkeys(("model", "optimizer", "schedule"), Choice)
    return Config(**{key: sections[key](**value) if key in sections else value for key, value in tree.items()})


def check_no_consent(tree: dict[str, Any], source: str) -> None:
    """Refuses `trust` in a recipe or a record: a file must not consent to loading code, its author's for example.

    Args:
        tree: the options.
        source: where they were read, for the message.

    Raises:
        UsageError: `trust` is among them, whatever its value.
    """
    if "trust" in tree:
        raise UsageError(f"{source} sets trust, which only the command line may: take it out and add --trust")
