"""What the activations of a training step take, and what activation checkpointing and smaller micro-batches save.

Counted to the byte by torch's MemTracker on tensors that have shapes and no values (FakeTensorMode): networks that fit
nowhere are counted too. One CPU, float32 or autocast to bfloat16; no optimizer.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import exits
import models
from models.moe import gates
from models.recomputation import checkpoint_blocks
from sources.dataset import IMAGE_SHAPE

NUM_CLASSES = 10


class Bytes(NamedTuple):
    """Of one micro-batch."""

    saved: int
    """Held between the forward and the backward pass, beside parameters and their buffers."""

    peak: int
    """The most of all that is there at any time: parameters, gradients, activations, what an operation takes."""


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
                pairs = (*zip(plain, checkpointed, strict=True),)
                table.add_row(name, str(images), precision, *(f"{size / 1e6:,.1f}" for pair in pairs for size in pair))
    Console(width=120).print(table)
    return 0


def counted(model: str, images: int, precision: str, activation_checkpointing: bool) -> Bytes:
    """The bytes of one forward and one backward pass of so many images."""
    tracker = MemTracker()
    with FakeTensorMode():
        net = models.build(model, NUM_CLASSES)
        if activation_checkpointing:
            checkpoint_blocks(net)
        batch, labels = torch.empty(images, *IMAGE_SHAPE), torch.zeros(images, dtype=torch.int64)
        tracker.track_external(net)
        with tracker:
            with torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else nullcontext():
                scores = net(batch)
            loss = F.cross_entropy(scores.float(), labels)
            for gate in gates(net):
                assert gate.routing is not None
                loss = loss + gate.routing.load_balance_loss
            saved = tracker.get_tracker_snapshot("current")[batch.device]
            loss.backward()
            peak = tracker.get_tracker_snapshot("peak")[batch.device]
    names = {getattr(category, "name", category): size for category, size in saved.items()}
    return Bytes(names["ACT"] + names["TEMP"], peak["Total"])


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
