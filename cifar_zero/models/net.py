"""Defines Net, the model of PyTorch's tutorial "Training a Classifier", its variant NetMoE with mixtures of experts,
and MLP."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from cifar_zero import models
from cifar_zero.models import MixtureOptions
from cifar_zero.models.moe import MixtureOfExperts

TOKEN_WIDTH = 84  # width of the tokens of NetMoE's mixtures
PIXELS = 3 * 32 * 32  # inputs of the first layer: all pixel values of an image

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "gelu": nn.GELU}


class Net(nn.Module):
    """The LeNet-like model of PyTorch's tutorial; 62,006 parameters for 10 classes."""

    def __init__(self, num_classes: int = 10, options: models.Net | None = None):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)  # 456 parameters
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)  # 2,416
        self.fc1 = nn.Linear(16 * 5 * 5, 120)  # 48,120
        self.fc2 = nn.Linear(120, 84)  # 10,164
        self.fc3 = nn.Linear(84, num_classes)  # 850

    def forward(self, x: Tensor) -> Tensor:
        """Returns class scores (N, num_classes) for images (N, 3, 32, 32) in [-1, 1]."""
        x = self.pool(F.relu(self.conv1(x)))  # (N, 6, 28, 28) -> (N, 6, 14, 14)
        x = self.pool(F.relu(self.conv2(x)))  # (N, 16, 10, 10) -> (N, 16, 5, 5)
        x = x.flatten(1)  # (N, 400)
        x = F.relu(self.fc1(x))  # (N, 120)
        x = F.relu(self.fc2(x))  # (N, 84)
        return self.fc3(x)  # (N, num_classes)


class NetMoE(Net):
    """Net with a row of mixtures of experts (84 -> 84) and a linear layer in place of its last layer, as in
    DeepSpeedExamples' CIFAR-10 program. Each image is one token."""

    def __init__(self, num_classes: int, options: MixtureOptions):
        super().__init__(num_classes)
        del self.fc3
        expert = partial(nn.Linear, TOKEN_WIDTH, TOKEN_WIDTH)
        mixtures = (MixtureOfExperts(TOKEN_WIDTH, number, expert, options) for number in options.num_experts)
        self.fc3 = nn.Sequential(*mixtures)
        self.fc4 = nn.Linear(TOKEN_WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc4(super().forward(x))


class MLP(nn.Sequential):
    """Linear layers and non-linearities that map images (N, 3, 32, 32) in [-1, 1] to class scores (N, num_classes)."""

    def __init__(self, num_classes: int, options: models.MLP):
        layers: list[nn.Module] = [nn.Flatten()]  # (N, 3072)
        inputs = PIXELS
        for neurons in options.hidden:
            # Normalisation comes before the non-linearity and makes the bias redundant (Ioffe and Szegedy 2015).
            layers.append(nn.Linear(inputs, neurons, bias=not options.batch_norm))  # (N, neurons)
            if options.batch_norm:
                layers.append(nn.BatchNorm1d(neurons))
            layers.append(ACTIVATIONS[options.activation]())
            if options.dropout:
                layers.append(nn.Dropout(options.dropout))
            inputs = neurons
        super().__init__(*layers, nn.Linear(inputs, num_classes))
