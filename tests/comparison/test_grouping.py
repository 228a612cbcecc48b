"""Which runs make a variant, and which show what rounding does."""

from __future__ import annotations

from comparison.grouping import Group, grouped, second_runs
from tests.comparison.made_up import made_up


def sizes(groups: list[Group]) -> list[int]:
    return [len(group.loaded) for group in groups]


def test_runs_become_variants_by_what_differs() -> None:
    runs = [made_up(strategy="ddp"), made_up(), made_up(seed=1), made_up(strategy="ddp", accumulate=4)]
    groups = grouped([made_up(rounding=2**-23), *runs])
    names = [group.name for group in groups]
    assert names == ["baseline, 1 micro-batch", "ddp, 1 micro-batch", "ddp, 4 micro-batches"]
    assert sizes(groups) == [2, 1, 1]


def test_a_repeat_is_a_variant_of_its_own() -> None:
    again = [made_up(folder=f"version_{number}", seed=seed) for number, seed in ((1, 0), (2, 1))]
    groups = grouped([made_up(), made_up(seed=1), *again])
    assert [group.name for group in groups] == ["baseline", "baseline (version_1)"]
    assert sizes(groups) == [2, 2]


def test_runs_that_differ_in_an_option_without_maths_are_variants() -> None:
    compiled = made_up(folder="version_1", settings={"data": {"source": "digits", "root": "data", "loader": "torch"}})
    assert [group.name for group in grouped([made_up(), compiled])] == ["baseline", "baseline (version_1)"]


def test_a_second_run_is_of_the_reference_and_its_recipe() -> None:
    reference = Group("baseline", "", [made_up(), made_up(seed=1)])
    moved, again = made_up(rounding=2**-23, settings={"name": "any"}), made_up(seed=1, settings={"out": "elsewhere"})
    others = [made_up(rounding=2**-23, strategy="ddp"), made_up(rounding=2**-23, settings={"epochs": 3})]
    compiled, unknown = made_up(settings={"compile": True}), made_up(rounding=2**-23, seed=7)
    found, notes = second_runs([*reference.loaded, again, compiled, moved, *others, unknown], reference)
    assert found == [moved, again]
    assert len(notes) == 3


def test_a_name_alone_makes_no_rounding_run() -> None:
    named = made_up(settings={"name": "rounding-mine"}, strategy="ddp")
    assert sizes(grouped([made_up(), named])) == [1, 1]
