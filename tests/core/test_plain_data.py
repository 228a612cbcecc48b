"""Records and JSON files that would hang the program, or that name code, are refused in one line.

tests/config/test_command_line.py refuses such recipes."""

from pathlib import Path
from typing import Any

import pytest

from cifar_zero.core import exits, plain_data
from cifar_zero.core.errors import UsageError


def test_a_tree_that_contains_itself_is_refused():
    """The record in a checkpoint can contain itself."""
    tree: dict[str, Any] = {}
    tree["tree"] = [tree]
    with pytest.raises(UsageError, match="nested levels"):
        plain_data.check(tree, "the record")
    wide: list[Any] = []
    for _ in range(19):
        wide = [wide] * 10
    with pytest.raises(UsageError, match="more than 100,000 values"):
        plain_data.check(wide, "the record")


def test_json_that_names_code_is_refused(tmp_path: Path):
    (tmp_path / "file.json").write_text('{"optimizer": {"init_args": 1}}')
    with pytest.raises(UsageError, match="optimizer has init_args, which names code"):
        plain_data.read_json(tmp_path / "file.json", "--ds_config")


@pytest.mark.parametrize("tree", [{"name": "\x1b[2Ja"}, {"a": [{"b\r": 1}]}, ["\x9b31m"], {"a": '{b: "\\e[1m"}'}])
def test_escape_sequences_of_a_file_do_not_reach_the_terminal(tree: Any, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UsageError, match="control characters") as raised:
        plain_data.check(tree, "metrics.json")
    exits.guarded(lambda: plain_data.check(tree, "metrics.json") or 0)
    assert capsys.readouterr().err.strip().isprintable(), raised.value
