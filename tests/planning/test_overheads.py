"""The formula of the bytes that a rank sends in a step; tests/distributed/test_wire.py measures them on a link."""

from __future__ import annotations

from typing import Any

import pytest

from cifar_zero.config.placement import ZeROConfig
from cifar_zero.config.run import Run
from cifar_zero.config.settings import make_settings
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.planning.model_states import Network, Weight, network_of_size
from cifar_zero.planning.overheads import buckets, sent_bytes
from cifar_zero.planning.survey import PLANNED

LARGE = Network((Weight(10**9, 10**9),), 0)
"""One large weight: half of it is still gathered when the backward pass reaches it."""

SMALL = Network((Weight(10**6, 10**6), Weight(5 * 10**4, 5 * 10**4)), 5 * 10**5)
"""The second one stays whole at stage 3."""


def sent(strategy: str, network: Network, nodes: int = 4, precision: str = "bf16-mixed", **options: object) -> float:
    """Returns the bytes sent per parameter, without the factor (N - 1)/N."""
    config = make_settings(devices=1, num_nodes=nodes, accelerator="gpu", precision=precision, **options)  # pyright: ignore[reportArgumentType]
    return sent_bytes(Run.of(config, STRATEGIES[strategy], 10), network) / network.elements / (nodes - 1) * nodes


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
def test_numbers_sent_by_a_large_model(strategy: str, numbers: float, accumulated: float) -> None:
    """Numbers are bfloat16, 2 bytes each; `accumulated` is for four micro-batches."""
    assert sent(strategy, LARGE) == pytest.approx(2 * numbers)
    assert sent(strategy, LARGE, accumulate=4) == pytest.approx(2 * accumulated)


def test_formats() -> None:
    assert sent("ddp", LARGE) == pytest.approx(8)  # autocast: its weights and gradients are float32
    assert sent("ddp", LARGE, precision="bf16-true") == pytest.approx(4)
    assert sent("deepspeed_stage_0", LARGE, precision="32-true") == pytest.approx(8)
    # fsdp2 gathers in bfloat16, the blocks twice, and reduces in float32.
    assert sent("fsdp2", SMALL) == pytest.approx(2 * 2 + 4)
    assert sent("fsdp2", network_of_size(10**9)) == pytest.approx(2 * 2 + 4)  # cifar-zero plan --parameters
    assert sent("fsdp2", Network((Weight(10**6, 10**6),), 10**6)) == pytest.approx(2 + 4)  # a model without blocks


def test_parameters_that_stay_whole_are_gathered_once_in_a_step() -> None:
    assert sent("deepspeed_stage_3", SMALL, accumulate=4) == pytest.approx(2 * (4 * 1e6 + 5e4) / 1.05e6 + 2 * 4)
    every = ZeROConfig(param_persistence_threshold=0)
    assert sent("deepspeed_stage_3", SMALL, accumulate=4, zero=every) == pytest.approx(2 * 4 + 2 * 4)


def test_gloo_scatters_by_an_all_reduce() -> None:
    config = make_settings(devices=1, num_nodes=2, accelerator="cpu", precision="32-true")
    assert sent_bytes(Run.of(config, STRATEGIES["deepspeed_stage_3"], 10), SMALL) == (1 + 2) * SMALL.elements * 4 // 2


def test_frozen_and_expert_parameters_send_less() -> None:
    frozen = Network((Weight(10**6, 10), Weight(10**6, 10, trained=False)), 0)
    assert sent("ddp", frozen) == pytest.approx(4)  # the same over twice the parameters
    experts = Network((Weight(8 * 10**6, 10, ranks_that_share=4),), 0)
    assert sent("deepspeed_stage_0", experts) == 0  # no two of the four ranks hold the same experts


def test_one_rank_sends_nothing() -> None:
    assert [sent_bytes(Run.of(make_settings(devices=1), STRATEGIES[name], 10), LARGE) for name in PLANNED] == [0] * len(
        PLANNED
    )


def test_switches_of_the_buckets() -> None:
    """In elements of bfloat16."""

    def held(strategy: str, **switches: Any) -> int:
        config = make_settings(devices=4, precision="bf16-mixed", zero=ZeROConfig(**switches))
        return buckets(Run.of(config, STRATEGIES[strategy], 10), LARGE) // 2

    assert held("deepspeed_stage_2") == 50_000_000
    assert held("deepspeed_stage_2", reduce_bucket_size=10, overlap_comm=True) == 20
    assert held("deepspeed_stage_3", reduce_bucket_size=10) == 550_000_010
    assert held("deepspeed_stage_3", reduce_bucket_size=10, prefetch_bucket_size=7) == 500_000_017
