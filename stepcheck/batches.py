"""Finds batches that ranks share or that repeat, and random numbers that repeat. They become notes and not faults,
because a script may repeat them on purpose."""

from typing import Any

import torch
from torch import Tensor

from stepcheck.engines.adapter import RankInfo, tensors_in

ELEMENTS = 4096
"""Number of elements that a fingerprint reads, from the start of a batch's first tensor with several elements."""


class Batches:
    """Records a fingerprint of this rank's inputs in a step, and whether a later micro-batch starts from the random
    state of the first one, so that both have the same dropout. Never waits for the device."""

    def __init__(self, ranks: RankInfo):
        self.rank = ranks.rank
        # Of this step; of other ranks 0.
        self.fingerprints = torch.zeros(ranks.size, dtype=torch.float64, device=ranks.device)
        self.last: Tensor | None = None  # of all ranks, in `last_step`
        self.last_step = 0  # the last audited step
        self._before: Tensor | None = None  # the random state before the first micro-batch of this step
        self._drew = False  # whether a forward pass of this step has drawn random numbers
        self.repeats_random = False

    def begin_step(self) -> None:
        self.fingerprints.zero_()
        self._before, self._drew, self.repeats_random = None, False, False

    def before_forward(self, inputs: Any) -> None:
        """Adds the inputs of a micro-batch to the fingerprint, and compares the random state with the state before the
        first micro-batch of the step."""
        first = next((each for each in tensors_in(inputs) if each.numel() > 1), None)
        is_dense = first is not None and first.layout == torch.strided and not first.is_nested
        if first is not None and is_dense and not first.is_complex():
            values = first.detach().reshape(-1)[:ELEMENTS].double()
            places = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device).sqrt()
            self.fingerprints[self.rank] += values.dot(places).to(self.fingerprints.device)
        state = _random_state(self.fingerprints.device)
        if self._before is None:
            self._before = state
        elif self._drew and torch.equal(state, self._before):
            self.repeats_random = True

    def begin_backward(self) -> None:
        if self._before is not None and not self._drew:
            self._drew = not torch.equal(_random_state(self.fingerprints.device), self._before)

    def notes(self, step: int, fingerprints: Tensor) -> dict[str, str]:
        """Returns a sentence for each kind of repetition in a step, keyed by "batches" and "random numbers". Random
        numbers are compared on this rank only.

        Args:
            fingerprints: Fingerprints of all ranks, on the CPU. They are kept for the next step.
        """
        found, seen, last = {}, fingerprints.tolist(), self.last
        same = [(one, two) for two in range(len(seen)) for one in range(two) if seen[one] and seen[one] == seen[two]]
        if same:
            found["batches"] = f"ranks {same[0][0]} and {same[0][1]} had the same batch in step {step}"
        elif last is not None and self.last_step == step - 1 and seen[self.rank] == float(last[self.rank]) != 0:
            found["batches"] = f"step {step} had the batch of the step before"
        if self.repeats_random:
            found["random numbers"] = f"the micro-batches of step {step} draw the same, so their dropout is the same"
        self.last, self.last_step = fingerprints, step
        return found


def _random_state(device: torch.device) -> Tensor:
    """Returns the state of the generator that dropout uses. Reading a GPU's does not wait for the GPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
