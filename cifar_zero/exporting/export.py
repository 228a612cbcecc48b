"""Writes the model of any checkpoint as one plain file that needs neither Lightning nor DeepSpeed; see --help."""

import os
from argparse import Namespace
from copy import deepcopy
from pathlib import Path

from cifar_zero.checkpoints import run_folder
from cifar_zero.config.settings import DataConfig
from cifar_zero.core import atomic, exits
from cifar_zero.core.console import command, quieten
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.exporting import FORMATS
from cifar_zero.models import register_user_model

DELTA, DELTA_SUFFIX = "delta", ".delta.safetensors"  # a format that is not in FORMATS: its file is not a complete model


def main() -> int:
    """Writes one export and prints what it is; returns the exit code."""
    arguments = _parse()
    quieten()
    checkpoint = run_folder.find_checkpoint(arguments.checkpoint)
    suffix = DELTA_SUFFIX if arguments.to == DELTA else FORMATS[arguments.to].suffix
    output = Path(arguments.output or checkpoint.with_suffix(suffix))
    if output.suffix != (ending := Path(f"_{suffix}").suffix):
        raise UsageError(f"--output {output} must end in {ending}, by which cifar-zero predict recognises the format")
    if output.is_dir() or not os.access(output.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{output} cannot be written: name a file in a writable folder with --output FILE")
    if output.resolve() == checkpoint.resolve():
        raise UsageError(f"{output} is the checkpoint itself: name another file with --output FILE")
    if arguments.to == DELTA:
        export_delta(checkpoint, output, arguments.trust)
    else:
        check = not arguments.no_check
        export(checkpoint, output, arguments.to, arguments.dtype, arguments.trust, check, arguments.delta)
    return 0


def export_delta(checkpoint: Path, output: Path, trust: bool = False) -> None:
    """Writes only the trained parameters of a run; see `finetuning.load.write_delta`."""
    from cifar_zero.checkpoints.finetuning.load import write_delta
    from cifar_zero.checkpoints.read import read

    names = write_delta(read(checkpoint, trust), output, checkpoint.name)
    print(f"{output}: {len(names)} trained tensors, {output.stat().st_size / 1e6:,.2f} MB")
    print(f"apply it to the weights that the run started from: BASE --delta {output}")


def export(
    checkpoint: Path, output: Path, to: str, dtype: str, trust: bool = False, check: bool = True, delta: str = ""
) -> None:
    """Writes the file, reads it back, compares it with the checkpoint, and only then gives it its name.

    The checkpoint is of any strategy; with `delta` it may be any file of weights. `dtype` is that of the weights in the
    file; `check` compares the scores of the run's test images too, if they are on this machine. Raises UsageError: the
    checkpoint is damaged, or not of the model that it names. Raises RunError: the file does not compute what the
    checkpoint does. Raises OSError: the file cannot be written.
    """
    import torch

    from cifar_zero.checkpoints.finetuning.load import apply_delta
    from cifar_zero.checkpoints.read import RECORD, plain_network, read
    from cifar_zero.checkpoints.safetensors_file import metadata_of
    from cifar_zero.exporting.classifier import build, on_random_images, on_test_images, test_images

    content = apply_delta(checkpoint, Path(delta), trust) if delta else read(checkpoint, trust)
    metadata = metadata_of(content, checkpoint.name, dtype)
    net, original = build(plain_network(content), metadata, checkpoint)
    format = FORMATS[to]
    tolerance = format.tolerance if dtype == "float32" else None  # rounding to bfloat16 is shown, not refused
    accuracy = "not checked"
    staged = atomic.staged(output)
    try:
        staged.write_bytes(format.encode(deepcopy(net).to(getattr(torch, dtype)), metadata))
        written = format.load(staged)
        on_random_images(original, written, tolerance)
        if check:
            try:
                dataset = test_images(checkpoint, DataConfig(**content[RECORD]["config"]["data"]), original.classes)
            except (UsageError, RunError) as error:
                accuracy = f"not checked: {error}"
            else:
                accuracy = on_test_images(original, written, dataset, tolerance)
        atomic.put_in_place(output)
    finally:
        atomic.discard(staged)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    print(f"{output}: {metadata['model']}, {parameters:,} parameters in {dtype}, {output.stat().st_size / 1e6:,.2f} MB")
    print(f"test accuracy {accuracy}")


def add_weight_options(parser: exits.Parser) -> None:
    """Adds the options that export and predict share."""
    add = parser.add_argument
    add("--delta", metavar="FILE", default="", help="file of cifar-zero export --to delta to apply to the weights")
    add("--trust", action="store_true", help="load a checkpoint that could run code; only if you trust its author")
    add("--model", metavar="FILE.py:NAME", type=register_user_model, help="the code of the model, if it is your own")


def _parse() -> Namespace:
    width = max(map(len, FORMATS))
    parser = exits.Parser(
        prog=command("export"),
        description="Writes the model of a checkpoint of any strategy as one plain file.",
        epilog="formats:\n"
        + "\n".join(f"  {name:<{width}}  {format.summary}" for name, format in FORMATS.items())
        + f"\n  {DELTA:<{width}}  only the trained parameters of a run that froze the rest (read: BASE --delta FILE)",
    )
    add_weight_options(parser)
    add, dtypes = parser.add_argument, ("float32", "bfloat16")
    add("checkpoint", help="a run folder (its newest checkpoint), or a .ckpt file or folder")
    add("--to", required=True, choices=[*FORMATS, DELTA], help="format of the file")
    add("--output", metavar="FILE", help="file to write (default: next to the checkpoint)")
    add("--dtype", choices=dtypes, default="float32", help="number format of the weights (default: %(default)s)")
    add("--no_check", action="store_true", help="skip the comparison on the run's test images")
    arguments = parser.parse_args()
    if arguments.to == DELTA:
        if arguments.delta or arguments.dtype != "float32":
            flag = "--delta" if arguments.delta else "--dtype"
            raise UsageError(f"{flag} cannot be combined with --to {DELTA}: leave it out")
    elif arguments.dtype not in FORMATS[arguments.to].dtypes:
        wrong = f"--dtype {arguments.dtype} is not for --to {arguments.to}"
        raise UsageError(f"{wrong}: onnxruntime cannot run it on a CPU")
    return arguments
