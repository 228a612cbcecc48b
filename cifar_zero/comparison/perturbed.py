"""The LightningModule of a perturbed run, which shows what rounding can do to a recipe."""

from dataclasses import fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.modules.conv import _ConvNd

from cifar_zero.comparison.agreement import EPS, LEAST_PERTURBATION, eps_of
from cifar_zero.comparison.reading import PERTURBED
from cifar_zero.reports.summary import write_json
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.hooks import Hooks
from cifar_zero.training import MODULE


def perturbed(precision: str, accelerator: str, sign: int = 1) -> type[LightningModule]:
    """Returns a subclass of a run's module that changes its initial weights and optimizer constants by about one
    rounding error.

    The weights change right after initialisation, before the strategy copies, shards or casts them, with `sign` -1 in
    the opposite direction. The constants matter as much: DeepSpeed's Adam on the CPU stores beta2 in float32, so 1 -
    0.999 is off by up to 6e-5. PERTURBED marks the run.
    """
    base: Any = resolve_name(MODULE)

    class PerturbedModule(base):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            self.optimizer = with_perturbed_constants(self.optimizer)

        def configure_model(self) -> None:
            built = self.net is not None
            super().configure_model()
            if built:
                return
            distance = perturb(self.net, precision, accelerator, sign, hooks_of(self.trainer.strategy))
            if self.trainer.is_global_zero:
                write_json(Path(self.trainer.default_root_dir) / PERTURBED, {"distance": distance})

    return PerturbedModule


def with_perturbed_constants(optimizer: Any) -> Any:
    """Returns an entry of optimizers/ whose learning rate, decays and other numbers are larger by one eps of float32,
    in which optimizers compute with them at any precision of the model."""

    def larger(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(larger, value))
        return value * (1 + EPS["32"]) if isinstance(value, float) else value

    return replace(optimizer, **{field.name: larger(getattr(optimizer, field.name)) for field in fields(optimizer)})


def perturb(net: nn.Module, precision: str, accelerator: str, sign: int, hooks: Hooks) -> float:
    """Multiplies each weight at random by 1 + distance or 1 - distance, identically on every rank that has it, and
    returns the distance. The strategy of `hooks` may have sharded the parameters."""
    convolves = torch.backends.cudnn.allow_tf32 and any(isinstance(module, _ConvNd) for module in net.modules())
    distance = max(eps_of(precision, accelerator, convolves), LEAST_PERTURBATION)
    for seed, parameter in enumerate(net.parameters()):
        tensor = hooks.local(parameter)
        signs = torch.randint(0, 2, tensor.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        with torch.no_grad():
            tensor.mul_((1 + sign * distance * signs).to(tensor.dtype).to(tensor.device))
    return distance
