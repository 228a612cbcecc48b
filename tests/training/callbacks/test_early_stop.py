"""Early stopping: training ends when val/acc stops improving."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cifar_zero.config.flags import Choice, Config
from cifar_zero.training.callbacks.early_stop import EarlyStop

STUCK = Config(optimizer=Choice("sgd", {"lr": 0.0}), batch_size=8, epochs=9)


def test_training_ends_after_patience_validations_and_prints_it(
    fit: Callable[..., Any], capfd: pytest.CaptureFixture[str]
):
    done = fit(STUCK, 16, EarlyStop(2))
    assert done.trainer.current_epoch == 3  # the first one is the best
    accuracy = done.module.val_metrics.overall()["acc"]
    message = f"early stopping after epoch 3: val/acc has not exceeded {accuracy:.2%} in 2 validations"
    assert message in capfd.readouterr().err


def test_a_resumed_run_continues_counting_with_its_own_patience(fit: Callable[..., Any]):
    before = fit(STUCK, 16, EarlyStop(2)).observer(EarlyStop).state_dict()
    for patience, epochs in ((1, 0), (2, 0), (4, 2)):
        again = EarlyStop(patience)
        again.load_state_dict(before)
        assert fit(STUCK, 16, again).trainer.current_epoch == epochs


def test_a_run_that_ends_before_its_first_validation(fit: Callable[..., Any]):
    done = fit(replace(STUCK, max_steps=1), 16, EarlyStop(2))
    assert done.trainer.global_step == 1
    assert done.observer(EarlyStop).wait_count == 0


def test_a_better_accuracy_resets_the_count():
    again = EarlyStop(2)
    for accuracy, stop in ((0.5, False), (0.5, False), (0.6, False), (0.4, False), (0.6, True)):
        assert again._evaluate_stopping_criteria(torch.tensor(accuracy))[0] is stop
