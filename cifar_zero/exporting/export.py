"""Writes the model of any checkpoint as one plain file that needs neither Lightning nor DeepSpeed; see --help."""

from argparse import Namespace
from pathlib import Path

from cifar_zero.checkpoints import run_folder
from cifar_zero.core import exits
from cifar_zero.core.console import command, quieten
from cifar_zero.core.errors import UsageError
from cifar_zero.models import register_user_model

SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx"}
"""Suffix of the file in each format."""


def main() -> int:
    """Writes one export and prints what it is; returns the exit code."""
    arguments = _parse()
    quieten()
    checkpoint = run_folder.find_checkpoint(arguments.checkpoint)
    suffix = SUFFIXES[arguments.to]
    output = Path(arguments.output or checkpoint.with_suffix(suffix))
    if output.suffix != suffix:
        raise UsageError(f"--output {output} must end in {suffix}, by which cifar-zero predict recognises the format")
    if output.is_dir() or not output.parent.is_dir():
        raise UsageError(f"{output} cannot be written: name a file in a folder that exists with --output FILE")
    if output.resolve() == checkpoint.resolve():
        raise UsageError(f"{output} is the checkpoint itself: name another file with --output FILE")
    from cifar_zero.exporting import formats  # which imports torch

    check = not arguments.no_check
    formats.export(checkpoint, output, arguments.to, arguments.dtype, arguments.trust, check)
    return 0


def add_weight_options(parser: exits.Parser) -> None:
    """Adds the options that export and predict share."""
    add = parser.add_argument
    add("--trust", action="store_true", help="load a checkpoint that could run code; only if you trust its author")
    add("--model", metavar="FILE.py:NAME", type=register_user_model, help="the code of the model, if it is your own")


def _parse() -> Namespace:
    parser = exits.Parser(
        prog=command("export"),
        description="Writes the model of a checkpoint of any strategy as one plain file.",
        epilog="formats:\n"
        "  safetensors  weights, with a description of the model\n"
        "  onnx         the model itself, for onnxruntime",
    )
    add_weight_options(parser)
    add, dtypes = parser.add_argument, ("float32", "bfloat16")
    add("checkpoint", help="a run folder (its newest checkpoint), or a .ckpt file or folder")
    add("--to", required=True, choices=SUFFIXES, help="format of the file")
    add("--output", metavar="FILE", help="file to write (default: next to the checkpoint)")
    add("--dtype", choices=dtypes, default="float32", help="number format of the weights (default: %(default)s)")
    add("--no_check", action="store_true", help="skip the comparison on the run's test images")
    arguments = parser.parse_args()
    if arguments.dtype != "float32" and arguments.to != "safetensors":  # onnxruntime (1.31): no bfloat16 on the CPU
        raise UsageError(f"--dtype {arguments.dtype} is not for --to {arguments.to}: leave it out")
    return arguments
