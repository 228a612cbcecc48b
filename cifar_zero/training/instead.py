"""Implements the two flags with which `train` does not train. `--plot_schedule` draws the learning rate over the steps
of a run, and `--check_gradients` compares the derivatives of autograd with finite differences."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cifar_zero import build_model
from cifar_zero.config.run import Run
from cifar_zero.config.settings import Settings
from cifar_zero.core.errors import UsageError
from cifar_zero.launch import rank_environment
from cifar_zero.models import IMAGE_SHAPE
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.schedules import SCHEDULES, with_total_steps
from cifar_zero.training import DATAMODULE
from cifar_zero.training.metrics import loss

POINTS = 2000  # largest number of points of the curve; the figure is less than 2,000 pixels wide

IMAGES = 4

STEP = 1e-6
"""Distance from an element's value to the two values, one on each side, between which the central difference is
computed in float64. The error of the difference is about 1e-12 (the square of the distance) plus 1e-10 (the rounding
error of the loss, divided by the distance)."""

TOLERANCE = 1e-5  # largest difference relative to the derivative


def plot_schedule(run: Run) -> int:
    """Draws the learning rate over the optimizer steps of a run into the PNG file of --plot_schedule, and returns the
    exit code. Only rank 0 draws. Raises UsageError if the file cannot be written."""
    if rank_environment.global_rank() != 0:
        return 0
    file, schedule, optimizer = Path(run.output.plot_schedule), run.recipe.schedule, run.recipe.optimizer
    steps = run_steps(run, resolve_name(DATAMODULE)(run))
    formula = with_total_steps(SCHEDULES[schedule.name](**schedule.options), lambda: steps)
    base_lr = OPTIMIZERS[optimizer.name](**optimizer.options).lr
    shown = range(0, steps, max(1, steps // POINTS))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="learning rate")
    axes.set_title(f"{schedule.name}, {optimizer.name} with {base_lr:g}, {steps:,} steps")
    axes.plot(shown, [formula.rate(step, base_lr) for step in shown])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    print(f"the learning rate of {schedule.name} is plotted in {file}")
    return 0


def run_steps(settings: Settings, datamodule: Any) -> int:
    """Returns the number of optimizer steps that a run would do in all its epochs, at most --max_steps. In the run,
    Lightning's `Trainer.estimated_stepping_batches` returns the same number. Decodes the images if necessary, because
    the number of images is needed."""
    datamodule.setup()
    batches, recipe = len(datamodule.train_dataloader()), settings.recipe
    limit = recipe.trainer.get("overfit_batches") or recipe.trainer.get("limit_train_batches", 1.0)
    batches = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
    steps = recipe.epochs * (batches // settings.placement.accumulate)  # a run refuses a remainder
    if recipe.max_steps == -1:
        return steps
    return min(steps, recipe.max_steps)


def check_gradients(run: Run) -> int:
    """Compares the gradients of autograd with finite differences. Returns the exit code, which is 1 if they differ by
    more than TOLERANCE.

    Prints a table with one row per parameter, for the element of the parameter that has the largest gradient. The row
    has the derivative of the loss with respect to this element, from autograd and as a central difference. The model
    computes in float64 without dropout.
    """
    torch.manual_seed(run.recipe.seed)
    net = build_model.build(run.recipe, run.num_classes).double().eval()
    side = run.data.image_size
    images = torch.rand(IMAGES, IMAGE_SHAPE[0], side, side, dtype=torch.float64) * 2 - 1
    labels = torch.arange(IMAGES) % run.num_classes

    def value() -> Tensor:
        return loss(run.recipe.loss, net(images), labels, run.recipe.label_smoothing)

    value().backward()
    table = Table("parameter", "autograd", "finite difference", "relative difference")
    worst = 0.0
    for name, parameter in net.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            continue
        place = int(parameter.grad.abs().argmax())
        exact, numbers = parameter.grad.flatten()[place].item(), parameter.data.view(-1)
        here, sides = numbers[place].item(), []
        for step in (STEP, -STEP):
            numbers[place] = here + step
            with torch.no_grad():
                sides.append(value().item())
        numbers[place] = here
        difference = (sides[0] - sides[1]) / (2 * STEP)
        relative = abs(difference - exact) / abs(exact)
        worst = max(worst, relative)
        table.add_row(name, f"{exact:.9f}", f"{difference:.9f}", f"{relative:.1e}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{'agree' if worst <= TOLERANCE else 'DIFFER'}: at most {worst:.1e} of the derivative")
    return int(worst > TOLERANCE)
