"""Tests that each unusable value of an option of Lightning's Trainer is refused in one line, and leaves no folder, and
that `--audit` and `--check_steps` check the steps of a run on two real ranks, and write the verdict."""

import inspect
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from cifar_zero import train
from cifar_zero.checkpoints.resume import starts_of
from cifar_zero.checkpoints.run_folder import RANKS, STEP_CHECK
from cifar_zero.config import command_line
from cifar_zero.config.mistakes import OWNED
from cifar_zero.config.run import Run
from cifar_zero.core.errors import FaultFound, UsageError
from cifar_zero.core.plain_data import load_value
from cifar_zero.training import build
from cifar_zero.training.resolve import resolve
from stepcheck.lightning import StepCheck
from tests.support.helpers import refused, run_folder_of, train_all

OPTIONS = sorted(inspect.signature(Trainer.__init__).parameters.keys() - {"self", *OWNED})

VALUES = ("5", "-3", "0.5", "1e9", "true", "x", "[1]", "{a: 1}", ".nan", "null")


@pytest.fixture
def resolved(small_data: list[str], tmp_path: Path):
    short = ["--batch_size", "64", "--max_steps", "3", "--logger", "none", "--accelerator", "cpu", "--epochs", "1"]

    def run_of(*flags: str) -> Run:
        return resolve(command_line.parse([*small_data, *short, "--out", str(tmp_path / "runs"), *flags]))

    return run_of


@pytest.mark.parametrize("flags", [[], ["--bench_steps", "3"]], ids=str)
def test_an_option_that_the_program_sets_has_one_owner(flags: list[str], resolved):
    options = build.trainer_options(resolved(*flags), None, callbacks=[])
    overridable = {*build.OVERRIDABLE, *(["limit_val_batches"] if flags else [])}
    assert options.keys() - OWNED.keys() == overridable


def test_a_benchmark_is_audited_too(resolved):
    callbacks = build.trainer_options(resolved("--bench_steps", "3", "--audit"), None)["callbacks"]
    assert any(isinstance(each, StepCheck) for each in callbacks)


@pytest.mark.parametrize(("outcome", "faulty"), [("different", True), ("agrees", False)])
def test_a_fault_before_a_restart_counts(outcome: str, faulty: bool, resolved, tmp_path: Path):
    """torchrun restarts the ranks after exit code 3 or the death of a rank. The steps of its last start agree."""
    run = resolved("--audit")
    starts = [Path(run.output.out, run.run_name, f"version_{number}") for number in range(3)]
    for agent, folder in zip(("other", "own", "own"), starts, strict=True):
        folder.mkdir(parents=True)
        (folder / RANKS).write_text(json.dumps([{"agent": agent}]))
        (folder / STEP_CHECK).write_text(json.dumps({"outcome": "different", "summary": "FAULT of another torchrun"}))
    (starts[1] / STEP_CHECK).write_text(json.dumps({"outcome": outcome, "summary": "FAULT step 2: gradient"}))
    (starts[2] / STEP_CHECK).unlink()
    found = starts_of({"own", ""}, run.output.out, run.run_name)
    assert sorted(found) == starts[1:]
    trainer = build.trainer(run, starts[2])
    with pytest.raises(FaultFound, match="FAULT step 2: gradient") if faulty else nullcontext():
        build.check_audited(trainer, starts[2], found)


@pytest.mark.parametrize("option", OPTIONS)
def test_each_value_makes_a_trainer_or_is_refused(option: str, resolved):
    said: list[str] = []
    plain = resolved()
    for value in VALUES:
        run = plain.changed(trainer={option: load_value(value)})
        try:
            build.check_trainer_options(run)
            build.trainer(run, None, callbacks=[])
        except UsageError as error:
            said.append(str(error))
    assert len(said) >= 5  # no option takes half of these values
    assert all(option in line and "\n" not in line for line in said), said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--trainer.no_such_option 1", "--trainer.no_such_option is not an option of Lightning's Trainer"),
        ("--trainer.profiler 5", "--trainer.profiler: expected str, not 5"),
        ("--trainer.max_time 5", "--trainer.max_time: expected str or dict, not 5"),
        ("--trainer.limit_train_batches 0", "--trainer.limit_train_batches must be above 0, not 0"),
        ("--trainer.limit_train_batches 0.0001", "refuses --trainer.limit_train_batches: "),
        ("--trainer.limit_test_batches 0.00001", "limit_test_batches 1e-05 is less than one batch (1 in all)"),
        ("--trainer.limit_val_batches 0.1 --trainer.check_val_every_n_epoch 2", "limit_val_batches 0.1 is less than"),
        ("--trainer.val_check_interval 1000", "refuses --trainer.val_check_interval: "),
        (
            "--trainer.val_check_interval 3 --accumulate 2",
            "--accumulate 2 does not divide --trainer.val_check_interval 3",
        ),
        ("--trainer.max_time 00:00:00:00", "no step was trained"),
        (
            "--devices 2 --strategy ddp",
            "1 x 2 ranks (--num_nodes, --devices): one process is one rank: use --devices 1",
        ),
    ],
)
def test_a_refused_run_leaves_no_folder(flags: str, said: str, resolved, tmp_path: Path):
    with refused(said):
        train.train(resolved(*flags.split()))
    assert not [*(tmp_path / "runs").glob("*")]


FROZEN = ["--model", "resnet18", "--model.width", "0.05", "--trainable", "fc.*", "--optimizer", "adamw"]
"""A model whose batch norms the program puts into evaluation mode. This is no fault of the strategy."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("flags", "strategy", "replayed"), [(["--audit"], "deepspeed_stage_3", 0), (["--check_steps", "2"], "ddp", 2)]
)
def test_the_verdict_is_in_the_run_folder(
    flags: list[str], strategy: str, replayed: int, small_data: list[str], tmp_path: Path
):
    recipe = [*small_data, *FROZEN, "--accelerator", "cpu", "--batch_size", "16", "--accumulate", "2"]
    train_all({tmp_path: [*recipe, "--devices", "2", "--strategy", strategy, "--max_steps", "4", *flags]})
    verdict = json.loads((run_folder_of(tmp_path) / STEP_CHECK).read_text())
    assert (verdict["outcome"], verdict["steps"], verdict["replayed"]) == ("agrees", 4, replayed), verdict["summary"]
    assert verdict["notes"] == {}
