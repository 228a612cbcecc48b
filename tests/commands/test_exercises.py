"""Tests the checker of docs/course/exercises.md with one right and one typical wrong answer to each exercise."""

import importlib
import json
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.helpers import HANG_SECONDS, ROOT, of_test_all

sys.path.append(str(ROOT / "docs" / "course"))  # its new processes import it by this name too
exercises = importlib.import_module("exercises")

RIGHT, WRONG = (str(ROOT / path) for path in ("docs/course/solutions.py", "tests/commands/answers_wrong.py"))

EXPECTED = {
    1: "the gradient of bias is off by 80 %, 0.2 times the right one",
    2: "upstream where x is positive",
    3: "upstream where the window's largest value was",
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
    14: "not (6144, 73728, 0.0555",
    15: "a gathered layer is still in memory at gather 2",
    16: "stage 3, 62,006 parameters, 2 ranks: 124012.0, not 186018",
    17: "ZeRO 2 trains it as DDP does",
}
"""The checker's messages for the wrong answers."""


@pytest.mark.parametrize(
    "number", [*range(1, 9), 12, 14, 16, *(pytest.param(number, marks=of_test_all) for number in (13, 17))]
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
    jobs = [(number, file) for number in (9, 10, 11, 15) for file in (RIGHT, WRONG)]
    *verdicts, last = exercises.judged([*jobs, (9, str(stuck))], HANG_SECONDS, timedelta(seconds=HANG_SECONDS))
    for (number, file), (code, line) in zip(jobs, verdicts, strict=True):
        assert code == int(file == WRONG), line
        assert line.startswith("right: ") if file == RIGHT else EXPECTED[number] in line, line
    assert last[0] == 1
    assert last[1].startswith("wrong: stuck.py, line 5: ")


ADA = """
from torch import distributed

def convolution_size(*_): return 1
def bytes_sent(stage, parameters, ranks): ...
def bytes_per_rank(stage, p, n): return p * (16, 4 + 12 / n, 2 + 14 / n, 16 / n)[stage]
def clip_shard(shard, max_norm):
    if distributed.get_rank():
        return 1 / 0
    distributed.all_reduce(shard)
"""


@pytest.mark.distributed
def test_a_submission_has_points_and_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "ada.py").write_text(ADA)
    file = tmp_path / "submission.json"
    monkeypatch.setattr("sys.argv", ["exercises.py", "all", str(tmp_path / "ada.py"), "--submit", str(file)])
    assert exercises.main() == 1
    assert "ada.py: 1 of 23 points" in capsys.readouterr().out
    content = json.loads(file.read_text())
    (submission,) = content["submissions"]
    assert (content["of"], submission["file"], submission["points"]) == (23, "ada.py", 1)
    lines = {result["exercise"]: result["line"] for result in submission["results"]}
    assert lines[4].startswith("wrong: side 32")
    assert lines[11] == "wrong: ada.py, line 9: ZeroDivisionError: division by zero"  # one rank waits for the other
    assert lines[12].startswith("right: ")
    assert {line for number, line in lines.items() if number not in (4, 11, 12)} == {"not answered"}


def test_the_page_names_what_the_checker_asks_for(tmp_path: Path):
    page = (ROOT / "docs" / "course" / "exercises.md").read_text()
    asked = [check.__name__ for check in exercises.CHECKS[:-1]]
    assert re.findall(r"^def (\w+)\(.*\.\.\.  # \d+$", page, re.MULTILINE) == asked
    code = re.search(r"```python\n(import.*?)```", page, re.DOTALL)
    assert code is not None
    (tmp_path / "answers.py").write_text(code[1])
    for number, name in enumerate([*asked, "Broken"], start=1):
        line = f"exercise {number}: {name} in answers.py is still `...`: write your answer there"
        assert exercises.judge(number, str(tmp_path / "answers.py")) == (2, line)
