from __future__ import annotations

from typing import Any

import pytest
import torch

from cifar_zero.config import command_line
from cifar_zero.config.placement import ZeROConfig
from cifar_zero.config.recipe import Choice
from cifar_zero.config.run import Run
from cifar_zero.config.settings import make_settings
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.planning.formulas import STATE_TENSORS, Network, Weight, buckets, network_of, predicted
from cifar_zero.training.resolve import make_run

ADAM = Choice("adam")
MILLION = 10**6
LARGE = [Weight(2_520 * 2_520)] * 10
"""63.5 million parameters: stage 3 keeps none of them whole, and 1 to 9 ranks shard them evenly."""
ELEMENTS = 10 * 2_520 * 2_520


def bytes_each(strategy: str, ranks: int, precision: str, optimizer: Choice = ADAM) -> float:
    states = predicted(strategy, LARGE, ranks, precision, optimizer)
    assert states is not None
    return states.in_memory.total / ELEMENTS


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
    ],
)
def test_state_of_an_optimizer(name: str, options: dict[str, Any]):
    """The formula agrees with the number of tensors that torch's optimizer keeps per parameter."""
    parameter = torch.nn.Parameter(torch.ones(1_000))
    parameter.grad = torch.ones(1_000)
    optimizer = OPTIMIZERS[name](**options).build([parameter], "torch")
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value) and value.numel() == 1_000]
    assert bytes_each("baseline", 1, "32-true", Choice(name, options)) == 8 + 4 * len(kept)


def test_every_optimizer_has_a_tensor_count():
    assert {*STATE_TENSORS} == {*OPTIMIZERS}
    assert bytes_each("baseline", 1, "32-true", Choice("adam8bit")) == 10


def test_frozen_parameters_have_neither_gradient_nor_state():
    config = command_line.parse(
        ["--model", "vit_tiny", "--optimizer", "adam", "--trainable", "head.*", "--devices", "1"]
    )
    net = network_of(make_run(config))
    assert (net.elements, net.trained) == (5_362_378, 1_930)
    for ranks, strategy in ((1, "baseline"), (2, "deepspeed_stage_2")):
        states = predicted(strategy, net.weights, ranks, "32-true", ADAM)
        assert states is not None
        assert states.in_memory.parameters == net.elements * 4
        assert states.in_memory.gradients == net.trained * 4 // ranks
    states = predicted("deepspeed_stage_3", [Weight(10**6, trained=False)], 4, "32-true", ADAM)
    assert states is not None
    assert (states.in_memory.parameters, states.in_memory.gradients, states.in_memory.optimizer) == (10**6, 0, 0)


def test_small_layers_stay_whole_at_stage_3():
    states = predicted("deepspeed_stage_3", [Weight(100_000), Weight(100_002)], 2, "bf16-mixed", ADAM)
    assert states is not None
    assert states.in_memory.parameters == 2 * (100_000 + 100_002 // 2 + 100_000 // 2)


def test_experts_are_spread_over_ranks():
    def weights(ep_size: int) -> tuple[Weight, ...]:
        flags = ["--model", "vit_moe", "--model.num_experts", "[4]", "--model.ep_size", str(ep_size), "--devices", "4"]
        return network_of(make_run(command_line.parse([*flags, "--strategy", "deepspeed_stage_0"]))).weights

    whole, shared = (predicted("deepspeed_stage_0", weights(size), 4, "32-true", ADAM) for size in (1, 4))
    experts = sum(weight.elements for weight in weights(4) if weight.ranks_that_share == 4)
    assert whole is not None
    assert shared is not None
    assert experts > 7 * MILLION
    assert whole.in_memory.total - shared.in_memory.total == experts * 3 // 4 * 16


def test_switches_of_the_buckets():
    """In elements of bfloat16."""

    def held(strategy: str, **switches: Any) -> int:
        config = make_settings(devices=4, precision="bf16-mixed", zero=ZeROConfig(**switches))
        return buckets(Run.of(config, STRATEGIES[strategy], 10), Network((Weight(10**9),), 0)) // 2

    assert held("deepspeed_stage_2") == 50_000_000
    assert held("deepspeed_stage_2", reduce_bucket_size=10, overlap_comm=True) == 20
    assert held("deepspeed_stage_3", reduce_bucket_size=10) == 550_000_010
    assert held("deepspeed_stage_3", reduce_bucket_size=10, prefetch_bucket_size=7) == 500_000_017
