"""Defines the command `stepcheck accept`, which audits the installed PyTorch and DeepSpeed."""

import argparse
import importlib.util
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from stepcheck.accept.cases import STEPS, STRATEGIES, Case, plan
from stepcheck.accept.fuzz import random_cases
from stepcheck.accept.known import known_fault
from stepcheck.accept.release import installed_version
from stepcheck.launch.launcher import result_of, train_cases
from stepcheck.report import Result, add_baseline_flags, add_flags, baseline_of, write_files
from stepcheck.strategies import ZERO, deepspeed_folder
from stepcheck.usage import UsageError, positive
from stepcheck.verdict import ENOUGH, Finding, Verdict

THROUGH = {
    "raw": "stepcheck.accept.train:train_case",
    "lightning": "stepcheck.accept.frameworks:train_through_lightning",
    "accelerate": "stepcheck.accept.frameworks:train_through_accelerate",
    "transformers": "stepcheck.accept.frameworks:train_through_transformers",
}
"""For each value of --through, the function that trains a case on a rank: in a plain loop ("raw"), or as a script for
this framework does."""


def add_parser(commands: Any) -> None:
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
    """Trains the cases and prints the verdict. Returns the exit code: 0 if there are cases, all pass (see `_judge`),
    and all files were written, else 1. With --print_cases, lists the cases and returns 0."""
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
    for row, why in left_out.items():
        print(f"left out: {row}: {why}")
    if options.print_cases:
        _print_cases(cases)
        return 0
    with tempfile.TemporaryDirectory(prefix="stepcheck-") as folder:
        baseline = baseline_of(options, "stepcheck accept", folder)
        settings: Any = {"baseline": baseline} if baseline else {}
        results = train_cases(cases, options.devices, THROUGH[options.through], _judge, **settings)
        return _conclude(results, left_out, options, baseline)


def _refuse_mistakes(options: argparse.Namespace, strategies: Sequence[str]) -> None:
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


def _print_cases(cases: Iterable[Case]) -> None:
    blank = asdict(Case(""))
    for case in cases:
        print(case)
        print(f"  {case.why}")
        print(f"  {json.dumps({name: value for name, value in asdict(case).items() if value != blank[name]})}")


def _judge(case: Case, verdict: dict[str, Any]) -> Result:
    """Returns the result of a case. If a fault in KNOWN explains all findings, all steps were audited or skipped, and
    nothing is left that was not judged, the case passes, and its outcome is "known"."""
    result = {**result_of(case, verdict, STEPS), "row": case.row, "strategy": case.strategy}
    known = known_fault(case, [str(Finding(**each)) for each in result["findings"]], installed_version("deepspeed"))
    is_judged = result["steps"] + result["skipped"] >= STEPS and result["coverage"] >= ENOUGH
    if known and is_judged and not result["not_judged"]:
        result |= {"outcome": "known", "passed": True, "summary": f"{result['summary']} (known: {known})"}
    precision = case.config.get("torch_autocast", {}).get("dtype", case.precision)  # the lowest
    return {**result, "known": known, "precision": precision}


def _conclude(
    results: list[Result], left_out: dict[str, str], options: argparse.Namespace, baseline: dict[str, Any] | None
) -> int:
    failed = [each for each in results if not each["passed"]]
    passed = bool(results) and not failed
    print()
    for each in failed:
        print(f"FAULT {each['engine']}: {each['summary']}")
    print(f"stepcheck accept: {'PASSED' if passed else 'FAILED'}: {'; '.join(_sentences(results, options.devices))}")
    return write_files(options, passed, results, baseline, left_out=left_out)


def _sentences(results: Sequence[Result], ranks: int) -> Iterable[str]:
    right, known = ([each for each in results if each["outcome"] == outcome] for outcome in ("agrees", "known"))
    yield f"{len(right)} of {len(results)} cases are correct"
    if known:
        yield f"{len(known)} have a known fault of DeepSpeed"
    versions = [f"{name} {version}" for name in ("torch", "deepspeed") if (version := installed_version(name))]
    yield f"{', '.join(versions)}, {ranks} ranks"
    notes = Counter(
        f"{what}: {why}" if "changed" in what else what
        for each in results
        for what, why in each["notes"].items()
        if "changed" in what or "baseline" in what
    )
    yield from (f"in {count} of them: {note}" for note, count in notes.items())
    for name in dict.fromkeys(each["precision"] for each in right):
        yield f"{name}: {_total([each for each in right if each['precision'] == name])}"


def _total(results: Sequence[Result]) -> Verdict:
    """Returns one verdict on several cases without a fault: the sums of their counts, and the largest of their shares
    and of the smallest errors that would be seen."""
    counted = ("steps", "replayed", "identical", "values", "values_in_all")
    counts: Any = {name: sum(each[name] for each in results) for name in counted}
    kinds = {kind for each in results for kind in each["shares"]}
    return Verdict(
        **counts,
        shares={kind: max(each["shares"].get(kind, 0.0) for each in results) for kind in kinds},
        smallest_scale_error=max(each["smallest_scale_error"] for each in results),
        smallest_tensor_error=max(each["smallest_tensor_error"] for each in results),
    )
