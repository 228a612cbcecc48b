"""`stepcheck run`: audits a script as it is, and every process that it starts."""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stepcheck.report import add_baseline_flags, add_flags, baseline_of, write_files
from stepcheck.usage import UsageError, positive
from stepcheck.verdict import ENOUGH

SITE = """\
import importlib.machinery, importlib.util, sys
sys.path.append({package!r})
from stepcheck.attach import install
install(**{settings!r})
# Python imports only one sitecustomize: here is the one that this file hides.
others = [path for path in sys.path if path != {folder!r}]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if spec:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
"""Text of the module sitecustomize, which each Python process imports at its start (Python's documentation of `site`).
`package` is the folder that contains stepcheck, `settings` has the arguments of `install`, and `folder` contains this
module."""

PASSED_ON = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that a cluster's scheduler sends to a job, for example before its time is over."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="audit each step of a script",
        description="Audits each optimizer step of an unmodified script that trains with DeepSpeed, DistributedData"
        "Parallel, FSDP2 or plain PyTorch, directly or through Lightning, Accelerate or transformers. The first fault "
        "ends the run with exit code 1. Otherwise the exit code is the script's, or 1 if an audit did not start, ended "
        f"early, judged less than {ENOUGH:.0%} of the gradients, or compared no step with --against.",
        epilog="examples: stepcheck run train.py --lr 0.1; stepcheck run torchrun --nproc_per_node 2 train.py; "
        "stepcheck run deepspeed train.py; stepcheck run accelerate launch train.py",
    )
    parser.add_argument("--every", type=positive, default=1, metavar="N", help="audit every N-th step (default: 1)")
    parser.add_argument(
        "--weights_every",
        type=positive,
        default=8,
        metavar="N",
        help="compare each weight in every N-th step (default: 8)",
    )
    parser.add_argument("--keep_going", action="store_true", help="continue after a fault, and report all at the end")
    add_baseline_flags(parser)
    add_flags(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS...", help="a .py file or launcher")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the script under the audit, and returns its exit code. If that is 0, returns 1 if an engine does not agree,
    if there was no engine, or if a file could not be written. If rank 0 runs on another machine, prints no verdict and
    returns the script's exit code. Raises UsageError if the script or launcher does not exist."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    program = command[0] if command else ""
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise UsageError(f"SCRIPT: {program} is not a file")
        command = [sys.executable, *command]
    else:  # a launcher: next to this Python, or on PATH
        search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        found = shutil.which(program, path=search) if program else None
        if found is None:
            raise UsageError(f"SCRIPT: {program or 'it'} is missing; give a .py file, or a launcher such as torchrun")
        command = [found, *command[1:]]
    with tempfile.TemporaryDirectory(prefix="stepcheck-") as folder:
        baseline = baseline_of(options, shlex.join(options.command), folder)
        settings = {
            "reports": folder,
            "every": options.every,
            "weights_every": options.weights_every,
            "keep_going": options.keep_going,
        }
        if baseline:
            settings |= {"baseline": baseline, "weights_every": 1}
        package = str(Path(__file__).resolve().parents[1])
        site = SITE.format(package=package, settings=settings, folder=folder)
        Path(folder, "sitecustomize.py").write_text(site)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        code = _run_script(command, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
        verdicts = [each for file in sorted(Path(folder).glob("*.json")) for each in json.loads(file.read_text())]
        audited = {file.name for file in Path(folder).glob("rank *")}
        if audited and "rank 0" not in audited and not verdicts:
            print("stepcheck: the verdict is printed where rank 0 runs", flush=True)
            return code
        return _conclude(verdicts, code, options, baseline)


def _run_script(command: list[str], environment: dict[str, str]) -> int:
    """Runs the script, which gets the terminal's Ctrl-C itself, and passes the signals in PASSED_ON to it. Signals that
    are ignored, as under nohup, stay so. Returns the exit code: 128 + N if signal N ended the script."""
    process = None

    def pass_on(number: int, frame: Any) -> None:
        if process is not None and number != signal.SIGINT:
            process.send_signal(number)

    numbers = [getattr(signal, name) for name in ("SIGINT", *PASSED_ON) if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    handlers = {number: each for number, each in handlers.items() if each not in (signal.SIG_IGN, None)}
    try:
        for number in handlers:
            signal.signal(number, pass_on)
        process = subprocess.Popen(command, env=environment)
        code = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _conclude(
    verdicts: list[dict[str, Any]], code: int, options: argparse.Namespace, baseline: dict[str, Any] | None
) -> int:
    for each in verdicts:
        print(f"stepcheck: {each['engine']}: {each['summary']}", flush=True)
    passed = bool(verdicts) and all(each["passed"] for each in verdicts)
    why = ""
    if not any(each["steps"] for each in verdicts):
        why = "no step was audited, so this run proves nothing"
    elif not passed and not any(each["findings"] for each in verdicts):
        lacks = f"judged less than {ENOUGH:.0%} of the gradients, or compared no step with --against"
        why = f"exit code 1, because an audit did not start, ended early, {lacks}"
    if why:
        print(f"stepcheck: {why}", file=sys.stderr, flush=True)
    exit_code = code if passed else code or 1
    return write_files(options, passed, verdicts, baseline, command=options.command, exit_code=exit_code)
