"""`stepcheck accept`: the command."""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepcheck.accept.cases import ROWS, STEPS, STRATEGIES, ZERO, Case, plan
from stepcheck.accept.fuzz import random_cases
from stepcheck.accept.known import known_fault
from stepcheck.accept.launch import train_cases
from stepcheck.accept.release import deepspeed_folder
from stepcheck.report import refuse_folders, write_files
from stepcheck.run import positive
from stepcheck.usage import UsageError
from stepcheck.verdict import Finding

BLANK = Case("")

Result = dict[str, Any]
"""A verdict as plain data, with the case's name, row and strategy. Has an `error` if the case was not judged."""


def add_parser(commands: Any) -> None:
    """Adds the parser of `stepcheck accept`."""
    parser = commands.add_parser(
        "accept",
        help="audit the installed PyTorch and DeepSpeed",
        description=f"Trains small models for {STEPS} steps under each strategy, with the installed PyTorch and "
        "DeepSpeed, and audits each step. Exit code 0: all are correct; 1: a fault, or a case that cannot be trained.",
        epilog="examples: stepcheck accept --quick; stepcheck accept --strategies deepspeed_stage_2 --seeds 5",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="train only the most important cases")
    add("--devices", type=positive, default=2, metavar="N", help="number of ranks (default: 2)")
    add(
        "--strategies", nargs="+", choices=STRATEGIES, metavar="NAME", help=f"of {', '.join(STRATEGIES)} (default: all)"
    )
    add("--seeds", type=positive, default=1, metavar="N", help="train each case with N seeds (default: 1)")
    add("--fuzz", type=positive, metavar="N", help="train N random cases instead, which are the same each time")
    add("--print_cases", action="store_true", help="list the cases, and train nothing")
    add("--json", type=Path, metavar="FILE", help="write the verdicts")
    add("--junit", type=Path, metavar="FILE", help="write the verdicts for a CI system")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Trains the cases and prints the verdict. Returns the exit code."""
    strategies = options.strategies or [name for name in STRATEGIES if name not in ZERO or deepspeed_folder()]
    _refuse_mistakes(options, strategies)
    left_out: dict[str, str] = {}
    if options.fuzz:
        cases = random_cases(options.fuzz, strategies, options.devices)
    else:
        cases, left_out = plan(strategies, options.devices, options.quick, options.seeds)
    if options.print_cases:
        _print_cases(cases)
    else:
        results = _train(cases, options.devices)
    for row, why in left_out.items():
        print(f"left out: {row}: {why}")
    return 0 if options.print_cases else _conclude(results, left_out, options)


def _refuse_mistakes(options: argparse.Namespace, strategies: Sequence[str]) -> None:
    """Raises UsageError if the flags make no sense."""
    if not deepspeed_folder() and {*strategies} & {*ZERO}:
        raise UsageError("--strategies: DeepSpeed is not installed; install it, or choose ddp and fsdp2")
    if options.fuzz and (options.quick or options.seeds > 1):
        raise UsageError("--fuzz: its cases have seeds of their own; leave out --quick and --seeds")
    refuse_folders(options, "json", "junit")


def _print_cases(cases: Iterable[Case]) -> None:
    why = {row.case.row: row.why for row in ROWS}
    for case in cases:
        print(case)
        print(f"  {why.get(case.row, 'random options')}")
        print(f"  {json.dumps({name: value for name, value in asdict(case).items() if value != getattr(BLANK, name)})}")


def _train(cases: Sequence[Case], ranks: int) -> list[Result]:
    """Trains the cases and prints a line for each. Returns their results."""
    results: list[Result] = []

    def report(case: Case, verdict: dict[str, Any]) -> None:
        result = {"steps": 0, "findings": [], "shares": {}, **verdict}
        result |= {"engine": str(case), "row": case.row, "strategy": case.strategy, "precision": case.precision}
        unjudged = [f"{what} is not judged, because {why}" for what, why in result.get("not_judged", {}).items()]
        if not result.get("error") and not result["findings"] and (unjudged or result["steps"] < STEPS):
            result["error"] = (unjudged or [f"only {result['steps']} of {STEPS} steps were audited"])[0]
        result["known"] = known_fault(case, [_sentence(finding) for finding in result["findings"]])
        result["passed"] = not result.get("error") and (not result["findings"] or bool(result["known"]))
        result["summary"] = verdict.get("summary", result.get("error"))
        results.append(result)
        print(f"{_status(result):5} {case}: {_outcome(result)}", flush=True)

    train_cases(cases, ranks, report)
    return results


def _status(result: Result) -> str:
    return ("known" if result["known"] else "ok") if result["passed"] else "FAULT"


def _outcome(result: Result) -> str:
    if result["findings"]:
        return _sentence(result["findings"][0]) + (f" (in each release: {result['known']})" if result["known"] else "")
    return result.get("error") or f"{_share(result):.2g} of a tolerance, {result['took']:.2f} s"


def _sentence(finding: dict[str, Any]) -> str:
    return str(Finding(**finding))


def _share(result: Result) -> float:
    return max((float("inf" if share == "infinite" else share) for share in result["shares"].values()), default=0.0)


def _conclude(results: list[Result], left_out: dict[str, str], options: argparse.Namespace) -> int:
    """Prints the table and the verdict, and writes the files. Returns the exit code."""
    failed = [each for each in results if not each["passed"]]
    passed = bool(results) and not failed
    print("\n" + "\n".join(_table(results)) + "\n")
    for each in failed:
        print(f"FAULT {each['engine']}: {_outcome(each)}")
    print(f"stepcheck accept: {'PASSED' if passed else 'FAILED'}: {'; '.join(_sentences(results, options.devices))}")
    result = {
        "passed": passed,
        "exit_code": 0 if passed else 1,
        "command": ["stepcheck", *sys.argv[1:]],
        "left_out": left_out,
        "engines": results,
    }
    write_files(options, result)
    return result["exit_code"]


def _table(results: Sequence[Result]) -> Iterable[str]:
    """Yields the lines of a table of cases and strategies, with the largest share of a tolerance that was used."""
    cells: dict[tuple[str, str], list[Result]] = {}
    for each in results:
        cells.setdefault((each["row"], each["strategy"]), []).append(each)
    rows, columns = (list(dict.fromkeys(key[part] for key in cells)) for part in (0, 1))
    columns.sort(key=STRATEGIES.index)
    heads = [name.removeprefix("deepspeed_stage_") for name in columns]
    width = max(map(len, rows), default=0)
    yield "Largest share of a tolerance (numbers as columns: deepspeed_stage_N)"
    yield "  ".join([" " * width, *(f"{head:>5}" for head in heads)])
    for row in rows:
        texts = [_cell(cells.get((row, column), [])) for column in columns]
        yield "  ".join(
            [f"{row:{width}}", *(f"{text:>{max(5, len(head))}}" for text, head in zip(texts, heads, strict=True))]
        )


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return ""
    worst = max(map(_status, results), key=["ok", "known", "FAULT"].index)
    return f"{max(map(_share, results)):.2f}" if worst == "ok" else worst


def _sentences(results: Sequence[Result], ranks: int) -> Iterable[str]:
    right = [each for each in results if _status(each) == "ok"]
    yield f"{len(right)} of {len(results)} cases are correct"
    known = [each for each in results if _status(each) == "known"]
    if known:
        yield f"{len(known)} have a fault that every release has"
    versions = [f"{name} {_version(name)}" for name in ("torch", "deepspeed") if _version(name)]
    yield f"{', '.join(versions)}, {ranks} ranks, {sum(each['steps'] for each in results)} steps audited"
    replayed, identical = (sum(each[key] for each in right) for key in ("replayed", "identical"))
    yield f"{replayed} computed again by plain PyTorch, {identical} of them bit-identical"
    kinds = sorted({kind for each in right for kind in each["shares"]})
    largest = [f"{kind} {max(each['shares'].get(kind, 0.0) for each in right):.2g}" for kind in kinds]
    if largest:
        yield f"largest share of a tolerance: {', '.join(largest)}"
    for name in ("float32", "bfloat16", "float16"):
        own = [each for each in right if each["precision"] == name]
        if own:
            of_all, of_one = (max(each[f"smallest_{what}_error"] for each in own) for what in ("scale", "tensor"))
            judged = sum(each["values"] for each in own) / sum(each["values_in_all"] for each in own)
            yield (
                f"{name}: {100 * judged:.3g} % of the gradients' values are judged, a scale error of {of_all:.1e} of "
                f"all gradients or of {of_one:.1e} of one would be seen"
            )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
