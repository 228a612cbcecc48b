from __future__ import annotations

from pathlib import Path

import pytest

from errors import UsageError
from sweeping.space import Range, Values, space


def test_lists_ranges_and_seeds() -> None:
    searched = space(
        ["optimizer.lr=1e-4..1e-1:log", "--batch_size=32..128:32", "model.hidden=[512],[64,64]", "seed=0,1"]
    )
    assert searched.parameters == [
        Range("optimizer.lr", "1e-4", "1e-1", log=True),
        Range("batch_size", "32", "128", step="32"),
        Values("model.hidden", ("[512]", "[64,64]")),
    ]
    assert searched.seeds == ("0", "1")
    assert not searched.is_grid
    assert [each.written for each in searched.parameters] == ["1e-4..1e-1:log", "32..128:32", "[512],[64,64]"]
    ends = {"optimizer.lr": "1e-1", "batch_size": "128", "model.hidden": "[64,64]"}
    assert len(searched.combinations()) == 8
    assert searched.combinations()[-1] == ends
    assert searched.one_by_one()[1:] == [{**searched.combinations()[0], name: end} for name, end in ends.items()]


def test_a_grid_is_all_combinations() -> None:
    searched = space(["optimizer.lr=0.1,0.01", "config=../a.yaml,b.yaml"])
    assert searched.is_grid
    assert [[*each.values()] for each in searched.combinations()] == [
        ["0.1", "../a.yaml"],
        ["0.1", "b.yaml"],
        ["0.01", "../a.yaml"],
        ["0.01", "b.yaml"],
    ]


def test_a_combination_by_its_place() -> None:
    searched = space(["optimizer.lr=0.1,0.01", "augment.flip=none,random", "batch_size=8,16,32"])
    assert [searched.combination(number) for number in range(searched.size)] == searched.combinations()
    assert space(["seed=0,1"]).combination(0) == {}


def test_values_may_be_lists_of_lists() -> None:
    written = ["[[1,2],[3]]", "[]", "{a: [1,2], b: 3}"]
    (parameter,) = space([f"model.stages={','.join(written)}"]).parameters
    assert parameter == Values("model.stages", tuple(written))


def test_seeds_alone_are_one_setting() -> None:
    assert space(["seed=0,1,2"]).combinations() == [{}]


def test_a_file_is_the_same(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("optimizer.lr: 1e-4..1e-1:log\nmodel.hidden: [[512], [64, 64]]\ncompile: [true, false]\nseed: 3\n")
    given = ["optimizer.lr=1e-4..1e-1:log", "model.hidden=[512],[64, 64]", "compile=true,false", "seed=3"]
    assert space([], str(file)) == space(given)


@pytest.mark.parametrize(
    ("definitions", "message"),
    [
        ([], "nothing to search"),
        (["optimizer.lr"], "write NAME=VALUES"),
        (["optimizer.lr="], "write NAME=VALUES"),
        (["optimizer.lr=0.1,,1"], "empty or there twice"),
        (["optimizer.lr=0.1,0.1"], "empty or there twice"),
        (["optimizer.lr=0.1", "optimizer.lr=0.2"], "is there twice"),
        (["seed=1", "seed=2"], "is there twice"),
        (["seed=0..9"], "seed=0,1,2"),
        (["optimizer.lr=1..0.1"], "begins with the lower number"),
        (["optimizer.lr=0..1:log"], "begins above 0"),
        (["optimizer.lr=0..1:linear"], "a range is LOW..HIGH"),
        (["batch_size=8..33:8"], "whole steps"),
        (["batch_size=8..32:0"], "whole steps"),
        (["name=a,b"], "changes no result"),
    ],
)
def test_what_is_no_space(definitions: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        space(definitions)


@pytest.mark.parametrize(
    ("content", "message"),
    [("- 1", "must be a mapping"), ("model: {width: [1]}", "model needs a list"), ("a: [", "is not YAML")],
)
def test_what_is_no_file_of_a_space(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "space.yaml").write_text(content)
    with pytest.raises(UsageError, match=message):
        space([], str(tmp_path / "space.yaml"))
    with pytest.raises(UsageError, match="cannot be read"):
        space([], str(tmp_path / "nowhere.yaml"))
