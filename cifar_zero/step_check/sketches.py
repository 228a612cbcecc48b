"""Defines `SketchCheck`, a step check that also keeps sketches of the values of each step. Sketches are small enough to
be stored (`cifar-zero compare --save_baseline`). Later they can be compared with the sketches of a run on another
machine or with another release.

A sketch is a short vector. Each element of a tensor is added to one element of the sketch, or subtracted from it. The
sketch of the difference of two tensors is therefore the difference of their sketches. The norm of this sketch equals
the norm of the difference of the tensors, up to an error of about a fifth (feature hashing, Weinberger et al. 2009).
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from cifar_zero.step_check.callback import StepCheck
from cifar_zero.step_check.guard import exchange
from cifar_zero.step_check.replay import gathered_losses
from cifar_zero.step_check.updates import laid
from cifar_zero.strategies import hooks_of
from cifar_zero.strategies.hooks import local_of

SIZE = 16
"""Number of elements of a sketch."""


class SketchCheck(StepCheck):
    """Checks every step, warns of faults, and keeps the losses and the sketches of each step in `sketches`, in float64
    on the CPU.

    Each key of `sketches` has a list with one tensor per step. A step that overflows in float16 is left out. These keys
    have values that do not come from the replay in float64:

    - `weights` (SIZE,): the sketch of all weights before the step
    - `found` (SIZE,): the sketch of the strategy's whole gradient
    - `losses` (ranks, micro-batches): the losses of the replay in the training's precision

    These keys have values that come from the replay in float64:

    - `loss/` (ranks, micro-batches): the losses
    - `gradient/NAME` (SIZE,): the sketch of the gradient of the weight NAME
    - `update/` (SIZE,): the sketch of the update of all weights that torch's optimizer makes, in float32, from these
      gradients
    """

    def __init__(self) -> None:
        super().__init__(every=1, on_fault="warn")
        self.sketches: dict[str, list[Tensor]] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Checks the step as `StepCheck` does, and keeps its losses and sketches."""
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if self._replays is None or self._overflows:
            return
        low, exact = self._replays
        update = torch.zeros(SIZE, dtype=torch.float64)
        expected, _ = self._expect_updates(trainer, pl_module, optimizer, exact.gradients)
        for each in expected:
            own = laid(each.updated, [places(name, self._weights[name]) for name in each.names])
            update += sketch(local_of(each.twin) - local_of(each.before), local_of(own))
        losses = gathered_losses(low, exact)
        found = hooks_of(trainer.strategy).gradients(pl_module)
        step = {"weights": sketch_of(self._weights), "found": sketch_of(found), "losses": losses[:, 0]}
        step |= {"loss/": losses[:, 1], "update/": torch.stack(exchange(update)).sum(0)}
        step |= {f"gradient/{name}": sketch_of({name: gradient}) for name, gradient in exact.gradients.items()}
        for key, value in step.items():
            self.sketches.setdefault(key, []).append(value)


def sketch_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns one sketch of all named tensors together, float64 (SIZE,)."""
    return torch.stack([sketch(tensor, places(name, tensor)) for name, tensor in tensors.items()]).sum(0)


def sketch(values: Tensor, places: Tensor) -> Tensor:
    """Returns the sketch of a tensor, float64 (SIZE,).

    Args:
        values: The tensor.
        places: For each element of the tensor, its place in the sketch, as the function `places` returns it. Elements
            with place 0 are left out.
    """
    places = places.cpu().flatten()
    signed = values.detach().cpu().double().flatten() * places.sign()
    return torch.zeros(SIZE + 1, dtype=torch.float64).index_add(0, places.abs().long(), signed)[1:]


def places(name: str, like: Tensor) -> Tensor:
    """Returns, for each element of a tensor, its place in the sketch: the index, counted from 1, of the sketch's
    element to which it is added. If it is subtracted instead, the place is negative. The places are float32, in the
    tensor's shape.

    The places depend only on the tensor's name and shape. They are the same on any machine, because numpy does not
    change the random numbers of RandomState between releases (NEP 19).

    Args:
        name: The tensor's name.
        like: The tensor, or another tensor of its shape.
    """
    drawn = np.random.RandomState(zlib.crc32(name.encode())).randint(-SIZE, SIZE, math.prod(like.shape), np.int64)
    return torch.from_numpy(drawn + (drawn >= 0)).float().view(like.shape)
