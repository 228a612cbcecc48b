"""`cifar-zero compare --acceptance --fuzz N` trains cases under random placements, to find what the fixed rows miss."""

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Any

from cifar_zero.comparison.cases import ADAMW, CLIP, DEFAULT, EDGE_CASES, EXPERTS, FALLING, NET, SGD, WARMUP, make_case
from cifar_zero.comparison.result import Variant
from cifar_zero.config.placement import ComputeOptions, OffloadConfig, ZeROConfig
from cifar_zero.core.errors import UsageError

RECIPES = ((EDGE_CASES, "32-true"), (NET, "32-true"), (EXPERTS, "32-true"), (NET, "bf16-mixed"))
"""Models, each with a precision in which rounding is small enough for most of its gradients to be judged."""

OPTIMIZERS = (SGD, ADAMW, "--optimizer adam", "--optimizer lion", "--optimizer adagrad")
SECTIONS: dict[str, Any] = {"zero.": ZeROConfig, "offload.": OffloadConfig, "": ComputeOptions}
LEFT_OUT = {"compile", "cuda_graphs", "activation_checkpointing"}
"""Options that are not drawn. The first two take a minute for each training, and these models have no blocks to
recompute."""


def random_cases(count: int, ranks: int) -> list[Variant]:
    """Returns `count` cases, each on one rank or on `ranks` ranks. On the same machine, a number always gives the same
    case."""
    cases: list[Variant] = []
    number = 0
    while len(cases) < count:
        with suppress(UsageError):  # the machine cannot train the strategy, or the strategy cannot train the recipe
            cases.append(_case(number, ranks))
        number += 1
    return cases


def _case(number: int, ranks: int) -> Variant:
    """Returns the case of a number, with those of the randomly drawn options that its strategy supports. Raises
    UsageError if the case cannot train."""
    draw = random.Random(number)
    strategy, size, accumulate = draw.choice(DEFAULT), draw.choice([1, ranks]), draw.choice([1, 2, 4])
    model, precision = draw.choice(RECIPES)
    recipe = [model, draw.choice(OPTIMIZERS), draw.choice([FALLING, WARMUP]), draw.choice(["", CLIP])]
    flags = ["--precision", precision, *" ".join(recipe).split()]
    case = make_case(strategy, f"random {number}", flags, size, accumulate)
    for option in _options(draw):
        with suppress(UsageError):
            case = make_case(strategy, f"random {number}", [*flags, *option], size, accumulate)
            flags += option
    return case


def _options(draw: random.Random) -> Iterator[list[str]]:
    """Yields the flags of about half of the options for ZeRO, offload and computation, with random values."""
    for prefix, section in SECTIONS.items():
        for option in fields(section):
            value: Any = f"{draw.uniform(0.1, 1):.2f}"
            if isinstance(option.default, bool):
                value = str(not option.default).lower()
            elif isinstance(option.default, int):
                value = str(int(10 ** draw.uniform(2, 5)))
            if option.name not in LEFT_OUT and draw.random() < 0.5:
                yield [f"--{prefix}{option.name}", value]
