"""Tests that fsdp2, tensor_parallel and pipeline, which split the model, resume each other's checkpoints and end with
DDP's weights. `make test-all` adds data parallelism on four ranks, and compares 50 steps with one device."""

from pathlib import Path

import pytest
import torch

from cifar_zero.checkpoints.read import RECORD
from tests.distributed.changes import equal_ranks_of_a_model, small_vit
from tests.support.helpers import largest_difference, last_checkpoint, last_weights, metrics_of, of_test_all, train_all

pytestmark = pytest.mark.distributed

COMBINED = [
    "fsdp2 --tensor_parallel_size 2",
    "tensor_parallel --tensor_parallel_size 2",
    "pipeline --pipeline_parallel_size 2",
]
"""Two groups of two ranks each. The groups compute different images, and the ranks of a group the same images."""

RELAYS = {"sgd": ["ddp", "fsdp2", "tensor_parallel", "pipeline", "ddp"], "adamw": ["ddp", *COMBINED, "ddp"]}
"""The strategies of each optimizer. Each resumes the run of the one before and takes one step."""

SIZE = ["--data.source", "synthetic", "--data.synthetic_size", "64", "--data.val_fraction", "0", "--accelerator", "cpu"]
RECIPE = [*SIZE, "--batch_size", "8", "--gradient_clip_val", "0.5", "--log_interval", "1"]
RECIPE += ["--optimizer.weight_decay", "0.01"]  # which makes two groups of parameters

# Adam divides each gradient by its size. A larger eps limits the effect of rounding in the smallest gradients.
OPTIMIZERS = {"sgd": ["--optimizer.lr", "0.05"], "adamw": ["--optimizer.lr", "0.005", "--optimizer.eps", "1e-4"]}


@pytest.mark.parametrize(("optimizer", "ranks"), [("sgd", 2), pytest.param("adamw", 4, marks=of_test_all)])
def test_a_run_resumed_by_each_strategy_in_turn_ends_as_under_ddp(optimizer: str, ranks: int, tmp_path: Path):
    """Clipping is active, so every norm must be over all ranks. The strategies have the same global batch, but
    different micro-batches."""
    relay = RELAYS[optimizer]
    same = [*RECIPE, "--optimizer", optimizer, *OPTIMIZERS[optimizer], "--model", "vit_tiny"]
    same += ["--devices", str(ranks), "--data.root", str(tmp_path / "data")]
    outs = [tmp_path / str(number) for number in range(len(relay))]
    runs = {tmp_path / "whole": [*same, "--strategy", "ddp", "--max_steps", str(len(relay))]}
    for number, (out, name) in enumerate(zip(outs, relay, strict=True)):
        before = ["--resume", str(outs[number - 1])] if number else []
        accumulate = ["--accumulate", "2"] if "tensor_parallel" in name else []
        runs[out] = [*same, *before, *accumulate, "--strategy", *name.split(), "--max_steps", str(number + 1)]
    train_all(runs, small_vit)

    (whole, expected), (ended, actual) = (
        (last_checkpoint(out), metrics_of(out)) for out in (tmp_path / "whole", outs[-1])
    )
    assert ended["global_step"] == whole["global_step"] == len(relay)
    assert [*ended["state_dict"]] == [*whole["state_dict"]]
    torch.testing.assert_close(ended["state_dict"], whole["state_dict"], rtol=0, atol=1e-5)
    one, other = (checkpoint["optimizer_states"][0] for checkpoint in (ended, whole))
    assert one["param_groups"] == other["param_groups"]
    torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=1e-5)
    assert actual["test/loss"] == pytest.approx(expected["test/loss"], abs=1e-5)
    for out, name in zip(outs[1:-1], relay[1:-1], strict=True):
        content, metrics = last_checkpoint(out), metrics_of(out)
        assert {type(value) for value in content["state_dict"].values()} == {torch.Tensor}, name
        assert metrics["num_test"] == 64
        # At most norms, patches and positions are whole on every rank. They are a tenth of this small model.
        replicas = 2 if name in COMBINED[1:] else 1
        assert sum(metrics["mem/model_state_rank_bytes"]) < 1.15 * replicas * expected["mem/model_state_rank_bytes"][0]


def test_the_ranks_of_one_model_drop_the_same_tokens(tmp_path: Path):
    """The first run has two replicas. The ranks of the pipeline have one and two blocks."""
    same = [*RECIPE, "--model", "vit_tiny", "--model.depth", "3", "--model.dropout", "0.5", "--devices", "2"]
    same += ["--data.root", str(tmp_path / "data")]
    before: list[str] = []
    for number, (strategy, replicas) in enumerate([("ddp", 2), ("tensor_parallel", 1), ("pipeline", 1)], 1):
        out = tmp_path / strategy
        length = ["--max_steps", str(2 * number), "--save_every_n_steps", "1"]
        train_all({out: [*same, *before, *length, "--strategy", strategy]}, equal_ranks_of_a_model)
        assert len(last_checkpoint(out)[RECORD]["random_states"]) == replicas
        before = ["--resume", str(out)]


@of_test_all
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("model", "ranks", "strategies"),
    [
        ("net", 2, ["fsdp2", "deepspeed_stage_3"]),
        ("vit_tiny", 2, ["fsdp2", "deepspeed_stage_3", "pipeline"]),
        ("vit_small", 2, ["tensor_parallel"]),
        ("vit_small", 4, ["fsdp2", "deepspeed_stage_3", "pipeline", *COMBINED]),
    ],
)
def test_fifty_steps_as_on_one_device(model: str, ranks: int, strategies: list[str], tmp_path: Path):
    same = [*SIZE, "--data.synthetic_size", "100", "--batch_size", "4", "--max_steps", "50", "--log_interval", "10"]
    same += ["--optimizer.lr", "0.01", "--gradient_clip_val", "0.5", "--model", model, "--data.root", str(tmp_path)]
    train_all({tmp_path / "one": [*same, "--devices", "1"]})
    runs = {tmp_path / name: [*same, "--devices", str(ranks), "--strategy", *name.split()] for name in strategies}
    train_all(runs)
    one = last_checkpoint(tmp_path / "one")
    assert one["global_step"] == 50
    for name in strategies:
        difference = largest_difference(last_weights(tmp_path / name), last_weights(tmp_path / "one"))
        print(f"{model} {name}, {ranks} ranks: {difference:.1e}")
        assert difference < 1e-5
