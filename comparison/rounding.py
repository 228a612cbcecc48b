"""A run of train.py whose initial weights and optimizer's constants are moved by little: what rounding can do to its
recipe.

`python -P -m comparison.rounding FLAGS`: as train.py has them.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import checks
import cli
import exits
import launch
import train
from comparison.agreement import LEAST_MOVE, UNITS, unit_of_rounding
from comparison.reading import MARK
from reports.summary import write_json

if TYPE_CHECKING:
    from torch.nn import Module

    from cifar_module import CIFARModule


def main() -> int:
    """Trains, in this process or in the ranks that it starts; returns the exit code."""
    config = cli.parse()
    checks.settle(config)
    if config.world_size > 1 and not launch.is_rank():
        return launch.run(config.world_size, on_cpu=config.accelerator == "cpu")
    import build

    build.CIFARModule = moved(build.CIFARModule, config.precision, config.accelerator)
    train.train(config)
    return 0


def moved(module_class: type[CIFARModule], precision: str, accelerator: str) -> type[CIFARModule]:
    """The module with its weights moved when they have been drawn, before the strategy copies, cuts or casts them, and
    with its optimizer's constants moved too.

    Those matter as much: DeepSpeed's Adam on the CPU holds beta2 in float32, and 1 - 0.999 is then off by up to 6e-5.
    The run folder gets a file that tells this run from one of the user's, with the unit of rounding.
    """

    class Moved(module_class):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            self.optimizer = with_moved_constants(self.optimizer)

        def configure_model(self) -> None:
            drawn = self.net is None
            super().configure_model()
            if drawn and self.net is not None:
                unit = unit_of_rounding(precision, accelerator, _convolves(self.net))
                move(self.net, max(unit, LEAST_MOVE))
                if self.trainer.is_global_zero:
                    write_json(Path(self.trainer.default_root_dir) / MARK, {"unit": unit})

    return Moved


def with_moved_constants(optimizer: Any) -> Any:
    """A dataclass of optimizers/ whose learning rate, decays and so on are larger by one unit of float32.

    Arithmetic with them is in float32 or better, whatever the precision of the network.
    """

    def larger(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(larger, value))
        return value * (1 + UNITS["32"]) if isinstance(value, float) else value

    return replace(optimizer, **{field.name: larger(getattr(optimizer, field.name)) for field in fields(optimizer)})


def move(net: Module, distance: float) -> None:
    """Multiplies each weight by 1 + distance or 1 - distance, at random, the same on every rank that has it.

    Args:
        net: whose parameters ZeRO-3 or torch's DTensor may have cut.
        distance: relative.
    """
    import torch
    from torch.distributed.tensor import DTensor

    for seed, parameter in enumerate(net.parameters()):
        part: Any = getattr(parameter, "ds_tensor", parameter)
        tensor = part.to_local() if isinstance(part, DTensor) else part
        signs = torch.randint(0, 2, tensor.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        with torch.no_grad():
            tensor.mul_((1 + distance * signs).to(tensor.dtype).to(tensor.device))


def _convolves(net: Module) -> bool:
    from torch.nn import Conv2d

    return any(isinstance(module, Conv2d) for module in net.modules())


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
