"""small_vit_runs on CPU ranks, with the optimizers of a GPU: torch's fused ones."""

from __future__ import annotations

import sys

from cifar_zero import strategies
from cifar_zero.core import exits
from tests.support.small_vit_runs import main

chosen = strategies.optimizer_implementation
strategies.optimizer_implementation = lambda strategy, device, *given: chosen(strategy, "cuda", *given)

if __name__ == "__main__":
    sys.exit(exits.guarded(main))
