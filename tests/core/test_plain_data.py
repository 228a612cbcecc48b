"""A file that would hang its reader, or stands for more than it holds, is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cifar_zero.config import command_line
from cifar_zero.core import plain_data
from cifar_zero.core.errors import UsageError

BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "line 2 has the alias [*]a0: repeat the value"),
        (MERGED, "line 2 has the alias [*]a0"),
        ("x: &a {x: *a}", "line 1 has the alias [*]a"),
        ("trainer: " + json.dumps({"x": BOMB}), "trainer.x is a text with an alias"),
        ("name: " + "[" * 5000, "nested too deeply"),
        ("trainer: " + "[" * 30 + "]" * 30, "or 20 levels of them"),
        ("name: 2026-02-30", "day is out of range"),
        ("name: 2026-02-03", "name is a date: write a number"),
        ("name: !!python/name:os.system", "could not determine a constructor"),
    ],
)
def test_a_recipe_is_plain_data(text: str, message: str, tmp_path: Path):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message) as refused:
        command_line.parse(["--config", str(file)])
    assert "\n" not in str(refused.value)


def test_a_tree_that_contains_itself_is_refused():
    """A checkpoint's record can be one."""
    tree: dict[str, Any] = {}
    tree["tree"] = [tree]
    with pytest.raises(UsageError, match="levels of them"):
        plain_data.check(tree, "the record")
    wide: list[Any] = []
    for _ in range(19):
        wide = [wide] * 10
    with pytest.raises(UsageError, match="more than 100,000 values"):
        plain_data.check(wide, "the record")


def test_json_is_read_as_plain_data(tmp_path: Path):
    file = tmp_path / "file.json"
    file.write_text("[" * 100_000)
    with pytest.raises(UsageError, match="is not JSON"):
        plain_data.read_json(file, "--ds_config")
    file.write_text('{"optimizer": {"init_args": 1}}')
    with pytest.raises(UsageError, match="optimizer has init_args, which names code"):
        plain_data.read_json(file, "--ds_config")
