"""What ZeRO's formulas say of the model states of a run."""

from __future__ import annotations

import cli
import run_folder
from comparison.reading import Loaded
from comparison.result import ModelStates
from errors import UsageError
from planning import model_states, network


def predicted(loaded: Loaded) -> ModelStates | None:
    """Bytes on the fullest rank, its device's and the host's; None where there is no formula, or where the recipe of an
    older version is none any more."""
    try:
        config = cli.parse(["--config", str(loaded.folder / run_folder.CONFIG)])
        weights = network.of(config).weights
    except UsageError:
        return None
    if config.ds_config:
        return None
    ranks = loaded.metrics["world_size"]
    found = model_states.predicted(config.strategy, weights, ranks, config.precision, config.optimizer)
    return found and ModelStates(found.parameters, found.gradients, found.optimizer)
