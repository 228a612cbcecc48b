"""What a rank sends in a step, by formula; tests/distributed/test_wire.py counts it on a link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from config import Config
from errors import UsageError
from planning import machine
from planning.communication import Traffic, traffic
from planning.model_states import Weight
from planning.network import Network, of_size
from strategies import STRATEGIES

LARGE = Network((Weight(10**9, 10**9),), 0)
"""In one piece: half of it is still there when the backward pass comes to it."""

SMALL = Network((Weight(10**6, 10**6), Weight(5 * 10**4, 5 * 10**4)), 5 * 10**5, (5 * 10**5, 4 * 10**5))
"""The second one stays whole at stage 3."""


def sent(strategy: str, network: Network, nodes: int = 4, precision: str = "bf16-mixed", **options: object) -> float:
    """Bytes for each parameter, without the (N - 1)/N."""
    config = replace(Config(), devices=1, num_nodes=nodes, accelerator="gpu", precision=precision, **options)  # pyright: ignore[reportArgumentType]
    found = traffic(STRATEGIES[strategy], config, network)
    assert found is not None
    return found.sent_bytes / network.elements / (nodes - 1) * nodes


@pytest.mark.parametrize(
    ("strategy", "numbers", "accumulated"),
    [
        ("deepspeed_stage_0", 2, 2),
        ("deepspeed_stage_1", 3, 3),
        ("deepspeed_stage_2", 3, 9),
        ("deepspeed_stage_2_offload", 3, 9),
        ("deepspeed_stage_3", 2.5, 10),
    ],
)
def test_numbers_of_a_large_network(strategy: str, numbers: float, accumulated: float) -> None:
    """In bfloat16, 2 bytes each; and of four micro-batches."""
    assert sent(strategy, LARGE) == pytest.approx(2 * numbers)
    assert sent(strategy, LARGE, accumulate=4) == pytest.approx(2 * accumulated)


def test_formats() -> None:
    assert sent("ddp", LARGE) == pytest.approx(8)  # autocast: its weights and gradients are float32
    assert sent("ddp", LARGE, precision="bf16-true") == pytest.approx(4)
    assert sent("deepspeed_stage_0", LARGE, precision="32-true") == pytest.approx(8)
    # fsdp2 gathers in bfloat16, the blocks twice, and adds up in float32.
    assert sent("fsdp2", SMALL) == pytest.approx(2 * (1 + 9e5 / 1.05e6) + 4)
    assert sent("fsdp2", of_size(10**9)) == pytest.approx(2 * 2 + 4)  # plan.py --parameters: all in blocks
    assert sent("fsdp2", Network((Weight(10**6, 10**6),), 10**6)) == pytest.approx(2 + 4)  # a network without any


def test_parameters_that_stay_whole_are_gathered_once_in_a_step() -> None:
    assert sent("deepspeed_stage_3", SMALL, accumulate=4) == pytest.approx(2 * (4 * 1e6 + 5e4) / 1.05e6 + 2 * 4)


def test_gloo_scatters_by_an_all_reduce() -> None:
    config = replace(Config(), devices=1, num_nodes=2, accelerator="cpu", precision="32-true")
    found = traffic(STRATEGIES["deepspeed_stage_3"], config, SMALL)
    assert found is not None
    assert found.sent_bytes == (1 + 2) * SMALL.elements * 4 // 2


def test_frozen_and_expert_parameters_send_less() -> None:
    frozen = Network((Weight(10**6, 10), Weight(10**6, 10, trained=False)), 0)
    assert sent("ddp", frozen) == pytest.approx(4)  # the same over twice the parameters
    experts = Network((Weight(8 * 10**6, 10, ranks_that_share=4),), 0)
    assert sent("deepspeed_stage_0", experts) == 0  # four ranks: nobody has the same ones


def test_one_rank_sends_nothing_and_cut_layers_have_no_formula() -> None:
    assert traffic(STRATEGIES["ddp"], replace(Config(), devices=1), LARGE) == Traffic(0, 0)
    assert traffic(STRATEGIES["pipeline"], replace(Config(), devices=2), LARGE) is None


def test_seconds() -> None:
    assert Traffic(10**9, 10).seconds(10**8) == 10


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100Gbit/s", 12.5e9), ("200mbit", 25e6), ("12.5GB/s", 12.5e9), ("1.5 TB", 1.5e12), ("9600bit/s", 1200)],
)
def test_rates(text: str, rate: float) -> None:
    assert machine.bytes_per_second(text, "--bandwidth") == rate


@pytest.mark.parametrize("text", ["", "fast", "100", "100Gb/s", "-1GB/s", "0GB/s", "nanGB/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="give a rate such as 100Gbit/s"):
        machine.bytes_per_second(text, "--bandwidth")
