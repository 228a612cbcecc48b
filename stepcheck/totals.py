"""Sums what the ranks contribute to the comparison of a step."""

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stepcheck.engines import EngineAdapter
from stepcheck.engines.adapter import Part
from stepcheck.judge import COLUMNS
from stepcheck.sketch import K, project

FAILED = 1e300
"""Stands for a rank whose audit failed, in place of its largest share of a tolerance."""


class Totals:
    """Holds this rank's values in COLUMNS, and sums them over the ranks with one small collective per step."""

    def __init__(self, adapter: EngineAdapter):
        self.adapter = adapter
        rows, width = len(adapter.row_names), sum(COLUMNS.values())
        self.matrix = torch.zeros(rows, width, dtype=torch.float64, device=adapter.device)
        self.columns = _columns(self.matrix)
        self.used: dict[int, Tensor] = {}  # sketches of the weights as first used in this step, by index
        factors = torch.zeros(rows, 1, dtype=torch.float64, device="cpu")
        for index, row in enumerate(adapter.rows):
            factors[row] = _difference_factor(*adapter.replica(index))
        self._difference_factors = factors.to(adapter.device)

    def begin_step(self) -> None:
        self.matrix.zero_()
        self.used = {}

    def mark(self, column: str, indices: Iterable[int]) -> None:
        for index in indices:
            self.columns[column][self.adapter.rows[index]] = 1

    def begin_gradient(self, index: int, earlier: Tensor | None) -> None:
        """Begins the sum of a parameter's gradients anew, with 0 or with the gradient that the parameter has. Under
        FSDP2, this gradient is this rank's part of a reduced one."""
        for column in ("expected", "summands"):
            self.columns[column][self.adapter.rows[index]] = 0.0
        if earlier is not None:
            adapter = self.adapter
            sketch = project(adapter.local(earlier), adapter.own_part(index)[1])
            factor = adapter.ranks.size / (adapter.replica(index)[1] * adapter.reduction_factor())
            self._add("expected", index, factor * sketch[:K])
            self._add("summands", index, factor * sketch[K].sqrt())

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        sketch = project(gradient)
        self._add("expected", index, sketch[:K])
        self._add("summands", index, sketch[K].sqrt())

    def begin_update(self) -> None:
        """Drops what an update that has failed has added."""
        for column in ("actual", "square", "modified", "trained"):
            self.columns[column].zero_()

    def add_optimizer_gradient(self, parts: Iterable[Part], gradient: Tensor, measure: bool) -> None:
        """Adds the gradient of a tensor that the optimizer updates, split into `parts`, to the sums of the parts'
        parameters. With `measure`, the norm of each part is computed exactly instead of estimated."""
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)
        for part in parts:
            sketch = project(flat[part.offset : part.offset + part.length], part.start, measure=measure)
            self._add("actual", part.index, sketch[:K])
            self._add("square", part.index, sketch[K])

    def add_optimizer_weights(self, indices: Collection[int]) -> None:
        """Adds this rank's parts of some weights, cast to the dtype of the forward pass: the optimizer's values of
        trained weights, and the module's values of all others."""
        adapter = self.adapter
        for target in adapter.targets.values():
            flat = adapter.local(target.tensor).detach().reshape(-1)
            for part in target.parts:
                if part.length and part.index in indices:
                    self._add_reference(part.index, flat[part.offset : part.offset + part.length], part.start)
        for index in indices:
            if index not in adapter.trained:
                self._add_reference(index, *adapter.own_part(index))

    def _add_reference(self, index: int, values: Tensor, start: int) -> None:
        self._add("reference", index, project(values.to(self.adapter.compute_dtype(index)), start, exact=True)[:K])

    def _add(self, column: str, index: int, value: Tensor) -> None:
        self.columns[column][self.adapter.rows[index]] += value.to(self.adapter.device)

    def add_used_weight(self, index: int, parameter: Tensor) -> None:
        """Records an unsharded weight that a forward or backward pass uses, and how much it has changed since its first
        use in this step. Ignores an empty tensor, as ZeRO 3 leaves it after use."""
        if not parameter.numel():
            return
        in_use = parameter.to(self.adapter.compute_dtype(index))
        sketch = project(in_use, exact=True)[:K].to(self.adapter.device)
        first = self.used.setdefault(index, sketch)
        if first is not sketch:
            moved = self.columns["moved"][self.adapter.rows[index]]
            torch.maximum(moved, (sketch - first).abs().max(), out=moved)

    def all_reduce(
        self, shares: Sequence[Tensor], failed: bool, fingerprints: Tensor
    ) -> tuple[dict[str, Tensor], float, Tensor, list[float]]:
        """Sums the contributions of all ranks. Every rank must call it, and it waits for the device. Returns, on the
        CPU:

        - the sums of the columns
        - the largest of all ranks' shares, or FAILED if the audit of a rank has failed
        - the fingerprints of all ranks
        - this rank's shares, in which NaN has become infinite

        Args:
            shares: Error / tolerance of each value that only this rank compares.
            failed: Whether this rank's audit has failed.
            fingerprints: One element for each rank. Only the element of this rank is not 0.
        """
        adapter, columns = self.adapter, self.columns
        for index, sketch in self.used.items():
            row = adapter.rows[index]
            columns["used"][row] += sketch
            columns["used_difference"][row] += _difference_factor(adapter.ranks.rank, adapter.ranks.size) * sketch
            columns["uses"][row] += 1
        columns["replica_difference"].copy_(self._difference_factors * columns["actual"])
        own = torch.stack([torch.zeros_like(fingerprints[0]), *(share.to(adapter.device) for share in shares)])
        own = own.nan_to_num(nan=torch.inf)
        worst = torch.zeros_like(fingerprints)
        worst[adapter.ranks.rank] = FAILED if failed else own.max().clamp(max=FAILED / 2)
        flat = torch.cat([self.matrix.view(-1), worst, fingerprints])
        if adapter.ranks.size > 1:
            dist.all_reduce(flat)
        both = torch.cat([flat, own]).cpu()  # the only synchronisation of a step
        sums, worst, fingerprints, own = both.split([self.matrix.numel(), len(worst), len(fingerprints), len(own)])
        return _columns(sums.view(self.matrix.shape)), float(worst.max()), fingerprints, own[1:].tolist()


def _columns(matrix: Tensor) -> dict[str, Tensor]:
    return dict(zip(COLUMNS, matrix.split([*COLUMNS.values()], 1), strict=True))


def _difference_factor(replica: int, replicas: int) -> float:
    """Returns the factor of a replica's sketch in the sum over the replicas. The factors of all replicas differ and add
    up to 0, so that the sum over equal replicas is 0."""
    return (2 * replica - replicas + 1) / replicas
