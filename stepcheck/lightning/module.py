"""`stepcheck module`: trains a user's own LightningModule under strategies, and checks each step.

Imports neither torch nor Lightning. The ranks import them, and refuse mistakes that only an import shows.
"""

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from stepcheck.launch.launcher import result_of, train_cases
from stepcheck.lightning import user_code
from stepcheck.lightning.case import PARTS, PRECISIONS, ModuleCase
from stepcheck.lightning.deepspeed_file import read_config
from stepcheck.report import Result, add_flags, write_files
from stepcheck.strategies import ZERO, deepspeed_folder, has_gpu
from stepcheck.usage import UsageError, nearest, positive

STRATEGIES = ("ddp", *ZERO)

HANG_SECONDS = 1800
"""How long ranks may be silent. One case of a large module takes minutes. torch ends a collective that hangs after 10
minutes (NCCL) or 30 (gloo)."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "module",
        help="check strategies on your own LightningModule",
        description="Trains your LightningModule for some steps under each strategy, in new processes, and checks each "
        "step. Exit code 0: all agree with plain PyTorch; 1: one differs, or is not judged; 2: wrong usage.",
        epilog="--module.ARG and --datamodule.ARG set the arguments of your classes, --trainer.OPTION an option of "
        "Lightning's Trainer. examples: stepcheck module my_module.py:MyModule --devices 2 --accumulate 1 4; "
        "stepcheck module my_package.training:MyModule --module.lr 0.1 --strategies ddp my_deepspeed.json",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("module", metavar="FILE.py:MODULE", help="the LightningModule, also as PACKAGE.MODULE:NAME")
    add("--datamodule", metavar="FILE.py:DATA", help="the LightningDataModule (default: the module's own loader)")
    add(
        "--strategies",
        nargs="+",
        metavar="NAME",
        help="strategies to train under (default: all of DeepSpeed, or ddp if it is not installed): "
        f"{', '.join(STRATEGIES)}, or DeepSpeed configurations (*.json)",
    )
    add("--devices", type=positive, metavar="N", help="number of ranks (default: all GPUs, or two CPU ranks)")
    add("--accumulate", nargs="+", type=positive, metavar="N", help="micro-batches per optimizer step (default: 1)")
    add("--precision", choices=PRECISIONS, help="precision of the training (default: 32-true)")
    add("--gradient_clip_val", dest="clip", type=float, metavar="X", help="clip gradients to this norm (default: off)")
    add("--steps", type=positive, default=ModuleCase.steps, metavar="N", help="optimizer steps (default: %(default)s)")
    add(
        "--replay",
        type=int,
        default=ModuleCase.replayed,
        metavar="N",
        help="how many of these steps a plain copy of the module computes again (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    add("--resume_at", type=positive, default=0, metavar="N", help="save after step N, resume, and compare both runs")
    add_flags(parser)
    parser.set_defaults(run=run, sections=(*PARTS, "trainer"))


def run(options: argparse.Namespace) -> int:
    """Trains the cases and prints the verdict. Returns the exit code: 0 if all cases agree and all files were written,
    else 1."""
    results = train(parse_cases(options))
    failed = [each for each in results if not each["passed"]]
    for each in failed:
        print(f"{each['outcome']}: {each['engine']}: {shlex.join(each['command'])}")
    print(f"stepcheck module: {len(results) - len(failed)} of {len(results)} agree with plain PyTorch")
    return write_files(options, not failed, results)


def require_lightning() -> None:
    for package in ("lightning", "jsonargparse"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{package} is missing: pip install lightning 'jsonargparse[signatures]'")


def parse_cases(options: argparse.Namespace) -> list[ModuleCase]:
    require_lightning()
    import yaml

    classes, trainer = {"module": options.module}, {}
    if options.datamodule:
        classes["datamodule"] = options.datamodule
    for name, value in options.more.items():
        section, _, rest = name.partition(".")
        if section == "trainer":
            trainer[rest] = yaml.safe_load(value)
        else:
            classes[name] = value
    maths = {name: value for name in ("precision", "clip") if (value := getattr(options, name)) is not None}
    return cases_of(
        classes,
        options.strategies or (),
        options.accumulate or (),
        maths,
        ranks=options.devices or _default_ranks(),
        steps=options.steps,
        replayed=options.replay,
        seed=options.seed,
        resume_at=options.resume_at,
        trainer=trainer,
    )


def cases_of(
    classes: dict[str, str], strategies: Sequence[str], accumulate: Sequence[int], maths: Mapping[str, Any], **same: Any
) -> list[ModuleCase]:
    """Returns a case for each strategy and each number of micro-batches. Appends the current folder to sys.path.

    Args:
        classes: Names and arguments of the user's classes: module, module.lr, datamodule, ...
        strategies: Names of strategies, or DeepSpeed configuration files. If empty, all names in ZERO, or ddp if
            DeepSpeed is not installed.
        accumulate: Numbers of micro-batches per step. If empty, the number in a strategy's configuration file, or 1.
        maths: Fields of all cases, such as precision. A configuration file may repeat them only with the same values.
        **same: Other fields of all cases.

    Raises:
        UsageError: If a case cannot be trained. Finds only what can be found without importing torch.
    """
    cases = []
    for parts in accumulate or (None,):
        given = {**maths, "accumulate": parts} if parts else maths
        for strategy in strategies or ([*ZERO] if deepspeed_folder() else ["ddp"]):
            _check_strategy(strategy)
            config, fields = read_config(strategy) if strategy.endswith(".json") else ({}, {})
            for name, value in fields.items():
                if given.get(name, value) != value:
                    raise UsageError(
                        f"--strategies {strategy} sets {name} to {value}, not {given[name]}: leave out one"
                    )
            fields = {**given, **fields, **same, "strategy": strategy, "config": config}
            cases.append(ModuleCase(classes, **fields))
    sys.path.append(os.getcwd())  # for PACKAGE.MODULE:NAME, as in the ranks
    user_code.check_parts(classes)
    return cases


def _check_strategy(name: str) -> None:
    if name not in STRATEGIES and not name.endswith(".json"):
        raise UsageError(f"--strategies {name}: {nearest(name, STRATEGIES)}")
    if name != "ddp" and not deepspeed_folder():
        raise UsageError(f"--strategies {name}: DeepSpeed is missing: pip install deepspeed")


def _default_ranks() -> int:
    if not has_gpu():
        return 2
    import torch

    return torch.cuda.device_count() or 2


def train(cases: Sequence[ModuleCase]) -> list[Result]:
    """Trains the cases, prints a line for each, and returns their results. Raises UsageError if a rank refuses a flag
    or the user's code."""
    return train_cases(cases, cases[0].ranks, "stepcheck.lightning.train:train_case", _judge, HANG_SECONDS)


def _judge(case: ModuleCase, verdict: dict[str, Any]) -> Result:
    """Returns the result of a case (see `result_of`). To agree, every step must have been audited or skipped, and a
    step replayed, unless none was to be. Raises UsageError if the rank has refused a flag or the user's code."""
    if "refused" in verdict:
        raise UsageError(verdict["refused"])
    steps = case.steps - case.resume_at - verdict.get("skipped", 0)
    unreplayed = "no step was replayed" if case.replayed and not verdict.get("replayed") else ""
    # argparse takes the last of an option that is given twice.
    alone = ["--strategies", case.strategy, "--accumulate", str(case.accumulate)]
    return {**result_of(case, verdict, steps, unreplayed), "command": ["stepcheck", *sys.argv[1:], *alone]}
