"""Tests the checker of docs/exercises.md with one right and one typical wrong answer to each exercise."""

from __future__ import annotations

import importlib
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.helpers import HANG_SECONDS, ROOT, of_test_all

sys.path.append(str(ROOT / "docs"))  # its new processes import it by this name too
exercises = importlib.import_module("exercises")

RIGHT, WRONG = (str(ROOT / "tests" / "commands" / f"answers_{kind}.py") for kind in ("right", "wrong"))

EXPECTED = {
    1: "the gradient of bias is off by 80 %, 0.2 times the right one",
    2: "upstream where x is positive",
    3: "the largest of each 2 x 2 window",
    4: "padding 0: (28, 450), not (28, 456)",
    5: "the gradient of images is off by",
    6: "6 times the right one",
    7: "the loss of step 1 is 2.30",
    8: "weigh the mean loss of a micro-batch",
    9: "2 times the right one",
    10: "step 1: the momentum is off by 100 %, 0 times the right one",
    11: "the global norm is 9.361",
    12: "stage 1, 1,000,000,000 parameters, 8 ranks: 3750000000.0, not 5500000000",
    13: "DDP fits, ZeRO 2 fits: try a larger batch",
    14: "not (6144, 73728)",
    15: "ZeRO 2 trains it as DDP does",
}
"""The checker's messages for the wrong answers."""


@pytest.mark.parametrize(
    "number", [*range(1, 9), 12, 14, *(pytest.param(number, marks=of_test_all) for number in (13, 15))]
)
def test_answers_on_one_rank(number: int):
    code, line = exercises.judge(number, RIGHT)
    assert (code, line[:7]) == (0, "right: "), line
    code, line = exercises.judge(number, WRONG)
    assert code == 1
    assert line.startswith("wrong: ")
    assert EXPECTED[number] in line


@pytest.mark.distributed
def test_answers_on_two_ranks(tmp_path: Path):
    """All answers run in the same two processes. The last answer waits for a message that no rank sends."""
    stuck = tmp_path / "stuck.py"
    stuck.write_text(
        "from datetime import timedelta\nfrom torch import distributed\n\ndef average_gradients(model):\n"
        "    distributed.irecv(model.fc3.bias.data).wait(timedelta(seconds=1))\n"
    )
    jobs = [(number, file) for number in (9, 10, 11) for file in (RIGHT, WRONG)]
    *verdicts, last = exercises.judged([*jobs, (9, str(stuck))], HANG_SECONDS, timedelta(seconds=HANG_SECONDS))
    for (number, file), (code, line) in zip(jobs, verdicts, strict=True):
        assert code == int(file == WRONG), line
        assert line.startswith("right: ") if file == RIGHT else EXPECTED[number] in line, line
    assert last[0] == 1
    assert last[1].startswith("wrong: stuck.py, line 5: ")


@pytest.mark.distributed
def test_the_command_prints_an_error_of_one_rank_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    code = "from torch import distributed\n\n\ndef clip_shard(shard, max_norm):\n    if distributed.get_rank():\n"
    (tmp_path / "answers.py").write_text(code + "        return 1 / 0\n    distributed.all_reduce(shard)\n")
    monkeypatch.setattr("sys.argv", ["exercises.py", "11", str(tmp_path / "answers.py")])
    assert exercises.main() == 1
    assert capsys.readouterr().out == "wrong: answers.py, line 6: ZeroDivisionError: division by zero\n"


def test_the_page_names_what_the_checker_asks_for(tmp_path: Path):
    page = (ROOT / "docs" / "exercises.md").read_text()
    asked = [check.__name__ for check in exercises.CHECKS[:-1]]
    assert re.findall(r"^def (\w+)\(.*\.\.\.  # \d+$", page, re.MULTILINE) == asked
    code = re.search(r"```python\n(import.*?)```", page, re.DOTALL)
    assert code is not None
    (tmp_path / "answers.py").write_text(code[1])
    for number, name in enumerate([*asked, "Broken"], start=1):
        line = f"exercise {number}: {name} in answers.py is still `...`: write your answer there"
        assert exercises.judge(number, str(tmp_path / "answers.py")) == (2, line)
