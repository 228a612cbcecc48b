"""The audit on two real ranks: no alarm on healthy engines, and each planted fault at the step that it changes.

`make test-all` adds rows of healthy engines, and plants faults in bfloat16 too."""

import itertools
import json
from typing import Any

import pytest

from tests.support.suite import WHOLE, run_python

pytestmark = [pytest.mark.distributed]

ENGINES = ("zero0", "zero1", "zero2", "zero3", "ddp", "fsdp2")

HEALTHY: dict[str, dict[str, Any]] = {
    f"{engine} {'bfloat16' if bf16 else 'float32'} x{accumulate} clip {clip}": {
        "engine": engine,
        "bf16": bf16,
        "accumulate": accumulate,
        "clip": clip,
    }
    for engine, bf16, (accumulate, clip) in itertools.product(ENGINES, (False, True), ((1, 0.0), (3, 0.5)))
    if WHOLE or bf16 == (accumulate > 1) or engine == "zero2"
} | {f"{engine} offloaded": {"engine": engine, "offload": True, "accumulate": 2} for engine in ("zero2", "zero3")}

FAULTS: list[tuple[str, str, int, str, dict[str, Any]]] = [
    # fault, engine, step of the first finding, its kind, other options
    ("loss_halved", "zero2", 1, "loss", {}),
    ("loss_slightly_off", "zero3", 1, "loss", {}),
    ("second_micro_batch_lost", "zero1", 1, "loss", {"accumulate": 2}),
    ("one_bucket_not_reduced", "zero2", 1, "gradient", {}),
    ("gradients_of_one_rank_doubled", "zero1", 1, "gradient", {}),
    ("not_clipped", "zero2", 1, "clipping", {"clip": 0.5}),
    ("clipped_by_local_norm", "zero2", 1, "clipping", {"clip": 0.5}),
    ("decay_lost", "zero1", 1, "options", {}),
    ("decay_on_all_from_the_start", "zero3", 1, "options", {}),
    ("rate_changed_in_the_step", "zero2", 1, "options", {}),
    ("rate_restarts", "zero2", 2, "options", {}),
    ("schedule_steps_per_micro_batch", "zero2", 1, "options", {"accumulate": 2}),
    ("one_partition_not_updated", "zero2", 2, "state", {}),
    ("steps_counted_twice", "zero1", 2, "update", {}),
    ("state_lost_between_steps", "zero2", 4, "state", {}),
    ("master_weights_rewritten", "zero1", 3, "state", {}),
    ("weights_stale_on_one_rank", "zero2", 2, "weight", {}),
    ("module_changed_by_the_engine", "zero2", 0, "start", {}),
    ("untied_by_the_engine", "zero1", 0, "start", {}),
    ("batch_norm_frozen", "zero2", 1, "buffer", {}),
    ("shard_changed_by_zero_3", "zero3", 1, "weight", {}),
    ("gradients_scaled_in_zero_3", "zero3", 1, "scale", {}),
    ("all_reduce_of_ddp_left_out", "ddp", 1, "gradient", {}),
    ("ddp_weights_drift", "ddp", 1, "update", {}),
    ("shards_doubled_by_fsdp2", "fsdp2", 1, "scale", {}),
    ("shards_doubled_by_fsdp2_once", "fsdp2", 1, "gradient", {"accumulate": 2}),
    ("reduction_of_fsdp2_left_out", "fsdp2", 1, "scale", {}),
    ("reduction_of_blocks_of_fsdp2_left_out", "fsdp2", 1, "gradient", {"accumulate": 2}),
]

NOT_LOW = {
    *("loss_slightly_off", "ddp_weights_drift", "gradients_scaled_in_zero_3"),  # smaller than bfloat16's rounding
    *("module_changed_by_the_engine", "untied_by_the_engine", "batch_norm_frozen"),  # the same in any precision, as
    *(row[0] for row in FAULTS if row[3] == "options"),  # these are
}

LOW = [(*row[:4], {**row[4], "bf16": True}) for row in FAULTS if WHOLE and row[0] not in NOT_LOW]


def row_of(fault: str, engine: str, options: dict[str, Any]) -> str:
    return f"{fault} {engine} {'bfloat16' if options.get('bf16') else 'float32'}"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Trains all rows in one launch of two ranks, and returns their results by name."""
    folder = tmp_path_factory.mktemp("audit")
    rows = {
        **HEALTHY,
        **{
            row_of(fault, engine, more): {"fault": fault, "engine": engine, "weights_every": 1, **more}
            for fault, engine, _, _, more in FAULTS + LOW
        },
    }
    (folder / "rows.json").write_text(json.dumps(rows))
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "tests.stepcheck.table"]
    done = run_python(*launcher, str(folder / "rows.json"), str(folder / "out.json"))
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_training_agrees_and_is_not_changed(verdicts: dict[str, Any], name: str):
    verdict = verdicts[name]
    assert verdict["findings"] == []
    assert verdict["steps"] == 4
    assert verdict["coverage"] > 0.95
    assert not verdict["not_judged"]
    assert {"gradient", "scale", "update", "state", "weight"} <= verdict["shares"].keys()
    assert verdict["audited"] == verdict["alone"]


@pytest.mark.parametrize(("fault", "engine", "step", "kind", "options"), FAULTS + LOW)
def test_fault_is_found_at_its_first_step(
    verdicts: dict[str, Any], fault: str, engine: str, step: int, kind: str, options: dict[str, Any]
):
    findings = verdicts[row_of(fault, engine, options)]["findings"]
    assert findings, "no finding"
    assert findings[0]["step"] == step, findings[:3]
    assert kind in {finding["kind"] for finding in findings if finding["step"] == step}, findings[:3]


def test_small_scale_errors_are_seen(verdicts: dict[str, Any]):
    full, low = verdicts["zero2 float32 x1 clip 0.0"], verdicts["zero2 bfloat16 x1 clip 0.0"]
    assert full["smallest_scale_error"] <= 1e-7
    assert full["smallest_tensor_error"] <= 1e-6
    assert low["smallest_scale_error"] <= 0.005
    assert low["smallest_tensor_error"] <= 0.02
