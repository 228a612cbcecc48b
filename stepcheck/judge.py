"""Judges a step by sums over all ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stepcheck.bounds import CLIPPING, EXACT, SIGMAS, factor_tolerance, gradient_deviation, underflow, unit_roundoff
from stepcheck.engines import EngineAdapter
from stepcheck.sketch import K
from stepcheck.verdict import Kind, Verdict

COLUMNS = {
    "expected": K,  # sketch of what autograd computed
    "summands": 1,  # sum of the norms of these gradients
    "actual": K,  # sketch of this rank's part of what reaches the optimizer
    "square": 1,  # its squared norm
    "replica_difference": K,  # `actual`, weighted by the replica: 0 in sum if all replicas are equal
    "reference": K,  # sketch of this rank's part of the optimizer's weights
    "used": K,  # sketch of the weights that this rank has used
    "used_difference": K,  # `used`, weighted by the rank: 0 in sum if all ranks use the same
    "uses": 1,  # whether this rank has used the weight and compares it in this step
    "moved": 1,  # largest change of `used` within the step
    "trained": 1,  # whether this rank's optimizer updates it
    "modified": 1,  # whether the gradient at the step is not the one that the backward pass has left
}
"""What each rank contributes for each parameter: names and widths of the columns of a matrix that has a row for each
parameter. The sum of the ranks' matrices is judged."""


@dataclass(frozen=True)
class Step:
    """The sums of a step over all ranks."""

    number: int  # from 1
    micro_batches: int
    scale: float  # the loss scale that is in autograd's gradients, and not in the optimizer's
    sums: dict[str, Tensor]  # of COLUMNS over the ranks, float64 (rows, width) on the CPU
    batches: Tensor  # fingerprints of each rank's batches, float64 on the CPU


class Judge:
    """Compares the sums of each step with their tolerances, and records the results in a verdict."""

    def __init__(self, adapter: EngineAdapter, verdict: Verdict):
        self.adapter, self.verdict = adapter, verdict
        self.unit, self.smallest = unit_roundoff(adapter.rounding_dtypes()), underflow(adapter.rounding_dtypes())
        self.optimizer_unit = unit_roundoff(
            {target.tensor.dtype for target in adapter.targets.values()} or {torch.float32}
        )
        indices = adapter.index_of_row
        # On the CPU, which may not be the device that a script has made torch's default.
        self.trained = torch.tensor([index in adapter.trained for index in indices], dtype=torch.bool, device="cpu")
        counts = [
            (adapter.replica(each)[1], adapter.weight_replicas(each), adapter.shape(each).numel()) for each in indices
        ]
        self.replicas, self.weight_replicas, self.sizes = torch.tensor(counts, dtype=torch.float64, device="cpu").T
        self.frozen: dict[int, Tensor] = {}  # last sketches of weights that the optimizer does not update, by row

    def gradients(self, step: Step) -> tuple[Tensor, Tensor]:
        """Compares the gradients that reach the optimizer with what autograd computed. For a baseline, returns the
        sketches of the expected gradients (0 if a gradient is not judged) and the standard deviations of their
        errors."""
        adapter, verdict = self.adapter, self.verdict
        rows = len(self.trained)
        unjudged = torch.zeros(rows, K, device="cpu"), torch.zeros(rows, 1, device="cpu")
        trained = self.trained & self._comparable(step)
        if not trained.any():
            return unjudged
        ranks, reduction = adapter.ranks.size, adapter.reduction_factor()
        factor_of_mean = reduction / step.scale / ranks
        expected = step.sums["expected"] * factor_of_mean
        summands = step.sums["summands"][:, 0] * factor_of_mean
        actual = step.sums["actual"] / self.replicas[:, None]
        difference = step.sums["replica_difference"].abs()
        if not expected[trained].isfinite().all():
            verdict.notes["gradients that are not finite"] = f"autograd computed them in step {step.number}"
            return unjudged
        micro_batches = max(1, step.micro_batches)
        smallest = self.smallest * max(1.0, reduction) / step.scale
        deviation = gradient_deviation(summands, self.sizes, self.unit, smallest, micro_batches, ranks)[:, None]
        judged = expected * trained[:, None], deviation
        signal = (expected / deviation)[trained]
        strength = float(signal.norm()) or 1e-30
        factor = float((signal * (actual / deviation)[trained]).sum()) / strength**2
        tolerance = factor_tolerance(strength, (ranks, step.scale, reduction))
        norm = float((step.sums["square"][:, 0] / self.replicas)[trained].sum().sqrt())
        complete = trained.equal(self.trained)
        may_be_clipped = adapter.clip_limit() or not adapter.owns_step
        scaled = factor if may_be_clipped and abs(factor - 1) > tolerance and 0 < factor < 1 else 1.0
        is_unknown = scaled < 1 and not adapter.clip_limit() and strength > SIGMAS
        if is_unknown:
            verdict.not_judged["the scale of all gradients"] = (
                f"something other than clip_grad_norm_ of exactly these gradients multiplied them by {factor:.5g} "
                f"in step {step.number}{self._meaning(step, factor)}"
            )
        fault = None if is_unknown or strength <= SIGMAS else self._factor(step, factor, tolerance, norm, complete)
        error = (actual - scaled * expected).abs() + difference
        shares = (error / (SIGMAS * scaled * deviation)).amax(1)[trained].nan_to_num(nan=torch.inf)
        if adapter.clips_others or not is_unknown:
            self._measure(trained, expected, summands, deviation, tolerance)
        worst = int(shares.argmax())
        verdict.record("gradient", float(shares[worst]))
        rest = (actual - factor * expected).abs() + difference
        is_explained = fault is not None and bool((rest <= SIGMAS * abs(factor) * deviation)[trained].all())
        # One tensor that is far off moves the factor too.
        if fault is not None and (is_explained or shares[worst] <= 1 or fault[0] == "clipping"):
            verdict.add(step.number, *fault)
        if is_explained or shares[worst] <= 1:
            return judged
        row = int(trained.nonzero()[worst])
        aim = scaled * expected[row]
        size = float(aim.norm().clamp(min=1e-30))
        text = (
            f"the gradient of {adapter.row_names[row]} is {float(actual[row] @ aim) / size**2:.5g} times what autograd "
            f"computed, and off by {float(error[row].norm()) / size:.2g} of its norm "
            f"(tolerance {float(SIGMAS * scaled * deviation[row] * K**0.5) / size:.1e})"
        )
        if difference[row].norm() > 0.1 * error[row].norm():
            text += "; the ranks have different gradients"
        verdict.add(step.number, "gradient", float(shares[worst]), text)
        return judged

    def _measure(
        self, trained: Tensor, expected: Tensor, summands: Tensor, deviation: Tensor, tolerance: float
    ) -> None:
        """Adds to the verdict how many gradient elements were judged, and the smallest scale errors that would have
        been detected: of all gradients together, and of one gradient (the median). The largest over all steps counts. A
        gradient counts as judged if losing half of it would be detected, or if autograd computed 0."""
        visible = (SIGMAS * deviation[:, 0] / expected.abs().amax(1).clamp(min=1e-30))[trained]
        computed = summands[trained] > 0
        self.verdict.values += int(self.sizes[trained][(visible < 0.5) | ~computed].sum())
        if computed.any():
            median = float(visible[computed].median())
            self.verdict.smallest_scale_error = max(tolerance, self.verdict.smallest_scale_error or 0.0)
            self.verdict.smallest_tensor_error = max(median, self.verdict.smallest_tensor_error or 0.0)

    def _comparable(self, step: Step) -> Tensor:
        """Returns for each row, bool (rows,), whether its gradient can be judged: only the engine and known clipping
        have changed it since autograd computed it. Adds to the verdict how many gradient elements there are, and why
        some are not judged."""
        adapter, verdict = self.adapter, self.verdict
        verdict.values_in_all += int(self.sizes[self.trained].sum())
        modified = step.sums["modified"][:, 0] > 0
        if modified.any():
            count = f"{int(modified.sum())} of {len(modified)} in step {step.number}"
            verdict.not_judged["some gradients"] = f"{adapter.modified_because} ({count})"
        updaters = step.sums["trained"][:, 0]
        if not adapter.owns_step and ((updaters > 0) & (updaters < adapter.ranks.size)).any():
            verdict.not_judged["gradients"] = "the optimizers of the ranks update different parameters"
            return torch.zeros_like(modified)
        return ~modified

    def _factor(
        self, step: Step, factor: float, tolerance: float, norm: float, complete: bool
    ) -> tuple[Kind, float, str] | None:
        """Judges the factor that all gradients have in common, which clipping may make smaller than 1. `norm` is the
        norm of all gradients if `complete` is true, or else of the compared ones. Returns the fault (kind, error /
        tolerance and text) or None."""
        limit, share = self.adapter.clip_limit(), abs(factor - 1) / tolerance
        rounding = CLIPPING + 2 * self.optimizer_unit
        if limit and norm > limit * (1 - rounding):
            self.verdict.record("clipping", error := abs(norm / limit - 1) / rounding)
            if error > 1:
                return "clipping", error, f"the norm of all gradients is {norm:.6g} and the limit {limit}"
            share = max(0.0, factor - 1) / (tolerance + rounding)
        elif limit and not complete and share > 1 and 0 < factor < 1:
            self.verdict.not_judged["clipping"] = "the norm includes gradients that are not judged"
            return None
        self.verdict.record("scale", share)
        if share <= 1:
            return None
        text = f"all gradients together are {factor:.7g} times what autograd computed (tolerance {tolerance:.1e})"
        return "scale", share, text + self._meaning(step, factor)

    def _meaning(self, step: Step, factor: float) -> str:
        """Returns the likely cause of a wrong `factor` of all gradients, as ", as if ...", or ""."""
        ranks, parts = self.adapter.ranks.size, max(1, step.micro_batches)
        causes = {
            1 / parts: f"divided by the {parts} micro-batches once too often",
            float(parts): f"not divided by the {parts} micro-batches",
            1 / ranks: f"divided by the {ranks} ranks once too often",
            float(ranks): f"not divided by the {ranks} ranks",
        }
        found = [cause for value, cause in causes.items() if value != 1 and abs(factor / value - 1) < 0.01]
        return f", as if {' or '.join(found)}" if found else ""

    def weights(self, step: Step) -> None:
        """Compares the weights that forward and backward passes used with the optimizer's weights, as far as it is
        their turn in this step (see `Audit`). If a weight that the optimizer does not update changes between steps, the
        verdict notes it."""
        uses, adapter = step.sums["uses"], self.adapter
        used = (uses[:, 0] > 0).nonzero()[:, 0]
        if not len(used):
            return
        reference = (step.sums["reference"] / self.weight_replicas[:, None])[used]
        mean = (step.sums["used"] / uses)[used]
        difference = step.sums["used_difference"][used].abs().amax(1) * (uses[used, 0] == adapter.ranks.size)
        size = reference.norm(dim=1).clamp(min=1e-30)
        error = (mean - reference).abs().amax(1) / (EXACT * size)
        moved = (step.sums["moved"][used, 0] / (EXACT * size)).nan_to_num()
        if adapter.owns_step:
            # A script may change a weight that no optimizer updates in its forward pass, as MoCo does.
            error = torch.where(self.trained[used], torch.maximum(error, moved), error)
        elif (moved > 1).any():
            name = adapter.row_names[int(used[int(moved.argmax())])]
            self.verdict.notes["weights that change within a step"] = f"{name} changed in step {step.number}"
        error = torch.maximum(error, difference / (EXACT * size)).nan_to_num(nan=torch.inf)
        error[~reference.isfinite().all(1)] = 0  # such as a frozen mask with infinities
        worst = int(error.argmax())
        text = f"the weight {adapter.row_names[int(used[worst])]} is used with another value than the optimizer's"
        self.verdict.add(step.number, "weight", float(error[worst]), text)
        for place, row in enumerate(used.tolist()):
            if not self.trained[row]:
                before = self.frozen.get(row, reference[place])
                if (before - reference[place]).abs().max() > EXACT * size[place]:
                    # The script may do this, as MoCo does.
                    self.verdict.notes["weights that the optimizer does not update"] = (
                        f"{adapter.row_names[row]} has changed"
                    )
                self.frozen[row] = reference[place].clone()
