"""What a study keeps: each test opens it again, as a second start of sweep.py does."""

from __future__ import annotations

from pathlib import Path

import pytest

from errors import UsageError
from sweeping.result import Run, ranked
from sweeping.space import space
from sweeping.study import Study

GRID = ["optimizer.lr=0.1,0.01,0.001"]
RANGE = ["optimizer.lr=1e-4..1e-1:log", "batch_size=16..64:16"]


def opened(
    folder: Path, search: list[str], trials: int = 20, sampler: str = "", record: dict[str, str] | None = None
) -> Study:
    searched = space(search)
    sampler = sampler or ("grid" if searched.is_grid else "tpe")
    return Study(
        folder, {"--epochs": "2", **(record or {})}, searched, {"batch_size"}, "val/acc", sampler, trials, seed=0
    )


def run(value: float, seed: int = 0) -> Run:
    return Run(seed, value, "folder", 1.0)


def test_a_grid_goes_on_where_it_was(tmp_path: Path) -> None:
    study = opened(tmp_path, GRID)
    asked = [study.ask() for _ in range(4)]
    assert asked == [*((number, {"optimizer.lr": lr}) for number, lr in enumerate(("0.1", "0.01", "0.001"))), None]
    study.finish(0, [run(0.5), run(0.75, seed=1)])
    study.fail(1, "out of memory")  # and the third is cut off

    study = opened(tmp_path, GRID)
    assert study.left == 2
    assert study.ask() == (2, {"optimizer.lr": "0.001"})
    assert study.ask() == (3, {"optimizer.lr": "0.01"})
    assert study.ask() is None
    study.finish(2, [run(0.25)])
    assert [(each.trial, each.state, each.error) for each in ranked(study.results(), "val/acc")] == [
        (0, "finished", ""),
        (2, "finished", ""),
        (3, "cut off", ""),
    ]
    study.finish(3, [run(1.0)])
    best = ranked(study.results(), "val/acc")[0]
    assert (best.setting, best.mean, best.deviation) == ({"optimizer.lr": "0.01"}, 1.0, None)
    assert opened(tmp_path, GRID).left == 0


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_more_settings_of_a_range_are_others(tmp_path: Path, sampler: str) -> None:
    settings = []
    for trials in (3, 6):
        study = opened(tmp_path, RANGE, trials, sampler)
        assert study.left == 3
        while (asked := study.ask()) is not None:
            settings.append(asked[1])
            study.finish(asked[0], [run(0.5)])
    assert len({setting["optimizer.lr"] for setting in settings}) == len(settings) == 6
    assert all(1e-4 <= float(setting["optimizer.lr"]) <= 1e-1 for setting in settings)
    assert {setting["batch_size"] for setting in settings} <= {"16", "32", "48", "64"}


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_no_setting_of_values_is_tried_twice(tmp_path: Path, sampler: str) -> None:
    """Two trials of one setting would share a folder."""
    search = ["optimizer.lr=0.1,0.01,0.001,0.0001", "augment.flip=none,random", "batch_size=16,32"]
    settings = []
    for trials, expected in ((12, 12), (14, 2), (99, 2)):
        study = opened(tmp_path, search, trials, sampler)
        assert study.left == expected
        while (asked := study.ask()) is not None:
            settings.append(asked[1])
            study.finish(asked[0], [run(float(asked[1]["optimizer.lr"]))])
    assert sorted(map(repr, settings)) == sorted(map(repr, space(search).combinations()))
    assert settings != space(search).combinations()


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_values_that_failed_are_tried_again_in_the_next_start_alone(tmp_path: Path, sampler: str) -> None:
    study = opened(tmp_path, GRID, 2, sampler)
    (_, failed), (_, finished) = study.ask() or (-1, {}), study.ask() or (-1, {})
    study.fail(0, "out of memory")
    study.finish(1, [run(0.5)])
    assert study.ask() is None
    study = opened(tmp_path, GRID, 3, sampler)
    assert study.left == 2
    assert study.ask() == (2, failed)
    _, third = study.ask() or (-1, {})
    assert {each["optimizer.lr"] for each in (failed, finished, third)} == {"0.1", "0.01", "0.001"}


def test_a_grid_too_large_to_list(tmp_path: Path) -> None:
    search = [f"model.option_{number}=0,1,2,3,4,5,6,7,8,9" for number in range(20)]
    study = opened(tmp_path, search, 5, "random")
    settings = [(study.ask() or (-1, {}))[1] for _ in range(5)]
    assert len({tuple(setting.items()) for setting in settings}) == 5


def test_another_sweep_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, GRID, record={"--epochs": "3"})  # nothing has been tried: the command may still change
    opened(tmp_path, GRID).ask()
    with pytest.raises(UsageError, match="its --epochs was 2, and is 3 here; give this one another --name"):
        opened(tmp_path, GRID, record={"--epochs": "3"})
    with pytest.raises(UsageError, match="its --search batch_size was not given, and is 1,2 here"):
        opened(tmp_path, GRID, record={"--search batch_size": "1,2"})


def test_a_setting_behind_the_median_is_pruned(tmp_path: Path) -> None:
    study = opened(tmp_path, RANGE)
    for _ in range(5):  # of so many that have finished the median is taken
        number, _ = study.ask() or (-1, {})
        assert not study.prunes(number, [0.5])
        assert not study.prunes(number, [0.5, 0.6])
        study.finish(number, [run(0.6)])
    behind, _ = study.ask() or (-1, {})
    ahead, _ = study.ask() or (-1, {})
    assert not study.prunes(behind, [])
    assert study.prunes(behind, [0.4])
    assert not study.prunes(ahead, [0.7])
    study.prune(behind)
    assert [result.state for result in study.results()] == ["finished"] * 5 + ["pruned", "cut off"]
