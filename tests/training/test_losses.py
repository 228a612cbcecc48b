"""Compares the losses of --loss with their definitions, and test-time augmentation with views that are made one by one.
Label smoothing changes the training loss, but not the validation loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_module import CIFARModule, averaged_scores
from cifar_zero.config.recipe import Views
from cifar_zero.config.settings import make_settings
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


def test_views_are_averaged():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), nn.Tanh())
    seen = torch.rand(5, 3, 32, 32) * 2 - 1
    before, after = [1, *range(31)], [*range(1, 32), 30]  # the border's neighbour pixel is reflected into the image
    up_left, down_right = seen[:, :, before][:, :, :, before], seen[:, :, after][:, :, :, after]
    centre, *moved = ((net(view) + net(view.flip(3))) / 2 for view in (seen, up_left, down_right))
    expected: dict[Views, Tensor] = {"none": net(seen), "mirror": centre}
    expected["mirror_translate"] = centre / 2 + sum(moved) / 4
    for views, scores in expected.items():
        torch.testing.assert_close(averaged_scores(net, seen, views), scores, rtol=0, atol=1e-6)
