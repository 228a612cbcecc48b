"""Checks everything that a run needs on this machine, or on the nodes of a cluster; see --help."""

import argparse
import json
import math
import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from cifar_zero.config.output import Output
from cifar_zero.config.recipe import DataConfig
from cifar_zero.core import exits
from cifar_zero.core.console import command, torchrun
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import nearest
from cifar_zero.diagnosis import Finding, answer, machine, software
from cifar_zero.launch import rank_environment

CHECKS: dict[str, Callable[[Namespace], Finding]] = {
    "torch": partial(software.package, "torch"),
    "torchvision": software.torchvision_import,
    "lightning": partial(software.package, "lightning"),
    "deepspeed": partial(software.package, "deepspeed"),
    "torchmetrics": partial(software.package, "torchmetrics"),
    "compiler": software.compiler,
    "gpu": machine.gpu,
    "all-reduce": machine.all_reduce,
    "memory": machine.memory,
    "out": machine.out,
    "data": machine.data,
}
"""The checks in their order. A check imports torch itself if needed, because the doctor must start quickly."""

SCHEMA = 2  # version of the output of `--json`, raised when a key changes its name or meaning

EPILOG = """\
exit code: 0 if no check failed (a warning names what some runs cannot do), 1 if one failed, or with --strict warned,
2 for wrong usage

`python -m torch.utils.collect_env` and `ds_report` list the versions, the processor and the GPUs of this machine.

examples:
  %(prog)s                          all checks, in about ten seconds
  %(prog)s all-reduce --ranks 8     one check, for eight ranks

  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29400 -m cifar_zero doctor --nodes
                                            run on each of two nodes: checks that they can train together
"""


def main() -> int:
    """Prints the result of each check, with --json as one JSON object, and returns the exit code, which is 1 if a check
    failed, or with --strict if a check gave a warning. With --nodes, only rank 0 prints, and the other ranks return
    0."""
    options = _parse()
    closing = ""
    if options.nodes:
        rank_environment.set_torchrun_variables()
        if not rank_environment.is_rank() or os.environ["WORLD_SIZE"] == "1":
            start = f"start it on each node with {torchrun('doctor')} --nodes"
            raise UsageError(f"--nodes needs ranks that a launcher has started: {start}")
        from cifar_zero.diagnosis import nodes

        findings = nodes.examine(options)
        closing = f" {nodes.BANDWIDTH}"
        if rank_environment.global_rank():
            return 0
    else:
        findings = {name: answer(CHECKS[name], options) for name in options.checks or CHECKS}
    statuses = [finding.status for finding in findings.values()]
    failures, warnings = statuses.count("failed"), statuses.count("warning")
    code = int(failures > 0 or (options.strict and warnings > 0))
    if options.json:
        checks = [{"name": name, **asdict(finding)} for name, finding in findings.items()]
        print(json.dumps({"schema": SCHEMA, "checks": checks}, indent=2))
        return code
    for name, finding in findings.items():
        line = f"{finding.status:<7}  {name:<12}  {finding.summary}"
        if finding.fix:
            line += f": {finding.fix}"
        print(line, *finding.bugs, sep="\n         - ")
    result = "Nothing failed"
    if failures:
        unfit = "These nodes are not ready to train together" if options.nodes else "This machine is not ready to train"
        result = f"{unfit}: {'1 check' if failures == 1 else f'{failures} checks'} failed"
    print(f"{result}; warnings: {warnings}.{closing}")
    return code


def _parse() -> Namespace:
    parser = exits.Parser(
        prog=command("doctor"),
        description="Checks everything that a run needs on this machine, and prints how to fix what is missing. "
        "Changes nothing.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("checks", metavar="CHECK", nargs="*", help=f"checks to run (default: all): {', '.join(CHECKS)}")
    add("--ranks", metavar="N", type=int, default=2, help="ranks of a run on this machine (default: %(default)s)")
    add("--out", metavar="DIR", default=Output.out, help="directory for run folders (default: %(default)s)")
    root = "directory of the dataset (default: %(default)s)"
    add("--data.root", dest="data_root", metavar="DIR", default=DataConfig.root, help=root)
    timeout = "how long a rank may wait for the others in each step (default: %(default)g)"
    add("--timeout", metavar="SECONDS", type=float, default=20.0, help=timeout)
    add("--nodes", action="store_true", help="compare the nodes of a run; start doctor with torchrun or srun")
    add("--strict", action="store_true", help="exit with code 1 after a warning too")
    add("--local_rank", help=argparse.SUPPRESS)  # given by DeepSpeed's launcher, which sets LOCAL_RANK too
    add("--json", action="store_true", help="print one JSON object, for programs")
    options = parser.parse_intermixed_args()
    for name in options.checks:
        if name not in CHECKS:
            raise UsageError(f"unknown check {name}: {nearest(name, CHECKS)}")
    if options.ranks < 1:
        raise UsageError(f"--ranks must be at least 1, not {options.ranks}")
    if not 0 < options.timeout < math.inf:
        raise UsageError(f"--timeout must be a number of seconds above 0, not {options.timeout:g}")
    if options.nodes and options.checks:
        raise UsageError("--nodes cannot be combined with the name of a check: leave one of them out")
    return options
