"""Starts ranks on this machine, and reads the verdicts of the cases that they train."""

import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

HANG_SECONDS = 180
"""How long ranks may be silent. On an idle machine their imports take less than 10 seconds, and a case less than 1."""

AnyCase = TypeVar("AnyCase", bound=Any)
"""A dataclass of plain data with a `strategy` and DeepSpeed's `config`."""

Processes = list[subprocess.Popen[bytes]]


def train_cases(
    cases: Sequence[AnyCase],
    ranks: int,
    report: Callable[[AnyCase, dict[str, Any]], None],
    train: str,
    hang_seconds: float = HANG_SECONDS,
    **settings: Any,
) -> None:
    """Trains cases, and reports the verdict of each as it ends. A case in which a rank fails or hangs is reported with
    an `error`, and new ranks train the rest.

    Args:
        cases: Trained one after the other.
        ranks: Number of ranks, all of which train each case.
        report: Is called with each case and its verdict.
        train: Name of the function that trains a case on a rank. It takes the fields of the case, the rank's device,
            a folder that all ranks share, and `settings`. It returns the verdict as plain data.
        hang_seconds: How long the ranks may be silent.
        **settings: More arguments of `train`, as plain data.
    """
    done = 0
    while done < len(cases):
        ready = False
        with _started(cases[done:], ranks, train, settings) as (processes, pipe, folder):
            for result in _lines(processes, pipe, hang_seconds):
                if ready:
                    report(cases[done], result)
                    done += 1
                ready = True  # the first line says that the imports have ended
            error = _error(processes, folder, hang_seconds)
        for case in cases[done : done + 1] if ready else cases[done:]:
            report(case, {"error": error})
            done += 1


@contextmanager
def _started(
    cases: Sequence[Any], ranks: int, train: str, settings: dict[str, Any]
) -> Iterator[tuple[Processes, int, Path]]:
    """Starts ranks that train cases. Yields them, the pipe to which the first writes, and the folder of their logs."""
    temporary = tempfile.TemporaryDirectory(prefix="stepcheck-")
    folder = Path(temporary.name)
    work = {"train": train, "cases": [asdict(case) for case in cases], "settings": settings}
    (folder / "work.json").write_text(json.dumps(work))
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package]))
    # No case compiles. Otherwise importing DeepSpeed's Muon would import the compiler.
    shared = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **os.environ}
    # Without LOCAL_SIZE, DeepSpeed starts numactl to count the devices.
    shared |= {"PYTHONPATH": path, **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(ranks))}
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "stepcheck.launch.rank", str(folder), str(writing)]
    processes = []
    try:
        for rank in range(ranks):
            with (folder / f"{rank}.log").open("wb") as log:
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                pipes = [writing] if rank == 0 else []
                processes.append(
                    subprocess.Popen(command, env=own, pass_fds=pipes, stdout=log, stderr=subprocess.STDOUT)
                )
        os.close(writing)
        yield processes, reading, folder
    finally:
        os.close(reading)
        for process in processes:
            process.kill()
            process.wait()
        temporary.cleanup()


def _lines(processes: Processes, pipe: int, hang_seconds: float) -> Iterator[dict[str, Any]]:
    """Yields what the first rank writes, until it ends, or another rank fails, or all are silent for too long."""
    waiting = selectors.DefaultSelector()
    waiting.register(pipe, selectors.EVENT_READ)
    text, heard = b"", time.monotonic()
    while time.monotonic() - heard < hang_seconds:
        failed = any(process.poll() for process in processes)
        if waiting.select(0.1):
            read = os.read(pipe, 1 << 16)
            if not read:
                return
            *lines, text = (text + read).split(b"\n")
            yield from map(json.loads, lines)
            heard = time.monotonic()
        elif failed:
            return


def _error(processes: Processes, folder: Path, hang_seconds: float) -> str:
    """Returns the exception of the rank that failed first, or that the ranks hang."""
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
