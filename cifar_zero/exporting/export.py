"""Writes the network of any checkpoint as one plain file, which needs neither Lightning nor DeepSpeed.

python export.py RUN_OR_CHECKPOINT --to safetensors|onnx|state_dict [--output FILE] [--dtype bfloat16]
python export.py RUN_OR_CHECKPOINT --to delta    only what was trained, of a run that froze the rest
"""

from __future__ import annotations

import os
from argparse import Namespace, RawDescriptionHelpFormatter
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_zero.checkpoints import run_folder
from cifar_zero.config.flags import DataConfig
from cifar_zero.core import atomic
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.core.quiet import quieten
from cifar_zero.exporting import FORMATS, exporter
from cifar_zero.exporting.command_line import Parser

if TYPE_CHECKING:
    from cifar_zero.exporting.classifier import Classifier

DELTA, DELTA_SUFFIX = "delta", ".delta.safetensors"
"""A format beside FORMATS: it is no network by itself."""


def main() -> int:
    """Writes one export and says what it is; returns the exit code."""
    arguments = _parse()
    quieten()
    checkpoint = run_folder.find_checkpoint(arguments.checkpoint, out="", name="")
    suffix = DELTA_SUFFIX if arguments.to == DELTA else FORMATS[arguments.to].suffix
    output = Path(arguments.output or checkpoint.with_suffix(suffix))
    _check_output(output, Path(f"_{suffix}").suffix, checkpoint)
    if arguments.to == DELTA:
        export_delta(checkpoint, output, arguments.trust)
    else:
        check = not arguments.no_check
        export(checkpoint, output, arguments.to, arguments.dtype, arguments.trust, check, arguments.delta)
    return 0


def export_delta(checkpoint: Path, output: Path, trust: bool = False) -> None:
    """Writes what a run has trained; see `finetuning.delta.write`."""
    from cifar_zero.checkpoints.finetuning.delta import write
    from cifar_zero.checkpoints.read import read

    names = write(read(checkpoint, trust), output, checkpoint.name)
    print(f"{output}: {len(names)} trained tensors, {output.stat().st_size / 1e6:,.2f} MB")
    print(f"whole again with the weights that the run started from: BASE --delta {output}")


def export(
    checkpoint: Path, output: Path, to: str, dtype: str, trust: bool = False, check: bool = True, delta: str = ""
) -> None:
    """Writes the file, reads it back, compares it with the checkpoint, and only then gives it its name.

    Args:
        checkpoint: of any strategy, file or folder.
        output: to be written.
        to: a name in FORMATS.
        dtype: of the weights in the file, float32 or bfloat16.
        trust: see `checkpointing.safe_load.load`.
        check: whether the run's test images are compared too, where they are on this machine.
        delta: what a run has trained over the checkpoint, which may then be any file of weights.

    Raises:
        UsageError: the checkpoint is damaged, or not of the network that it says.
        RunError: the file does not do what the checkpoint does.
        OSError: it cannot be written.
    """
    import torch

    from cifar_zero.checkpoints import weights
    from cifar_zero.checkpoints.finetuning.delta import together
    from cifar_zero.checkpoints.read import RECORD, read
    from cifar_zero.checkpoints.safetensors_file import metadata_of
    from cifar_zero.exporting import network
    from cifar_zero.exporting.check import on_random_images
    from cifar_zero.exporting.classifier import of_network

    content = together(checkpoint, Path(delta), trust) if delta else read(checkpoint, trust)
    metadata = metadata_of(content, checkpoint.name, dtype)
    net, classes = network.build(weights.plain_network(content), metadata, checkpoint)
    original = of_network(net, classes)
    tolerance = FORMATS[to].tolerance if dtype == "float32" else None  # bfloat16 has 8 bits: what it costs is shown
    staged = atomic.staged(output)
    try:
        staged.write_bytes(exporter(to).encode(deepcopy(net).to(getattr(torch, dtype)), metadata))
        written = exporter(to).load(staged, None if FORMATS[to].describes_itself else metadata)
        on_random_images(original, written, tolerance)
        data = content[RECORD]["config"]["data"]
        accuracy = _accuracy(checkpoint, data, original, written, tolerance) if check else "not checked"
        atomic.put_in_place(output)
    finally:
        atomic.discard(staged)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    print(f"{output}: {metadata['model']}, {parameters:,} parameters in {dtype}, {output.stat().st_size / 1e6:,.2f} MB")
    print(f"test accuracy {accuracy}")


def _accuracy(
    checkpoint: Path, data: dict[str, Any], original: Classifier, written: Classifier, tolerance: float | None
) -> str:
    """The end of a sentence on the test accuracy of both; raises RunError where their scores differ."""
    from cifar_zero.exporting.check import on_test_images, test_images

    try:
        dataset = test_images(checkpoint, DataConfig(**data), original.classes)
    except (UsageError, RunError) as error:
        return f"not checked: {error}"
    counts = on_test_images(original, written, dataset, tolerance)
    accuracy = f"{counts.correct / counts.images:.2%}".replace("%", " %")
    if not counts.differing:
        return f"{accuracy}, the same class as the checkpoint's for each of {counts.images:,} images"
    before = f"{counts.checkpoint_correct / counts.images:.2%}".replace("%", " %")
    return f"{accuracy}, the checkpoint's {before}; {counts.differing:,} of {counts.images:,} images differ in class"


def _parse() -> Namespace:
    width = max(map(len, FORMATS))
    parser = Parser(
        prog="export.py",
        description="Writes the network of a checkpoint of any strategy as one plain file.",
        epilog="formats:\n"
        + "\n".join(f"  {name:<{width}}  {format.summary}" for name, format in FORMATS.items())
        + f"\n  {DELTA:<{width}}  what was trained, where the rest was frozen: read with BASE --delta FILE",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", help="a run folder (its newest checkpoint), or a .ckpt file or folder")
    parser.add_argument("--to", required=True, choices=[*FORMATS, DELTA], help="format of the file")
    parser.add_argument("--output", metavar="FILE", help="file to write (default: beside the checkpoint)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (default: %(default)s)"
    )
    parser.add_argument(
        "--no_check", action="store_true", help="do not classify the run's test images with the file that was written"
    )
    arguments = parser.parse_args()
    if arguments.to == DELTA:
        if arguments.delta or arguments.dtype != "float32":
            raise UsageError(f"--to {DELTA} stands without --{'delta' if arguments.delta else 'dtype'}")
        return arguments
    if arguments.dtype not in FORMATS[arguments.to].dtypes:
        raise UsageError(
            f"--dtype {arguments.dtype} is not for --to {arguments.to}: onnxruntime cannot run it on a CPU"
        )
    return arguments


def _check_output(output: Path, suffix: str, checkpoint: Path) -> None:
    if output.suffix != suffix:
        raise UsageError(f"--output {output} must end in {suffix}, by which predict.py knows the format")
    if output.is_dir() or not os.access(output.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{output} cannot be written: name a file in a folder of yours with --output FILE")
    if output.resolve() == checkpoint.resolve():
        raise UsageError(f"{output} is the checkpoint itself: name another file with --output FILE")
