"""Tests which releases of DeepSpeed compute what plain PyTorch computes. Runs `stepcheck accept` with each release, and
prints one Markdown table.

Each release is installed in a separate folder, which comes before the environment's packages on the path. The
environment does not change. Finished results are in results.json next to these folders, and are not measured again:

- The file maps the flags of `stepcheck accept`, and then the release, to `date` (ISO 8601), `machine` (processor,
  cores, memory, versions, commit) and `strategies`.
- `strategies` maps each strategy to its verdict, which is one of KINDS, and to the first case with this verdict and its
  reason.
"""

import json
import os
import shlex
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
from cifar_zero.core.hardware import git_commit, this_computer, versions

HEADING = "| DeepSpeed | strategy | verdict | first case with this verdict |\n|---|---|---|---|\n"

KINDS = ("passes", "not judged", "cannot run", "different")  # verdicts, the worst last

Rows = dict[str, Sequence[str]]  # by strategy: a verdict of KINDS, and the first case with this verdict and its reason


def main() -> int:
    """Runs the acceptance with each release and returns the exit code, which is 1 if a release does not pass."""
    parser = exits.Parser(prog="python -m benchmarks.releases", description=__doc__)
    add = parser.add_argument
    add("releases", nargs="+", metavar="RELEASE", help="releases of DeepSpeed, such as 0.18.4")
    folder = "folder for the installed releases, the reports and results.json (default: %(default)s)"
    add("--folder", type=Path, default=Path("comparisons/releases"), help=folder)
    add("--strategies", nargs="+", metavar="NAME", default=[], help="default: all")
    add("--quick", action="store_true", help="only the three most sensitive recipes")
    arguments = parser.parse_args()
    exits.install()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results = arguments.folder / "results.json"
    known: dict[str, dict[str, dict[str, Any]]] = json.loads(results.read_text()) if results.exists() else {}
    flags = [*["--quick"] * arguments.quick, *(["--strategies", *arguments.strategies] if arguments.strategies else [])]
    done = known.setdefault(shlex.join(flags), {})
    table = HEADING
    for release in arguments.releases:
        print(f"DeepSpeed {release}", file=sys.stderr)
        if release not in done:
            started = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
            machine = {**this_computer(), **versions(), "deepspeed": release, "commit": git_commit()}
            rows = verdicts(release, arguments.folder.absolute(), flags)
            done[release] = {"date": started, "machine": machine, "strategies": rows}
            write_json(results, known)
        for strategy, (verdict, reason) in done[release]["strategies"].items():
            table += f"| {release} | {strategy} | {verdict} | {reason.replace('|', ' ')} |\n"
        (arguments.folder / "releases.md").write_text(table)
    print(table, end="")
    kinds = [kind for release in arguments.releases for kind, _ in done[release]["strategies"].values()]
    return int(any(kind != "passes" for kind in kinds))


def verdicts(release: str, folder: Path, flags: Sequence[str]) -> Rows:
    """Installs a release, trains the cases with it, and returns the verdicts."""
    if not (target := folder / release).exists() and (failure := installed(release, target)):
        return {"all": ("cannot run", failure)}
    report = folder / "reports" / f"{release}.json"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "stepcheck", "accept", *flags, "--json", str(report)]
    # Operators that DeepSpeed compiles differ between releases, so each release has a folder for them.
    environment = {"PYTHONPATH": str(target), "TORCH_EXTENSIONS_DIR": str(target / "torch_extensions")}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    if not report.exists():
        return {"all": ("cannot run", last_line(done.stderr))}
    cases = json.loads(report.read_text())["engines"]
    rows: Rows = {}
    for strategy in dict.fromkeys(case["strategy"] for case in cases):
        worst = max((case for case in cases if case["strategy"] == strategy), key=lambda case: KINDS.index(kind(case)))
        rows[strategy] = kind(worst), "" if kind(worst) == "passes" else f"{worst['row']}: {worst['summary']}"
    return rows


def kind(case: dict[str, Any]) -> str:
    """Returns the verdict, one of KINDS, on a case of `stepcheck accept`."""
    if case["passed"]:
        return "passes"
    if case["findings"]:
        return "different"
    return "not judged" if case["steps"] else "cannot run"


def installed(release: str, target: Path) -> str:
    """Installs a release in a folder that does not exist yet. Returns the reason for a failure, or an empty string."""
    staged = target.with_name(f"{release}.part")
    shutil.rmtree(staged, ignore_errors=True)
    # The source distribution imports torch when it is built, which an isolated build does not have.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(staged), "--no-deps"]
    command += ["--no-build-isolation", f"deepspeed=={release}"]
    done = subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, capture_output=True, text=True)
    if done.returncode == 0:
        staged.rename(target)
    return last_line(done.stderr) if done.returncode else ""


def last_line(text: str) -> str:
    """Returns the last line of a program's output that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


if __name__ == "__main__":
    exits.run(main)
