"""Starts ranks on this machine, and judges the cases that they train."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from stepcheck.report import Result
from stepcheck.verdict import ENOUGH, Finding, Verdict

HANG_SECONDS = 180
"""How long ranks may be silent. On an idle machine their imports take less than 10 seconds, and a case less than 1."""

AnyCase = TypeVar("AnyCase", bound=Any)
"""A dataclass of plain data with a `strategy` and DeepSpeed's `config`."""

Processes = list[subprocess.Popen[bytes]]


def train_cases(
    cases: Sequence[AnyCase],
    ranks: int,
    train: str,
    judge: Callable[[AnyCase, dict[str, Any]], Result],
    hang_seconds: float = HANG_SECONDS,
    **settings: Any,
) -> list[Result]:
    """Trains cases, prints a line for each as it ends, and returns their results. A case in which a rank fails or hangs
    has an `error`, and new ranks train the rest. If ranks fail before they have imported their modules, all remaining
    cases have this `error`. After Ctrl-C the next case has an `error`, and the cases after it have no results.

    Args:
        ranks: Number of ranks, all of which train each case.
        train: Name of the function that trains a case on a rank. It takes the fields of the case, the rank's device,
            a folder that all ranks share, and `settings`. It returns the verdict as plain data.
        judge: Returns the result of a case from its verdict (see `result_of`).
        hang_seconds: How long the ranks may be silent.
        **settings: More arguments of `train`, as plain data.
    """
    results: list[Result] = []

    def add(verdict: dict[str, Any]) -> None:
        case = cases[len(results)]
        results.append(judge(case, verdict))
        print(f"{results[-1]['outcome']:10}  {case}: {results[-1]['summary']}", flush=True)

    try:
        while len(results) < len(cases):
            with _started(cases[len(results) :], ranks, train, settings) as (processes, folder):
                verdicts = _lines(processes, folder / "verdicts", hang_seconds)
                is_ready = next(verdicts, None)  # the first line says that the imports have ended
                for verdict in verdicts:
                    add(verdict)
                error = _error(processes, folder, hang_seconds)
            for _ in cases[len(results) :][: 1 if is_ready else None]:
                add({"error": error})
    except KeyboardInterrupt:
        if len(results) < len(cases):
            add({"error": f"stopped by Ctrl-C after {len(results)} of {len(cases)} cases"})
    return results


def result_of(case: Any, verdict: dict[str, Any], steps: int, *reasons: str) -> Result:
    """Returns the result of a case. Its outcome is "different" if it has findings, or else "not judged" if it has an
    error, a part that is not judged, too few audited steps or judged gradients, or another reason. Otherwise it is
    "agrees", and the case passes.

    Args:
        case: `str(case)` becomes the result's `engine`.
        verdict: The fields of a rank's verdict, or only `error` if the rank has failed.
        steps: Number of steps that must have been audited.
        reasons: More reasons why the case is not judged. Empty texts are ignored.
    """
    result = {**Verdict().as_dict(), **verdict, "engine": str(case), "outcome": "agrees"}
    unjudged = [f"not judged: {what}, because {why}" for what, why in result["not_judged"].items()]
    if result["steps"] < steps:
        unjudged.append(f"only {result['steps']} of {steps} steps were audited")
    elif result["coverage"] < ENOUGH:
        unjudged.append(f"less than {ENOUGH:.0%} of the gradients' values were judged")
    errors = [text for text in (result.get("error"), *unjudged, *reasons) if text]
    if result["findings"]:
        result |= {"outcome": "different", "summary": str(Finding(**result["findings"][0]))}
    elif errors:
        result |= {"outcome": "not judged", "error": errors[0], "summary": errors[0]}
    else:
        share = max(result["shares"].values(), default=0.0)
        identical = "all" if result["identical"] == result["replayed"] else result["identical"]
        result["summary"] = (
            f"{result['steps']} steps audited, {result['replayed']} replayed, {identical} of them bit-identical, "
            f"{share:.2g} of a tolerance, {result['took']:.1f} s"
        )
    return result | {"passed": result["outcome"] == "agrees"}


@contextmanager
def _started(
    cases: Sequence[Any], ranks: int, train: str, settings: dict[str, Any]
) -> Iterator[tuple[Processes, Path]]:
    """Starts ranks that train cases. Yields them, and the folder of their logs and verdicts. Ends the ranks and removes
    the folder at the end of the context."""
    temporary = tempfile.TemporaryDirectory(prefix="stepcheck-")
    folder = Path(temporary.name)
    work = {"train": train, "cases": [asdict(case) for case in cases], "settings": settings}
    (folder / "work.json").write_text(json.dumps(work))
    (folder / "verdicts").touch()
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
    # No case compiles. Otherwise importing DeepSpeed's Muon would import the compiler.
    shared = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **os.environ}
    # Without LOCAL_SIZE, DeepSpeed starts numactl to count the devices.
    shared |= {"PYTHONPATH": path, **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(ranks))}
    command = [sys.executable, "-m", "stepcheck.launch.rank", str(folder / "verdicts")]
    processes = []
    try:
        for rank in range(ranks):
            with (folder / f"{rank}.log").open("wb") as log:
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
        yield processes, folder
    finally:
        for process in processes:
            process.kill()
            process.wait()
        temporary.cleanup()


def _lines(processes: Processes, file: Path, hang_seconds: float) -> Iterator[Any]:
    """Yields the JSON values that the first rank writes, one a line, until it ends, another rank fails, or there is no
    new line for `hang_seconds`."""
    text, heard = "", time.monotonic()
    with file.open() as written:
        while time.monotonic() - heard < hang_seconds:
            ended = processes[0].poll() is not None or any(process.poll() for process in processes)
            *lines, text = (text + written.read()).split("\n")
            yield from map(json.loads, lines)
            if lines:
                heard = time.monotonic()
            elif ended:
                return
            else:
                time.sleep(0.1)


def _error(processes: Processes, folder: Path, hang_seconds: float) -> str:
    """Returns an error line: the last exception in the log of the rank that failed first, or that the ranks hang. Waits
    up to a second for each rank to end."""
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
    failed = [folder / f"{rank}.log" for rank, process in enumerate(processes) if process.returncode]
    if not failed:
        return f"the ranks have been silent for {hang_seconds:g} s"
    first = min(failed, key=lambda log: log.stat().st_mtime)
    lines = first.read_text(errors="replace").strip().splitlines() or ["it has written nothing"]
    exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return f"rank {first.stem} failed: {(exceptions or lines)[-1]}"
