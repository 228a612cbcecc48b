"""Adds up over the ranks what each of them contributes to the comparison of a step."""

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stepcheck.engines import View
from stepcheck.engines.view import Part
from stepcheck.judge import COLUMNS
from stepcheck.sketch import K, project

FAILED = 1e300
"""Stands for a rank whose audit failed, in place of its largest share of a tolerance."""


class Totals:
    """This rank's values in COLUMNS, and their sums over the ranks, which take one small collective per step."""

    def __init__(self, view: View):
        self.view = view
        self.targets = [*view.targets()]
        self.columns = {name: self._zeros(width) for name, width in COLUMNS.items()}
        self.used: dict[int, Tensor] = {}  # sketches of the weights as first used in this step, by index
        self._contrasts = self._zeros(1)
        for index, row in enumerate(view.rows):
            self._contrasts[row] = _contrast(view.replica(index), view.gradient_replicas(index))

    @property
    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.columns.values())

    def begin_step(self) -> None:
        for column in self.columns.values():
            column.zero_()
        self.used = {}

    def mark(self, column: str, indices: Iterable[int]) -> None:
        """Sets a column to 1 for some parameters."""
        for index in indices:
            self.columns[column][self.view.rows[index]] = 1

    def forget_gradient(self, index: int) -> None:
        """Resets the sums of autograd's gradients of a parameter."""
        for column in ("expected", "summands"):
            self.columns[column][self.view.rows[index]] = 0.0

    def saw_gradient(self, index: int, gradient: Tensor) -> None:
        """Adds a gradient that autograd has computed for a parameter."""
        row, sketch = self.view.rows[index], project(gradient).to(self.view.device)
        self.columns["expected"][row] += sketch[:K]
        self.columns["summands"][row] += sketch[K].sqrt()

    def saw_optimizer_gradient(self, parts: Iterable[Part], gradient: Tensor, measure: bool) -> None:
        """Adds the gradient of a tensor that the optimizer updates. `measure` is whether its norm must be exact."""
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)
        for part in parts:
            values = flat[part.offset : part.offset + part.length]
            sketch = project(values, part.start, measure=measure).to(self.view.device)
            self.columns["actual"][self.view.rows[part.index]] += sketch[:K]
            self.columns["square"][self.view.rows[part.index]] += sketch[K]

    def saw_optimizer_weights(self, indices: Collection[int]) -> None:
        """Adds this rank's parts of some parameters, with the optimizer's values."""
        view = self.view
        for target in self.targets:
            flat = view.local(target.tensor).detach().reshape(-1)
            for part in target.parts:
                if part.length and part.index in indices:
                    self._add_reference(part.index, flat[part.offset : part.offset + part.length], part.start)
        for index in indices:
            if index not in view.trained:
                self._add_reference(index, *view.frozen_parts(index))

    def _add_reference(self, index: int, values: Tensor, start: int) -> None:
        sketch = project(values.to(self.view.compute_dtype(index)), start, exact=True)[:K]
        self.columns["reference"][self.view.rows[index]] += sketch.to(self.view.device)

    def saw_weight(self, index: int, parameter: Tensor) -> None:
        """Compares a weight in a forward or backward pass with its first use in this step."""
        if not parameter.numel():
            return
        sketch = project(parameter, exact=True)[:K].to(self.view.device)
        if index not in self.used:
            self.used[index] = sketch
        else:
            moved = self.columns["moved"][self.view.rows[index]]
            torch.maximum(moved, (sketch - self.used[index]).abs().max(), out=moved)

    def over_ranks(
        self, shares: Sequence[Tensor], failed: bool, fingerprints: Tensor
    ) -> tuple[dict[str, Tensor], float, Tensor, list[float]]:
        """Returns what all ranks have contributed, on the CPU: the sums of the columns, the largest share of a
        tolerance on any rank, or FAILED, and the fingerprints of their batches. Then come the shares of this rank.

        Args:
            shares: Of tolerances, which only this rank has compared.
            failed: Whether this rank's audit has failed.
            fingerprints: Of the batches of this rank.
        """
        view, columns = self.view, self.columns
        for index, sketch in self.used.items():
            row = view.rows[index]
            columns["used"][row] += sketch
            columns["used_contrast"][row] += _contrast(view.ranks.rank, view.ranks.size) * sketch
            columns["uses"][row] += 1
        columns["contrast"].copy_(self._contrasts * columns["actual"])
        own = torch.stack([torch.zeros_like(fingerprints[0]), *(share.to(view.device) for share in shares)])
        own = own.nan_to_num(nan=torch.inf)
        worst = torch.zeros_like(fingerprints)
        worst[view.ranks.rank] = FAILED if failed else own.max().clamp(max=FAILED / 2)
        flat = torch.cat([*(column.view(-1) for column in columns.values()), worst, fingerprints])
        if view.ranks.size > 1:
            dist.all_reduce(flat)
        both = torch.cat([flat, own]).cpu()  # the only synchronisation of a step
        widths = [*(column.numel() for column in columns.values()), len(worst), len(fingerprints), len(own)]
        *sums, worst, fingerprints, own = both.split(widths)
        pairs = zip(COLUMNS.items(), sums, strict=True)
        named = {name: column.view(-1, width) for (name, width), column in pairs}
        return named, float(worst.max()), fingerprints, own[1:].tolist()

    def _zeros(self, width: int) -> Tensor:
        return torch.zeros(len(self.view.row_names), width, dtype=torch.float64, device=self.view.device)


def _contrast(replica: int, replicas: int) -> float:
    """Returns the factor of a replica. The factors of all replicas differ and add up to 0, so that the sum over equal
    replicas is 0."""
    return (2 * replica - replicas + 1) / replicas
