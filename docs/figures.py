"""Draws the figures of docs/course from the program's own functions, into docs/course/figures: `python
docs/figures.py`. Names of figures as arguments draw only these. `confusion_roc` trains for about 20 seconds."""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch import Tensor, distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cifar_zero import schedules  # noqa: E402 - it is found now
from cifar_zero.build_model import LoRALinear  # noqa: E402
from cifar_zero.config.recipe import LoRAConfig  # noqa: E402
from cifar_zero.models.net import ACTIVATIONS, Net  # noqa: E402
from docs.course import solutions  # noqa: E402

FOLDER = ROOT / "docs" / "course" / "figures"
BLUE, ORANGE, GREEN, GREY, YELLOW = "#0072b2", "#d55e00", "#009e73", "#bbbbbb", "#f0c030"
BOX = partial(FancyBboxPatch, boxstyle="round,pad=0.05", linewidth=1.5, edgecolor="black")


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str = "white", size: int = 15):
    axes.add_patch(BOX((x, y), width, height, facecolor=color))
    on_color = "white" if color in (BLUE, ORANGE, GREEN) else "black"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=on_color)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = "black", curve: float = 0):
    style = {"arrowstyle": "-|>", "lw": 2, "color": color, "connectionstyle": f"arc3,rad={curve}"}
    axes.annotate("", end, start, arrowprops=style)


def sketch(width: float, height: float, size: tuple[float, float] = (12, 5)) -> Axes:
    """Returns axes without ticks, for boxes and arrows in a plane of `width` x `height`."""
    axes = pyplot.figure(figsize=size).add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def net_shapes() -> None:
    """The shapes and parameters of Net, read by hooks from a forward pass."""
    net = Net(10)
    rows: list[tuple[str, tuple[int, ...], int]] = [("image", (3, 32, 32), 0)]

    def record(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        rows.append((name, tuple(output.shape[1:]), sum(p.numel() for p in module.parameters())))

    for name, module in net.named_children():
        module.register_forward_hook(partial(record, name))
    net(torch.zeros(1, 3, 32, 32))
    axes = sketch(len(rows) * 2, 5)
    colors = {"conv": BLUE, "fc": GREEN, "pool": ORANGE, "image": GREY}
    for place, (name, shape, parameters) in enumerate(rows):
        height = 0.7 + 2.1 * (shape[-1] / 32 if len(shape) == 3 else shape[0] / 120)
        color = next(color for start, color in colors.items() if name.startswith(start))
        axes.add_patch(Rectangle((2 * place + 0.5, 2.6 - height / 2), 1.0, height, facecolor=color, edgecolor="black"))
        text = f"{name}\n{' x '.join(map(str, shape))}"
        axes.text(2 * place + 1, 4.55, text, ha="center", va="center", fontsize=15)
        axes.text(2 * place + 1, 0.5, f"{parameters:,}" if parameters else "-", ha="center", fontsize=15)
        if place:
            arrow(axes, (2 * place - 0.5, 2.6), (2 * place + 0.5, 2.6))
    total = sum(parameters for *_, parameters in rows)
    axes.text(len(rows), 0.05, f"parameters of each layer; together {total:,}", ha="center", fontsize=15)


def computation_graph() -> None:
    """Values and gradients of a neuron with ReLU and squared error, computed by autograd."""
    x, w, b, t = (torch.tensor(value, requires_grad=True) for value in (2.0, 3.0, -1.0, 4.0))
    product = w * x
    z = product + b
    y = z.relu()
    loss = (y - t) ** 2
    for tensor in (product, z, y, loss):
        tensor.retain_grad()
    loss.backward()
    axes = sketch(12, 5)
    places = {
        "x": (x, 0.2, 3.6),
        "w": (w, 0.2, 2.0),
        "wx": (product, 2.6, 2.8),
        "b": (b, 2.6, 0.8),
        "z = wx + b": (z, 5.0, 2.0),
        "y = relu(z)": (y, 7.4, 2.0),
        "t": (t, 7.4, 0.5),
        "L = (y - t)²": (loss, 9.8, 2.0),
    }
    for name, (tensor, left, bottom) in places.items():
        axes.add_patch(BOX((left, bottom), 1.8, 0.9, facecolor="#eef4fa"))
        axes.text(left + 0.9, bottom + 0.68, name, ha="center", va="center", fontsize=15)
        axes.text(left + 0.45, bottom + 0.22, f"{tensor.item():g}", ha="center", va="center", fontsize=16, color=BLUE)
        assert tensor.grad is not None
        value = f"{tensor.grad.item():g}"
        axes.text(left + 1.35, bottom + 0.22, value, ha="center", va="center", fontsize=16, color=ORANGE)
    ends = [("x", "wx"), ("w", "wx"), ("wx", "z = wx + b"), ("b", "z = wx + b"), ("z = wx + b", "y = relu(z)")]
    for start, end in [*ends, ("y = relu(z)", "L = (y - t)²"), ("t", "L = (y - t)²")]:
        (_, left, bottom), (_, right, top) = places[start], places[end]
        arrow(axes, (left + 1.86, bottom + 0.5), (right - 0.06, top + 0.5))
    axes.text(4.8, 4.4, "forward: values", fontsize=17, color=BLUE)
    axes.text(8.2, 4.4, "backward: dL/d(each)", fontsize=17, color=ORANGE)


def activations() -> None:
    """The program's activation functions, and their derivatives by autograd."""
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4.6))
    for (name, function), color in zip(ACTIVATIONS.items(), (BLUE, ORANGE, GREEN, "black"), strict=True):
        x = torch.linspace(-4, 4, 401, requires_grad=True)
        y = function()(x)
        (slope,) = torch.autograd.grad(y.sum(), [x])
        for axes, values in zip(panels, (y, slope), strict=True):
            axes.plot(x.detach(), values.detach(), color=color, lw=2.5, label=name)
    for axes, title in zip(panels, ("value", "derivative"), strict=True):
        axes.set_title(title, fontsize=18)
        axes.tick_params(labelsize=14)
        axes.grid(alpha=0.3)
    panels[0].set_ylim(-1.2, 2.5)
    panels[0].legend(fontsize=15)
    figure.tight_layout()


def learning_rates() -> None:
    """Learning rates of the program's schedules over 1,000 steps, as shares of the optimizer's."""
    figure, panels = pyplot.subplots(2, 4, figsize=(14, 6), sharex=True, sharey=True)
    options: dict[str, dict[str, Any]] = {
        "linear": {},
        "exponential": {"gamma": 0.997},
        "step": {"step_size": 300},
        "cosine": {},
        "cosine_restarts": {"period": 250},
        "warmup_linear": {"warmup_steps": 100},
        "onecycle": {},
        "warmup_lr": {"warmup_num_steps": 300},
    }
    for axes, (name, chosen) in zip(panels.flat, options.items(), strict=True):
        known = schedules.SCHEDULES[name].__dataclass_fields__
        schedule = schedules.SCHEDULES[name](**{key: value for key, value in chosen.items() if key in known})
        schedule = schedules.with_total_steps(schedule, lambda: 1000)
        axes.plot(range(1000), [schedule.rate(step, 1.0) for step in range(1000)], color=BLUE, lw=2.5)
        axes.set_title(name, fontsize=16)
        axes.tick_params(labelsize=13)
        axes.grid(alpha=0.3)
    figure.supxlabel("step", fontsize=15)
    figure.supylabel("share of --optimizer.lr", fontsize=15)
    figure.tight_layout()


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


def lora() -> None:
    """A LoRA layer next to a linear layer of vit_base's size, with the sizes that the program's layer has."""
    with torch.device("meta"):
        layer = LoRALinear(nn.Linear(768, 3072), LoRAConfig(rank=8))
    sizes = {name: parameter.numel() for name, parameter in layer.named_parameters()}
    a, b = (next(size for name, size in sizes.items() if name.endswith(part)) for part in ("lora_a", "lora_b"))
    axes = sketch(14, 6, (12, 5))
    box(axes, 0.2, 2.5, 1.6, 1, "x\n768")
    box(axes, 3.6, 3.3, 4.6, 2.4, f"W, frozen\n3072 x 768 = {768 * 3072:,}", GREY, 17)
    box(axes, 3.6, 1.2, 1.6, 1, f"A: 8 x 768\n{a:,}", ORANGE, 14)
    box(axes, 6.6, 1.2, 1.6, 1, f"B: 3072 x 8\n{b:,}", ORANGE, 14)
    box(axes, 9.3, 1.2, 1.1, 1, "alpha\n/ r")
    box(axes, 11.0, 2.7, 0.7, 0.7, "+", size=20)
    box(axes, 12.4, 2.55, 1.4, 1, "y\n3072")
    arrow(axes, (1.9, 3.2), (3.5, 4.4))
    arrow(axes, (1.9, 2.8), (3.5, 1.7))
    arrow(axes, (5.3, 1.7), (6.5, 1.7))
    arrow(axes, (8.3, 1.7), (9.2, 1.7))
    arrow(axes, (8.3, 4.5), (11.2, 3.5))
    arrow(axes, (10.5, 1.7), (11.2, 2.6))
    arrow(axes, (11.8, 3.05), (12.3, 3.05))
    text = (
        f"trained: {a + b:,}, which is {100 * (a + b) / (768 * 3072):.1f} % of W. B starts at zero, so y = Wx at first"
    )
    axes.text(7, 0.35, text, ha="center", fontsize=16)


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


def confusion_roc() -> None:
    """The confusion matrix and ROC curves of lab 3's run, from its predictions."""
    from torchmetrics.functional.classification import multiclass_confusion_matrix, multiclass_roc

    from cifar_zero.config import command_line
    from cifar_zero.data.augment import normalize
    from datamodule import CIFARDataModule

    flags = "--data.source digits --optimizer adam --batch_size 64"
    settings = command_line.parse(flags.split())
    data = CIFARDataModule(settings)
    data.prepare_data()
    data.setup()
    torch.manual_seed(0)
    net = Net(10)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    for _, (images, labels) in zip(range(600), data.train_dataloader(), strict=False):
        loss = nn.functional.cross_entropy(net(normalize(images, settings.recipe.data.inputs)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scores, truth = [], []
    with torch.no_grad():
        for images, labels, *_ in data.test_dataloader():
            scores.append(net(normalize(images, settings.recipe.data.inputs)).softmax(1))
            truth.append(labels)
    probabilities, classes = torch.cat(scores), torch.cat(truth).long()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, 6.2))
    matrix = multiclass_confusion_matrix(probabilities, classes, 10)
    left.imshow(matrix, cmap="Blues")
    for row in range(10):
        for column in range(10):
            color = "white" if matrix[row, column] > 500 else "black"
            text = str(int(matrix[row, column]))
            left.text(column, row, text, ha="center", va="center", fontsize=11, color=color)
    left.set_xlabel("predicted digit", fontsize=16)
    left.set_ylabel("true digit", fontsize=16)
    left.set_xticks(range(10))
    left.set_yticks(range(10))
    rates = multiclass_roc(probabilities, classes, 10)
    for digit, color in ((0, BLUE), (1, GREEN), (8, ORANGE)):
        right.plot(rates[0][digit], rates[1][digit], lw=2.5, color=color, label=f"digit {digit}")
    right.plot([0, 1], [0, 1], "--", color=GREY, lw=2, label="chance")
    right.set_xlabel("false positive rate", fontsize=16)
    right.set_ylabel("recall", fontsize=16)
    right.legend(fontsize=15)
    right.grid(alpha=0.3)
    for axes in (left, right):
        axes.tick_params(labelsize=13)
    figure.tight_layout()


FIGURES: tuple[Callable[[], None], ...] = (
    *(net_shapes, computation_graph, activations, learning_rates, zero_memory, zero3_timeline),
    *(parallelism, lora, audit, confusion_roc),
)

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in FIGURES:
        if not sys.argv[1:] or draw.__name__ in sys.argv[1:]:
            draw()
            pyplot.savefig(FOLDER / f"{draw.__name__}.png", dpi=110)
            pyplot.close()
