"""Tests the cases of `cifar-zero compare --acceptance`. test_planted_faults.py trains them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cifar_zero.comparison import cases, launches
from cifar_zero.comparison.cases import ROWS, plan_cases, random_cases
from cifar_zero.comparison.compare import main
from cifar_zero.comparison.launches import train_cases
from cifar_zero.comparison.result import PLAIN, Comparison
from cifar_zero.config.strategy_specs import STRATEGIES
from tests.support.helpers import assert_ok, of_test_all, run_program


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Returns a function that takes flags of compare and returns the lines that --print_cases prints."""

    def lines(*flags: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["compare", "--acceptance", "--print_cases", "--devices", "2", *flags])
        assert main() == 0
        return capsys.readouterr().out.splitlines()

    return lines


def test_the_cases_are_listed_also_of_a_raw_configuration(tmp_path: Path, listed: Callable[..., list[str]]):
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    lines = listed("--strategies", "deepspeed_stage_3", str(mine))
    assert "mine: float32, accumulated, 2 ranks" in lines
    number = lines.index("deepspeed_stage_3: all parameters sharded, 2 ranks")
    assert lines[number + 1] == "  stage 3: gathering, prefetching and releasing each parameter"
    assert "train --data.source synthetic" in lines[number + 2]


def test_rows_are_resumed_where_it_matters_but_not_with_quick(listed: Callable[..., list[str]]):
    flags = ["--strategies", "ddp", "deepspeed_stage_2", "deepspeed_stage_3"]
    bfloat16 = "bfloat16, AdamW, clipped, 2 ranks, resumed at step 3"
    assert [line for line in listed(*flags) if re.match(r"\S.* resumed at", line)] == [
        f"ddp: {bfloat16}",
        f"deepspeed_stage_2: {bfloat16}",
        f"deepspeed_stage_3: {bfloat16}",
        "deepspeed_stage_2: AdamW, clipped, accumulated, 2 ranks, resumed at step 3 under deepspeed_stage_3",
        "deepspeed_stage_3: frozen layers, 2 ranks, resumed at step 3 under deepspeed_stage_1 on 1 rank",
    ]
    assert f"ddp: {bfloat16}" not in listed(*flags, "--quick")
    assert f"ddp: {bfloat16}" in listed(*flags, "--quick", "--resume_at", "3")


def test_random_placements_are_the_same_each_time():
    few, more = random_cases(2, 2), random_cases(4, 2)
    assert few == more[:2]
    assert len({tuple(case.flags) for case in more}) == 4
    drawn = [flag for case in more for flag in case.flags if flag.startswith(("--zero.", "--offload."))]
    assert len({*drawn}) > 3


@of_test_all
@pytest.mark.distributed
@pytest.mark.parametrize("flags", ["--quick", "--fuzz 60"])
def test_the_pinned_release_passes(flags: str, tmp_path: Path):
    done = run_program("compare", "--acceptance", *flags.split(), "--out", str(tmp_path))
    assert_ok(done)


ZERO_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer."
RELEASE = (
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator."
    "_PartitionedParameterCoordinator__release_param"
)
FETCH = "deepspeed.runtime.zero.partition_parameters:AllReduceCoalescedHandle.wait"
KEEP = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer._update_hp_grad"

CODE = {
    "float32, accumulated": ("deepspeed_stage_2", ZERO_1_2 + "average_tensor", 4),
    "bfloat16, accumulated": ("deepspeed_stage_2", ZERO_1_2 + "average_tensor", 4),
    "bfloat16, AdamW, clipped": ("deepspeed_stage_1", ZERO_1_2 + "unscale_and_clip_grads", 1),
    "AdamW, clipped, accumulated": ("deepspeed_stage_1", ZERO_1_2 + "scaled_global_norm", 1),
    "several buckets": ("deepspeed_stage_2", ZERO_1_2 + "average_tensor", 8),
    "all parameters sharded": ("deepspeed_stage_3", RELEASE, 4),
    "Muon, warmed up": ("deepspeed_stage_0", "cifar_zero.optimizers.torch_updates:TorchMuon._muon", 1),
    "experts": ("deepspeed_stage_2", "deepspeed.moe.sharded_moe:MOELayer.forward", 4),
    "experts, spread": ("deepspeed_stage_2", "deepspeed.comm:all_to_all_single", 1),
    "gradients that are not contiguous": (
        *("deepspeed_stage_2_not_contiguous", ZERO_1_2 + "buffered_reduce_fallback", 1),
    ),
    "gradients kept in float32": ("deepspeed_stage_1_fp32_gradients", KEEP, 10),
    "parameters fetched by all-reduce": ("deepspeed_stage_3_all_reduce", FETCH, 1),
}
"""A strategy, a function, and the least number of its calls per optimizer step, for each row. The row "frozen layers"
is left out, because it has no such function."""


@of_test_all
@pytest.mark.distributed
def test_each_row_executes_the_code_that_it_is_there_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launches, "TRAININGS", 7)  # the ranks are started again in between
    assert CODE.keys() == {row.name for row in ROWS} - {"frozen layers"}
    wanted = {(f"{row}, 2 ranks", strategy): (name, calls) for row, (strategy, name, calls) in CODE.items()}
    found = [case for case in plan_cases([], 2, quick=False) if (case.row, case.strategy) in wanted]
    assert len(found) == len(CODE)
    comparison = train_cases(Comparison("", {}, PLAIN, found), tmp_path, "tests.comparison.counted_calls:train")
    assert comparison.passed, [case.outcome for case in found if not case.passed]
    assert {log.name for log in tmp_path.glob("*.log")} == {"2-ranks-0.log", "2-ranks-7.log"}
    counts = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    for case, counted in zip(found, counts, strict=True):
        name, calls = wanted[case.row, case.strategy]
        assert counted[name] >= calls * cases.STEPS, (case.name, counted)


def test_no_stage_of_a_row_is_left_out(monkeypatch: pytest.MonkeyPatch):
    """The only exception is stage 3 with experts, which DeepSpeed cannot train."""
    monkeypatch.setattr("cifar_zero.config.rules.free_memory_bytes", lambda: 2**40)  # whatever this computer has
    wanted = set()
    for row in ROWS:
        if not row.raw:
            stages = row.stages or range(4)
            wanted |= {(f"{row.name}, 2 ranks", f"deepspeed_stage_{stage}") for stage in stages}
    found = {(case.row, case.strategy) for case in plan_cases([], 2, quick=False)}
    assert wanted - found == {("experts, 2 ranks", "deepspeed_stage_3")}
    assert ("experts, 1 rank", "deepspeed_stage_2") in found


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=of_test_all) for ranks in (1, 16))])
def test_every_row_and_stage_trains_on_any_number_of_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch):
    """The only exceptions are experts on several ranks, which need an even number of ranks, and strategies that need a
    fast disk or a GPU."""
    monkeypatch.setattr("cifar_zero.config.rules.free_memory_bytes", lambda: 2**40)  # whatever this computer has
    found = [case for case in plan_cases([], ranks, quick=False) if case.world_size == ranks]
    rows = {case.row.rpartition(",")[0] for case in found}
    assert rows == {row.name for row in ROWS} - ({"experts, spread"} if ranks % 2 else set())
    stages = {name for name, spec in STRATEGIES.items() if spec.family == "deepspeed"}
    left_out = stages - {case.strategy for case in found}
    assert left_out <= {"deepspeed_stage_3_offload_nvme", "deepspeed_stage_3_superoffload"}
