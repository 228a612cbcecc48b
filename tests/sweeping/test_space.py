from __future__ import annotations

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from cifar_zero.core.errors import UsageError
from cifar_zero.sweeping.study import combinations, parse


def test_values_ranges_and_seeds():
    space, seeds = parse(
        [
            "optimizer.lr=1e-4..1e-1:log",
            "batch_size=32..128:32",
            "augment.crop=0..4",
            "ema=0.0..1.0",
            "model.hidden=[512],[64,64]",
            "config=../a.yaml,b.yaml",
            "seed=0,1",
        ]
    )
    assert space == {
        "optimizer.lr": FloatDistribution(1e-4, 1e-1, log=True),
        "batch_size": IntDistribution(32, 128, step=32),
        "augment.crop": IntDistribution(0, 4),
        "ema": FloatDistribution(0, 1),
        "model.hidden": CategoricalDistribution(["[512]", "[64,64]"]),
        "config": CategoricalDistribution(["../a.yaml", "b.yaml"]),
    }
    assert seeds == [{"seed": "0"}, {"seed": "1"}]


def test_combinations_have_each_value_and_each_end():
    space, seeds = parse(["optimizer.lr=0.5..1.5", "batch_size=8,16"])
    assert seeds == [{}]
    assert [(*each.values(),) for each in combinations(space)] == [(0.5, "8"), (0.5, "16"), (1.5, "8"), (1.5, "16")]


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("optimizer.lr=0.1,,1", "a value is missing; write NAME=A,B"),
        ("optimizer.lr=1..0.1", "low <= high"),
        ("optimizer.lr=0..1:linear", "could not convert string to float: 'linear'"),
        ("seed=0..9", "list the seeds, seed=0,1,2"),
    ],
)
def test_an_invalid_space_is_refused(definition: str, message: str):
    with pytest.raises(UsageError, match=message):
        parse([definition])
