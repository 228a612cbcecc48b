"""Tests that strategies agree on the weights of each optimizer, on two real ranks."""

from pathlib import Path

import pytest

from cifar_zero.checkpoints.weights import net_weights
from cifar_zero.optimizers import OPTIMIZERS
from tests.support.helpers import WHOLE, largest_difference, last_checkpoint, train_all

pytestmark = pytest.mark.distributed

STEPS = 8
RATES = {"sgd": 0.05, "adadelta": 1.0, "adagrad": 0.01}
STAGES = [f"deepspeed_stage_{stage}" for stage in range(4)]

RUNS = [("muon", "deepspeed_stage_0"), ("adagrad", "deepspeed_stage_3")]
"""The optimizer and the strategy of each run."""
if WHOLE:
    STAGES += ["deepspeed_stage_2_offload", "deepspeed_stage_3_offload"]
    RUNS = [
        ("muon", "deepspeed_stage_0"),
        *((name, stage) for name in OPTIMIZERS if OPTIMIZERS[name].shardable for stage in STAGES),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_data: list[str]) -> Path:
    """Returns the folder of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    same = [*small_data, "--accelerator", "cpu", "--devices", "2", "--batch_size", "16", "--data.val_fraction", "0"]
    same += ["--logger", "none", "--trainer.limit_test_batches", "1"]
    same += ["--optimizer.weight_decay", "0.1", "--schedule", "cosine", "--max_steps", str(STEPS)]
    flags = {}
    for name, strategy in RUNS:
        for used in ("ddp", strategy):
            optimizer = ["--optimizer", name, "--optimizer.lr", str(RATES.get(name, 0.001))]
            flags[folder / f"{name}-{used}"] = [*same, *optimizer, "--strategy", used]
    train_all(flags)
    return folder


@pytest.mark.parametrize(("name", "strategy"), RUNS)
def test_strategies_agree(name: str, strategy: str, runs: Path):
    """Weights and optimizer state agree bit for bit, because each element has its own update, however parameters are
    sharded. Muon updates whole matrices, which no strategy here shards. DeepSpeed's C++ optimizers round differently
    from torch's."""
    actual, expected = (last_checkpoint(runs / f"{name}-{used}") for used in (strategy, "ddp"))
    one, other = (checkpoint["optimizer_states"][0] for checkpoint in (actual, expected))
    for mine, plain in zip(one["param_groups"], other["param_groups"], strict=True):
        assert plain["lr"] == 0.0  # The schedule has reached the end of the run.
        for key in ("params", "param_names", "weight_decay", "lr"):
            assert mine[key] == plain[key]
    assert one["state"].keys() == other["state"].keys()
    by_deepspeed = strategy.endswith("offload") and OPTIMIZERS[name].compiled
    tolerance = 1e-4 if by_deepspeed else 0
    for number, state in one["state"].items():
        assert largest_difference(state, other["state"][number]) <= tolerance
    assert largest_difference(net_weights(actual), net_weights(expected)) <= tolerance
