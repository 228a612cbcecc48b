"""Checks answers to exercises.md: `python docs/course/exercises.py N answers.py` prints one line and exits with 0 if
the answer is right, 1 if it is wrong, 2 for wrong usage. `all` instead of N checks every exercise, of one or more
files. Answers run in new processes, which can be ended."""

import argparse
import ast
import hashlib
import json
import multiprocessing
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for the new processes too, to which multiprocessing passes it on

# These modules need no package that is missing on Windows. The checks of `program` import the others.
from checker import one_process, program, two_ranks  # noqa: E402 - it is found now
from checker.comparing import Wrong  # noqa: E402

from cifar_zero.core.errors import RunError, UsageError, short  # noqa: E402
from stepcheck.lightning import user_code  # noqa: E402

SECONDS = 120  # for an answer and the start of its processes
PROGRAM_SECONDS = 900  # for an answer that starts this program, which takes half a minute on two free cores
PATIENCE = timedelta(seconds=60)  # for one collective

Job = tuple[int, str]  # number of the exercise, file of the answer
Verdict = tuple[int, str]  # exit code, line


def main() -> int:
    parser = argparse.ArgumentParser(prog="exercises.py", description="Checks answers to docs/course/exercises.md.")
    numbers = [str(number) for number in range(1, len(CHECKS) + 1)]
    parser.add_argument("exercise", choices=[*numbers, "all"], metavar="N|all", help="number of the exercise, or all")
    parser.add_argument("answers", nargs="+", type=Path, help="Python files with answers, one for each student")
    parser.add_argument("--submit", type=Path, metavar="FILE.json", help="writes points and verdicts of `all` as JSON")
    options = parser.parse_args()
    if missing := [str(file) for file in options.answers if not file.is_file()]:
        parser.error(f"{', '.join(missing)}: no such file")
    if options.exercise == "all":
        try:
            if options.submit:
                options.submit.parent.mkdir(parents=True, exist_ok=True)
                options.submit.open("a").close()  # keeps the results of an earlier grading until there are new ones
        except OSError as error:
            parser.error(f"--submit {options.submit}: {error.strerror}")
        return grade(options.answers, options.submit)
    if len(options.answers) > 1 or options.submit:
        parser.error("several files, and --submit, need `all` instead of a number")
    ((code, line),) = judged([(int(options.exercise), str(options.answers[0].absolute()))])
    print(line, file=sys.stderr if code == UsageError.exit_code else sys.stdout)
    return code


def grade(files: Sequence[Path], submission: Path | None = None) -> int:
    """Checks all exercises of each file, and prints the verdicts and points. After each file, writes the results of the
    files so far to `submission`. Returns 0 if everything is right, else 1."""
    reports: list[dict[str, Any]] = []
    for file in files:
        results: list[dict[str, Any]] = []
        for number, check in enumerate(CHECKS, start=1):
            code, line = 1, "not answered"
            if _is_answered(file, _name(check)):
                try:
                    ((code, line),) = judged([(number, str(file.absolute()))])
                except RunError as error:
                    code, line = error.exit_code, f"not checked: {error}"
            results.append({"exercise": number, "points": 0 if code else POINTS[number], "line": line})
            print(f"{number:>2} {_name(check):<24} {results[-1]['points']} of {POINTS[number]}  {line}", flush=True)
        points = sum(result["points"] for result in results)
        print(f"{file}: {points} of {sum(POINTS.values())} points\n")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        reports.append({"file": str(file), "sha256": digest, "points": points, "results": results})
        if submission:
            write_submission(submission, reports)
    return int(any(report["points"] < sum(POINTS.values()) for report in reports))


def write_submission(path: Path, reports: Sequence[dict[str, Any]]) -> None:
    """Writes the JSON file of --submit, and makes its folder."""
    made_with = {"python": platform.python_version(), "torch": str(torch.__version__), "system": platform.system()}
    content = {"format": 1, "of": sum(POINTS.values()), **made_with, "submissions": reports}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _name(check: Callable[..., str]) -> str:
    return "Broken" if check is program.broken else check.__name__


def judged(jobs: Sequence[Job], seconds: float | None = None, patience: timedelta = PATIENCE) -> list[Verdict]:
    """Runs all jobs, one after the other, in new processes: two if the first job's exercise needs two ranks, else one.
    Returns the verdict of each job. If the ranks' verdicts differ, the first mistake counts. If a process crashes or
    takes longer than `seconds` (by default, PROGRAM_SECONDS or SECONDS), all jobs are wrong. Raises RunError if the
    ranks do not meet within `patience`."""
    check = CHECKS[jobs[0][0] - 1]
    ranks, verdicts = 2 if check.__module__ == two_ranks.__name__ else 1, []
    if seconds is None:
        seconds = PROGRAM_SECONDS if check.__module__ == program.__name__ else SECONDS
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, context) as pool:
        arguments = ranks, (Path(folder) / "ranks").as_uri(), jobs, patience
        try:
            for rank in as_completed([pool.submit(_rank, rank, *arguments) for rank in range(ranks)], seconds):
                verdicts.append(rank.result())
                if all(code for code, _ in verdicts[-1]):
                    break
        except (TimeoutError, BrokenProcessPool):
            line = f"wrong: no result within {seconds:g} s: an endless loop, or a collective of one rank?"
            return [(1, line)] * len(jobs)
        finally:
            for process in multiprocessing.active_children():
                process.kill()
    return [next((one for one in of_job if one[0]), of_job[0]) for of_job in zip(*verdicts, strict=True)]


def _rank(rank: int, ranks: int, place: str, jobs: Sequence[Job], patience: timedelta) -> list[Verdict]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    torch.set_num_threads(1)
    if ranks > 1:
        try:
            distributed.init_process_group("gloo", place, patience, ranks, rank)
        except Exception as error:  # of torch's classes, some of which cannot be passed on
            raise RunError(f"the ranks have not met: {short(error, 300)}") from None
    return [judge(exercise, file) for exercise, file in jobs]


def judge(exercise: int, file: str) -> Verdict:
    """Runs an answer in this process, and returns its exit code and line."""
    check = CHECKS[exercise - 1]
    name = _name(check)
    try:
        if sys.platform == "win32" and check.__module__ == program.__name__:
            raise UsageError(f"exercise {exercise} needs Linux or macOS; on Windows use WSL")
        answer = user_code.load(f"{file}:{name}", f"exercise {exercise}:")
        if _is_open(Path(file), name):
            raise UsageError(
                f"exercise {exercise}: {name} in {Path(file).name} is still `...`: write your answer there"
            )
        if exercise in WITHOUT_AUTOGRAD:
            answer = torch.inference_mode()(answer)
        return 0, f"right: {check(answer)}"
    except UsageError as error:
        return error.exit_code, str(error)
    except (Exception, SystemExit) as error:
        line = "" if isinstance(error, Wrong) else f"{user_code.where(error)}{type(error).__name__}: "
        return 1, f"wrong: {line}{short(error, 400)}"


def _is_answered(file: Path, name: str) -> bool:
    source = file.read_text(errors="replace")
    try:
        return name in source and not _is_open(file, name)
    except SyntaxError:
        return True  # the verdict then names the line


def _is_open(file: Path, name: str) -> bool:
    """Returns whether the last function or class of this name in a file has nothing but `...` or a docstring in its
    body."""
    parts = [part for part in ast.parse(file.read_bytes()).body if isinstance(part, ast.FunctionDef | ast.ClassDef)]
    body = next((part.body for part in reversed(parts) if part.name == name), [])
    return bool(body) and all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in body)


CHECKS: list[Callable[..., str]] = [
    one_process.linear,
    one_process.relu,
    one_process.max_pool,
    one_process.convolution_size,
    one_process.convolution_gradients,
    one_process.cross_entropy_gradient,
    program.training_step,
    one_process.accumulate,
    two_ranks.average_gradients,
    two_ranks.zero_1_step,
    two_ranks.clip_shard,
    one_process.bytes_per_rank,
    program.batch_for_zero,
    one_process.lora_cost,
    two_ranks.zero_3_step,
    one_process.bytes_sent,
    program.broken,
]
"""The checks of exercises 1 to 17: each returns what is right, or raises Wrong. An answer has the name of its check,
except that the answer to `broken` is the class `Broken`."""
WITHOUT_AUTOGRAD = range(1, 7)  # exercises
POINTS = dict.fromkeys(range(1, 18), 1) | {5: 2, 10: 2, 15: 4, 17: 2}

if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunError as error:
        sys.exit(str(error))
