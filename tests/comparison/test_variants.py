from __future__ import annotations

import pytest

from comparison.variants import plan
from errors import UsageError

Axes = tuple[list[str], list[str], list[str]]
"""Strategies, devices, micro-batches."""

SMALL = ["--data.source", "synthetic", "--accelerator", "cpu", "--batch_size", "16"]


def names(strategies: list[str], devices: list[str], accumulate: list[str]) -> list[str]:
    return [variant.name for variant in plan(strategies, devices, accumulate, 1, SMALL)]


def test_names_say_what_varies() -> None:
    assert names(["deepspeed_stage_2", "baseline"], [], []) == ["baseline", "deepspeed_stage_2"]
    assert names([], ["1", "2"], []) == ["1 rank", "2 ranks"]
    assert names(["ddp", "fsdp2"], ["2"], ["1", "4"])[1] == "ddp, 4 micro-batches"


def test_a_training_for_each_seed() -> None:
    baseline, other = plan(["baseline", "ddp"], ["2"], [], 2, [*SMALL, "--seed", "5"])
    assert [training.seed for training in other.trainings] == [5, 6]
    assert [training.name for training in other.trainings] == ["ddp-seed_5", "ddp-seed_6"]
    assert {training.config.batch_size for training in baseline.trainings + other.trainings} == {16}
    assert other.trainings[1].config.world_size == 2


@pytest.mark.parametrize(
    ("axes", "rest", "message"),
    [
        ((["baseline"], [], []), [], "nothing to compare"),
        ((["ddp", "ddp"], [], []), [], "names one twice"),
        ((["baseline", "ddq"], [], []), [], "unknown strategy 'ddq'"),
        ((["baseline", "fsdp"], [], []), [], "fsdp needs a GPU"),
        (([], ["1", "3"], []), [], "no whole micro-batch"),
        ((["baseline", "ddp"], [], []), ["--strategy", "ddp"], "--strategies"),
        ((["baseline", "ddp"], [], []), ["--bench_steps", "5"], "--bench_steps"),
        ((["baseline", "ddp"], [], []), ["--num_nodes", "2"], "--num_nodes"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(
    axes: tuple[list[str], list[str], list[str]], rest: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*axes, 1, [*SMALL, *rest])
