"""Defines the registry of models. A model is a plain torch module that maps normalised images (N, 3, H, W), by default
of 32 x 32 pixels, to class scores (N, classes).

Each entry is a dataclass. Its fields are the `--model.<option>` flags, and its docstring is the model's help text. It
imports its torch module only when it builds the model, so that the command line does not need torch.
"""

# There are no postponed annotations here, because jsonargparse would import torch (see TYPE_CHECKING) to resolve them.
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from cifar_zero.core.plain_data import Plain
from cifar_zero.core.usage import Options, limited

if TYPE_CHECKING:
    from torch import nn

IMAGE_SHAPE = (3, 32, 32)  # channels, height and width of the images, in pixels
PATCH_SIDE = 4  # height and width of a vision transformer's patches, in pixels
Size = Literal["tiny", "small", "base", "large", "1b", "13b"]  # the size of a vision transformer


class Layout(NamedTuple):
    """The size of a vision transformer."""

    width: int  # of a token
    depth: int  # number of blocks
    heads: int  # attention heads of a block


LAYOUTS: dict[Size, Layout] = {
    # DeiT (Touvron et al. 2021)
    "tiny": Layout(192, 12, 3),
    "small": Layout(384, 12, 6),
    # ViT (Dosovitskiy et al. 2021)
    "base": Layout(768, 12, 12),
    "large": Layout(1024, 24, 16),
    # The widths of GPT-3 XL and GPT-3 13B (Brown et al. 2020), and the depth that gives 1.3 and 13 billion parameters.
    "1b": Layout(2048, 26, 16),
    "13b": Layout(5120, 41, 40),
}


@dataclass
class MixtureOptions(Options):
    """The options that apply to every mixture of experts in a model."""

    num_experts: list[int] = field(default_factory=lambda: [2])
    """Number of experts of each mixture, as a list with one number per mixture; different numbers make a pyramid
    (PR-MoE with mlp_type residual)."""

    ep_size: int = limited(1, at_least=1)
    """Ranks over which the experts of a mixture are distributed; more than 1 needs DeepSpeed with ZeRO stages 0 to 2.
    1: every rank holds all experts."""

    mlp_type: Literal["standard", "residual"] = "standard"
    """residual: a dense layer next to the experts processes every token, and the weights of both outputs are learnt."""

    top_k: Literal[1, 2] = 1
    """Number of experts per token."""

    capacity_factor: float = limited(1.0, over=0)
    """Largest number of tokens of a micro-batch that an expert processes in training, as a multiple of its even share;
    other tokens are dropped."""

    eval_capacity_factor: float = 0.0
    """Value of capacity_factor in evaluation, where the last tokens are dropped. 0: no tokens are dropped, so that
    images do not affect each other."""

    min_capacity: int = 0
    """Lower bound of an expert's capacity, in tokens."""

    noisy_gate_policy: Literal["none", "RSample", "Jitter"] = "none"
    """Noise of the gate in training. RSample: experts are drawn with the gate's probabilities (top_k 1 only). Jitter:
    the gate's input is multiplied by random numbers close to 1."""

    load_balance: float = 0.01
    """Weight of the load-balancing loss, which is 1 for a mixture with even load. 0: no load-balancing loss, as in
    DeepSpeedExamples."""

    def __post_init__(self) -> None:
        if not self.num_experts or min(self.num_experts) < 1:
            raise ValueError(f"num_experts must be numbers from 1, one for each mixture, not {self.num_experts}")
        super().__post_init__()
        for number in self.num_experts:
            if number % self.ep_size:
                raise ValueError(f"ep_size {self.ep_size} does not divide num_experts {number}")
            if number < self.top_k:
                raise ValueError(f"top_k {self.top_k} needs at least as many experts: num_experts has {number}")
        if self.top_k == 2 and self.noisy_gate_policy == "RSample":
            raise ValueError("noisy_gate_policy RSample works only with top_k 1: use Jitter with top_k 2")


@dataclass
class Model(Options):
    """An entry of the registry of models, with the values of its options."""

    network: ClassVar[str]
    """The class or function that builds the model, as MODULE.NAME, where MODULE is a file in models/. It is called with
    the number of classes and this entry."""

    tokens_per_image: ClassVar[int] = 0  # number of a transformer's patches; 0 for other models
    may_need_values: ClassVar[bool] = False  # whether shapes may depend on tensors' values; the meta device has none

    def build(self, num_classes: int) -> "nn.Module":
        """Returns the model with freshly initialised weights and `num_classes` output scores."""
        module, _, name = self.network.partition(".")
        return getattr(import_module(f"cifar_zero.models.{module}"), name)(num_classes, self)


@dataclass
class Net(Model):
    """the model of the PyTorch CIFAR-10 tutorial: two convolutions, three linear layers, 62,006 parameters"""

    network = "net.Net"


@dataclass
class NetMoE(Model, MixtureOptions):
    """Net with mixtures of experts before its last layer, as in DeepSpeedExamples"""

    network = "net.NetMoE"


@dataclass
class MLP(Model):
    """a multi-layer perceptron on the pixels; --model.hidden [] is softmax regression, one neuron for each class"""

    network = "net.MLP"

    hidden: list[int] = field(default_factory=lambda: [512])
    """Number of neurons of each hidden layer, from the pixels to the scores. []: no hidden layer."""

    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = "relu"
    """Non-linearity after each hidden layer."""

    dropout: float = limited(0.0, below=1)
    """Share of the hidden layers' outputs that is dropped in training (Srivastava et al. 2014)."""

    batch_norm: bool = False
    """Normalise the input of each non-linearity over the micro-batch of a rank (Ioffe and Szegedy 2015)."""

    def __post_init__(self) -> None:
        if self.hidden and min(self.hidden) < 1:
            raise ValueError(f"hidden must be numbers from 1, one for each layer, not {self.hidden}")
        super().__post_init__()


@dataclass
class Scalable(Model):
    """A model whose width can be scaled."""

    width: float = limited(1.0, over=0)
    """Width of all hidden layers, as a multiple of the paper's: 0.25 suits a CPU."""

    def scaled(self, channels: int) -> int:
        """Returns `channels`, a layer's number of channels in the paper, multiplied by the width. The result is rounded
        and at least 1."""
        return max(1, round(channels * self.width))


@dataclass
class VGG16(Scalable):
    """VGG-16 with batch normalisation (Simonyan and Zisserman 2015): 134 million parameters at width 1"""

    network = "vgg.VGG16"

    dropout: float = limited(0.5, below=1)
    """Share of the two hidden linear layers' outputs that is dropped in training; the paper's is 0.5."""


@dataclass
class SpeedNet(Scalable):
    """the model of the CIFAR-10 speed records (airbench94, Jordan 2024): 1.97 million parameters at width 1"""

    network = "speednet.SpeedNet"


@dataclass
class ResNet(Scalable):
    """a residual network (He et al. 2016) with the first layer for images of 32 x 32 pixels"""

    network = "resnet.ResNet"
    depth: ClassVar[int]


def _resnet(depth: int, parameters: str) -> type[ResNet]:
    summary = f"{ResNet.__doc__}: {parameters} parameters at width 1"
    return type(f"ResNet{depth}", (ResNet,), {"__doc__": summary, "depth": depth})


@dataclass
class ViT(Model):
    """a vision transformer on patches of 4 x 4 pixels"""

    network = "vit.ViT"
    tokens_per_image = (IMAGE_SHAPE[1] // PATCH_SIDE) ** 2
    size: ClassVar[Size]

    depth: int = 0
    """Number of blocks of attention and MLP. 0: as many as a model of this size has."""

    dropout: float = limited(0.0, below=1)
    """Share of the embedded patches and of the output of each attention and MLP that is dropped in training."""

    @property
    def layout(self) -> Layout:
        layout = LAYOUTS[self.size]
        return layout._replace(depth=self.depth or layout.depth)


def _vit(size: Size, parameters: str) -> type[ViT]:
    return type(f"ViT_{size}", (ViT,), {"__doc__": f"{ViT.__doc__}: {parameters} parameters", "size": size})


@dataclass
class ViTMoE(Model, MixtureOptions):
    """a vision transformer with mixtures of experts in place of every second MLP"""

    network = "vit.ViT"
    tokens_per_image = ViT.tokens_per_image
    dropout: ClassVar[float] = 0.0

    num_experts: list[int] = field(default_factory=lambda: [4])
    """Number of experts of each mixture, as one number for all mixtures or one number per mixture. Half of the blocks
    have a mixture."""

    size: Size = "tiny"
    """Size of the model without its experts, here with its millions of parameters: tiny (5.4), small (21), base (85),
    large (302), 1b, 13b."""

    def __post_init__(self) -> None:
        super().__post_init__()
        mixtures = self.layout.depth // 2
        if len(self.num_experts) not in (1, mixtures):
            raise ValueError(f"num_experts must be one number, or one for each of {mixtures} mixtures")

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.size]


def _harmless(value: Any) -> bool:
    """Returns whether an option's value consists only of numbers, booleans and None, or lists of them. Such a value
    cannot name a file, an address or code. Options may come from files that other people wrote."""
    if isinstance(value, (list, tuple)):
        return all(map(_harmless, value))
    return value is None or isinstance(value, (bool, int, float))


class ThirdParty(Model):
    """A model that was not written for this program. The full model is built before it is sharded. Before a run,
    `external.check` builds it and runs it on a micro-batch of the run's shape."""


@dataclass
class External(ThirdParty):
    """an image classifier of torchvision"""

    network = "external.external"
    architecture: ClassVar[str]

    kwargs: dict[str, Plain] = field(default_factory=dict)
    """Options of the torchvision function that builds the model, for instance --model.kwargs.dropout 0.1. The values
    are numbers, true or false, or lists of them."""

    image_size: int = 0
    """Side in pixels to which the images are scaled, for a model that needs larger images. 0: not scaled."""

    weights: str = ""
    """Name of torchvision's pretrained weights to start from: DEFAULT, or a name such as IMAGENET1K_V1. The head is new
    if the number of classes differs. Most weights expect --data.normalize imagenet. Empty: initialised weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.kwargs.items():
            if not _harmless(value):
                raise ValueError(f"kwargs.{name} must be a number, true or false, or a list of them")


PREFIX = "torchvision:"  # before the name of a torchvision classifier, as in torchvision:resnet50


class Models(dict[str, type[Model]]):
    """The registry of models, keyed by name. Iterating over it yields the models in this folder and those of
    `register_user_model`. Every name that begins with `torchvision:` is also valid in `[]` and `in`, but not in
    `get`."""

    def __missing__(self, name: str) -> type[Model]:
        if name not in self:
            raise KeyError(name)
        architecture = name.removeprefix(PREFIX)
        return type("External", (External,), {"__doc__": f"torchvision's {architecture}", "architecture": architecture})

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.startswith(PREFIX))


MODELS = Models(
    {
        "mlp": MLP,
        "net": Net,
        "net_moe": NetMoE,
        "vgg16": VGG16,
        "speednet": SpeedNet,
        "resnet18": _resnet(18, "11.2 million"),
        "resnet34": _resnet(34, "21.3 million"),
        "resnet50": _resnet(50, "23.5 million"),
        "vit_tiny": _vit("tiny", "5.4 million"),
        "vit_small": _vit("small", "21 million"),
        "vit_base": _vit("base", "85 million"),
        "vit_large": _vit("large", "302 million"),
        "vit_1b": _vit("1b", "1.3 billion"),
        "vit_13b": _vit("13b", "13 billion"),
        "vit_moe": ViTMoE,
    }
)


def build(name: str, num_classes: int, **options: Any) -> "nn.Module":
    """Builds the model that is registered in MODELS as `name`. `options` are values for the fields of its entry. Raises
    KeyError if there is no such model, TypeError if there is no such option, and ValueError if a value is invalid."""
    return MODELS[name](**options).build(num_classes)
