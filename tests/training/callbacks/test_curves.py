"""Tests the training curves, also of mixtures of experts, the steps at which their points are due, and what EngineInfo
counts in a fit. tests/commands/test_train.py reads its other values in the metrics.json of a run."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.distributions import Categorical

from cifar_zero.comparison.reading import read_losses
from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import Settings, make_settings
from cifar_zero.models.moe import Routing
from cifar_zero.schedules import WarmupLR
from cifar_zero.strategies.hooks import Hooks
from cifar_zero.training.callbacks.curves import Experts, TrainingCurves
from cifar_zero.training.callbacks.engine import EngineInfo
from tests.support.helpers import curve, train_all

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


NUM_EXPERTS = [2, 4]


class ExpertWitness(Callback):
    """Records, at every micro-batch, how each mixture routes its tokens."""

    def __init__(self) -> None:
        self.routings: list[list[Routing]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.routings.append([gate.routing for gate in module.gates])


def test_the_curves_agree_with_the_routings(fit: Callable[..., Any]):
    """The run has ten optimizer steps of two micro-batches of eight images. The capacity of the experts is half of the
    tokens."""
    routed = ExpertWitness()
    model = Choice("net_moe", {"num_experts": NUM_EXPERTS, "top_k": 2, "capacity_factor": 0.5})
    settings = make_settings(epochs=2, batch_size=16, accumulate=2, log_interval=4, model=model)
    run = fit(settings, 80, Experts(), routed)
    assert len(routed.routings) == 20
    for (number, num_experts), (first, last) in product(enumerate(NUM_EXPERTS), ((0, 4), (4, 8), (8, 10))):
        seen = [of_all[number] for of_all in routed.routings[2 * first : 2 * last]]
        sent_to = torch.cat([routing.experts for routing in seen], dim=1)
        expected = {
            "dropped": (sent_to == -1).double().mean(),
            "load_balance_loss": torch.stack([routing.load_balance_loss for routing in seen]).mean(),
            "gate_entropy": Categorical(seen[-1].probabilities.double()).entropy().mean() / math.log(num_experts),
        }
        assert expected["dropped"] > 0  # otherwise this would test nothing
        for name, value in expected.items():
            points = run.points(f"moe/{name}/mixture_{number}")
            assert points[last] == pytest.approx(value.item(), rel=1e-6), name
            assert list(points) == list(run.points("train/loss")) == [4, 8, 10]
        for expert in range(num_experts):
            tokens = run.points(f"moe/tokens/mixture_{number}/expert_{expert}")
            assert tokens[last] == (sent_to == expert).sum().item() / (last - first)


@pytest.mark.distributed
def test_two_ranks_count_all_tokens(small_data: list[str], tmp_path: Path):
    options = ["--model", "net_moe", "--model.num_experts", "[2]", "--model.capacity_factor", "2"]
    length = ["--batch_size", "32", "--max_steps", "3", "--log_interval", "2", "--data.val_fraction", "0"]
    train_all({tmp_path: [*small_data, *options, *length, "--devices", "2", "--accelerator", "cpu"]})
    first, second = (curve(tmp_path, f"moe/tokens/mixture_0/expert_{expert}") for expert in range(2))
    assert {step: first[step] + second[step] for step in first} == {2: 32, 3: 32}
    assert curve(tmp_path, "moe/dropped/mixture_0") == {2: 0, 3: 0}
    for name in ("load_balance_loss", "gate_entropy"):
        assert curve(tmp_path, f"moe/{name}/mixture_0") == pytest.approx({2: 1, 3: 1}, abs=0.2)


def test_steps_that_the_gradient_scaler_skips_are_counted(fit: Callable[..., Any]):
    """The run uses float16 as on a GPU. The scaler halves its scale whenever it skips a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    run = fit(make_settings(epochs=1, batch_size=8), 80, plugins=plugins, precision=None)
    totals = run.observer(EngineInfo).totals_of_run
    assert (totals["compute_dtype"], totals["parameter_dtype"]) == ("float16", "float32")
    assert 0 < totals["skipped_steps"] == 24 - math.log2(scaler.get_scale()) < 10


def test_memory_that_tensors_share_counts_once():
    layer = torch.nn.Linear(8, 8, bias=False)
    layer.tied = layer.weight.data.view(64)  # pyright: ignore
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    optimizer.state[layer.weight]["alias"] = layer.tied
    optimizer.state[layer.weight]["momentum_buffer"] = torch.zeros(8, 8)
    assert Hooks().state_bytes(layer, optimizer) == (256, 0, 256)
