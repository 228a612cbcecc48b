"""Checks everything that a run needs on this machine, or on the nodes of a cluster; see --help."""

import argparse
import json
import math
import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, fields

from cifar_zero.config.output import Output
from cifar_zero.config.settings import DataConfig
from cifar_zero.core import exits
from cifar_zero.core.console import command, torchrun
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import nearest
from cifar_zero.diagnosis import CHECKS
from cifar_zero.diagnosis.check import Finding, Options, examine
from cifar_zero.launch import rank_environment

SCHEMA = 1  # version of the output of `--json`; goes up when a key changes its meaning or its name

EPILOG = """\
exit code: 0 if no check failed (a warning says what some runs cannot do), 1 if one failed, 2 for wrong usage

examples:
  %(prog)s                          all checks, in about ten seconds
  %(prog)s all-reduce --ranks 8     one check, for eight ranks
  %(prog)s ops --build              compile DeepSpeed's operators now instead of in the first run

  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29400 -m cifar_zero doctor --nodes
                                            run on each of two nodes: checks that they can train together

checks:
"""


def main() -> int:
    """Prints a line for each check; returns the exit code, 1 if one failed."""
    arguments = _parse()
    options = Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})
    names, closing = arguments.checks or [*CHECKS], ""
    answers: Iterable[tuple[str, Finding]] = ((name, examine(CHECKS[name], options)) for name in names)
    if options.build:
        print("DeepSpeed's operators will be built, which takes minutes ...", file=sys.stderr, flush=True)
    if arguments.nodes:
        rank_environment.adopt()
        if not rank_environment.is_rank() or os.environ["WORLD_SIZE"] == "1":
            start = f"start it on each node with {torchrun('doctor')} --nodes"
            raise UsageError(f"--nodes needs ranks that a launcher has started: {start}")
        from cifar_zero.diagnosis import nodes

        if (found := nodes.examine(options)) is None:
            return 0
        names, closing, answers = [*found], f" {nodes.BANDWIDTH}", found.items()
    findings: dict[str, Finding] = {}
    width = max(map(len, names))
    for name, finding in answers:
        findings[name] = finding
        if not arguments.json:
            text = ": ".join(filter(None, [finding.found, finding.fix]))
            print(f"{finding.status:<7}  {name:<{width}}  {text}", flush=True)
    if arguments.json:
        checks = [{"name": name, **asdict(finding)} for name, finding in findings.items()]
        print(json.dumps({"schema": SCHEMA, "checks": checks}, indent=2))
    else:
        count = Counter(finding.status for finding in findings.values())
        result = f"Not fit to train: {count['failed']} failed" if count["failed"] else "Nothing failed"
        print(f"{result}; warnings: {count['warning']}.{closing}")
    return int(any(finding.status == "failed" for finding in findings.values()))


def _parse() -> Namespace:
    width = max(map(len, CHECKS))
    parser = exits.Parser(
        prog=command("doctor"),
        description="Checks everything that a run needs on this machine, and says how to fix what is missing. "
        "Changes nothing, except with --build.",
        epilog=EPILOG
        + "\n".join(f"  {name:<{width}}  {check.summary}" for name, check in CHECKS.items()).replace("%", "%%"),
    )
    add = parser.add_argument
    add("checks", metavar="CHECK", nargs="*", help="run only these checks (listed below; default: all)")
    add("--ranks", metavar="N", type=int, default=2, help="ranks of a run on this machine (default: %(default)s)")
    add("--out", metavar="DIR", default=Output.out, help="directory for run folders (default: %(default)s)")
    root = "directory of the dataset (default: %(default)s)"
    cache = "directory for the decoded images (default: <data.root>/.cifar-zero)"
    add("--data.root", dest="data_root", metavar="DIR", default=DataConfig.root, help=root)
    add("--data.cache", dest="data_cache", metavar="DIR", default=DataConfig.cache, help=cache)
    add("--build", action="store_true", help="build the missing DeepSpeed operators that a strategy here needs")
    timeout = "how long a rank may wait for the others in each step (default: %(default)g)"
    add("--timeout", metavar="SECONDS", type=float, default=20.0, help=timeout)
    add("--nodes", action="store_true", help="compare the nodes of a run instead; start it with torchrun or srun")
    add("--local_rank", help=argparse.SUPPRESS)  # given by DeepSpeed's launcher, which sets LOCAL_RANK too
    add("--json", action="store_true", help="print one JSON object, for programs")
    arguments = parser.parse_intermixed_args()
    for name in arguments.checks:
        if name not in CHECKS:
            raise UsageError(f"there is no check {name}: {nearest(name, CHECKS)}")
    if arguments.ranks < 1:
        raise UsageError(f"--ranks must be at least 1, not {arguments.ranks}")
    if not 0 < arguments.timeout < math.inf:
        raise UsageError(f"--timeout must be a number of seconds above 0, not {arguments.timeout:g}")
    if arguments.nodes and (arguments.checks or arguments.build):
        raise UsageError("--nodes compares nodes: it cannot be combined with --build or the name of a check")
    if arguments.build and arguments.checks and "ops" not in arguments.checks:
        raise UsageError("--build is for the check ops: name it, or give no check at all")
    return arguments
