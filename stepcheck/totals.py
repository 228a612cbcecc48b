"""Adds up over the ranks what each of them contributes to the comparison of a step."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepcheck.engines import View
from stepcheck.judge import COLUMNS
from stepcheck.sketch import K, project

FAILED = 1e300
"""Stands for a rank whose audit failed, in place of its largest share of a tolerance."""


class Totals:
    """The columns of this rank, and their sums over the ranks, which one small collective brings."""

    def __init__(self, view: View):
        self.view = view
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

    def saw_weight(self, index: int, parameter: Any) -> None:
        """Compares a weight, as a forward or backward pass uses it, with its first use in this step."""
        if not parameter.numel():
            return
        sketch = project(parameter, exact=True)[:K].to(self.view.device)
        if index not in self.used:
            self.used[index] = sketch
        else:
            moved = self.columns["moved"][self.view.rows[index]]
            torch.maximum(moved, (sketch - self.used[index]).abs().max(), out=moved)

    def over_ranks(self, shares: Tensor, failed: bool, fingerprints: Tensor) -> Tensor:
        """Returns, flat, the sums of all columns over the ranks, followed by the largest of each rank's own shares of
        tolerances, or FAILED, and the fingerprints of their batches. `split` separates them."""
        view, columns = self.view, self.columns
        for index, sketch in self.used.items():
            row = view.rows[index]
            columns["used"][row] += sketch
            columns["used_contrast"][row] += _contrast(view.ranks.rank, view.ranks.size) * sketch
            columns["uses"][row] += 1
        columns["contrast"].copy_(self._contrasts * columns["actual"])
        worst = torch.zeros(view.ranks.size, dtype=torch.float64, device=view.device)
        if failed:
            worst[view.ranks.rank] = FAILED
        elif len(shares):
            worst[view.ranks.rank] = shares.nan_to_num(nan=torch.inf).clamp(max=FAILED / 2).max()
        flat = torch.cat([*(column.view(-1) for column in columns.values()), worst, fingerprints])
        if view.ranks.size > 1:
            dist.all_reduce(flat)
        return flat

    def split(self, flat: Tensor) -> tuple[dict[str, Tensor], float, Tensor]:
        """Returns the sums by column, the largest share of any rank, and the fingerprints."""
        rows, ranks = len(self.view.row_names), self.view.ranks.size
        *columns, worst, fingerprints = flat.split([*(rows * width for width in COLUMNS.values()), ranks, ranks])
        pairs = zip(COLUMNS.items(), columns, strict=True)
        return {name: column.view(-1, width) for (name, width), column in pairs}, float(worst.max()), fingerprints

    def _zeros(self, width: int) -> Tensor:
        return torch.zeros(len(self.view.row_names), width, dtype=torch.float64, device=self.view.device)


def everywhere(ranks: int, own: Any) -> list[Any]:
    """Returns an object of each rank. Every rank must call it."""
    everyone: list[Any] = [own]
    if ranks > 1:
        everyone = [None] * ranks
        dist.all_gather_object(everyone, own)
    return everyone


def _contrast(replica: int, replicas: int) -> float:
    """Returns the weight of a replica. The weights of all replicas differ and add up to 0."""
    return (2 * replica - replicas + 1) / replicas
