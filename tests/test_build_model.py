from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cifar_module import CIFARModule
from cifar_zero.build_model import check_patterns, freeze, on_meta
from cifar_zero.config.recipe import Choice, Recipe
from cifar_zero.config.settings import make_settings
from cifar_zero.core.errors import UsageError


def test_a_pattern_without_a_match_is_refused():
    net = on_meta(Recipe(model=Choice("vit_tiny"), trainable=["head"]), 10)
    with pytest.raises(
        UsageError, match=r"--trainable head matches no parameter .* did you mean head\.\w+ or "
    ) as error:
        check_patterns(net, ["head"], ep_size=1)
    assert "\n" not in str(error.value)


def test_experts_spread_over_ranks_are_all_trained_or_all_frozen():
    model = Choice("net_moe", {"num_experts": [4], "ep_size": 2})
    one, all_of_them = ["fc3.0.experts.1.*"], ["fc3.0.experts.*"]
    with pytest.raises(UsageError, match=r"train all or none of fc3\.0\.experts\.\*\.weight"):
        check_patterns(on_meta(Recipe(model=model, trainable=one), 10), one, ep_size=2)
    check_patterns(on_meta(Recipe(model=model, trainable=all_of_them), 10), all_of_them, ep_size=2)


class WithoutCurves(CIFARModule):
    """Logs nothing, because there is no data module."""

    def on_validation_epoch_end(self) -> None:
        pass


def test_frozen_batch_norms_keep_their_statistics():
    """The fit has validations, after each of which Lightning sets the model back to training mode."""
    module = WithoutCurves(make_settings(), 10)
    norms = [nn.BatchNorm2d(4), nn.BatchNorm2d(4)]
    net = module.net = nn.Sequential(nn.Conv2d(3, 4, 3), norms[0], norms[1], nn.Flatten(), nn.LazyLinear(10))
    net.eval()(torch.zeros(1, 3, 32, 32))  # for the lazy layer's shape
    net.train()
    freeze(net, ["2.*", "4.*"])
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    loader = DataLoader(TensorDataset(images, torch.arange(16) % 10), 4)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", max_epochs=2, val_check_interval=2, **quiet)
    trainer.fit(module, loader, loader)
    assert [int(norm.num_batches_tracked) for norm in norms] == [0, 8]  # pyright: ignore
    assert torch.equal(norms[0].running_mean, torch.zeros(4))  # pyright: ignore
