"""Defines the command `stepcheck accept`, which audits the installed PyTorch and DeepSpeed."""

import argparse
import importlib.metadata
import importlib.util
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from stepcheck.accept.cases import ROWS, STEPS, STRATEGIES, Case, plan
from stepcheck.accept.fuzz import random_cases
from stepcheck.accept.known import known_fault
from stepcheck.launch.launcher import train_cases
from stepcheck.report import Result, add_baseline_flags, add_flags, baseline_of, refuse_folders, unjudged, write_files
from stepcheck.strategies import ZERO, deepspeed_folder
from stepcheck.usage import UsageError, positive
from stepcheck.verdict import Finding

THROUGH = {
    "raw": "stepcheck.accept.train:train_case",
    "lightning": "stepcheck.accept.frameworks:train_through_lightning",
    "accelerate": "stepcheck.accept.frameworks:train_through_accelerate",
    "transformers": "stepcheck.accept.frameworks:train_through_transformers",
}
"""The function that trains a case in a plain loop, or as a script for a framework does."""

BLANK = Case("")


def add_parser(commands: Any) -> None:
    """Adds the command `accept` and its flags to the subparsers of `stepcheck`."""
    parser = commands.add_parser(
        "accept",
        help="audit the installed PyTorch and DeepSpeed",
        description=f"Trains small models for {STEPS} steps under each strategy, with the installed PyTorch and "
        "DeepSpeed, and audits each step. Exit code 0: all are correct; 1: a fault, or a case that cannot be trained.",
        epilog="examples: stepcheck accept --quick; stepcheck accept --strategies deepspeed_stage_2 --seeds 5",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="train only the most sensitive cases")
    add("--devices", type=positive, default=2, metavar="N", help="number of ranks (default: 2)")
    names = f"strategies to train under (default: all): {', '.join(STRATEGIES)}"
    add("--strategies", nargs="+", choices=STRATEGIES, metavar="NAME", help=names)
    add("--through", choices=THROUGH, default="raw", help="framework that trains (default: raw, a plain loop)")
    add("--seeds", type=positive, default=1, metavar="N", help="train each case with N seeds (default: 1)")
    add("--fuzz", type=positive, metavar="N", help="train N random cases instead (the same ones in each call)")
    add("--print_cases", action="store_true", help="list the cases, and train nothing")
    add_baseline_flags(parser)
    add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Trains the cases and prints the verdict. Returns the exit code."""
    usual = [name for name in STRATEGIES if name not in ZERO or deepspeed_folder()]
    if options.through != "raw":
        usual.remove("fsdp2")
    strategies = options.strategies or usual
    _refuse_mistakes(options, strategies)
    left_out: dict[str, str] = {}
    if options.fuzz:
        cases = random_cases(options.fuzz, strategies, options.devices)
    else:
        cases, left_out = plan(strategies, options.devices, options.quick, options.seeds, options.through)
    if options.print_cases:
        _print_cases(cases)
    else:
        with baseline_of(options, "stepcheck accept") as baseline:
            results = _train(cases, options.devices, options.through, {"baseline": baseline} if baseline else {})
    for row, why in left_out.items():
        print(f"left out: {row}: {why}")
    return 0 if options.print_cases else _conclude(results, left_out, options)


def _refuse_mistakes(options: argparse.Namespace, strategies: Sequence[str]) -> None:
    """Raises UsageError if flags contradict one another, or need a package that is not installed."""
    if not deepspeed_folder() and {*strategies} & {*ZERO}:
        raise UsageError("--strategies: DeepSpeed is not installed; install it, or choose ddp and fsdp2")
    if options.fuzz and (options.quick or options.seeds > 1):
        raise UsageError("--fuzz does not work with --quick or --seeds: leave them out")
    if options.through != "raw":
        if options.fuzz or options.save or options.against or "fsdp2" in strategies:
            both = f"--through {options.through} does not work with --fuzz, --save, --against or fsdp2"
            raise UsageError(f"{both}: leave them out")
        if importlib.util.find_spec(options.through) is None or not deepspeed_folder():
            raise UsageError(f"--through {options.through} needs {options.through} and DeepSpeed: install both")
    refuse_folders(options)


def _print_cases(cases: Iterable[Case]) -> None:
    why = {row.case.row: row.why for row in ROWS}
    for case in cases:
        print(case)
        print(f"  {why.get(case.row, 'random options')}")
        print(f"  {json.dumps({name: value for name, value in asdict(case).items() if value != getattr(BLANK, name)})}")


def _train(cases: Sequence[Case], ranks: int, through: str, settings: dict[str, Any]) -> list[Result]:
    """Trains the cases and prints a line for each. Returns their results."""
    results: list[Result] = []

    def report(case: Case, verdict: dict[str, Any]) -> None:
        results.append(_result(case, verdict))
        print(f"{results[-1]['status']:5} {case}: {results[-1]['summary']}", flush=True)

    train_cases(cases, ranks, report, THROUGH[through], **settings)
    return results


def _result(case: Case, verdict: dict[str, Any]) -> Result:
    """Judges a case by the audit's verdict: "ok", "known" or "FAULT"."""
    result = {"steps": 0, "findings": [], "shares": {}, "not_judged": {}, "known": "", **verdict}
    result |= {"engine": str(case), "row": case.row, "strategy": case.strategy, "precision": case.precision}
    left_out = unjudged(result)
    findings = [str(Finding(**each)) for each in result["findings"]]
    if findings:
        result["known"] = known_fault(case, findings)
        result["summary"] = findings[0] + (f" (in each release: {result['known']})" if result["known"] else "")
    elif left_out or result["steps"] < STEPS:
        result.setdefault("error", (left_out or [f"only {result['steps']} of {STEPS} steps were audited"])[0])
    if "error" in result:
        result["summary"] = result["error"]
    result["passed"] = "error" not in result and (not findings or bool(result["known"]))
    result["status"] = ("known" if result["known"] else "ok") if result["passed"] else "FAULT"
    if result["status"] == "ok":
        result["summary"] = f"{max(result['shares'].values()):.2g} of a tolerance, {result['took']:.2f} s"
    return result


def _conclude(results: list[Result], left_out: dict[str, str], options: argparse.Namespace) -> int:
    """Prints the verdict and writes the files. Returns the exit code."""
    failed = [each for each in results if not each["passed"]]
    passed = bool(results) and not failed
    print()
    for each in failed:
        print(f"FAULT {each['engine']}: {each['summary']}")
    print(f"stepcheck accept: {'PASSED' if passed else 'FAILED'}: {'; '.join(_sentences(results, options.devices))}")
    return write_files(options, passed, results, left_out=left_out)


def _sentences(results: Sequence[Result], ranks: int) -> Iterable[str]:
    right, known = ([each for each in results if each["status"] == status] for status in ("ok", "known"))
    yield f"{len(right)} of {len(results)} cases are correct"
    if known:
        yield f"{len(known)} have a fault that every release has"
    versions = [f"{name} {_version(name)}" for name in ("torch", "deepspeed") if _version(name)]
    yield f"{', '.join(versions)}, {ranks} ranks, {sum(each['steps'] for each in results)} steps audited"
    replayed, identical = (sum(each[key] for each in right) for key in ("replayed", "identical"))
    if replayed:
        yield f"{replayed} computed again by plain PyTorch, {identical} of them bit-identical"
    kinds = sorted({kind for each in right for kind in each["shares"]})
    largest = [f"{kind} {max(each['shares'].get(kind, 0.0) for each in right):.2g}" for kind in kinds]
    if largest:
        yield f"largest share of a tolerance: {', '.join(largest)}"
    notes = Counter(
        f"{what}: {why}" if "changed" in what else what
        for each in results
        for what, why in each.get("notes", {}).items()
        if "changed" in what or "baseline" in what
    )
    yield from (f"{count} cases: {note}" for note, count in notes.items())
    for name in dict.fromkeys(each["precision"] for each in right):
        own = [each for each in right if each["precision"] == name]
        of_all, of_one = (max(each[f"smallest_{what}_error"] for each in own) for what in ("scale", "tensor"))
        judged = sum(each["values"] for each in own) / sum(each["values_in_all"] for each in own)
        yield (
            f"{name}: {100 * judged:.3g} % of the gradients' values are judged, a scale error of {of_all:.1e} in "
            f"all gradients, or of {of_one:.1e} in one gradient, would be seen"
        )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
