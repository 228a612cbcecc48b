"""What predict.py and the check of an export need of a network, whatever file it comes from."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cifar_zero.data.augment import memory_format


@dataclass(frozen=True)
class Classifier:
    """A trained network and the names of its classes."""

    scores: Callable[[Tensor], Tensor]
    """Images float32 (N, 3, 32, 32) in [-1, 1] -> scores float32 (N, classes)."""

    classes: tuple[str, ...]
    """By label."""


def of_network(net: nn.Module, classes: tuple[str, ...]) -> Classifier:
    """A classifier that runs a float32 network of models/, in evaluation mode, on the CPU."""

    def scores(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return net(images.contiguous(memory_format=memory_format(images.device)))

    return Classifier(scores, classes)
