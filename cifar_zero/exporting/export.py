"""Writes the model of any checkpoint as one plain file that needs neither Lightning nor DeepSpeed (see --help)."""

from argparse import Namespace
from pathlib import Path

from cifar_zero.checkpoints import run_folder
from cifar_zero.core import exits
from cifar_zero.core.console import command
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import delta_file
from cifar_zero.models.user_model import register_user_model

SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "delta": ".delta.safetensors"}
"""Suffix of the exported file in each format. A delta has only the trained weights of a run that froze the rest, so it
is not a complete model."""


def main() -> int:
    """Writes one export, prints its path and size, and returns the exit code 0."""
    arguments = _parse()
    checkpoint = run_folder.find_checkpoint(arguments.checkpoint)
    suffix = SUFFIXES[arguments.to]
    output = Path(arguments.output or checkpoint.with_suffix(suffix))
    if output.suffix != (ending := suffix.removeprefix(".delta")):
        raise UsageError(f"--output {output} must end in {ending}, because cifar-zero predict needs this ending")
    if output.is_dir() or not output.parent.is_dir():
        raise UsageError(f"{output} cannot be written: name a file in an existing folder with --output FILE")
    if output.resolve() == checkpoint.resolve():
        raise UsageError(f"{output} is the checkpoint itself: name another file with --output FILE")
    from cifar_zero.exporting import formats  # which imports torch

    if arguments.to == "delta":
        formats.export_delta(checkpoint, output, arguments.trust)
    else:
        formats.export(checkpoint, output, arguments.to, arguments.trust, arguments.delta)
    return 0


def add_weight_options(parser: exits.Parser) -> None:
    """Adds --delta, --trust and --model, which export and predict share. Parsing --model runs the user's file."""
    add = parser.add_argument
    what = "apply this file of cifar-zero export --to delta to the weights"
    add("--delta", metavar="FILE", type=delta_file, default="", help=what)
    add("--trust", action="store_true", help="load a checkpoint that could run code; only if you trust its author")
    add("--model", metavar="FILE.py:NAME", type=register_user_model, help="the class of the model, if it is your own")


def _parse() -> Namespace:
    parser = exits.Parser(
        prog=command("export"),
        description="Writes the model of a checkpoint of any strategy as one plain file.",
        epilog="formats:\n"
        "  safetensors  weights, with a description of the model\n"
        "  onnx         the model itself, for onnxruntime\n"
        "  delta        only the trained parameters of a run that froze the rest; used as BASE --delta FILE",
    )
    add_weight_options(parser)
    add = parser.add_argument
    add("checkpoint", help="a run folder (its newest checkpoint), or a .ckpt file or folder")
    add("--to", required=True, choices=SUFFIXES, help="format of the file")
    add("--output", metavar="FILE", help="file to write (default: next to the checkpoint)")
    arguments = parser.parse_args()
    if arguments.delta and arguments.to == "delta":
        raise UsageError("--delta cannot be combined with --to delta: leave it out")
    return arguments
