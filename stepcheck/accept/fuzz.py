"""Draws the random cases of `stepcheck accept --fuzz`."""

import random
from collections.abc import Sequence
from typing import Any

from stepcheck.accept.cases import ADAMW, CLIP, Case
from stepcheck.accept.release import unknown
from stepcheck.strategies import ZERO

DRAWN_OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {},
    ADAMW,
    *({"optimizer": name, "options": {"lr": 0.005}} for name in ("Adam", "NAdam", "RMSprop")),
)

SIZES = (100, 600, 3000, 20000, 100000)  # elements; from a small tensor to more than the model

DRAWN_KEYS: tuple[tuple[str, tuple[int, ...], tuple[Any, ...]], ...] = (
    ("reduce_bucket_size", (1, 2, 3), SIZES),
    ("contiguous_gradients", (1, 2, 3), (False,)),
    ("overlap_comm", (1, 2, 3), (True, False)),
    ("reduce_scatter", (1, 2, 3), (False,)),
    ("allgather_bucket_size", (1, 2), SIZES),
    ("round_robin_gradients", (1, 2), (True,)),
    ("sub_group_size", (3,), SIZES),
    ("stage3_prefetch_bucket_size", (3,), SIZES),
    ("stage3_param_persistence_threshold", (3,), (0, *SIZES)),
    ("stage3_max_live_parameters", (3,), SIZES),
    ("stage3_max_reuse_distance", (3,), SIZES),
    ("stage3_use_all_reduce_for_fetch_params", (3,), (True,)),
)
"""Keys of "zero_optimization" in random cases, the stages that have them, and their values."""


def random_cases(count: int, strategies: Sequence[str], ranks: int) -> list[Case]:
    """Returns `count` random cases, which are the same in each call."""
    return [_random_case(seed, strategies, ranks) for seed in range(count)]


def _random_case(seed: int, strategies: Sequence[str], ranks: int) -> Case:
    draw = random.Random(seed)
    strategy = draw.choice(strategies)
    stage, _ = ZERO.get(strategy, (None, False))
    experts = stage in (0, 1, 2) and draw.random() < 0.2
    precision = draw.choice(("float32", "bfloat16"))
    return Case(
        "random",
        "random options",
        strategy,
        ranks,
        seed,
        model="experts" if experts else "edges",
        ep_size=draw.choice((1, 2)) if experts and ranks % 2 == 0 else 1,
        precision=precision,
        accumulate=draw.choice((1, 2, 4)),
        clip=0.0 if experts else draw.choice((0.0, CLIP)),  # DeepSpeed's norm of experts is another one
        syncs_each=draw.random() < 0.5,
        config={} if stage is None else _random_config(draw, stage, experts, precision == "bfloat16"),
        **draw.choice(DRAWN_OPTIMIZERS),
    )


def _random_config(draw: random.Random, stage: int, experts: bool, bfloat16: bool) -> dict[str, Any]:
    refused = ("reduce_scatter", "contiguous_gradients") if experts else ()  # by DeepSpeed
    drawn = [each for each in DRAWN_KEYS if stage in each[1] and each[0] not in refused and draw.random() < 0.4]
    own = {key: draw.choice(values) for key, _, values in drawn}
    config: dict[str, Any] = {"zero_optimization": own} if own else {}
    others: list[dict[str, Any]] = [{"communication_data_type": draw.choice(("fp32", "bf16"))}]
    if stage and bfloat16:
        others.append({"data_types": {"grad_accum_dtype": "fp32"}})
    if stage < 3:
        others.append({"gradient_allreduce_op": "sum"})
    if stage == 0 or not own.get("reduce_scatter", True):
        others += [{"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}]
    if not own.get("overlap_comm"):
        others.append({"managed_gradient_accumulation": False})
    for other in others:
        if draw.random() < 0.25 and not unknown(other):
            config |= other
    return config
