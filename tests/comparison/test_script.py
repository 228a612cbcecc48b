"""Tests `cifar-zero compare --script`, which runs a training script unchanged and checks that a LightningModule
computes its steps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cifar_zero.comparison import jobs, own_module, script
from cifar_zero.comparison.recording import RECORDING
from cifar_zero.comparison.result import Variant
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.step_check.verdict import Verdict
from tests.support.helpers import ROOT, of_test_all

FOLDER = ROOT / "tests" / "users_code" / "scripts"
SCRIPT = str(FOLDER / "old_train.py")
MODULE = ["--module", f"{FOLDER / 'migrated.py'}:Migrated"]

TOGETHER = (
    "step 1: script's option of model.body.0.bias: weight_decay 0 in the module, 0.1 in the script",
    "the script adds the gradient of the previous step, because a call of zero_grad is missing",
    "step 2: script's option of model.body.0.weight: lr 0.009 in the module, 0.01 in the script, because only",
)


def verdict_of(flags: str, folder: Path, *of_module: str, own_data: bool = False) -> Verdict:
    """Returns the verdict on plain PyTorch on one rank, trained in this process. `flags` are the arguments of the
    script."""
    recording = script.record(f"{SCRIPT} {flags}", 4, folder)
    recording.own_data = own_data
    recording.write(folder / RECORDING)
    (case,) = script.plan(recording, ["baseline"], 1, [*MODULE, *of_module])
    return trained(case, folder)


def trained(case: Variant, folder: Path, train: jobs.Train = own_module.train_module) -> Verdict:
    """Returns the verdict on a case that is trained in this process."""
    check = jobs.check_of(case, folder, sketches=False)
    train(case.flags, folder, check)
    return check.verdict


@of_test_all
@pytest.mark.distributed
def test_a_script_without_mistakes_under_zero_on_two_ranks(compared: Callable[..., Any]):
    recorded = ["--script", f"{SCRIPT} --no_norm", "--steps", "4", *MODULE, "--module.norm", "false"]
    code, comparison = compared(*recorded, "--strategies", "deepspeed_stage_3", "--devices", "2")
    one, two = comparison["variants"]
    assert code == 0
    assert (one["name"], one["world_size"], one["kind"]) == ("baseline", 1, "bit-identical")
    assert (two["name"], two["world_size"], two["kind"]) == ("deepspeed_stage_3", 2, "within rounding")


def test_what_scripts_do(tmp_path: Path):
    verdict = verdict_of("--amp --accumulate 2 --clip 0.3 --recompute", tmp_path)
    assert verdict.outcome in ("bit-identical", "within rounding"), str(verdict)
    assert verdict.tallies["script's gradient"].judged == 4 * 612


@pytest.mark.parametrize(
    ("flags", "outcome", "found"),
    [
        pytest.param(
            "--sum", "different", ["a sum over the samples in the script, a mean in the module"], marks=of_test_all
        ),
        pytest.param(
            "--accumulate 2 --undivided",
            "different",
            ["either the script does not divide its loss by its 2", "or the module divides its loss"],
            marks=of_test_all,
        ),
        (
            "--accumulate 2 | --module.divided true",
            "different",
            ["either the script does not divide its loss by its 2", "or the module divides its loss"],
        ),
        ("--no_zero_grad --by_epoch --decay_all", "different", TOGETHER),
        ("--dropout 0.2", "not judged", ["the module draws other random numbers"]),
    ],
)
def test_mistakes_of_a_migration(flags: str, outcome: str, found: Sequence[str], tmp_path: Path):
    of_script, _, of_module = flags.partition("|")
    verdict = verdict_of(of_script, tmp_path, *of_module.split())
    assert verdict.outcome == outcome
    named = "\n".join([str(verdict), *map(str, verdict.faults)])
    for text in found:
        assert text in named


@pytest.mark.parametrize(
    ("scale", "differs", "found"),
    [
        pytest.param("1.0", False, "4 steps checked", marks=of_test_all),
        ("0.5", True, "the module's values are 0.5 times the script's plus 0, so the normalisation differs"),
    ],
)
def test_the_batches_of_the_modules_own_loader(scale: str, differs: bool, found: str, tmp_path: Path):
    verdict = verdict_of("", tmp_path, "--module.scale", scale, own_data=True)
    assert (verdict.outcome == "different") == differs
    assert verdict.tallies["script's batch"].elements == 4
    assert found in str(verdict)


def test_the_tutorials_loop_and_this_programs_module(tmp_path: Path):
    """CIFARModule converts images to channels_last, so that its first convolution sums in another order."""
    recording = script.record(str(FOLDER / "tutorial.py"), 4, tmp_path)
    assert (recording.model, recording.batch_size, recording.accumulate) == ("Net", 4, 1)
    (case,) = script.plan(recording, ["baseline"], 1, [])
    verdict = trained(case, tmp_path, jobs.train_recipe)
    assert verdict.outcome == "within rounding", str(verdict)
    assert verdict.tallies["script's update"].judged == 4 * 62_006


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(f"{SCRIPT} --two_optimizers", "--script has several optimizers", marks=of_test_all),
        pytest.param(f"{SCRIPT} --lbfgs", "without a closure", marks=of_test_all),
        pytest.param(f"{FOLDER / 'migrated.py'}", "ended without an optimizer step", marks=of_test_all),
    ],
)
def test_scripts_that_cannot_be_recorded(flags: str, message: str, tmp_path: Path):
    with pytest.raises((UsageError, RunError), match=message):
        script.record(flags, 4, tmp_path)


def test_a_script_that_draws_random_numbers_is_compared_on_one_rank(tmp_path: Path):
    recording = script.record(f"{SCRIPT} --dropout 0.2", 1, tmp_path)
    assert recording.draws
    with pytest.raises(UsageError, match=r"--devices 2: the model of --script draws .* use --devices 1"):
        script.plan(recording, ["ddp"], 2, MODULE)
    assert [case.world_size for case in script.plan(recording, ["ddp"], 1, MODULE)] == [1, 1]


@of_test_all
@pytest.mark.parametrize("library", ["accelerate", "transformers"])
def test_scripts_of_other_libraries(library: str, tmp_path: Path):
    """`make test-all` installs the libraries."""
    pytest.importorskip(library)
    file = FOLDER / f"with_{library}.py"
    recording = script.record(str(file), 4, tmp_path)
    (case,) = script.plan(recording, ["baseline"], 1, ["--module", f"{file}:Migrated", "--max_steps", "30"])
    verdict = trained(case, tmp_path)
    assert verdict.outcome in ("bit-identical", "within rounding"), str(verdict)
