"""Tests the training curves, and the steps at which their points are due."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from cifar_zero.comparison.reading import read_losses
from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import Settings, make_settings
from cifar_zero.schedules import WarmupLR
from cifar_zero.training.callbacks.curves import TrainingCurves
from cifar_zero.training.callbacks.engine import EngineInfo

Fit = Callable[..., Any]


class Witness(Callback):
    """Records at every micro-batch the values that the curves summarise."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item() * trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in module.parameters()]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())


def config(**changes: Any) -> Settings:
    """Returns a configuration of ten optimizer steps in two epochs of 40 images. It has a point every 4 steps, and a
    changing learning rate."""
    schedule = Choice("warmup_lr", {"warmup_num_steps": 20, "warmup_type": "linear"})
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "accumulate": 2, "log_interval": 4, "schedule": schedule}
    return make_settings(**{**options, **changes})


def test_the_curves_are_means_over_the_log_interval(fit: Fit):
    witness = Witness()
    run = fit(config(), 40, witness)
    losses = torch.tensor(witness.losses, dtype=torch.float64)
    assert len(losses) == 20
    expected = {4: losses[:8].mean(), 8: losses[8:16].mean(), 10: losses[16:].mean()}
    assert run.points("train/loss") == pytest.approx({step: mean.item() for step, mean in expected.items()}, rel=1e-6)
    assert run.points("train/grad_norm") == pytest.approx({s: witness.norms[s - 1] for s in (4, 8, 10)}, rel=1e-6)
    rates = {step: WarmupLR(20, "linear").rate(step - 1, 0.001) for step in (4, 8, 10)}
    assert run.points("train/learning_rate") == pytest.approx(rates, rel=1e-6)
    assert run.points("train/epoch") == pytest.approx({4: 0.8, 8: 1.6, 10: 2.0})
    steps = losses.view(10, 2).mean(dim=1).tolist()
    assert read_losses(run.folder / "losses.csv") == dict(enumerate(steps, 1))  # to the bit
    peak_bytes = run.observer(EngineInfo).totals_of_run["mem/peak_rank_bytes"][0]
    assert 1e9 * run.points("mem/peak_gb")[10] == pytest.approx(peak_bytes, rel=0.01)


def test_a_sanity_check_is_not_a_validation(fit: Fit, capfd: pytest.CaptureFixture[str]):
    run = fit(config(max_steps=1), 40, num_sanity_val_steps=1)
    assert run.observer(TrainingCurves).totals_of_run["val/acc"] is None
    assert "val/acc" not in capfd.readouterr().err


@pytest.mark.usefixtures("own_process_group")
def test_deepspeeds_stages_log_the_curves_of_the_baseline(fit: Fit):
    clipped = {"gradient_clip_val": 0.2, "optimizer": Choice("adam", {"lr": 0.01})}
    baseline = fit(config(**clipped), 40)
    assert max(baseline.points("train/grad_norm").values()) > 0.2  # or there would be nothing to clip
    for stage in (0, 1, 3):  # stages 1 and 2 have the same optimizer
        run = fit(config(strategy=f"deepspeed_stage_{stage}", **clipped), 40)
        for tag in ("train/grad_norm", "train/loss", "train/learning_rate", "train/epoch"):
            assert run.points(tag) == pytest.approx(baseline.points(tag), rel=1e-5), f"stage {stage}, {tag}"
        effective = run.observer(EngineInfo).totals_of_run
        assert (effective["compute_dtype"], effective["skipped_steps"]) == ("float32", 0)
        assert effective.get("reduce_bucket_size") == (62006 if stage else None)
        assert torch.nn.functional.linear.__name__ == "linear"  # ZeRO 3 replaces it while it trains
