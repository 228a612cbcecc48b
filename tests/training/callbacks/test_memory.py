from collections.abc import Callable
from typing import Any

import torch

from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import make_settings
from cifar_zero.strategies.hooks import Hooks
from cifar_zero.training.callbacks.engine import EngineInfo

PARAMETERS = 62_006
FLOAT32 = 4


def test_model_states_of_a_run(fit: Callable[..., Any]) -> None:
    state = PARAMETERS * FLOAT32 * 2 + 10 * FLOAT32  # two moments, and a step counter for each of 10 tensors
    run = fit(make_settings(epochs=1, batch_size=8, accumulate=2, optimizer=Choice("adam")), 32)
    totals = run.observer(EngineInfo).totals_of_run
    expected = PARAMETERS * FLOAT32 * 2 + state
    assert totals["mem/parameter_rank_bytes"] == totals["mem/gradient_rank_bytes"] == [PARAMETERS * FLOAT32]
    assert totals["mem/optimizer_rank_bytes"] == [state]
    assert totals["mem/model_state_rank_bytes"] == [expected]
    (peak,) = totals["mem/peak_rank_bytes"]
    assert peak >= run.points("mem/peak_gb")[4] * 1e9 * 0.999 > expected


def test_memory_that_tensors_share_counts_once() -> None:
    layer = torch.nn.Linear(8, 8, bias=False)
    layer.tied = layer.weight.data.view(64)  # pyright: ignore
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    optimizer.state[layer.weight]["alias"] = layer.tied
    optimizer.state[layer.weight]["momentum_buffer"] = torch.zeros(8, 8)
    assert Hooks().state_bytes(layer, optimizer) == (64 * FLOAT32, 0, 64 * FLOAT32)
