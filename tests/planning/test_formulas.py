from typing import Any

import pytest
import torch

from cifar_zero import models
from cifar_zero.config.recipe import Choice
from cifar_zero.config.run import Run
from cifar_zero.config.settings import make_settings
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.optimizers.groups import parameter_groups
from cifar_zero.planning.formulas import Network, Weight, network_of, predicted

LARGE = Network((Weight(2_520 * 2_520, states=2),) * 10, blocks=())
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
