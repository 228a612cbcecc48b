"""Tests which releases of DeepSpeed compute what plain PyTorch computes. Runs `stepcheck accept` with each release, and
prints one Markdown table of the cases that are not correct.

Each release is installed in a separate folder, which comes before the environment's packages on the path. The
environment does not change. A folder that exists is used as it is, so a revision can be tested too: install it there.

Results are in results.json next to these folders, and are not measured again. The file maps each release to:

- `date` (ISO 8601), `machine` (processor, cores, memory, versions, commit), and `flags` of `stepcheck accept`
- `passed`: whether each case is correct, or has a known fault
- `cases`: maps the strategy, and then the name of the case, to the `verdict` (correct, not judged, does not run or
  wrong), the largest `share` of a tolerance that an error took (null if nothing was compared), and the first `fault`

`python docs/releases.py` draws such a file.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.runs import ROOT
from cifar_zero.core import exits
from cifar_zero.core.atomic import write_json
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.core.hardware import core_count, cpu_name, git_commit, memory_bytes, versions

HEADING = "| DeepSpeed | strategy | case | verdict | first fault |\n|---|---|---|---|---|"


def main() -> int:
    """Runs the acceptance with each release. Returns the exit code, which is 1 if a release could not be tested or has
    a fault that is not known."""
    parser = exits.Parser(prog="python -m benchmarks.releases", description=__doc__)
    add = parser.add_argument
    add("releases", nargs="+", metavar="RELEASE", help="releases of DeepSpeed, such as 0.18.4")
    folder = "folder for the installed releases, the reports and results.json (default: %(default)s)"
    add("--folder", type=Path, default=Path("comparisons/releases"), help=folder)
    add("--strategies", nargs="+", metavar="NAME", default=[], help="default: all")
    add("--quick", action="store_true", help="only the three most sensitive cases")
    arguments = parser.parse_args()
    exits.install()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    flags = [*["--quick"] * arguments.quick, *(["--strategies", *arguments.strategies] if arguments.strategies else [])]
    if any(result["flags"] != flags for result in results.values()):
        raise UsageError(f"--folder: {file} has results with other strategies or cases; give another folder")
    has_failed = False
    print(HEADING)
    for release in arguments.releases:
        print(f"DeepSpeed {release}", file=sys.stderr)
        if release not in results:
            try:
                results[release] = tested(release, arguments.folder.absolute(), flags)
            except RunError as error:
                print(f"| {release} | | | not tested | {error} |")
                has_failed = True
                continue
            write_json(file, results)
        has_failed |= not results[release]["passed"]
        for strategy, cases in results[release]["cases"].items():
            for row, case in cases.items():
                if case["fault"]:
                    fault = case["fault"].replace("|", " ")
                    print(f"| {release} | {strategy} | {row} | {case['verdict']} | {fault} |", flush=True)
    return int(has_failed)


def tested(release: str, folder: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Installs a release unless its folder exists, trains the cases with it, and returns its entry of results.json.
    Raises RunError if the release cannot be installed, or the acceptance writes no report."""
    if not (target := folder / release).exists():
        install(release, target)
    report = folder / "reports" / f"{release}.json"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    started = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    command = [sys.executable, "-m", "stepcheck", "accept", *flags, "--json", str(report)]
    # Operators that DeepSpeed compiles differ between releases, so each release has a folder for them.
    environment = {"PYTHONPATH": str(target), "TORCH_EXTENSIONS_DIR": str(target / "torch_extensions")}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    if not report.exists():
        raise RunError(last_line(done.stderr))
    machine: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": cpu_name(),
        "memory": f"{memory_bytes() / 1e9:.1f} GB",
        "cores": str(core_count()),
        **versions(),
        "deepspeed": release,
        "commit": git_commit(),
    }
    return {"date": started, "machine": machine, "flags": [*flags], **shortened(json.loads(report.read_text()))}


def shortened(report: dict[str, Any]) -> dict[str, Any]:
    """Returns what results.json keeps of a report of `stepcheck accept`."""
    cases: dict[str, dict[str, Any]] = {}
    for case in report["engines"]:
        if case["findings"]:
            verdict = "wrong"  # a fault that all releases have is one too
        elif case["passed"]:
            verdict = "correct"
        else:
            verdict = "not judged" if case["steps"] else "does not run"
        cases.setdefault(case["strategy"], {})[case["row"]] = {
            "verdict": verdict,
            "share": max(case["shares"].values(), default=None),
            "fault": "" if verdict == "correct" else case["summary"],
        }
    return {"passed": report["passed"], "cases": cases}


def install(release: str, target: Path) -> None:
    """Installs a release in a folder that does not exist yet. Raises RunError if this fails."""
    staged = target.with_name(f"{release}.part")
    shutil.rmtree(staged, ignore_errors=True)
    # The source distribution imports torch when it is built, which an isolated build does not have.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(staged), "--no-deps"]
    command += ["--no-build-isolation", f"deepspeed=={release}"]
    done = subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, capture_output=True, text=True)
    if done.returncode:
        raise RunError(last_line(done.stderr))
    staged.rename(target)


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


if __name__ == "__main__":
    exits.run(main)
