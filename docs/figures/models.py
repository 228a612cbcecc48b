"""Draws figures about models and their training in one process."""

from functools import partial
from typing import Any

import torch
from matplotlib import pyplot
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from cifar_zero import schedules
from cifar_zero.build_model import LoRALinear
from cifar_zero.config.recipe import LoRAConfig
from cifar_zero.models.net import ACTIVATIONS, Net
from docs.figures.shapes import BLUE, BOX, GREEN, GREY, ORANGE, arrow, box, sketch


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
