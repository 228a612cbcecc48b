"""What the activations of a training step take, and what activation checkpointing and smaller micro-batches save.

Counted to the byte by torch's MemTracker on tensors that have shapes and no values (FakeTensorMode): networks that fit
nowhere are counted too. One CPU, float32 or autocast to bfloat16; no optimizer.
"""

from __future__ import annotations

import argparse
import sys

from rich import box
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from cifar_zero import models
from cifar_zero.core import exits
from cifar_zero.models.recomputation import checkpoint_blocks
from cifar_zero.planning import activations

NUM_CLASSES = 10


def main() -> int:
    """Counts; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activation_memory", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["net", "vit_tiny", "vit_small"], choices=models.MODELS)
    parser.add_argument("--micro_batches", nargs="+", type=int, default=[64, 16], help="images (default: 64 16)")
    given = parser.parse_args()
    table = Table(
        "network", "images", "precision", "saved, MB", "checkpointed", "peak, MB", "checkpointed", box=box.MARKDOWN
    )
    for name in given.models:
        for images in given.micro_batches:
            for precision in ("32-true", "bf16-mixed"):
                plain, checkpointed = (counted(name, images, precision, switch) for switch in (False, True))
                pairs = (plain.saved, checkpointed.saved), (plain.peak, checkpointed.peak)
                table.add_row(name, str(images), precision, *(f"{size / 1e6:,.1f}" for pair in pairs for size in pair))
    Console(width=120).print(table)
    return 0


def counted(model: str, images: int, precision: str, activation_checkpointing: bool) -> activations.Bytes:
    """The bytes of one forward and one backward pass of so many images."""
    with FakeTensorMode():
        net = models.build(model, NUM_CLASSES)
        if activation_checkpointing:
            checkpoint_blocks(net)
        return activations.counted(net, images, "autocast" if precision == "bf16-mixed" else "float32")


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
