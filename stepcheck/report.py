"""Defines the flags for files with verdicts and baselines, and writes these files."""

import argparse
import errno
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from stepcheck.usage import UsageError

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 forbids, such as the control characters of colours in a log."""

Result = dict[str, Any]
"""The verdict on a case as plain data, with the case's name as `engine`. Has an `error` if it was not judged."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the verdict as JUnit XML, for CI systems")


def add_baseline_flags(parser: argparse.ArgumentParser) -> None:
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--save", type=Path, metavar="FILE", help="save what each step computes, for --against")
    either.add_argument("--against", type=Path, metavar="FILE", help="compare each step with the file of --save")


def baseline_of(options: argparse.Namespace, command: str, folder: str) -> dict[str, Any] | None:
    """Returns the arguments of `Baseline` for --save or --against, or None without these flags. Steps to save go into a
    file in `folder` first, which `write_files` moves. Raises UsageError if there is no file to compare with."""
    if options.against:
        if not options.against.is_file():
            raise UsageError(f"--against: {options.against} is not a file")
        return {"file": str(options.against.absolute()), "compare": True, "command": command}
    return {"file": str(Path(folder, "baseline.pt")), "compare": False, "command": command} if options.save else None


def check_files(options: argparse.Namespace) -> None:
    """Makes the folders for the files of --json, --junit and --save. Raises UsageError if a file cannot be written,
    before a run that would be in vain."""
    for flag in ("json", "junit", "save"):
        if file := getattr(options, flag, None):
            check_file(flag, file)


def check_file(flag: str, file: Path) -> None:
    """Makes the folder for the file of a flag. Raises UsageError if the file cannot be written."""
    try:
        if file.is_dir():
            raise UsageError(f"--{flag}: {file} is a folder; give a file")
        file.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"--{flag}: {file} cannot be written ({error.strerror}); give another file") from error


def write_files(
    options: argparse.Namespace,
    passed: bool,
    engines: list[dict[str, Any]],
    baseline: dict[str, Any] | None = None,
    **more: Any,
) -> int:
    """Writes the files of --json, --junit and --save, if they are given. A file that cannot be written is named on
    stderr. Returns the result's exit code (by default 0 if `passed`, else 1), but 1 instead of 0 if a file could not be
    written.

    Args:
        passed: Whether all was judged as required and agrees.
        engines: The verdict of each engine or case, as plain data.
        baseline: What `baseline_of` has returned.
        more: More fields of the result. May replace the default `command` and `exit_code`.
    """
    command = ["stepcheck", *sys.argv[1:]]
    result = {"passed": passed, "exit_code": int(not passed), "command": command, "engines": engines, **more}
    writers: dict[str, Callable[[Path], Any]] = {
        "json": lambda file: file.write_text(json.dumps(result, indent=1) + "\n"),
        "junit": lambda file: write_junit(file, result),
    }
    if baseline and not baseline["compare"] and Path(baseline["file"]).exists():
        writers["save"] = lambda file: shutil.move(baseline["file"], file)
    missing = False
    for flag, write in writers.items():
        file = getattr(options, flag)
        try:
            if file is not None:
                write(file)
        except OSError as error:
            why = error.strerror or error
            print(f"stepcheck: --{flag}: {file} cannot be written: {why}", file=sys.stderr, flush=True)
            missing = True
    return result["exit_code"] or int(missing)


def write_junit(file: Path, result: dict[str, Any]) -> None:
    """Writes a test case for each of the `engines` of a result of `write_files`, and a skipped one for each of its
    `left_out`. Without engines, writes one failed test case. Makes the file's folder."""
    engines = result["engines"] or [{"engine": "no engine", "steps": 0, "findings": [], "summary": "", "passed": False}]
    failed = [each for each in engines if not each["passed"]]
    counts = {"tests": len(engines) + len(result.get("left_out", {})), "failures": len(failed)}
    suite = ElementTree.Element(
        "testsuite", name="stepcheck", attrib={key: str(count) for key, count in counts.items()}
    )
    for each in engines:
        case = ElementTree.SubElement(
            suite, "testcase", classname="stepcheck", name=each["engine"], time=f"{each.get('training_seconds', 0):.3f}"
        )
        if not each["passed"]:
            message = each["findings"][0]["text"] if each["findings"] else each.get("error", "not judged")
            failure = ElementTree.SubElement(case, "failure", message=message)
            failure.text = f"{each['summary']}\n{shlex.join(each.get('command', result['command']))}"
    for name, why in result.get("left_out", {}).items():
        case = ElementTree.SubElement(suite, "testcase", classname="stepcheck", name=name)
        ElementTree.SubElement(case, "skipped", message=why)
    text = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True).decode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(NOT_IN_XML.sub("", text), encoding="utf-8")
