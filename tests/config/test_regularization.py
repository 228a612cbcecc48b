"""Label smoothing changes the training loss, but not the validation loss."""

import pytest
import torch
import torch.nn.functional as F

from cifar_module import CIFARModule
from cifar_zero.config.settings import make_settings


def test_labels_are_smoothed_only_in_training():
    module = CIFARModule(make_settings(label_smoothing=0.1), 10)
    module.configure_model()
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    classes = torch.randint(0, 10, (6,))
    scores = module(images)
    smoothed = 0.9 * F.one_hot(classes, 10) + 0.1 / 10
    torch.testing.assert_close(module.training_step((images, classes), 0), F.cross_entropy(scores, smoothed))
    module.validation_step((images, classes), 0)
    assert module.val_metrics.overall()["loss"] == pytest.approx(F.cross_entropy(scores, classes).item())
