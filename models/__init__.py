"""The registry of networks: plain torch modules that map images (N, 3, 32, 32) in [-1, 1] to class scores.

Each entry is a dataclass whose fields are the `--model.<option>` flags and whose docstring is their help. It imports
its network when it builds it, so that the command line knows every option without importing torch.
"""

# No postponed annotations here: jsonargparse would execute the TYPE_CHECKING imports, torch, to resolve them.
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from models.mixture_options import MixtureOptions
from models.vit_shapes import SHAPES, Size

if TYPE_CHECKING:
    from torch import nn


class Model(Protocol):
    """An entry of the registry, with its options set."""

    def build(self, num_classes: int) -> "nn.Module":
        """The network with freshly initialised weights and so many scores."""
        ...


@dataclass
class Net:
    """the network of the PyTorch CIFAR-10 tutorial: two convolutions, three linear layers, 62,006 parameters"""

    def build(self, num_classes: int) -> "nn.Module":
        """See `Model`."""
        from models.net import Net

        return Net(num_classes)


@dataclass
class NetMoE(MixtureOptions):
    """Net with mixtures of experts before its last layer, as in DeepSpeedExamples"""

    def build(self, num_classes: int) -> "nn.Module":
        """See `Model`."""
        from models.net_moe import NetMoE

        return NetMoE(num_classes, self)


@dataclass
class ViT:
    """a vision transformer on patches of 4 x 4 pixels"""

    size: ClassVar[Size]

    def build(self, num_classes: int) -> "nn.Module":
        """See `Model`."""
        from models.vit import vit

        return vit(self.size, num_classes)


def _vit(size: Size, parameters: str) -> type[ViT]:
    """The entry of one size."""
    return type(f"ViT_{size}", (ViT,), {"__doc__": f"{ViT.__doc__}: {parameters} parameters", "size": size})


@dataclass
class ViTMoE(MixtureOptions):
    """a vision transformer with mixtures of experts in place of every second MLP"""

    num_experts: list[int] = field(default_factory=lambda: [4])
    """Experts of each mixture: one number for each of them (half of the blocks), or one for all."""

    size: Size = "tiny"
    """Of the transformer without its experts: tiny (5.4 million parameters), small (21), base (85), large (302), 1b
    (1,300), 13b (13,000)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        mixtures = SHAPES[self.size].depth // 2
        if len(self.num_experts) not in (1, mixtures):
            raise ValueError(f"num_experts must be one number, or one for each of {mixtures} mixtures")

    def build(self, num_classes: int) -> "nn.Module":
        """See `Model`."""
        from models.vit import vit_moe

        return vit_moe(self.size, num_classes, self)


MODELS: dict[str, type[Model]] = {
    "net": Net,
    "net_moe": NetMoE,
    "vit_tiny": _vit("tiny", "5.4 million"),
    "vit_small": _vit("small", "21 million"),
    "vit_base": _vit("base", "85 million"),
    "vit_large": _vit("large", "302 million"),
    "vit_1b": _vit("1b", "1.3 billion"),
    "vit_13b": _vit("13b", "13 billion"),
    "vit_moe": ViTMoE,
}


def build(name: str, num_classes: int, **options: Any) -> "nn.Module":
    """Builds the network `name` with freshly initialised weights.

    Args:
        name: a key of MODELS.
        num_classes: width of the output.
        options: the network's own options, as in its registry entry.

    Raises:
        ValueError: the options make no sense.
    """
    return MODELS[name](**options).build(num_classes)
