"""The recipe: the options that decide what a run computes, regardless of the devices. The docstring under each field is
its `--help` text; numbers are at least 0 unless `limited` sets other limits. A resumed run keeps its recipe, except for
the fields with `may_change_on_resume`."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import MAY_CHANGE, limited
from cifar_zero.models import IMAGE_SHAPE

SourceName = Literal["auto", "cifar10", "cifar100", "folder", "digits", "synthetic"]
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
Padding = Literal["black", "reflect"]
Views = Literal["none", "mirror", "mirror_translate"]

NORMALIZATIONS = {
    "half": "0.5,0.5",  # from the PyTorch CIFAR tutorial; the pixels become -1 to 1
    "cifar": "0.4914,0.4822,0.4465,0.2470,0.2435,0.2616",  # measured on CIFAR-10's training images
    "imagenet": "0.485,0.456,0.406,0.229,0.224,0.225",  # measured on ImageNet; torchvision's weights expect them
}
"""Mean and standard deviation of pixels from 0 to 1: one of each for all channels, or three means followed by three
standard deviations."""


class Inputs(NamedTuple):
    """The size and normalisation of square RGB images. Pixels from 0 to 1 become (pixel - mean) / std."""

    side: int  # height and width in pixels
    mean: tuple[float, ...]  # of all channels, or of red, green and blue
    std: tuple[float, ...]

    def batch_size_of_equal_pixels(self, images: int) -> int:
        """Returns how many images of this size have at most as many pixels as `images` images of CIFAR's size, but at
        least 1."""
        return max(1, images * IMAGE_SHAPE[1] * IMAGE_SHAPE[2] // self.side**2)


def inputs(side: int = IMAGE_SHAPE[1], normalization: str = "half") -> Inputs:
    """Returns the size and normalisation of images for the values of --data.image_size and --data.normalize. Raises
    UsageError if the normalisation is invalid."""
    try:
        numbers = [float(number) for number in NORMALIZATIONS.get(normalization, normalization).split(",")]
    except ValueError:
        numbers = []
    channels = len(numbers) // 2
    mean, std = tuple(numbers[:channels]), tuple(numbers[channels:])
    if len(numbers) not in (2, 6) or not all(map(math.isfinite, numbers)) or min(std) <= 0:
        known = ", ".join(NORMALIZATIONS)
        raise UsageError(f"--data.normalize {normalization}: give {known}, or mean,std as 2 or 6 numbers, std above 0")
    return Inputs(side, mean, std)


PLAIN = inputs()  # images of CIFAR's size with pixels from -1 to 1


@dataclass(frozen=True)
class Choice:
    """A name from a registry (models, optimizers, schedules) with all its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """data: which images, where they are, and how they are read"""

    source: SourceName = field(default="auto", metadata=MAY_CHANGE)
    """Dataset. auto: CIFAR-10 from disk or by download; if neither is possible, the embedded digits, with a warning.
    All other sources never fall back. folder: your own images, <root>/train/<class>/*.png|jpg and
    <root>/test/<class>/*. digits: handwritten digits in CIFAR-10's shape. synthetic: random images, for benchmarks."""

    val_fraction: float = limited(0.1, below=1)
    """Share of the training images held out for validation, chosen by seed and stratified by class. 0: train on all."""

    synthetic_size: int = limited(50_000, at_least=10, may_change_on_resume=True)
    """Number of training images of the synthetic source."""

    image_size: int = limited(32, at_least=32, at_most=8192)  # as `data.folder.MAX_PIXELS`
    """Side in pixels to which the images of a folder source are scaled; images of all other sources have 32 x 32
    pixels."""

    normalize: str = "half"
    """Mean and standard deviation of the pixels (from 0 to 1), which become (pixel - mean) / std. half: 0.5 and 0.5.
    cifar: the values of CIFAR-10's channels. imagenet: the values that torchvision's pretrained weights expect.
    MEAN,STD: your own values, two for all channels, or three means and three standard deviations."""

    root: str = "data"
    """Directory of the dataset: the download location, and the root of a folder source."""

    cache: str = ""
    """Directory for the decoded images, shared by all ranks and runs. Empty: <root>/.cifar-zero."""

    url: str = ""
    """Mirror from which to download the CIFAR archive. Empty: the URL that torchvision uses."""

    loader: Literal["memory", "torch"] = "memory"
    """memory: slices whole batches from uint8 images in shared memory. torch: the tutorial's torchvision transforms and
    DataLoader. Both yield the same images in the same order."""

    workers: int = 2
    """Worker processes per rank of the torch loader."""

    @property
    def inputs(self) -> Inputs:
        return inputs(self.image_size, self.normalize)


@dataclass(frozen=True)
class AugmentConfig:
    """augmentation of the training images (off by default), identical for every strategy and number of ranks"""

    flip: Literal["none", "random", "alternating"] = "none"
    """Horizontal flips. random: each image with probability 1/2, drawn again in each epoch. alternating: a random half
    of the images in even epochs, the other half in odd epochs."""

    crop: int = 0
    """Pixels of padding on each side, at most half of the image's side, before a random crop to the original size. 0:
    off."""

    padding: Padding = "black"
    """Content of the padding of --augment.crop: black pixels, or the image mirrored at its edges (reflect)."""

    cutout: int = 0
    """Side in pixels of a square at a random position that is set to the mean of --data.normalize. 0: off."""

    mixup: float = 0.0
    """Mixup: blend each image with another image, and their labels likewise; the weight of the other image is drawn
    from Beta(MIXUP, MIXUP). 0: off. If cutmix is on as well, each image gets one of the two with probability 1/2."""

    cutmix: float = 0.0
    """CutMix: paste a rectangle of another image into each image. The rectangle's share of the area is drawn from
    Beta(CUTMIX, CUTMIX), and the rectangle is clipped at the image's borders; the labels are mixed in proportion to the
    pixels. 0: off."""

    erasing: float = limited(0.0, at_most=1)
    """Probability that a random rectangle, 0.02 to 0.33 of an image, is blanked out to the mean. 0: off."""

    policy: Literal["none", "randaugment", "autoaugment", "trivialaugment"] = "none"
    """Random operations on the pixels by torchvision.transforms.v2: RandAugment, AutoAugment (the policy of CIFAR-10)
    or TrivialAugmentWide. They are drawn once per group of images, for 64 groups in each epoch."""

    transform: str = ""
    """Transform of your own, as FILE.py:NAME or PACKAGE.MODULE:NAME: a function or an instance that maps uint8 images
    (N, 3, H, W) to uint8 images of the same shape, such as a Compose of torchvision.transforms.v2. It is called once
    per group of images, after --augment.policy. Only the command line may name a transform, because it is code."""


@dataclass(frozen=True)
class LoRAConfig:
    """LoRA: freeze a layer's weights, and train two small matrices whose product is added to them (Hu et al. 2022)"""

    rank: int = 0
    """Rank of the adapters: the inner dimension of the two matrices. 0: no adapters."""

    alpha: float = 16.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""

    target: list[str] = field(default_factory=list)
    """Names of linear layers that get an adapter, one or more, with wildcards * and ? ('blocks.*.attention.qkv')."""

    dropout: float = limited(0.0, below=1)
    """Dropout probability on the input of each adapter, in training."""


@dataclass(frozen=True)
class Training:
    """training: its length, batch size, loss, seed and initial weights"""

    epochs: int = limited(2, at_least=1, may_change_on_resume=True)
    """Number of passes over the training images."""

    max_steps: int = limited(-1, at_least=-1, may_change_on_resume=True)
    """Maximum number of optimizer steps; training stops at whichever of this and --epochs comes first. -1: no limit."""

    batch_size: int = limited(4, at_least=1, at_most=2**31 - 1)  # far above any dataset, and sizes fit torch's int64
    """Global batch size: images per optimizer step, over all ranks and accumulated micro-batches (DeepSpeed's
    train_batch_size). The micro-batch of a rank is batch_size / (ranks x accumulate), where ranks that share one model
    (tensor_parallel, pipeline) count as one."""

    gradient_clip_val: float = limited(0.0, may_change_on_resume=True)
    """Maximum global L2 norm of the gradient. 0: no clipping."""

    loss: LossName = field(default="cross_entropy", metadata=MAY_CHANGE)
    """Loss that training minimises, and that train/loss, val/loss and test/loss show. mse: squared distance of the
    scores from 1 for the class and 0 for the others. bce: binary cross-entropy, each class against the rest."""

    seed: int = limited(0, at_most=2**32 - 1)
    """Seed of the initial weights, the data order, the augmentation and the validation split."""

    init: Literal["default", "xavier", "he"] = "default"
    """Initialisation of convolutions and linear layers. xavier: uniform, for tanh and sigmoid (Glorot and Bengio 2010).
    he: normal, for ReLU (He et al. 2015). Both set the biases to 0. default: torch's defaults."""

    monitor: Monitor = field(default="val/acc", metadata=MAY_CHANGE)
    """Validation metric that decides which checkpoints are the best, and when --early_stopping stops. Losses and errors
    are best when low, all other metrics when high."""

    bench_steps: int = limited(0, may_change_on_resume=True)
    """Benchmark: run this many timed steps after a warm-up, print the speed and skip the test. 0: train normally."""


@dataclass(frozen=True)
class Regularization:
    """regularization (off by default)"""

    label_smoothing: float = limited(0.0, below=1, may_change_on_resume=True)
    """Label smoothing: share of each training label that is spread evenly over all classes, from 0 to below 1. Not
    applied in validation and test. 0: off."""

    early_stopping: int = limited(0, may_change_on_resume=True)
    """Stop after this many validations in a row (one per epoch) without a better --monitor. 0: never."""

    ema: float = limited(0.0, below=1, may_change_on_resume=True)
    """Decay of an exponential moving average of the weights, which averages over about 1 / (1 - decay) optimizer steps:
    over a thousand for 0.999. Validation, test, the best checkpoint and exports use the average. 0: off."""

    tta: Views = field(default="none", metadata=MAY_CHANGE)
    """Test-time augmentation: average the scores of several views of each image in the test, but not in validation.
    mirror: the image and its mirror image. mirror_translate: six views, namely these two, the two shifted by one pixel
    up and left, and the two shifted down and right. The unshifted views have half of the total weight."""


@dataclass(frozen=True)
class FineTuning:
    """fine-tuning: the weights to start from, and the parameters to train"""

    weights: str = field(default="", metadata=MAY_CHANGE)
    """Start from existing weights: a run folder, a checkpoint of any strategy, a safetensors file, or a torch state
    dict. Parameters without a tensor of the same name and shape are initialised and listed. Optimizer and step count
    start fresh."""

    trainable: list[str] = field(default_factory=list)
    """Names of the parameters to train, one or more, with the wildcards * and ? ('blocks.11.*' 'head.*'); all others
    are frozen. Empty: all parameters, or with LoRA only the adapters."""


@dataclass(frozen=True)
class Recipe(FineTuning, Regularization, Training):
    """The options that decide what a run computes. The defaults are those of the PyTorch tutorial, plus a validation
    split."""

    lora: LoRAConfig = field(default_factory=LoRAConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig, metadata=MAY_CHANGE)
    model: Choice = field(default_factory=lambda: Choice("net"))
    optimizer: Choice = field(default_factory=lambda: Choice("sgd"))
    schedule: Choice = field(default_factory=lambda: Choice("constant"), metadata=MAY_CHANGE)
    trainer: dict[str, Any] = field(default_factory=dict, metadata=MAY_CHANGE)

    @property
    def only_measures(self) -> bool:
        """Whether the run is a benchmark (--bench_steps), which has no checkpoint and no test."""
        return bool(self.bench_steps)

    @property
    def model_name(self) -> str:
        """The model's name as part of a path, for example torchvision-resnet18 or my_net.py-MyNet."""
        return Path(self.model.name).name.replace(":", "-")  # some file systems allow no colon
