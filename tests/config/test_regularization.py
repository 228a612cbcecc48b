"""Label smoothing is of training only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cifar_module import CIFARModule
from cifar_zero.config.settings import make_settings


@pytest.mark.parametrize("soft", [False, True])
def test_labels_are_smoothed_only_in_training(soft: bool):
    module = CIFARModule(make_settings(label_smoothing=0.1), 10)
    module.configure_model()
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 32, 32), generator=generator, dtype=torch.uint8)
    classes = torch.randint(0, 10, (6,), generator=generator)
    shares = F.one_hot(classes, 10).float()
    if soft:  # as mixup gives them
        shares = 0.7 * shares + 0.3 * shares.roll(1, 0)
    scores = module(images)
    loss = module.training_step((images, shares if soft else classes), 0)
    by_hand = -((0.9 * shares + 0.1 / 10) * scores.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss, by_hand)
    module.validation_step((images, classes), 0)
    assert module.val_metrics.overall()["loss"] == pytest.approx(F.cross_entropy(scores, classes).item())
