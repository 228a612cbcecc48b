"""Compares the losses of --loss with their definitions."""

import pytest
import torch

from cifar_zero.data.dataset import IGNORED
from cifar_zero.training.metrics import loss

SCORES = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.3, -2.0], [1.0, 1.0, 1.0]])
LABELS = torch.tensor([0, 2, IGNORED])
SHARES = torch.tensor([[1.0, 0, 0], [0, 0, 1]])
PROBABILITY = SCORES[:2].sigmoid()

EXPECTED = {
    "cross_entropy": -SCORES[:2].log_softmax(dim=1)[[0, 1], [0, 2]],
    "mse": ((SCORES[:2] - SHARES) ** 2).sum(dim=1),
    "bce": -(SHARES * PROBABILITY.log() + (1 - SHARES) * (1 - PROBABILITY).log()).sum(dim=1),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_equals_its_definition(name):
    assert torch.allclose(loss(name, SCORES, LABELS, reduction="none"), torch.tensor([*EXPECTED[name], 0.0]))
    hard = loss(name, SCORES, LABELS)
    assert torch.allclose(hard, EXPECTED[name].mean())
    assert torch.allclose(loss(name, SCORES[:2], SHARES), hard)
    smooth = loss(name, SCORES[:2], SHARES * 0.7 + 0.1)
    assert torch.allclose(loss(name, SCORES[:2], LABELS[:2], label_smoothing=0.3), smooth)
