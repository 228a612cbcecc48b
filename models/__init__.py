"""The registry of networks: plain torch modules that map images (N, 3, 32, 32) in [-1, 1] to class scores.

Each entry is a function whose parameters are the `--model.<option>` flags and whose docstring is their help. It imports
its file when it is called, so that the command line knows every option without importing torch.
"""

# No postponed annotations here: jsonargparse would execute the TYPE_CHECKING imports, torch, to resolve them.
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def net(num_classes: int):
    """The network of the PyTorch CIFAR-10 tutorial: two convolutions, three linear layers, 62,006 parameters."""
    from models.net import Net

    return Net(num_classes)


MODELS: dict[str, Callable[..., Any]] = {"net": net}


def build(name: str, num_classes: int, **options: Any) -> "nn.Module":
    """Builds the network `name` with freshly initialised weights.

    Args:
        name: a key of MODELS.
        num_classes: width of the output.
        options: the network's own options, as in its registry entry.
    """
    return MODELS[name](num_classes, **options)
