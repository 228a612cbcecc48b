from typing import Any

import pytest
import torch

from cifar_zero import models
from cifar_zero.config.recipe import Choice
from cifar_zero.config.run import Run
from cifar_zero.config.settings import make_settings
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.optimizers.groups import parameter_groups
from cifar_zero.planning import formulas
from cifar_zero.planning.activations import ActivationTracker
from cifar_zero.planning.formulas import Network, Weight, network_of, predicted

LARGE = Network((Weight((2_520, 2_520), states=2),) * 10, blocks=())
"""63.5 million parameters: stage 3 keeps none of them whole, and 1 to 9 ranks shard them evenly."""
ELEMENTS = 10 * 2_520 * 2_520


def run_of(**settings: Any) -> Run:
    return Run(**vars(make_settings(**settings)), num_classes=10)


def bytes_each(strategy: str, ranks: int, precision: str) -> float:
    states = predicted(run_of(strategy=strategy, devices=ranks, precision=precision, optimizer=Choice("adam")), LARGE)
    return (states.device.total + states.host.total) / ELEMENTS


@pytest.mark.parametrize("ranks", [1, 2, 8, 60])
def test_mixed_precision_adam_takes_what_the_paper_says(ranks: int):
    """Rajbhandari et al. 2020, section 3.1 and figure 1. At stage 1 the paper counts the gradients before they are
    reduced; 2/N of them are left at the update."""
    assert bytes_each("deepspeed_stage_0", ranks, "bf16-mixed") == 16
    assert bytes_each("deepspeed_stage_1", ranks, "bf16-mixed") == pytest.approx(4 + 12 / ranks - (2 - 2 / ranks))
    assert bytes_each("deepspeed_stage_2", ranks, "bf16-mixed") == pytest.approx(2 + 14 / ranks)
    assert bytes_each("deepspeed_stage_3", ranks, "16-mixed") == pytest.approx(16 / ranks)


def test_float32_has_master_weights_only_under_deepspeed():
    for name in ("baseline", "ddp", "deepspeed_stage_0"):
        assert bytes_each(name, 2, "32-true") == 16
    assert bytes_each("deepspeed_stage_1", 2, "32-true") == bytes_each("deepspeed_stage_2", 2, "32-true") == 4 + 16 / 2
    assert bytes_each("deepspeed_stage_3", 2, "32-true") == 20 / 2
    assert bytes_each("fsdp2", 2, "32-true") == bytes_each("fsdp2", 2, "bf16-mixed") == 16 / 2
    assert bytes_each("baseline", 1, "bf16-mixed") == 16  # autocast
    assert bytes_each("baseline", 1, "bf16-true") == 8


def test_fsdp2_shards_whole_rows():
    network = Network((Weight((768, 100), states=0), Weight((10,), states=0)), blocks=())
    states = predicted(run_of(strategy="fsdp2", devices=512, optimizer=Choice("sgd")), network).device
    assert states.parameters == 4 * (2 * 100 + 1)


def test_a_rank_has_gradients_and_an_average_of_its_own_experts_only():
    network = Network((Weight((1_000,), states=2, ranks_that_share=4),), blocks=())
    runs = {
        stage: run_of(
            strategy=f"deepspeed_stage_{stage}", devices=4, precision="bf16-mixed", ema=0.9, accelerator="gpu"
        )
        for stage in (0, 1)
    }
    assert formulas.update(runs[0], network) == 250 * 2 * 4
    assert formulas.average(runs[0], network) == 250 * 2 * 4
    assert formulas.buckets(runs[1], network) == 1_000 * 2 + 250 * 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("sgd", {}), ("sgd", {"weight_decay": 0.1}), ("adam", {}), ("adamw", {}), ("rmsprop", {})),
        *(("adagrad", {}), ("adadelta", {}), ("lion", {}), ("muon", {}), ("muon_sgd", {})),
    ],
)
def test_temporary_tensors_of_an_update(name: str, options: dict[str, Any]):
    """The formula agrees with what an update of all parameters together allocates, as on a GPU."""
    net, optimizer = models.build("vit_tiny", 10), OPTIMIZERS[name](**options)
    groups = [{**group, "foreach": True} for group in parameter_groups(optimizer, dict(net.named_parameters()))]
    tracker = ActivationTracker(net)
    built = optimizer.build(groups, "torch")
    if name == "adagrad":  # TorchAdagrad leaves the choice to torch, which takes the device's
        built = torch.optim.Adagrad(groups)
    built.step()
    before = tracker.peak = tracker.now
    with tracker:
        built.step()
    elements = sum(parameter.numel() for parameter in net.parameters())
    run = run_of(strategy="fsdp2", accelerator="gpu", devices=1, precision="32-true", optimizer=Choice(name, options))
    expected = formulas.update(run, Network((Weight((elements,), states=0),), blocks=()))
    assert (tracker.peak - before) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize(
    ("optimizer", "settings", "numbers"),
    [
        ("adamw", {"accelerator": "gpu"}, 0),  # torch's fused optimizer
        ("adamw", {"accelerator": "gpu", "gradient_clip_val": 1.0}, 0),
        ("adamw", {"accelerator": "gpu", "gradient_clip_val": 1.0, "precision": "bf16-mixed"}, 1),
        ("adamw", {"accelerator": "gpu", "precision": "16-mixed"}, 1),
        ("adamw", {"accelerator": "cpu"}, 0),
        ("lion", {"accelerator": "cpu"}, 1),
        ("lion", {"accelerator": "gpu", "strategy": "deepspeed_stage_1"}, (1 + 1) / 2),
    ],
)
def test_when_an_update_has_temporary_tensors(optimizer: str, settings: dict[str, Any], numbers: float):
    run = run_of(
        **{"strategy": "ddp", "devices": 2, "precision": "32-true", "optimizer": Choice(optimizer), **settings}
    )
    assert formulas.update(run, LARGE) == 4 * numbers * ELEMENTS


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("sgd", {"momentum": 0.0}), ("sgd", {"momentum": 0.9}), ("adamw", {}), ("lion", {}), ("adagrad", {})),
        *(("rmsprop", {"momentum": 0.9, "centered": True}), ("rmsprop", {}), ("adadelta", {})),
        *(("muon", {}), ("muon", {"momentum": 0.0}), ("muon_sgd", {}), ("muon_sgd", {"sgd_momentum": 0.0})),
    ],
)
def test_state_of_an_optimizer(name: str, options: dict[str, Any]):
    """The formula agrees with the numbers that the optimizer keeps. The model is Net, which has matrices, filters and
    biases."""
    net, optimizer = models.build("net", 10), OPTIMIZERS[name](**options)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    built = optimizer.build(parameter_groups(optimizer, dict(net.named_parameters())), "torch")
    built.step()
    kept = [value for state in built.state.values() for value in state.values()]
    elements = sum(value.numel() for value in kept if torch.is_tensor(value) and value.dim() > 0)
    run = run_of(strategy="baseline", devices=1, optimizer=Choice(name, options))
    assert predicted(run, network_of(run)).device.optimizer == 4 * elements
