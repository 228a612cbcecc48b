"""Which runs form a variant, and which are perturbed runs of the reference."""

from __future__ import annotations

from cifar_zero.comparison.result import Variant
from cifar_zero.comparison.variants import grouped, perturbed_runs
from tests.comparison.made_up import made_up


def sizes(variants: list[Variant]) -> list[int]:
    return [len(variant.runs) for variant in variants]


def test_runs_become_variants_by_what_differs() -> None:
    runs = [made_up(strategy="ddp"), made_up(), made_up(seed=1), made_up(strategy="ddp", accumulate=4)]
    variants = grouped([made_up(perturbed=True), *runs])
    names = [variant.name for variant in variants]
    assert names == ["baseline, 1 micro-batch", "ddp, 1 micro-batch", "ddp, 4 micro-batches"]
    assert sizes(variants) == [2, 1, 1]


def test_a_repeated_run_is_a_separate_variant() -> None:
    again = [made_up(folder=f"version_{number}", seed=seed) for number, seed in ((1, 0), (2, 1))]
    variants = grouped([made_up(), made_up(seed=1), *again])
    assert [variant.name for variant in variants] == ["baseline", "baseline (version_1)"]
    assert sizes(variants) == [2, 2]


def test_runs_that_differ_only_in_an_option_without_effect_on_the_maths_are_variants() -> None:
    compiled = made_up(folder="version_1", settings={"data": {"source": "digits", "root": "data", "loader": "torch"}})
    assert [variant.name for variant in grouped([made_up(), compiled])] == ["baseline", "baseline (version_1)"]


def test_perturbed_runs_are_those_of_the_reference_with_its_recipe() -> None:
    (reference,) = grouped([made_up(), made_up(seed=1)])
    perturbed = made_up(perturbed=True, settings={"name": "any"})
    others = [made_up(perturbed=True, strategy="ddp"), made_up(perturbed=True, settings={"epochs": 3})]
    repeat, unknown = made_up(seed=1, settings={"out": "elsewhere"}), made_up(perturbed=True, seed=7)
    assert perturbed_runs([*reference.runs, repeat, perturbed, *others, unknown], reference) == [perturbed]
