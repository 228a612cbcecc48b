"""Draws figures about training on several ranks."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import distributed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from docs.course import solutions
from docs.figures.shapes import BLUE, GREEN, GREY, ORANGE, YELLOW, arrow, box, sketch

ROOT = Path(__file__).resolve().parents[2]


def zero_memory() -> None:
    """Bytes per parameter on 8 ranks. The sums are those of exercise 12."""
    names, ranks = ("DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3"), 8
    axes = pyplot.figure(figsize=(12, 4.6)).add_subplot()
    for stage, name in enumerate(names):
        left = 0.0
        parts = (("weights", 2, 3, BLUE), ("gradients", 2, 2, ORANGE), ("optimizer state", 12, 1, GREEN))
        for label, size, sharded_from, color in parts:
            width = size / ranks if stage >= sharded_from else float(size)
            axes.barh(name, width, left=left, color=color, edgecolor="white", label=label if not stage else None)
            left += width
        assert abs(left - solutions.bytes_per_rank(stage, 1, ranks)) < 1e-9
        axes.text(left + 0.15, stage, f"{left:g}", va="center", fontsize=18)
    axes.invert_yaxis()
    axes.set_xlim(0, 17.5)
    axes.tick_params(labelsize=17)
    axes.set_xlabel("bytes per parameter on each of 8 ranks", fontsize=16)
    axes.legend(fontsize=15, loc="lower right")
    pyplot.tight_layout()


class _Trace(TorchDispatchMode):
    """Records the operations of a step of ZeRO 3, and which gathered weights are in memory at each."""

    def __init__(self, shapes: list[tuple[int, int]]):
        super().__init__()
        self.shapes = shapes
        self.operations: list[tuple[str, int, list[bool]]] = []  # kind, layer, whether each layer is gathered
        self.gathered: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        kind, name, layer = "", str(function), -1
        if "allgather" in name:
            kind, weight = "gather", args[0]
            layer = next(i for i, shape in enumerate(self.shapes) if shape[0] * shape[1] == weight.numel())
            self.gathered[layer] = StorageWeakRef(weight.untyped_storage())
        elif "reduce_scatter" in name:
            kind = "reduce-scatter"
            layer = next(i for i, shape in enumerate(self.shapes) if shape[0] * shape[1] == args[1].numel())
        elif name.startswith("aten.mm"):
            kind = "use"
        if kind:
            full = [i in self.gathered and not self.gathered[i].expired() for i in range(len(self.shapes))]
            self.operations.append((kind, layer if layer >= 0 else -1, full))
        return result


def zero3_timeline() -> None:
    """What the solution of exercise 15 gathers, uses and sends, recorded in a run on one rank."""
    shapes = [(16, 12), (16, 16), (10, 16)]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", (Path(folder) / "ranks").as_uri(), world_size=1, rank=0)
        shards = [torch.randn(rows * columns) for rows, columns in shapes]
        with _Trace(shapes) as trace, torch.no_grad():
            solutions.zero_3_step(shards, shapes, torch.randn(8, 12), torch.randint(10, (8,)), 0.1)
        distributed.destroy_process_group()
    axes = pyplot.figure(figsize=(14, 5)).add_subplot()
    backward = next(i for i, (kind, _, full) in enumerate(trace.operations) if kind == "use" and not any(full))
    for place, (kind, layer, full) in enumerate(trace.operations):
        for row, is_full in enumerate(full):
            if is_full:
                if kind == "gather" and layer == row:
                    _event(axes, place, row, "gather", YELLOW, "black")
                else:
                    _event(axes, place, row, "use", BLUE)
        if kind == "reduce-scatter":
            _event(axes, place, layer, "reduce-\nscatter", GREEN, size=12)
        elif kind == "use" and not any(full):
            row = next(later for what, later, _ in trace.operations[place:] if what == "reduce-scatter")
            _event(axes, place, row, "weight's\ngradient", "white", "black", 11)
    end = len(trace.operations)
    axes.axvline(backward - 0.02, color="black", lw=2)
    axes.text(backward / 2, -0.75, "forward", ha="center", fontsize=18)
    axes.text((backward + end) / 2, -0.75, "backward and update", ha="center", fontsize=18)
    axes.set(xlim=(0, end), ylim=(2.6, -1.05), xticks=[])
    axes.set_yticks(range(3), ["layer 1", "layer 2", "layer 3"], fontsize=17)
    axes.set_xlabel("time. Empty: each rank has only its shard of the layer", fontsize=16)
    pyplot.tight_layout()


def _event(axes: Axes, place: int, row: int, text: str, color: str, ink: str = "white", size: int = 14) -> None:
    axes.add_patch(Rectangle((place, row - 0.4), 0.96, 0.8, facecolor=color, edgecolor="black"))
    axes.text(place + 0.48, row, text, ha="center", va="center", fontsize=size, color=ink)


def parallelism() -> None:
    """The same two layers and four images under data, tensor and pipeline parallelism on two ranks."""
    axes = sketch(18, 6.2, (14, 5))
    for left, title in ((0, "data parallel (DP)"), (6, "tensor parallel (TP)"), (12, "pipeline parallel (PP)")):
        axes.text(left + 3, 5.8, title, ha="center", fontsize=19)
    for rank, color in enumerate((BLUE, ORANGE)):
        x = 0.5 + 2.7 * rank
        box(axes, x, 4.5, 2.2, 0.6, f"images {1 + 2 * rank}, {2 + 2 * rank}", GREY)
        for layer in (1, 2):
            box(axes, x, 4.3 - 1.2 * layer, 2.2, 0.7, f"layer {layer}", color)
        arrow(axes, (x + 1.1, 4.4), (x + 1.1, 3.9))
        arrow(axes, (x + 1.1, 3.0), (x + 1.1, 2.7))
        axes.text(x + 1.1, 1.3, f"rank {rank}", ha="center", fontsize=15, color=color)
    axes.text(3, 0.45, "all-reduce of the gradients", ha="center", fontsize=15)
    box(axes, 6.7, 4.5, 4.7, 0.6, "images 1, 2, 3, 4", GREY)
    for layer, kind in ((1, "columns"), (2, "rows")):
        for rank, color in enumerate((BLUE, ORANGE)):
            box(axes, 6.6 + 2.5 * rank, 4.3 - 1.2 * layer, 2.3, 0.7, f"layer {layer}:\n½ of the {kind}", color, 12)
    for rank, color in enumerate((BLUE, ORANGE)):
        arrow(axes, (7.75 + 2.5 * rank, 4.4), (7.75 + 2.5 * rank, 3.9))
        arrow(axes, (7.75 + 2.5 * rank, 3.0), (7.75 + 2.5 * rank, 2.7))
        axes.text(7.75 + 2.5 * rank, 1.3, f"rank {rank}", ha="center", fontsize=15, color=color)
    axes.text(9, 0.45, "all-reduce of the activations", ha="center", fontsize=15)
    box(axes, 12.7, 4.5, 4.7, 0.6, "images 1, 2, 3, 4", GREY)
    box(axes, 13.0, 3.1, 2.0, 0.7, "layer 1", BLUE)
    box(axes, 15.3, 1.9, 2.0, 0.7, "layer 2", ORANGE)
    arrow(axes, (14.0, 4.4), (14.0, 3.9))
    arrow(axes, (15.1, 3.4), (16.3, 2.7), curve=-0.3)
    axes.text(14.0, 1.3, "rank 0", ha="center", fontsize=15, color=BLUE)
    axes.text(16.3, 1.3, "rank 1", ha="center", fontsize=15, color=ORANGE)
    axes.text(15, 0.45, "activations go to the next rank", ha="center", fontsize=15)
    for line in (6.05, 12.05):
        axes.plot([line, line], [0.2, 6], color=GREY, lw=1.5)


def audit() -> None:
    """The values that stepcheck's audit compares in a step."""
    axes = sketch(16, 6, (13, 5))
    box(axes, 0.2, 3.6, 3.2, 1.3, "rank 0: autograd's\ngradient of each\nmicro-batch", "#dcebf7", 14)
    box(axes, 0.2, 1.4, 3.2, 1.3, "rank 1: autograd's\ngradient of each\nmicro-batch", "#dcebf7", 14)
    box(axes, 4.8, 2.2, 3.4, 1.8, "the engine adds,\nscales, reduces,\nshards, clips", GREY, 15)
    box(axes, 9.5, 3.6, 2.9, 1.3, "optimizer's shard\non rank 0", "#fbe3d3", 14)
    box(axes, 9.5, 1.4, 2.9, 1.3, "optimizer's shard\non rank 1", "#fbe3d3", 14)
    box(axes, 13.5, 2.5, 2.3, 1.3, "update,\nweights", "#d8f0e6", 15)
    for y, end in ((4.25, 3.5), (2.05, 2.7)):
        arrow(axes, (3.5, y), (4.7, end))
        arrow(axes, (8.3, end), (9.4, y))
        arrow(axes, (12.5, y), (13.4, 2.8 + (y > 3) * 0.7))
    box(axes, 1.6, 0.15, 4.6, 0.75, "random projections, mean", YELLOW, 15)
    box(axes, 8.0, 0.15, 4.6, 0.75, "random projections, sum", YELLOW, 15)
    axes.text(7.1, 0.52, "=?", ha="center", va="center", fontsize=22)
    arrow(axes, (1.8, 1.3), (2.6, 0.98), YELLOW)
    arrow(axes, (10.9, 1.3), (10.5, 0.98), YELLOW)
    axes.text(14.65, 4.35, "=? torch's own\noptimizer, on slices", ha="center", fontsize=14)
    axes.text(8, 5.5, "compared in every step, up to rounding; nothing is gathered", ha="center", fontsize=18)


def two_releases() -> None:
    """The losses in benchmarks/results/two_releases.json, which names the commands that measured them."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "two_releases.json").read_text())
    figure, panels = pyplot.subplots(1, 2, figsize=(14, 6), sharey=True)
    for axes, release, color in zip(panels, measured["releases"], (BLUE, ORANGE), strict=True):
        axes.set_title(f"DeepSpeed {release['deepspeed']}: {release['outcome']}", fontsize=20, color=color)
        for curve, line, width in zip(release["curves"], (GREY, color), (9, 2.5), strict=True):
            means = torch.tensor(curve["losses"]).view(-1, 5).mean(1)
            label = f"{curve['name']}, test accuracy {100 * curve['test_accuracy']:.1f} %"
            axes.plot(range(3, 5 * len(means), 5), means, color=line, lw=width, label=label)
        axes.text(0.97, 0.95, release["finding"], transform=axes.transAxes, ha="right", va="top", fontsize=14)
        axes.set_xlabel("optimizer step", fontsize=16)
        axes.legend(fontsize=14, loc="lower left")
        axes.tick_params(labelsize=14)
        axes.grid(alpha=0.3)
    panels[0].set_ylim(-0.4, 3)
    panels[0].set_ylabel("training loss, mean of 5 steps", fontsize=16)
    figure.tight_layout()
