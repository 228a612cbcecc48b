"""Is this machine fit to train? Looks at everything that a run needs and says how to mend what is missing.

python doctor.py [CHECK ...] [--ranks N] [--build] [--json]
torchrun --nnodes N --nproc_per_node M ... doctor.py --nodes [--json]
"""

import argparse
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

from cifar_zero.config.flags import DataConfig, OutputConfig
from cifar_zero.core import exits
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.diagnosis import CHECKS, report
from cifar_zero.diagnosis.examination import Examination
from cifar_zero.diagnosis.finding import Finding, Options
from cifar_zero.launch import local_launcher, rank_environment

EPILOG = """\
exit code: 0 where nothing failed (a warning tells what some runs cannot do), 1 where something did, 2 for wrong usage

examples:
  python doctor.py                          everything, in about ten seconds
  python doctor.py all-reduce --ranks 8     one check, for eight ranks
  python doctor.py ops --build              compile DeepSpeed's operators now, not in the first run that needs them

  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29400 doctor.py --nodes
                                            on each of two nodes: whether they can train together

checks:
"""


def main(requirements: Path) -> int:
    """Prints a line for each check; returns the exit code, 1 where one failed.

    Args:
        requirements: requirements.txt.
    """
    arguments = _parse()
    names = arguments.checks or [*CHECKS]
    options = Options(
        ranks=arguments.ranks,
        out=arguments.out,
        data_root=arguments.data_root,
        data_cache=arguments.data_cache,
        build=arguments.build,
        timeout=arguments.timeout,
        requirements=requirements,
    )
    if arguments.nodes:
        return between_nodes(arguments, options)
    findings: dict[str, Finding] = {}
    try:
        for name, finding in examine(names, options):
            findings[name] = finding
            if not arguments.json:
                report.print_line(name, finding, max(map(len, names)))
    except ModuleNotFoundError as error:
        raise RunError(f"{error.name} is not installed: pip install -r requirements.txt") from error
    print(report.as_json(findings) if arguments.json else report.summary(findings))
    return int(any(finding.status == "failed" for finding in findings.values()))


def between_nodes(arguments: Namespace, options: Options) -> int:
    """Compares the nodes with the other ranks; rank 0 prints the findings."""
    rank_environment.adopt()
    if not rank_environment.is_rank() or os.environ["WORLD_SIZE"] == "1":
        start = local_launcher.TORCHRUN.replace("train.py", "doctor.py --nodes")
        raise UsageError(f"--nodes needs ranks that a launcher has started: start it on each node with {start}")
    from cifar_zero.diagnosis import nodes

    findings = nodes.examine(options)
    if findings is None:
        return 0
    if arguments.json:
        print(report.as_json(findings))
    else:
        for name, finding in findings.items():
            report.print_line(name, finding, max(map(len, findings)))
        print(f"{report.summary(findings)} {nodes.BANDWIDTH}")
    return int(any(finding.status == "failed" for finding in findings.values()))


def examine(names: Iterable[str], options: Options) -> Iterator[tuple[str, Finding]]:
    """Makes some of CHECKS, one after the other, and gives the name and the finding of each as it comes."""
    for name in names:
        if name == "ops" and options.build:
            print("Building DeepSpeed's operators, which takes minutes ...", file=sys.stderr, flush=True)
        examination = Examination(CHECKS[name], options)
        with report.waiting(name):
            finding = examination.finding()
        yield name, finding


def _parse() -> Namespace:
    width = max(map(len, CHECKS))
    parser = exits.Parser(
        prog="doctor.py",
        description="Is this machine fit to train? Looks at everything that a run needs and says how to mend what is "
        "missing. Nothing is changed but by --build.",
        epilog=EPILOG + "\n".join(f"  {name:<{width}}  {check.summary}" for name, check in CHECKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checks", metavar="CHECK", nargs="*", help="only these (below; default: all)")
    parser.add_argument(
        "--ranks", metavar="N", type=int, default=2, help="processes of a run on this machine (default: %(default)s)"
    )
    parser.add_argument(
        "--out", metavar="DIR", default=OutputConfig.out, help="where runs will be kept (default: %(default)s)"
    )
    parser.add_argument(
        "--data.root",
        dest="data_root",
        metavar="DIR",
        default=DataConfig.root,
        help="where the dataset is or will be (default: %(default)s)",
    )
    parser.add_argument(
        "--data.cache",
        dest="data_cache",
        metavar="DIR",
        default=DataConfig.cache,
        help="where decoded images are or will be (default: <data.root>/.cifar-zero)",
    )
    parser.add_argument("--build", action="store_true", help="build DeepSpeed's operators that a strategy here needs")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=20.0,
        help="without any answer, after which a rank is given up (default: %(default)g)",
    )
    parser.add_argument(
        "--nodes",
        action="store_true",
        help="compare the nodes of a run instead; torchrun or srun starts this on each of them",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, for programs")
    arguments = parser.parse_intermixed_args(rank_environment.arguments(sys.argv[1:]))
    for name in arguments.checks:
        if name not in CHECKS:
            from cifar_zero.core.suggestions import nearest

            raise UsageError(f"there is no check {name}: {nearest(name, CHECKS)}")
    if arguments.ranks < 1:
        raise UsageError(f"--ranks must be at least 1, not {arguments.ranks}")
    if not 0 < arguments.timeout < math.inf:
        raise UsageError(f"--timeout must be a number of seconds above 0, not {arguments.timeout:g}")
    if arguments.nodes and (arguments.checks or arguments.build):
        raise UsageError("--nodes compares nodes: it cannot be combined with --build or the name of a check")
    if arguments.build and arguments.checks and "ops" not in arguments.checks:
        raise UsageError("--build is for the check ops: name it, or no check at all")
    return arguments
