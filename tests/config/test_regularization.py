"""Label smoothing, and refused values of the options against overfitting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cifar_module import CIFARModule
from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.config.settings import make_settings, settings_of
from cifar_zero.config.strategy_rules import check
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError


def module(label_smoothing: float) -> CIFARModule:
    made = CIFARModule(make_settings(label_smoothing=label_smoothing), 10)
    made.configure_model()
    return made


@pytest.mark.parametrize("soft", [False, True])
def test_labels_are_smoothed_only_in_training(soft: bool):
    made = module(0.1)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 32, 32), generator=generator, dtype=torch.uint8)
    classes = torch.randint(0, 10, (6,), generator=generator)
    shares = F.one_hot(classes, 10).float()
    if soft:  # as mixup gives them
        shares = 0.7 * shares + 0.3 * shares.roll(1, 0)
    scores = made(images)
    loss = made.training_step((images, shares if soft else classes), 0)
    by_hand = -((0.9 * shares + 0.1 / 10) * scores.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(loss, by_hand)
    assert torch.equal(loss, F.cross_entropy(scores, shares if soft else classes, label_smoothing=0.1))
    made.validation_step((images, classes), 0)
    assert made.val_metrics.overall()["loss"] == pytest.approx(F.cross_entropy(scores, classes).item())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--label_smoothing", "1"], "--label_smoothing must be at least 0 and under 1"),
        (["--ema", "1"], "--ema must be at least 0 and under 1"),
        (["--swa_from", "-0.1"], "--swa_from must be at least 0 and under 1"),
        (["--ema", "0.9", "--swa_from", "0.5"], "leave one of them out"),
        (["--early_stopping", "-1"], "--early_stopping must be at least 0"),
        (["--early_stopping", "2", "--data.val_fraction", "0"], "--early_stopping needs a validation"),
        (["--monitor", "val/f1", "--data.val_fraction", "0"], "--monitor needs a validation"),
        (["--save_top_k", "3", "--trainer.limit_val_batches", "0"], "--save_top_k needs a validation"),
        (["--monitor", "test/acc"], "--monitor: expected one of"),
        (["--early_stopping", "2", "--trainer.limit_val_batches", "0"], "--early_stopping needs a validation"),
    ],
)
def test_refused_by_the_command_line(flags: list[str], message: str):
    with pytest.raises(UsageError, match=message):
        command_line.parse(flags)


@pytest.mark.parametrize("strategy", ["fsdp2", "pipeline", "deepspeed_stage_3_offload_nvme"])
def test_weights_that_cannot_be_averaged_are_refused(strategy: str):
    with pytest.raises(UsageError, match=r"--swa_from.*use deepspeed_stage_3"):
        check(
            Run.of(
                make_settings(strategy=strategy, devices=2, accelerator="gpu", swa_from=0.5), STRATEGIES[strategy], 10
            )
        )


def test_the_configuration_of_an_older_run_has_none_of_it():
    older: dict[str, Any] = {"strategy": "ddp", "seed": 1}
    assert settings_of(older) == make_settings(strategy="ddp", seed=1)
