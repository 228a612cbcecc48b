"""The multi-layer perceptron: linear layers with a non-linearity between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

PIXELS = 3 * 32 * 32
"""Inputs of the first layer: all numbers of an image."""

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "gelu": nn.GELU}


class MLP(nn.Sequential):
    """Class scores (N, num_classes) of images (N, 3, 32, 32) in [-1, 1]; without hidden layers it is softmax
    regression, one neuron for each class.

    Args:
        num_classes: width of the output.
        hidden: neurons of each hidden layer.
        activation: key of ACTIVATIONS.
        dropout: share of the hidden layers' outputs that is dropped in training.
        batch_norm: whether the inputs of the non-linearities are normalised.
    """

    def __init__(self, num_classes: int, hidden: Sequence[int], activation: str, dropout: float, batch_norm: bool):
        layers: list[nn.Module] = [nn.Flatten()]  # (N, 3072)
        inputs = PIXELS
        for neurons in hidden:
            # Normalisation comes before the non-linearity and makes the bias redundant (Ioffe and Szegedy 2015).
            layers.append(nn.Linear(inputs, neurons, bias=not batch_norm))  # (N, neurons)
            if batch_norm:
                layers.append(nn.BatchNorm1d(neurons))
            layers.append(ACTIVATIONS[activation]())
            if dropout:
                layers.append(nn.Dropout(dropout))
            inputs = neurons
        super().__init__(*layers, nn.Linear(inputs, num_classes))
