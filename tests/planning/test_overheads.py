from __future__ import annotations

from typing import Any

from cifar_zero.config.placement import ZeROConfig
from cifar_zero.config.run import Run
from cifar_zero.config.settings import make_settings
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.planning.model_states import Network, Weight
from cifar_zero.planning.overheads import buckets


def test_switches_of_the_buckets() -> None:
    """In elements of bfloat16."""

    def held(strategy: str, **switches: Any) -> int:
        config = make_settings(devices=4, precision="bf16-mixed", zero=ZeROConfig(**switches))
        return buckets(Run.of(config, STRATEGIES[strategy], 10), Network((Weight(10**9),), 0)) // 2

    assert held("deepspeed_stage_2") == 50_000_000
    assert held("deepspeed_stage_2", reduce_bucket_size=10, overlap_comm=True) == 20
    assert held("deepspeed_stage_3", reduce_bucket_size=10) == 550_000_010
    assert held("deepspeed_stage_3", reduce_bucket_size=10, prefetch_bucket_size=7) == 500_000_017
