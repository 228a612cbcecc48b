"""The typed configuration of a run. Plain Python: `--help` and usage errors need neither torch nor Lightning.

The docstring under each field is its text in `--help`, so it names the unit, the scope and what the default means.
Numbers are at least 0 if `limited` says nothing else.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from cifar_zero.config.inputs import Inputs, inputs
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import limited

SourceName = Literal["auto", "cifar10", "cifar100", "folder", "digits", "synthetic"]
Precision = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "auto"]
LossName = Literal["cross_entropy", "mse", "bce"]
Monitor = Literal[
    "val/acc",
    "val/loss",
    "val/precision",
    "val/recall",
    "val/f1",
    "val/precision_weighted",
    "val/f1_weighted",
    "val/calibration_error",
]
LoggerName = Literal["tensorboard", "csv", "wandb", "mlflow", "none"]
Padding = Literal["black", "reflect"]
Views = Literal["none", "mirror", "mirror_translate", "uncertain"]


@dataclass(frozen=True)
class DeviceConfig:
    """devices, strategy and precision"""

    strategy: str = "baseline"
    """How the run is spread over devices, and what is sharded or offloaded (names below). auto: the strategy that
    plan.py recommends for this machine; a resumed run keeps its own."""

    devices: int | Literal["auto"] = limited("auto", at_least=1)
    """Ranks per node: one per GPU, or processes on the CPU. auto: the largest number of GPUs that divides the batch
    into micro-batches of 32 images or more, or one CPU process. torchrun and SLURM set it by the ranks that they
    start."""

    num_nodes: int = limited(1, at_least=1)
    """Number of nodes. For more than one, start the run on each node with torchrun, DeepSpeed's launcher or SLURM."""

    tensor_parallel_size: int = 0
    """Ranks that split each layer of a vit_* and compute the same images, for tensor_parallel and fsdp2. The others
    compute other images; fsdp2 shards over them too. 0: all ranks under tensor_parallel, 1 under fsdp2."""

    pipeline_parallel_size: int = 0
    """Ranks that divide the blocks of a vit_* and compute the same images, for pipeline; the others compute other
    images. 0: all ranks."""

    timeout: float = limited(600.0, over=0, at_most=7 * 24 * 3600)  # Python and torch cannot represent much more
    """Time limit of a collective, in seconds; when it expires, the waiting ranks end with an error. It must allow for a
    rank that compiles or writes a checkpoint while the others wait. Before training, other limits apply: at least 30
    minutes for data preparation, and 5 minutes for the rendezvous of torchrun's ranks."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Device type. auto: the GPU if there is one, otherwise the CPU."""

    precision: Precision = "32-true"
    """Number format. *-mixed: DeepSpeed and fsdp2 run a model cast to 16 bits, with float32 master weights; the other
    strategies use autocast. auto: on a GPU bf16-mixed, or 16-mixed if it has no bfloat16; 32-true on the CPU."""

    ds_config: str = ""
    """Your own DeepSpeed configuration (JSON file) instead of a strategy. Its batch, clipping, precision, optimizer and
    schedule become flags; "auto" leaves them to the flags."""

    nvme_path: str = ""
    """Directory on a local NVMe disk; required by deepspeed_stage_3_offload_nvme."""

    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass: less memory, a quarter to a third more computation."""

    activation_offload: bool = False
    """Store the tensors that the forward pass saves for the backward pass in pinned CPU memory instead of GPU memory.
    With --activation_checkpointing, only the inputs of the blocks."""

    compile: bool | Literal["step"] = False
    """Compile the model with torch.compile. step: the whole training step, from the images to the new weights, as one
    graph; faster for small models in small batches (baseline and ddp). With --cuda_graphs a GPU replays it."""

    channels_last: bool = False
    """Use the channels_last memory format on a GPU too; faster for convolutions in half precision."""

    fast_loop: bool = True
    """Train with this project's loop: less overhead per batch. false: Lightning's own loop, with the same results."""

    cuda_graphs: bool = False
    """Compile the model and replay its forward and backward passes as one CUDA graph each. Speeds up small models,
    whose kernels finish before the CPU can launch the next one."""


@dataclass(frozen=True)
class TrainingConfig:
    """training"""

    epochs: int = limited(2, at_least=1)
    """Number of passes over the training images."""

    max_steps: int = limited(-1, at_least=-1)
    """Maximum number of optimizer steps; training stops at whichever of this and --epochs comes first. -1: no limit."""

    batch_size: int = limited(4, at_least=1, at_most=2**31 - 1)  # far above a data set: sizes fit torch's int64
    """Global batch size: images per optimizer step, over all ranks and accumulated micro-batches (DeepSpeed's
    train_batch_size). The micro-batch of a rank is batch_size / (ranks x accumulate), where ranks that share one model
    (tensor_parallel, pipeline) count as one."""

    accumulate: int = limited(1, at_least=1)
    """Micro-batches per optimizer step whose gradients are accumulated."""

    gradient_clip_val: float = 0.0
    """Maximum global L2 norm of the gradient. 0: no clipping."""

    loss: LossName = "cross_entropy"
    """What training minimises, and train/loss, val/loss and test/loss show. mse: squared distance of the scores from 1
    for the class and 0 for the others. bce: binary cross-entropy, each class against the rest."""

    reduce_on_plateau: int = 0
    """Divide the learning rate by 10 after this many validations in a row (one per epoch) without a lower val/loss.
    Needs --schedule constant. 0: never."""

    seed: int = limited(0, at_most=2**32 - 1)
    """Seed of the initial weights, the data order, the augmentation and the validation split."""

    init: Literal["default", "xavier", "he"] = "default"
    """Initialisation of convolutions and linear layers. xavier: uniform, for tanh and sigmoid (Glorot and Bengio 2010).
    he: normal, for ReLU (He et al. 2015). Both set the biases to 0. default: torch's defaults."""

    resume: str = ""
    """Resume from a checkpoint: its path, a run folder, last (the newest run of this name), or auto (like last if this
    name has a checkpoint, otherwise from the start). All other options are that run's, as far as flags do not override
    them; strategy and number of ranks may differ."""

    save_every_n_steps: int = 0
    """Also update last.ckpt every N optimizer steps. 0: only at the end of each epoch."""

    save_every_minutes: float = 0.0
    """Also update last.ckpt every N minutes. 0: only at the end of each epoch."""

    monitor: Monitor = "val/acc"
    """Metric of the validations that decides which checkpoints are the best, and when --early_stopping stops; losses
    and errors are best when low, the others when high."""

    save_top_k: int = limited(1, at_least=-1)
    """How many of the best checkpoints to keep. -1: one of each validation. 0: none; last.ckpt is always kept."""

    save_weights: bool = False
    """Also save the float32 weights next to each checkpoint, as a safetensors file that needs no DeepSpeed to read."""

    on_nan: Literal["stop", "skip"] = "stop"
    """What to do if the loss is NaN or infinite. stop: end the run and report where it came from. skip: leave out the
    micro-batch, at the cost of one device synchronisation per step."""

    bench_steps: int = 0
    """Benchmark: run this many timed steps after a warm-up, print the figures and skip the test. 0: train normally."""

    warmup_steps: int = 20
    """Optimizer steps at the start that the figures of speed leave out, at most half of the run; --bench_steps runs
    them before the timed steps."""

    find_lr: bool = False
    """Learning rate range test: instead of the schedule, increase the learning rate from 1e-6 to 1 over 200 steps (or
    --max_steps), print a suggestion, plot the losses in lr_find.png in the run folder, and exit. --schedule range_test
    has options for the range."""


@dataclass(frozen=True)
class RegularizationConfig:
    """regularization (off by default)"""

    label_smoothing: float = limited(0.0, below=1)
    """Label smoothing: share of each training label that is spread evenly over all classes, from 0 to below 1. Not
    applied in validation and test. 0: off."""

    early_stopping: int = 0
    """Stop after this many validations in a row (one per epoch) without a better --monitor. 0: never."""

    ema: float = limited(0.0, below=1)
    """Decay of an exponential moving average of the weights; it averages over about 1 / (1 - decay) optimizer steps, so
    0.999 over a thousand. Validation, test, the best checkpoint and exports use the average. 0: off."""

    swa_from: float = limited(0.0, below=1)
    """Stochastic weight averaging: the point of training, from 0 to below 1 of its length, from which the weights at
    the end of each epoch (and of training) are averaged with equal weight. From its first epoch on, the average is used
    as with --ema. 0: off."""

    tta: Views = "none"
    """Test-time augmentation: average the scores of several views of each image in the test, but not in validation.
    mirror: the image and its mirror image. mirror_translate: 6 views: these two, and both shifted by one pixel up and
    left, and down and right; the unshifted views have half of the total weight. uncertain: the 6 views only for the
    quarter of each batch with the lowest confidence; an image's scores then depend on the others of its batch."""


@dataclass(frozen=True)
class FineTuneConfig:
    """fine-tuning"""

    weights: str = ""
    """Start from existing weights: a run folder, a checkpoint of any strategy, a safetensors file, or a torch state
    dict. Tensors with another name or shape are initialised and listed. Optimizer and step count start fresh."""

    delta: str = ""
    """Delta to apply on top of --weights: a file written by export.py --to delta."""

    trainable: list[str] = field(default_factory=list)
    """Names of the parameters to train, one or more, with the wildcards * and ? ('blocks.11.*' 'head.*'); all others
    are frozen. Empty: all parameters, or with LoRA only the adapters."""


@dataclass(frozen=True)
class LoRAConfig:
    """LoRA: instead of a layer's weights, train the product of two small matrices added to them (Hu et al. 2022)"""

    rank: int = 0
    """Rank of the adapters: the inner dimension of the two matrices. 0: no adapters."""

    alpha: float = 16.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""

    target: list[str] = field(default_factory=list)
    """Names of linear layers that get an adapter, one or more, with wildcards * and ? ('blocks.*.attention.qkv')."""

    dropout: float = limited(0.0, below=1)
    """Dropout probability on the input of each adapter, in training."""


@dataclass(frozen=True)
class ZeROConfig:
    """ZeRO 1 to 3, under the names of DeepSpeed's configuration"""

    overlap_comm: bool = False
    """Reduce gradients during the backward pass, on a CUDA stream of their own; stage 3 also gathers so. Has a history
    of wrong losses (DeepSpeed issues 4298, 5347, 8061): check with compare.py."""

    reduce_bucket_size: int = limited(50_000_000, at_least=1)
    """Elements of gradients reduced at a time; at most the model, and even. Smaller: less memory, more messages."""

    round_robin_gradients: bool = False
    """Stages 1 and 2: deal parameters out in turn, so that all ranks offload gradients at the same time."""

    prefetch_bucket_size: int = 50_000_000
    """Stage 3, like all below: elements of the parameters that are gathered ahead of their use. 0: none."""

    max_live_parameters: int = 1_000_000_000
    """Elements of gathered parameters on a device beyond which none are gathered ahead."""

    sub_group_size: int = limited(1_000_000_000, at_least=1)
    """Elements that the optimizer updates at a time. Smaller sub-groups let SuperOffload overlap its updates with the
    backward pass at a finer grain, and let --offload.ratio split the optimizer more exactly."""

    param_persistence_threshold: int = 100_000
    """Largest parameter, in elements, that every rank keeps whole. 0: none, for less memory and more messages."""

    hpz_partition_size: int = limited(1, at_least=1)
    """ZeRO++: each group of this many ranks keeps a second sharded copy of the parameters, and the backward pass
    gathers from it. Set it to the number of GPUs per node to reduce traffic between nodes (Wang et al. 2023, arXiv
    2306.10209). 1: no copy."""

    quantized_weights: bool = False
    """ZeRO++: gather parameters as 8-bit integers. Requires CUDA and at least two ranks. Changes the results."""

    quantized_gradients: bool = False
    """ZeRO++: reduce gradients as 4-bit integers. Requires CUDA and at least two nodes. Changes the results."""


@dataclass(frozen=True)
class OffloadConfig:
    """offload to the CPU, under the names of DeepSpeed's configuration"""

    ratio: float = limited(1.0, at_most=1)
    """Share of the optimizer that is offloaded to the CPU, in whole sub-groups of --zero.sub_group_size; the rest stays
    on the GPU (Twin-Flow of ZeRO-Offload++). Below 1 only with ZeRO 3, AdamW and a constant learning rate."""

    pin_memory: bool = False
    """Keep offloaded tensors in pinned (page-locked) CPU memory: faster copies, which can overlap with computation."""

    cpuadam_cores_perc: float = limited(0.8, over=0, at_most=1)
    """Share of the process's cores, above 0 to 1, on which SuperOffload runs its optimizer in a separate process."""


@dataclass(frozen=True)
class OutputConfig:
    """output"""

    out: str = "runs"
    """Directory for run folders."""

    name: str = ""
    """Name of the run; its folder is <out>/<name>/version_N. Empty: <model>-<strategy>."""

    logger: list[LoggerName] = field(default_factory=lambda: ["tensorboard"])
    """Loggers, one or more: tensorboard, csv (csv/metrics.csv in the run folder), wandb, mlflow; or none."""

    wandb_project: str = ""
    """Weights & Biases: project. Empty: WANDB_PROJECT, or cifar-zero."""

    wandb_run_name: str = ""
    """Weights & Biases: name of the run. Empty: that of the run folder."""

    wandb_group: str = ""
    """Weights & Biases: group of runs that are shown together. Empty: WANDB_RUN_GROUP, or none."""

    wandb_tags: list[str] = field(default_factory=list)
    """Weights & Biases: tags, one or more."""

    hparams: list[str] = field(default_factory=list)
    """Additional options to list in TensorBoard's HPARAMS tab, one or more (optimizer.momentum model.width)."""

    log_gradients: bool = False
    """Also log the norm of each parameter's gradient (grad_norm/*) and its histogram, every --log_interval steps."""

    log_weights: bool = False
    """Also log a histogram of each weight in TensorBoard, every --log_interval steps."""

    log_graph: bool = False
    """Also draw the model as a graph in TensorBoard; builds a whole copy of it in CPU memory."""

    test_figures: bool = True
    """Draw the confusion matrix and the worst mistakes after the test. false: a short run ends seconds earlier."""

    log_interval: int = limited(100, at_least=1)
    """Optimizer steps between two logged points of the training metrics."""

    plot_schedule: str = ""
    """Plot the learning rate of each step of the run to this PNG file, and exit. Without a value: schedule.png in
    the folder --out."""

    check_gradients: bool = False
    """Compare autograd's derivatives with finite differences, one of each parameter, print the table, and exit."""

    debug: bool = False
    """Print the full traceback of an error."""


@dataclass(frozen=True)
class DataConfig:
    """data"""

    source: SourceName = "auto"
    """Dataset. auto: CIFAR-10 from disk or by download; if neither is possible, the embedded digits, with a warning.
    All other sources never fall back. folder: your own images, <root>/train/<class>/*.png|jpg and
    <root>/test/<class>/*. digits: handwritten digits in CIFAR-10's shape. synthetic: random ones, for benchmarks."""

    root: str = "data"
    """Directory of the dataset: the download location, and the root of a folder source."""

    cache: str = ""
    """Directory for the decoded images, shared by all ranks and runs. Empty: <root>/.cifar-zero."""

    loader: Literal["memory", "torch"] = "memory"
    """memory: slices whole batches from uint8 images in shared memory. torch: the tutorial's torchvision transforms and
    DataLoader. Both yield the same images in the same order."""

    workers: int = 2
    """Worker processes per rank of the torch loader."""

    val_fraction: float = limited(0.1, below=1)
    """Share of the training images held out for validation, chosen by seed and stratified by class. 0: train on all."""

    url: str = ""
    """Mirror from which to download the CIFAR archive. Empty: the URL that torchvision uses."""

    synthetic_size: int = limited(50_000, at_least=10)
    """Number of training images of the synthetic source."""

    image_size: int = limited(32, at_least=32)
    """Side in pixels to which the images of a folder source are scaled; those of all other sources have 32."""

    normalize: str = "half"
    """Mean and standard deviation of the pixels (from 0 to 1), which become (pixel - mean) / std. half: 0.5 and 0.5.
    cifar: of CIFAR-10, by channel. imagenet: what torchvision's pretrained weights expect. MEAN,STD: your own, as two
    numbers, or as six for red, green and blue."""

    @property
    def inputs(self) -> Inputs:
        """The images as the model sees them."""
        return inputs(self.image_size, self.normalize)


@dataclass(frozen=True)
class AugmentConfig:
    """augmentation of the training images (off by default), identical for every strategy and number of ranks"""

    flip: Literal["none", "random", "alternating"] = "none"
    """Horizontal flips. random: each image with probability 1/2, drawn again in each epoch. alternating: a random half
    of the images in even epochs, the other half in odd epochs."""

    crop: int = 0
    """Padding in pixels on each side, up to half of the image's, from which a random crop of the original size is
    taken. 0: off."""

    padding: Padding = "black"
    """Content of the padding of --augment.crop: black pixels, or the image mirrored at its edges (reflect)."""

    cutout: int = 0
    """Side in pixels of a square at a random position that is set to the mean of --data.normalize. 0: off."""

    mixup: float = 0.0
    """Mixup: blend each image and its label with another image; the share is drawn from Beta(MIXUP, MIXUP). 0: off. If
    cutmix is on as well, each image gets one of the two with probability 1/2."""

    cutmix: float = 0.0
    """CutMix: paste a rectangle of another image into each image. Its share of the area is drawn from Beta(CUTMIX,
    CUTMIX) and it is clipped at the borders; the labels are mixed in proportion to the pixels. 0: off."""

    brightness: float = limited(0.0, below=1)
    """Add a random number from -BRIGHTNESS to BRIGHTNESS to all normalised pixels of an image. 0: off."""

    contrast: float = limited(0.0, below=1)
    """Multiply all normalised pixels of an image by a random number from 1 - CONTRAST to 1 + CONTRAST. 0: off."""

    erasing: float = limited(0.0, at_most=1)
    """Probability that a random rectangle, 0.02 to 0.33 of an image, is blanked out to the mean. 0: off."""

    policy: Literal["none", "randaugment", "autoaugment", "trivialaugment"] = "none"
    """Random operations on the pixels by torchvision.transforms.v2: RandAugment, AutoAugment (the policy of CIFAR-10)
    or TrivialAugmentWide, drawn for groups of images: 64 different ones in each epoch."""

    transform: str = ""
    """Transform of your own, as FILE.py:NAME or PACKAGE.MODULE:NAME: a function or an instance that maps uint8 images
    (N, 3, H, W) to as many of the same shape, such as a Compose of torchvision.transforms.v2. It is drawn for groups of
    images, after --augment.policy. Only the command line may name one, as it is code."""

    low_resolution: int = 0
    """Side in pixels to which images are downscaled in the first epochs, for models that accept any size. FLOPs are
    counted at full size. 0: off."""

    low_epochs: int = 0
    """Number of first epochs with --augment.low_resolution."""


SECTIONS: dict[str, type] = {"lora": LoRAConfig, "zero": ZeROConfig, "offload": OffloadConfig}
SECTIONS |= {"data": DataConfig, "augment": AugmentConfig}
"""Sections with dotted flags: --data.root, or data: {root: ...} in a recipe."""


@dataclass(frozen=True)
class Choice:
    """A name from a registry (models, optimizers, schedules) with all its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Config(DeviceConfig, TrainingConfig, RegularizationConfig, FineTuneConfig, OutputConfig):
    """All options of a run. The defaults are the PyTorch tutorial's recipe, plus a validation split."""

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
        """Ranks over all nodes; devices must be a number."""
        assert self.devices != "auto"
        return self.devices * self.num_nodes

    @property
    def only_measures(self) -> bool:
        """Whether the run is a benchmark or a learning rate range test: a few steps, no checkpoint, no test."""
        return bool(self.bench_steps or self.find_lr)

    @property
    def strategy_name(self) -> str:
        """The strategy, or the file name of the raw DeepSpeed configuration that replaces it."""
        return Path(self.ds_config).stem if self.ds_config else self.strategy

    @property
    def model_name(self) -> str:
        """The model's name as part of a path: torchvision-resnet18, my_net.py-MyNet."""
        return Path(self.model.name).name.replace(":", "-")  # some file systems allow no colon

    @property
    def run_name(self) -> str:
        """--name, or <model>-<strategy> without one."""
        return self.name or f"{self.model_name}-{self.strategy_name}"


def config_of(tree: dict[str, Any]) -> Config:
    """Returns the configuration from the output of `dataclasses.asdict`. Raises TypeError if it has unknown fields, of
    another version of the program, and UsageError if it sets `trust`."""
    check_no_consent(tree, "the checkpoint's configuration")
    sections: dict[str, type] = {**SECTIONS, **dict.fromkeys(("model", "optimizer", "schedule"), Choice)}
    return Config(**{key: sections[key](**value) if key in sections else value for key, value in tree.items()})


def flat(config: Config | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns every option and its value by its flag: data.root, optimizer.lr, seed; model is the model's name. Takes a
    configuration, or the content of config.yaml or of a checkpoint's record; `prefix` is that of the flags."""
    found: dict[str, Any] = {}
    for key, value in (asdict(config) if isinstance(config, Config) else config).items():
        if not isinstance(value, Mapping):
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
            continue
        inner = dict(value)
        if "name" in inner:  # a choice: {name, options} in a configuration, {name, its options} in config.yaml
            found[prefix + key] = inner.pop("name")
            inner = inner.pop("options", inner)
        found |= flat(inner, f"{prefix}{key}.")
    return found


def check_no_consent(tree: dict[str, Any], source: str) -> None:
    """Raises UsageError if options that were read from a file, `source`, set `trust`: no file may let code run."""
    if "trust" in tree:
        raise UsageError(f"{source} sets trust, which only the command line may: take it out and add --trust")
