"""`train --check_gradients`: the derivatives that autograd finds, next to finite differences."""

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cifar_zero.checkpoints import network
from cifar_zero.config.run import Run
from cifar_zero.models import IMAGE_SHAPE
from cifar_zero.training.metrics import loss

IMAGES = 4

STEP = 1e-6
"""Distance on each side, in float64: the error of the central difference is about 1e-12 (its square) plus 1e-10
(rounding of the loss, divided by it)."""

TOLERANCE = 1e-5  # largest difference, as a share of the derivative


def check_gradients(run: Run) -> int:
    """Prints the derivative of the loss by one number of each parameter, the one with the steepest slope, found by
    autograd and by moving that number, in float64, without dropout; returns the exit code, 1 if they differ."""
    torch.manual_seed(run.recipe.seed)
    net = network.build(run.recipe, run.num_classes).double().eval()
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
