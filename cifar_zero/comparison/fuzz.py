"""`cifar-zero compare --acceptance --fuzz N`: trainings under random placements, beyond what the rows have in mind."""

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
"""Models, and precisions in which rounding leaves enough of their gradients to judge."""

OPTIMIZERS = (SGD, ADAMW, "--optimizer adam", "--optimizer lion", "--optimizer adagrad")
SECTIONS: dict[str, Any] = {"zero.": ZeROConfig, "offload.": OffloadConfig, "": ComputeOptions}
LEFT_OUT = {"compile", "cuda_graphs", "activation_checkpointing"}
"""The first two take a minute for each training, and these models have no blocks to recompute."""


def random_cases(count: int, ranks: int) -> list[Variant]:
    """Returns `count` cases on one rank or on `ranks`. A number always means the same case, on the same machine."""
    cases: list[Variant] = []
    number = 0
    while len(cases) < count:
        with suppress(UsageError):  # this machine cannot train the strategy, or the strategy not the recipe
            cases.append(_case(number, ranks))
        number += 1
    return cases


def _case(number: int, ranks: int) -> Variant:
    """Returns a case with those of the drawn options that its strategy has; raises UsageError if it cannot train."""
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
    """Yields about half of the options of ZeRO, of offloading and of computing, with random values."""
    for prefix, section in SECTIONS.items():
        for option in fields(section):
            value: Any = f"{draw.uniform(0.1, 1):.2f}"
            if isinstance(option.default, bool):
                value = str(not option.default).lower()
            elif isinstance(option.default, int):
                value = str(int(10 ** draw.uniform(2, 5)))
            if option.name not in LEFT_OUT and draw.random() < 0.5:
                yield [f"--{prefix}{option.name}", value]
