"""`stepcheck run` on healthy scripts with odd habits: it neither ends nor changes a training, and says what it does not
judge."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepcheck.attach import AutoAudit
from tests.support.suite import WHOLE, run_python

SCRIPT = "tests/stepcheck/odd_loops.py"

FOREIGN, SCALE = "some gradients", "the scale of all gradients"

ENGINES: list[tuple[str, int, set[str]]] = [
    # script, audited steps, what is not judged; in the order in which the audits start
    ("closure", 4, set()),
    ("several_closures", 0, {"step 1 and later steps", "updates"}),
    ("failed_step", 2, {"updates"}),  # not of a class that it does not know
    ("failed_update", 4, {"updates"}),
    ("failed_backward", 8, set()),
    ("left_out_step", 4, set()),
    ("validated_with_gradients", 4, set()),
    ("captured_gradients", 4, set()),
    ("clipped_with_another", 4, {SCALE}),
    ("clipped_with_another", 4, {SCALE}),  # the second optimizer
    ("switched_statistics", 4, set()),
    ("low_precision_and_fused", 4, set()),
    ("traced", 4, set()),
    ("scaled_loss", 2, set()),
    ("clipped_before_unscaled", 4, set()),
    ("halved_unseen", 4, {SCALE}),
    ("removed_gradients", 4, set()),
    ("clipped_by_value", 4, {FOREIGN}),
    ("own_gradients", 4, {FOREIGN}),
    ("late_hooks", 4, set()),
    ("two_passes", 4, set()),
    ("bounded_weights", 4, set()),
    ("reset_optimizer", 4, set()),
    ("rebuilt_optimizer", 4, set()),
    ("rebuilt_optimizer", 4, set()),  # the last optimizer. The one before has no step
    ("wrapped_optimizer", 4, set()),
    ("hooks_of_the_optimizer", 4, set()),
    ("several_modules", 4, set()),
    ("fine_tuned_in_evaluation_mode", 4, set()),
    ("copied", 4, set()),
    ("resumed", 4, set()),
    ("unfrozen", 4, set()),
    ("grown", 4, {"some parameters"}),
    ("unusual_tensors", 4, set()),
    ("compiled", 4, {FOREIGN}),  # in the first step, at which the audit starts
    ("compiled_step", 0, set()),
]

ENGINES_OF_SEVERAL_RANKS: list[tuple[str, int, set[str]]] = [
    ("one_optimizer_for_two_wrappers", 4, set()),
    ("recomputed_in_views_of_buckets", 4, set()),
    ("sharded_optimizer, as a whole", 4, {"updates"}),
    ("sharded_optimizer", 4, {"gradients"}),
    ("sharded_and_clipped_by_value", 4, {FOREIGN}),
    ("divided_by_different_factors", 0, {"step 1 and later steps"}),
    ("sharded_two_passes", 4, set()),
    ("sharded_and_changed_between_passes", 4, set()),
    ("reduced_in_the_last_pass", 4, set()),
    ("reduced_over_replicas_in_the_last_pass", 4, set()),
    ("compressed_small_gradients", 4, set()),
    ("layer_of_one_rank", 4, set()),
    ("probe_of_one_rank", 4, set()),
    ("DistributedDataParallel", 0, {"all steps"}),  # refused: groups_of_one_rank
    ("FSDPSequential", 0, {"all steps"}),  # refused: sharded_in_groups_of_one_rank
    ("Linear", 0, {"all steps"}),  # refused: the probe
]

OF_SEVERAL_RANKS = """one_optimizer_for_two_wrappers recomputed_in_views_of_buckets uneven_inputs groups_of_one_rank
    sharded_optimizer sharded_and_clipped_by_value divided_by_different_factors sharded_two_passes
    sharded_and_changed_between_passes reduced_in_the_last_pass reduced_over_replicas_in_the_last_pass
    sharded_in_groups_of_one_rank compressed_small_gradients layer_of_one_rank probe_of_one_rank"""
"""The scripts of several ranks, in their order. Not each has an engine."""


def check(
    expected: list[tuple[str, int, set[str]]], names: Iterable[str], folder: Path, *launcher: str
) -> list[dict[str, Any]]:
    """Runs the scripts with and without the audit, and compares outputs and verdicts. Returns the verdicts."""
    script = [*launcher, SCRIPT, *names]
    report, baseline = folder / "verdict.json", folder / "baseline.pt"
    options = ["-m", "stepcheck", "run", "--weights_every", "1", "--json", str(report)]
    audited = run_python(*options, "--save", str(baseline), *script)
    alone = run_python(*(["-m", "torch.distributed.run", *script[1:]] if launcher else script))
    assert alone.returncode == 0, alone.stderr[-3000:]
    assert audited.returncode == 1, audited.stdout[-3000:] + audited.stderr[-3000:]
    assert "exit code 1, because an audit did not start, ended early, judged less than 90% of" in audited.stderr
    printed = [line for line in audited.stdout.splitlines() if not line.startswith("stepcheck: ")]
    assert printed == alone.stdout.splitlines()
    engines = json.loads(report.read_text())["engines"]
    assert all(f"stepcheck: {each['engine']}: {each['summary']}\n" in audited.stdout for each in engines)
    assert len(engines) == len(expected), [each["engine"] for each in engines]
    for (name, steps, not_judged), each in zip(expected, engines, strict=True):
        assert (name, each["steps"], set(each["not_judged"])) == (name, steps, not_judged), each["summary"]
    assert not any(each["findings"] for each in engines)
    if WHOLE or not launcher:
        again = run_python(*options, "--against", str(baseline), *script)
        assert "FAULT" not in again.stdout, again.stdout[-3000:]
    return engines


def test_odd_scripts_of_one_process(tmp_path: Path):
    expected = [*ENGINES, ("forked", 4, set())]
    *engines, of_the_fork = check(expected, dict.fromkeys(row[0] for row in expected), tmp_path)
    coverage = {name: each["coverage"] for (name, _, _), each in zip(ENGINES, engines, strict=True)}
    unjudged = {"several_closures", "halved_unseen", "clipped_by_value", "own_gradients", "compiled_step"}
    assert {name for name, share in coverage.items() if share == 0} == unjudged
    assert {name for name, share in coverage.items() if 0 < share < 1} == {"compiled"}
    assert of_the_fork["coverage"] == 1


def test_verdicts_are_in_the_order_in_which_processes_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As their files are sorted by name, a name that began with the id of the process put 10000 before 9999."""
    for process, model in ((9999, torch.nn.Linear(2, 2)), (10000, torch.nn.Bilinear(2, 2, 2))):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        auto_audit = AutoAudit(str(tmp_path))
        auto_audit.audit(model)  # refused, because it has no optimizer
        auto_audit.finish()
    verdicts = [json.loads(file.read_text())[0] for file in sorted(tmp_path.glob("*.json"))]
    assert [each["engine"] for each in verdicts] == ["Linear", "Bilinear"]


def test_a_full_disk_does_not_end_the_audit_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    auto_audit = AutoAudit(str(tmp_path / "missing"), baseline={"file": "", "compare": False, "command": ""})
    names = []
    for _ in range(2):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names.append(auto_audit._name_engine())
        assert auto_audit.audit(model, optimizer).baseline is not None
    assert names == ["engine 1", "engine 2"]
    auto_audit.finish()
    assert f"stepcheck: {tmp_path / 'missing'} cannot be written: " in capsys.readouterr().err
    auto_audit.is_first_rank = False  # nothing more at the end of this process


@pytest.mark.distributed
def test_odd_scripts_of_several_ranks(tmp_path: Path):
    launcher = ["torchrun", "--standalone", "--nproc_per_node", "2"]
    check(ENGINES_OF_SEVERAL_RANKS, OF_SEVERAL_RANKS.split(), tmp_path, *launcher)
