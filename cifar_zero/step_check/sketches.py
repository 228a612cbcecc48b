"""Defines `SketchCheck`, a step check that also keeps sketches of the values of each step. Sketches are small enough to
be stored, and compared later on another machine or with another release (`cifar-zero compare --save_baseline`).

A sketch is a short vector. Each element of a tensor is added to one element of the sketch, or subtracted from it. The
sketch of a difference is the difference of the sketches. Its norm equals the norm of the difference, up to an error of
about a fifth (feature hashing, Weinberger et al. 2009).
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from cifar_zero.launch.collectives import gather
from cifar_zero.step_check.callback import StepCheck
from cifar_zero.step_check.replay import gathered_losses
from cifar_zero.step_check.updates import laid
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.hooks import local_of

SIZE = 16
"""Number of elements of a sketch."""


class SketchCheck(StepCheck):
    """Checks every step, warns of faults, and keeps values of the steps in `sketches`, in float64 on the CPU.

    Each key of `sketches` has a list with one tensor per step. A step that overflows in float16 is left out. These keys
    have values of the training:

    - `weights` (SIZE,): the sketch of all weights before the step
    - `found` (SIZE,): the sketch of the whole gradient
    - `losses` (ranks, micro-batches): the losses of the replay in the training's precision

    These keys have values of the replay in float64:

    - `loss/` (ranks, micro-batches): the losses
    - `gradient/NAME` (SIZE,): the sketch of the gradient of a tensor
    - `update/` (SIZE,): the sketch of the update that torch's optimizer makes from these gradients, in float32
    """

    def __init__(self) -> None:
        super().__init__(every=1, on_fault="warn")
        self.sketches: dict[str, list[Tensor]] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Compares the gradients and keeps the sketches."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if self._replays is None or self._overflows:
            return
        low, exact = self._replays
        update = torch.zeros(SIZE, dtype=torch.float64)
        for each in self._expect_updates(trainer, pl_module, optimizer, exact.gradients):
            own = laid(each.updated, [places(name, self._weights[name]) for name in each.names])
            update += sketch(local_of(each.twin) - local_of(each.before), local_of(own))
        losses = gathered_losses(low, exact)
        found = hooks_of(trainer.strategy).gradients(pl_module)
        step = {"weights": sketch_of(self._weights), "found": sketch_of(found), "losses": losses[:, 0]}
        step |= {"loss/": losses[:, 1], "update/": torch.stack(gather(update)).sum(0)}
        step |= {f"gradient/{name}": sketch_of({name: gradient}) for name, gradient in exact.gradients.items()}
        for key, value in step.items():
            self.sketches.setdefault(key, []).append(value)


def sketch_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns one sketch of all named tensors together, float64 (SIZE,)."""
    return torch.stack([sketch(tensor, places(name, tensor)) for name, tensor in tensors.items()]).sum(0)


def sketch(values: Tensor, places: Tensor) -> Tensor:
    """Returns the sketch of a tensor, float64 (SIZE,). `places` has the place in the sketch of each element; see the
    function `places`. Elements with place 0 are left out."""
    places = places.cpu().flatten()
    signed = values.detach().cpu().double().flatten() * places.sign()
    return torch.zeros(SIZE + 1, dtype=torch.float64).index_add(0, places.abs().long(), signed)[1:]


def places(name: str, like: Tensor) -> Tensor:
    """Returns the place in the sketch to which each element of a tensor is added, counted from 1, or the negative place
    from which it is subtracted. The places are float32, in the tensor's shape. They depend on name and shape only and
    are the same on any machine, because numpy does not change the numbers of RandomState between releases (NEP 19)."""
    drawn = np.random.RandomState(zlib.crc32(name.encode())).randint(-SIZE, SIZE, math.prod(like.shape), np.int64)
    return torch.from_numpy(drawn + (drawn >= 0)).float().view(like.shape)
