"""Defines the flags for files with verdicts and baselines, and writes these files."""

import argparse
import json
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from stepcheck.usage import UsageError

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 forbids, such as the control characters of colours in a log."""

Result = dict[str, Any]
"""The verdict on a case as plain data, with the case's name as `engine`. Has an `error` if it was not judged."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --json and --junit to the parser of a command."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the verdict as JUnit XML, for CI systems")


def add_baseline_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --save and --against to the parser of a command."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--save", type=Path, metavar="FILE", help="save what each step computes, for --against")
    either.add_argument("--against", type=Path, metavar="FILE", help="compare each step with the file of --save")


@contextmanager
def baseline_of(options: argparse.Namespace, command: str) -> Iterator[dict[str, Any] | None]:
    """Yields the arguments of `Baseline` for --save or --against, or None without these flags. If steps were saved, the
    file of --save replaces an earlier one at the end of the context. Raises UsageError if there is no file to compare
    with."""
    if options.against:
        if not options.against.is_file():
            raise UsageError(f"--against: {options.against} is not a file")
        yield {"file": str(options.against.absolute()), "compare": True, "command": command}
        return
    if not options.save:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="stepcheck-") as folder:
        file = Path(folder, "baseline.pt")
        yield {"file": str(file), "compare": False, "command": command}
        if file.exists():
            options.save.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(file, options.save)


def refuse_folders(options: argparse.Namespace) -> None:
    """Raises UsageError if the path for the file of --json, --junit or --save is a folder."""
    for flag in ("json", "junit", "save"):
        file = getattr(options, flag, None)
        if file is not None and file.is_dir():
            raise UsageError(f"--{flag}: {file} is a folder; give a file")


def write_files(options: argparse.Namespace, passed: bool, engines: list[dict[str, Any]], **more: Any) -> int:
    """Writes the files of --json and --junit, if they are given. Returns the result's exit code, by default 0 if
    `passed`, else 1.

    Args:
        passed: Whether all was judged as required and agrees.
        engines: The verdict of each engine or case, as plain data.
        more: More fields of the result. May replace the default `command` and `exit_code`.
    """
    command = ["stepcheck", *sys.argv[1:]]
    result = {"passed": passed, "exit_code": int(not passed), "command": command, "engines": engines, **more}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.junit:
        write_junit(options.junit, result)
    return result["exit_code"]


def write_junit(file: Path, result: dict[str, Any]) -> None:
    """Writes a test case for each engine or case of a result of `write_files`, and a skipped one for each row that is
    left out. If there is no engine, writes one failed test case."""
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
