"""Compares the collectives that real ranks call in a step with the formulas of planning/traffic.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cifar_zero.config import command_line
from cifar_zero.planning import formulas
from cifar_zero.planning.traffic import traffic
from cifar_zero.training.resolve import make_run
from tests.distributed.changes import small_vit
from tests.distributed.step_costs import COSTS_FILE, COUNTED, counted_collectives
from tests.support.helpers import WHOLE, of_test_all, run_folder_of, train_all

pytestmark = pytest.mark.distributed

ACCUMULATE = 2
BUCKET = ["--zero.reduce_bucket_size", "50000"]
SHARDED = [*BUCKET, "--zero.param_persistence_threshold", "1000"]
CASES: dict[str, list[str]] = {
    "ddp bf16-mixed": [],
    "fsdp2 bf16-mixed": [],
    "deepspeed_stage_2 bf16-mixed": BUCKET,
}
if WHOLE:
    CASES |= {
        "deepspeed_stage_0 bf16-mixed": [],
        "deepspeed_stage_1 32-true": BUCKET,
        "deepspeed_stage_3 bf16-mixed": SHARDED,
    }
LARGE = "deepspeed_stage_3 as in a large model"
"""This case keeps no gathered parameters, so that a small model gathers them a second time, as a large model does."""
RAW = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 50_000,
        "stage3_param_persistence_threshold": 1000,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
    },
}
KINDS = {"allreduce_": "all_reduced", "_reduce_scatter_base_": "reduce_scattered", "_allgather_base_": "all_gathered"}
SMALL = 16  # largest number of bytes of a message that carries a norm or a loss


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=of_test_all)])
def test_a_step_sends_what_the_formulas_say(
    ranks: int, tmp_path: Path, small_data: list[str], monkeypatch: pytest.MonkeyPatch
):
    common = [*small_data, "--model", "vit_tiny", "--accelerator", "cpu", "--devices", str(ranks)]
    common += ["--accumulate", str(ACCUMULATE), "--batch_size", str(ACCUMULATE * ranks), "--log_interval", "100"]
    common += ["--max_steps", "5", "--data.val_fraction", "0", "--logger", "none"]
    common += ["--trainer.limit_test_batches", "1"]
    file = tmp_path / "large.json"
    file.write_text(json.dumps(RAW))
    asked = {tmp_path / LARGE: [*common, "--ds_config", str(file)]}
    planned = {LARGE: [*common, "--strategy", "deepspeed_stage_3", "--precision", "bf16-mixed"]}
    planned[LARGE] += [*SHARDED, "--zero.prefetch_bucket_size", "0"]
    for name, more in CASES.items():
        strategy, precision = name.split()
        planned[name] = [*common, "--strategy", strategy, "--precision", precision, *more]
        asked[tmp_path / name] = planned[name]
    train_all(asked, counted_collectives)
    small_vit(monkeypatch)
    for name, flags in planned.items():
        with monkeypatch.context() as patch:
            if name == LARGE:
                patch.setattr(formulas, "REUSE_ELEMENTS", 0)
            run = make_run(command_line.parse(flags))
            expected = traffic(run, formulas.network_of(run))
        found = dict.fromkeys(KINDS.values(), 0.0)
        collectives, steps = 0, len(COUNTED) // ACCUMULATE
        for kind, size in json.loads((run_folder_of(tmp_path / name) / COSTS_FILE).read_text()):
            if size > SMALL:
                found[KINDS[kind]] += size / steps
                collectives += 1
        by_formula = {kind: getattr(expected, kind) for kind in found}
        assert found == pytest.approx(by_formula, rel=0.02), name
        assert collectives == expected.collectives * steps, name
