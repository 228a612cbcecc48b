"""Defines the command `stepcheck script`, which compares the steps of a script with the steps of a LightningModule."""

import argparse
import logging
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from stepcheck.lightning.case import PARTS
from stepcheck.lightning.module import require_lightning
from stepcheck.report import add_flags, write_files
from stepcheck.usage import UsageError, positive


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "script",
        allow_abbrev=False,
        help="compare an old script's steps with those of your LightningModule",
        description="Runs a training script once, unchanged, and records its first optimizer steps. Then a "
        "LightningModule computes each step from the script's weights, batches and random numbers, on one process. "
        "Exit code 0: all steps agree; 1: a step differs, or cannot be judged.",
        epilog="example: stepcheck script 'old_train.py --lr 0.1' my_module.py:MyModule --module.width 64",
    )
    add = parser.add_argument
    add("script", metavar="'SCRIPT ARGS'", help="the script and its arguments, in quotes")
    add("module", metavar="FILE.py:MODULE", help="the LightningModule; --module.NAME VALUE sets its arguments")
    add("--datamodule", metavar="FILE.py:DATA", help="its data module; --datamodule.NAME VALUE sets its arguments")
    add("--steps", type=positive, default=20, metavar="N", help="number of steps (default: 20)")
    add("--max_steps", type=positive, default=0, metavar="N", help="steps of the training, if its schedule needs them")
    add("--rename", nargs="+", default=[], metavar="OLD=NEW", help="replace prefixes of the script's weight names")
    add("--own_data", action="store_true", help="compare the batches of the module's own loader too")
    add_flags(parser)
    parser.set_defaults(run=run, sections=PARTS)


def run(options: argparse.Namespace) -> int:
    """Compares the script with the module, and prints the verdict. Returns the exit code: 0 if all steps agree and all
    files were written, else 1."""
    verdict = _compare(options)
    for kind in dict.fromkeys(finding.kind for finding in verdict.findings):
        print(f"FAULT {next(finding for finding in verdict.findings if finding.kind == kind)}")
    print(f"stepcheck script: {verdict.outcome}: {verdict.engine}: {verdict}", flush=True)
    return write_files(options, verdict.passed, [verdict.as_dict()])


def _compare(options: argparse.Namespace) -> Any:
    script = _words(options.script)
    renames = dict(each.split("=", 1) for each in options.rename if "=" in each)
    if len(renames) < len(options.rename):
        raise UsageError("--rename: give OLD=NEW, each old prefix once")
    classes = {"module": options.module, **options.more}
    if options.datamodule:
        classes["datamodule"] = options.datamodule
    require_lightning()
    from stepcheck.lightning import user_classes, user_code

    user_code.check_parts(classes)
    module, datamodule = user_classes.build_parts(classes, needs_data=options.own_data)
    with tempfile.TemporaryDirectory(prefix="stepcheck-") as folder:
        recording = record(script, options.steps, Path(folder))
        from stepcheck.script.check import check_script

        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        try:
            return check_script(recording, module, datamodule, renames, options.own_data, options.max_steps)
        except Exception as error:
            if isinstance(error, UsageError) or not user_code.where(error):
                raise
            raise UsageError(f"{user_code.where(error)}{type(error).__name__}: {error}") from error


def record(script: list[str], steps: int, folder: Path) -> Any:
    """Runs a script with its arguments, records its first optimizer steps into a folder, and returns the recording.
    Raises UsageError if the script fails, or cannot be recorded."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # calls within compiled functions cannot be recorded
    if "deepspeed" in Path(script[0]).read_text(errors="replace"):  # which uses MPI where these are missing
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        environment = {**rank, **environment}
    command = [sys.executable, "-m", "stepcheck.script.recorder", str(folder), str(steps), *script]
    code = subprocess.run(command, env=environment).returncode
    from stepcheck.script.recorder import REFUSED
    from stepcheck.script.recording import Recording

    recording, refused = Recording.read(folder), folder / REFUSED
    if refused.is_file():
        raise UsageError(f"{script[0]}: {refused.read_text()}")
    if code:
        raise UsageError(f"{script[0]} has failed with exit code {code}")
    if recording is None:
        raise UsageError(f"{script[0]} has ended without an optimizer step")
    return recording


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text}: {str(error).lower()}") from error
    if not words or not Path(words[0]).is_file():
        raise UsageError(f"SCRIPT: {words[0] if words else 'it'} is not a file")
    return words
