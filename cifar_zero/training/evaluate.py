"""Tests a checkpoint of any strategy on one device, with the metrics that its run computes at the end; see --help."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.resume import check_classes, config_of_checkpoint
from cifar_zero.config import command_line
from cifar_zero.config.arguments import Arguments, read_arguments
from cifar_zero.config.run import Run
from cifar_zero.config.settings import owner_of
from cifar_zero.core.console import command, say
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import delta_file
from cifar_zero.training import DATAMODULE, MODULE
from cifar_zero.training.resolve import make_run, resolve_devices


def main() -> int:
    """Parses the command line, tests the checkpoint, prints its test table, and returns the exit code 0."""
    parser = argparse.ArgumentParser(
        prog=command("evaluate"),
        usage="%(prog)s RUN_OR_CHECKPOINT [--<option of train> VALUE ...]",
        description="Tests a checkpoint of any strategy on one device.",
        epilog="Computes in float32, with the model and the data options of the run, except --data.root, --data.url "
        "and --data.cache. Options of train override the run's options. If the run averaged its weights, the averages "
        "are tested; --ema 0 tests the newest weights.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="a run folder (its newest checkpoint), or a .ckpt file or folder")
    if len(sys.argv) < 2 or (sys.argv[1].startswith("-") and sys.argv[1] not in ("-h", "--help")):
        usage = command("evaluate", "RUN_OR_CHECKPOINT")
        raise UsageError(f"the first argument must be a run folder or a checkpoint: {usage} ...")
    parser.add_argument(
        "--delta",
        metavar="FILE",
        type=delta_file,
        help="delta (cifar-zero export --to delta) of a run started from RUN_OR_CHECKPOINT",
    )
    arguments, overrides = parser.parse_known_args()
    given = read_arguments(overrides)
    if (devices := given.options.get("devices", "1")) not in ("1", "auto"):
        raise UsageError(f"--devices {devices}: evaluate computes on one device: leave it out")
    for option in given.options:
        if option.startswith("trainer"):
            raise UsageError(f"--{option} has no effect on evaluate: leave it out")
    checkpoint = run_folder.find_checkpoint(arguments.checkpoint)
    content: dict[str, Any] | None = None
    if arguments.delta:
        from cifar_zero.checkpoints.weights import apply_delta

        content = apply_delta(checkpoint, Path(arguments.delta), given.consent.trust)
        checkpoint = Path(arguments.delta)
    evaluate(checkpoint, given, content)
    return 0


def run_of(checkpoint: Path, given: Arguments, content: dict[str, Any] | None = None) -> Run:
    """Returns the run that tests a checkpoint on one device, with the checkpoint's recipe and the default placement.
    The flags in `given` override both, except for the number of devices. --data.source auto becomes cifar10, and
    options of --trainer are dropped. Raises UsageError if the checkpoint has no recipe, or if the user must name the
    folder of the images with --data.root."""
    options = config_of_checkpoint(checkpoint, given.consent.trust, content)
    if options is None:
        raise UsageError(f"{checkpoint} is not in a run folder, and was not written by cifar-zero train")
    # The placement includes --data.root, --data.cache and --data.url, for which the checkpoint's author could name any
    # folder and server.
    kept = {flag: value for flag, value in options.items() if owner_of(flag) == "recipe"}
    root = options.get("data.root", "")
    settings = command_line.settings_of_arguments(given, lambda _: kept)
    data = settings.data
    if data.source == "auto":  # which would test a model of CIFAR-10 on digits where CIFAR-10 is not available
        data = replace(data, source="cifar10")
    if "data.root" not in settings.named and os.path.abspath(root) != os.path.abspath(data.root):
        if data.source == "folder":
            raise UsageError(f"--data.root DIR is missing: the run's images were in {root}")
        if data.source in ("cifar10", "cifar100"):
            say(f"The images are read from {data.root}, not from the run's {root}: --data.root names another folder.")
    return make_run(resolve_devices(settings.changed(data=data, trainer={}, devices=1)))


def evaluate(checkpoint: Path, given: Arguments, content: dict[str, Any] | None = None) -> dict[str, Any]:
    """Tests a checkpoint of any strategy, prints its test table and returns the test/* metrics of metrics.json. The
    recipe is read from the checkpoint's run folder, or from the checkpoint itself.

    Args:
        given: Flags of `cifar-zero train`, which override the checkpoint's data options and recipe, and the placement.
        content: The content of the checkpoint, if it has been read already.
    """
    from cifar_zero.checkpoints.read import RECORD, read
    from cifar_zero.checkpoints.weights import load_weights, net_weights
    from cifar_zero.training import build
    from cifar_zero.training.results import print_test_table, test_metrics

    run = run_of(checkpoint, given, content)
    content = content or read(checkpoint, given.consent.trust)
    if RECORD in content:
        check_classes(run.data, content[RECORD], checkpoint)
    module, datamodule = resolve_name(MODULE)(run, run.num_classes), resolve_name(DATAMODULE)(run)
    module.configure_model()
    load_weights(module.net, net_weights(content, averaged=run.recipe.ema > 0), str(checkpoint))
    build.trainer(run, None, callbacks=[]).test(module, datamodule=datamodule, verbose=False)
    metrics = test_metrics(module, datamodule)
    print(f"{checkpoint}: {datamodule.num_test:,} test images of {datamodule.dataset.name}")
    print_test_table(metrics)
    print(f"test loss {metrics['test/loss']:.4f}")
    return metrics
