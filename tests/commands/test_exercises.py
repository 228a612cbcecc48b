"""Tests the checker of docs/course/exercises.md with one right and one typical wrong answer to each exercise."""

import importlib
import json
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from cifar_zero.core.errors import RunError
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


AUTOGRAD = """
def relu(x, upstream):
    y = x.requires_grad_().relu()
    y.backward(upstream)
    return y.detach(), x.grad
"""
AT_ZERO = "def relu(x, upstream): return x.clamp(min=0), upstream * (x >= 0)"
BELOW = "def relu(x, upstream): ...\ndef relu(x, upstream): return x.clamp(min=0), upstream * (x > 0)"
FORWARD = """
import torch.nn.functional as F
def accumulate(model, micro_batches):
    for x, labels in micro_batches:
        (F.cross_entropy({}, labels) * len(labels) / 20).backward()
"""


@pytest.mark.parametrize(
    ("number", "text", "expected"),
    [
        pytest.param(2, AUTOGRAD, "wrong: answers.py, line 4: RuntimeError: element 0 of tensors", id="autograd"),
        pytest.param(2, AT_ZERO, "wrong: the gradient of x is off by", id="at zero"),
        pytest.param(2, BELOW, "right: ", id="below the template"),
        pytest.param(8, FORWARD.format("model.forward(x)"), "right: ", id="without the model's hooks"),
        pytest.param(8, FORWARD.format("model(x=x)"), "right: ", id="by keyword"),
    ],
)
def test_other_answers_on_one_rank(number: int, text: str, expected: str, tmp_path: Path):
    (tmp_path / "answers.py").write_text(text)
    code, line = exercises.judge(number, str(tmp_path / "answers.py"))
    assert line.startswith(expected)
    assert code == int(expected.startswith("wrong"))


@pytest.mark.distributed
def test_answers_on_two_ranks(tmp_path: Path):
    """All answers run in the same two processes. The last answer waits for a message that no rank sends."""
    stuck = tmp_path / "stuck.py"
    stuck.write_text(
        "from datetime import timedelta\nfrom torch import distributed\n\ndef average_gradients(model):\n"
        "    distributed.irecv(model.fc3.bias.data).wait(timedelta(seconds=1))\n"
    )
    gather, keywords, uncounted = "distributed.all_gather_into_tensor", tmp_path / "keywords.py", tmp_path / "own.py"
    call = f"{gather}(weight.flatten(), shard)"
    text = Path(RIGHT).read_text()
    keywords.write_text(text.replace(call, f"{gather}(input_tensor=shard, output_tensor=weight.flatten())"))
    uncounted.write_text(text.replace(call, "gather(weight.flatten(), shard)") + f"\n\ngather = {gather}\n")
    jobs = [(number, file) for number in (9, 10, 11, 15) for file in (RIGHT, WRONG)]
    jobs += [(15, str(keywords)), (15, str(uncounted)), (9, str(stuck))]
    *verdicts, by_keyword, not_counted, last = exercises.judged(jobs, HANG_SECONDS, timedelta(seconds=HANG_SECONDS))
    assert by_keyword[0] == 0, by_keyword[1]
    assert f"step 1: 0 calls of {gather}, not at least 4" in not_counted[1]
    for (number, file), (code, line) in zip(jobs, verdicts, strict=False):
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
    """Ranks that do not meet end only the exercise of the first file."""
    judged = exercises.judged

    def failing(jobs: list[tuple[int, str]]) -> list[tuple[int, str]]:
        if "grace" in jobs[0][1]:
            raise RunError("the ranks have not met")
        return judged(jobs)

    monkeypatch.setattr(exercises, "judged", failing)
    monkeypatch.chdir(tmp_path)
    for name in ("grace", "ada"):
        Path(name).mkdir()
        Path(name, "answers.py").write_text(ADA)
    file, answers = Path("results/submission.json"), ["grace/answers.py", "ada/answers.py"]
    monkeypatch.setattr("sys.argv", ["exercises.py", "all", *answers, "--submit", str(file)])
    assert exercises.main() == 1
    assert "ada/answers.py: 1 of 23 points" in capsys.readouterr().out
    content = json.loads(file.read_text())
    failed, submission = content["submissions"]
    assert failed["results"][3]["line"] == "not checked: the ranks have not met"
    assert (failed["file"], failed["points"]) == ("grace/answers.py", 0)
    assert (content["of"], submission["file"], submission["points"]) == (23, "ada/answers.py", 1)
    lines = {result["exercise"]: result["line"] for result in submission["results"]}
    assert lines[4].startswith("wrong: side 32")
    assert lines[11] == "wrong: answers.py, line 9: ZeroDivisionError: division by zero"  # one rank waits for the other
    assert lines[12].startswith("right: ")
    assert {line for number, line in lines.items() if number not in (4, 11, 12)} == {"not answered"}


def test_a_submission_that_cannot_be_written_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["exercises.py", "all", RIGHT, "--submit", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        exercises.main()
    assert capsys.readouterr().err.endswith(f"--submit {tmp_path}: Is a directory\n")


def test_an_interrupted_grading_keeps_the_earlier_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(jobs: list[tuple[int, str]]) -> list[tuple[int, str]]:
        raise KeyboardInterrupt

    file = tmp_path / "submission.json"
    file.write_text("earlier")
    monkeypatch.setattr(exercises, "judged", interrupted)
    monkeypatch.setattr("sys.argv", ["exercises.py", "all", RIGHT, "--submit", str(file)])
    with pytest.raises(KeyboardInterrupt):
        exercises.main()
    assert file.read_text() == "earlier"


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
