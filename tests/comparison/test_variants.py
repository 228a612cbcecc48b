from __future__ import annotations

from pathlib import Path

import pytest

from cifar_zero.comparison.variants import plan
from cifar_zero.core.errors import UsageError

Axes = tuple[list[str], list[str], list[str]]
"""Strategies, devices, micro-batches."""

SMALL = ["--data.source", "synthetic", "--accelerator", "cpu", "--batch_size", "16"]


def names(strategies: list[str], devices: list[str], accumulate: list[str]) -> list[str]:
    return [variant.name for variant in plan(strategies, devices, accumulate, 1, SMALL)]


def test_names_contain_what_varies() -> None:
    assert names(["deepspeed_stage_2", "baseline"], [], []) == ["baseline", "deepspeed_stage_2"]
    assert names([], ["1", "2"], []) == ["1 rank", "2 ranks"]
    assert names(["ddp", "fsdp2"], ["2"], ["1", "4"])[1] == "ddp, 4 micro-batches"


def test_a_run_for_each_seed() -> None:
    baseline, other = plan(["baseline", "ddp"], ["2"], [], 2, [*SMALL, "--seed", "5"])
    assert [other.run_name(seed) for seed in other.seeds] == ["ddp-seed_5", "ddp-seed_6"]
    assert other.flags_of(6)[-4:] == ["--devices", "2", "--seed", "6"]
    assert (baseline.run.config.batch_size, other.run.config.batch_size, other.run.world_size) == (16, 16, 2)


@pytest.mark.parametrize("names", [("a b", "a_b"), ("a", "perturbed-a")])
def test_two_variants_never_share_a_folder(tmp_path: Path, names: tuple[str, str]) -> None:
    files = [tmp_path / f"{name}.json" for name in names]
    for file in files:
        file.write_text('{"zero_optimization": {"stage": 1}}')
    with pytest.raises(UsageError, match="would share a folder"):
        plan([*map(str, files)], [], [], 1, SMALL)


@pytest.mark.parametrize(
    ("axes", "rest", "message"),
    [
        ((["baseline"], [], []), [], "nothing to compare"),
        ((["ddp", "ddp"], [], []), [], "would share a folder"),
        ((["baseline", "ddq"], [], []), [], "unknown strategy 'ddq'"),
        ((["baseline", "deepspeed_stage_3_superoffload"], [], []), [], "needs a CUDA GPU"),
        (([], ["1", "3"], []), [], "no whole micro-batch"),
        ((["baseline", "ddp"], [], []), ["--strategy", "ddp"], "--strategies"),
        ((["baseline", "ddp"], [], []), ["--bench_steps", "5"], "--bench_steps"),
        ((["baseline", "ddp"], [], []), ["--num_nodes", "2"], "--num_nodes"),
        ((["baseline", "ddp"], [], []), ["--resume", "last"], "leave out --resume"),
        (([], ["1", "01"], []), [], "would share a folder"),
    ],
)
def test_a_mistake_is_reported_before_anything_runs(
    axes: tuple[list[str], list[str], list[str]], rest: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*axes, 1, [*SMALL, *rest])
