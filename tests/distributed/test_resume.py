"""A run resumes from a checkpoint after it was killed at any moment, or with another strategy and number of ranks.

`make test-all` kills runs at random moments, and resumes every pair of shapes. test_faults.py has one kill.
"""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.read import RECORD, read
from cifar_zero.checkpoints.weights import net_weights
from cifar_zero.core import exits
from cifar_zero.core.errors import Stopped
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.schedules import SCHEDULES, with_total_steps
from tests.support.helpers import (
    ROOT,
    WHOLE,
    assert_ok,
    curve,
    largest_difference,
    last_checkpoint,
    last_weights,
    losses,
    metrics_of,
    of_test_all,
    on_ranks,
    run_folder_of,
    run_program,
    train_all,
)
from tests.support.many_runs import train_run

Shape = tuple[str, int, int]
"""The strategy and number of ranks of a run, and the ep_size of its experts, or 0 for a model without experts."""

ONE_RANK: Shape = ("baseline", 1, 0)
KILLS = 10
KILLED: list[Shape] = [ONE_RANK, ("deepspeed_stage_2", 2, 0), ("deepspeed_stage_3", 2, 0), ("deepspeed_stage_1", 2, 2)]

ACCUMULATING: Shape = ("ddp", 2, 0)
"""Takes two micro-batches per step, and the other shapes take one. The middle of an epoch must be at the same step."""

PAIRS: list[tuple[Shape, Shape]] = [
    (ONE_RANK, ("deepspeed_stage_2", 2, 0)),
    (("deepspeed_stage_3", 2, 0), ACCUMULATING),
    (("deepspeed_stage_0", 2, 2), ("deepspeed_stage_2", 2, 1)),
]
if WHOLE:
    STAGES = [f"deepspeed_stage_{stage}" for stage in range(4)]
    PLAIN: list[Shape] = [ONE_RANK, *((stage, ranks, 0) for stage in STAGES for ranks in (1, 2, 4))]
    SPREAD: list[Shape] = [("baseline", 1, 1)]
    SPREAD += [(stage, ranks, ep) for stage in STAGES[:3] for ranks, ep in ((1, 1), (2, 2), (4, 2))]
    PAIRS = [PAIRS[1], (("deepspeed_stage_2", 1, 0), ("deepspeed_stage_3_offload", 2, 0))]
    PAIRS += [(one, other) for shapes in (PLAIN, SPREAD) for one in shapes for other in shapes]

STOPPED_AT, STEPS = 20, 45
RECIPE = [
    *("--batch_size", "16", "--accelerator", "cpu", "--epochs", "2", "--data.val_fraction", "0.1"),
    *("--optimizer", "adam", "--optimizer.lr", "0.005", "--optimizer.weight_decay", "0.01"),
    *("--augment.flip", "random"),
    *("--schedule", "warmup_lr", "--schedule.warmup_num_steps", "30"),
]
"""An epoch has 36 steps. Both stops are in the middle of an epoch, and the first stop is in the warm-up too."""

EXPERTS = ["--model", "net_moe", "--model.num_experts", "[2,4]", "--model.capacity_factor", "4"]
EXPERTS += ["--model.load_balance", "0", "--optimizer.lr", "0.001", "--gradient_clip_val", "0.5"]
"""There is no noise, drop or load-balancing loss, because they depend on the micro-batches."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def flags_of(shape: Shape, steps: int, *more: str) -> list[str]:
    strategy, ranks, ep_size = shape
    where = ["--strategy", strategy, "--devices", str(ranks), "--accumulate", "2" if shape == ACCUMULATING else "1"]
    experts = [*EXPERTS, "--model.ep_size", str(ep_size)] if ep_size else []
    return [*RECIPE, *where, *experts, "--max_steps", str(steps), *more]


@pytest.fixture(scope="module")
def reshaped(folder: Path, small_data: list[str]) -> dict[tuple[Shape, Shape], Path]:
    """Returns the output directories of the runs that were resumed in another shape."""
    begun = {shape: folder / str(shape) for shape, _ in PAIRS}
    ended = {pair: folder / str(pair) for pair in PAIRS}
    train_all({out: [*small_data, *flags_of(shape, STOPPED_AT)] for shape, out in begun.items()})
    resumes = {pair: ["--resume", str(begun[pair[0]])] for pair in PAIRS}
    train_all({out: [*small_data, *flags_of(pair[1], STEPS, *resumes[pair])] for pair, out in ended.items()})
    return ended


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, small_data: list[str]) -> list[dict[int, float]]:
    """Returns the losses of two runs on one rank, without and with experts."""
    outs = [folder / "uninterrupted-0", folder / "uninterrupted-1"]
    train_all({out: [*small_data, *flags_of(("baseline", 1, ep_size), STEPS)] for ep_size, out in enumerate(outs)})
    return [losses(out) for out in outs]


@pytest.mark.distributed
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_resumes_in_another_shape(
    pair: tuple[Shape, Shape], reshaped: dict[tuple[Shape, Shape], Path], uninterrupted: list[dict[int, float]]
):
    """Every expert too keeps its weights, optimizer state and schedule."""
    has_experts = pair[0][2] > 0
    expected = {step: uninterrupted[has_experts][step] for step in range(STOPPED_AT + 1, STEPS + 1)}
    assert losses(reshaped[pair]) == pytest.approx(expected, abs=1e-4 if has_experts else 1e-5)


OWN_CHECKPOINTS = ["--trainer.callbacks", "lightning.pytorch.callbacks.ModelCheckpoint"]
OWN_CHECKPOINTS += ["--trainer.callbacks.every_n_train_steps", "36"]


@pytest.mark.distributed  # for the fixture
def test_resumes_twice_from_the_last_step_of_an_epoch(
    folder: Path, small_data: list[str], uninterrupted: list[dict[int, float]]
):
    """The first checkpoint is written after the last batch of an epoch, before its validation."""
    same = [*small_data, *flags_of(ONE_RANK, STEPS)]
    begun, middle, ended = (folder / f"twice-{name}" for name in ("begun", "middle", "ended"))
    train_all({begun: [*same, "--epochs", "1", *OWN_CHECKPOINTS]})
    saved = next(run_folder_of(begun).rglob("epoch=0-step=36.ckpt"))
    train_all({middle: [*same, "--max_steps", "38", "--resume", str(saved)]})
    train_all({ended: [*same, "--resume", str(middle)]})
    actual = losses(middle) | losses(ended)
    assert actual == {step: loss for step, loss in uninterrupted[0].items() if step > 36}


@pytest.mark.distributed
@of_test_all
@pytest.mark.parametrize("shape", KILLED, ids=str)
def test_a_run_killed_at_random_moments_ends_with_the_same_weights(shape: Shape, tmp_path: Path, small_data: list[str]):
    noise = ["--model.noisy_gate_policy", "RSample"] if shape[2] else []
    flags = [*small_data, *flags_of(shape, STEPS), *noise]
    train_all({tmp_path / "whole": flags})
    rng = random.Random(0)
    out, name = tmp_path / "killed", "run"
    command = [*flags, "--out", str(out), "--save_every_n_steps", "2", "--name", name]
    resume: list[str] = []
    for kill in range(KILLS):
        process = subprocess.Popen(
            [sys.executable, "train.py", *command, *resume],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None and not list((out / name / f"version_{kill}").glob("checkpoints/*")):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)  # its ranks end with it
        process.wait()
        resume = ["--resume", "last"] if list(out.rglob("*.ckpt")) else []
    assert_ok(run_program("train.py", *command, *resume))
    ended = net_weights(read(run_folder.find_checkpoint(str(out / name))))
    assert largest_difference(ended, last_weights(tmp_path / "whole")) == 0


def test_another_schedule_or_length_continues_at_its_own_learning_rate(folder: Path, small_data: list[str]):
    """A cosine run ends at the rate 0."""
    same = [*small_data, "--batch_size", "16", "--accelerator", "cpu", "--optimizer.lr", "0.1", "--log_interval", "1"]
    begun, names = folder / "rates", ("linear", "cosine")
    train_all({begun: [*same, "--max_steps", "3", "--schedule", "cosine"]})
    more = ["--max_steps", "6", "--resume", str(begun)]
    train_all({folder / f"to-{name}": [*same, "--schedule", name, *more] for name in names})
    for name in names:
        rates = curve(folder / f"to-{name}", "train/learning_rate")
        schedule = with_total_steps(SCHEDULES[name](), lambda: 6)
        assert rates == pytest.approx({step: schedule.rate(step - 1, 0.1) for step in (4, 5, 6)})


SENT_IN = 14
"""The step in which an interruption comes. A run saves every four steps, and an epoch has eight. The newest checkpoint
before the interruption is therefore in the middle of the second epoch too."""

SHORT = ["--data.synthetic_size", "160", "--batch_size", "16", "--epochs", "2", "--accelerator", "cpu"]
SHORT += ["--save_every_n_steps", "4", "--augment.flip", "random", "--logger", "none"]
RECORDS = ["--trainer.callbacks", "tests.users_code.sends_signal.RecordsBatches"]
READS_LENGTH = ["--trainer.callbacks.plans", "true"]
VALIDATES = ["--trainer.val_check_interval", "6"]  # also in the step SENT_IN, the sixth of its epoch

RESUMED: dict[str, list[str]] = {
    "a callback reads the length": READS_LENGTH,
    "validation": VALIDATES,
    "Lightning's loop": ["--schedule", "cosine", "--fast_loop", "false", *VALIDATES],
    "torch loader": ["--schedule", "cosine", "--data.loader", "torch", "--data.workers", "1", "--augment.flip", "none"],
    "accumulation": ["--schedule", "cosine", "--accumulate", "2"],
    **{f"schedule {name}": ["--schedule", name] for name in SCHEDULES},
}
"""Flags of runs that are interrupted in mid-epoch."""

OPTIMIZER_OF = dict(zip(RESUMED, cycle(OPTIMIZERS), strict=False))
"""The optimizer of each interrupted run on one rank."""

SCHEDULED = [name for name in RESUMED if name.startswith("schedule")]
INTERRUPTED: list[Any] = []
for strategy in ("baseline", "deepspeed_stage_1", "deepspeed_stage_3", "fsdp2"):
    marks = [pytest.mark.distributed] if strategy != "baseline" else []
    for number in (signal.SIGTERM, signal.SIGKILL):
        names = {"schedule cosine", "validation"} if WHOLE else set[str]()
        if strategy == "baseline" and number == signal.SIGTERM:
            names = {*RESUMED} if WHOLE else {*RESUMED} - {*SCHEDULED} | {"schedule cosine"}
        for name in sorted(names):
            row = f"{strategy}-{number.name}-{name}"
            INTERRUPTED.append(pytest.param(strategy, number, name, id=row, marks=marks))


def often(patch: pytest.MonkeyPatch) -> None:
    """Makes the ranks exchange their requests to stop after each step, so that a run stops in the step in which the
    signal comes."""
    patch.setattr("cifar_zero.training.callbacks.stop.EXCHANGE_SECONDS", 0.0)


def train_until_stopped(flags: list[str]) -> None:
    """Trains on each rank until the signal comes that the run sends itself."""
    handlers = {number: signal.getsignal(number) for number in exits.SIGNALS}
    with pytest.raises(Stopped):
        train_run(flags, "tests.distributed.test_resume:often")
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("strategy", "number", "name"), INTERRUPTED)
def test_an_interruption_in_mid_epoch_changes_nothing(
    strategy: str, number: signal.Signals, name: str, tmp_path: Path, small_data: list[str]
):
    """Batches, losses, validations, and all that the last checkpoint restores are the same as without the
    interruption."""
    ranks = 1 if strategy == "baseline" else 2
    same = [*small_data, *SHORT, "--strategy", strategy, "--devices", str(ranks), *RECORDS, *RESUMED[name]]
    if ranks == 1:
        same += ["--optimizer", OPTIMIZER_OF[name]]
    whole, begun, ended = (tmp_path / part for part in ("whole", "begun", "ended"))
    stop = ["--trainer.callbacks.step", str(SENT_IN), "--trainer.callbacks.number", str(number.value)]
    if number == signal.SIGKILL:
        with pytest.raises(AssertionError):  # the ranks have ended
            on_ranks(ranks, train_run, [*same, *stop, "--out", str(begun)], "")
    else:
        on_ranks(ranks, train_until_stopped, [*same, *stop, "--out", str(begun)])
    train_all({whole: same, ended: [*same, "--resume", str(run_folder_of(begun))]})
    saved = last_checkpoint(begun)["global_step"]
    assert saved == (12 if number == signal.SIGKILL else SENT_IN)
    assert_continued(ended, whole, saved)
    assert validations(ended) == [step for step in validations(whole) if step >= saved]


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        pytest.param("baseline", [], id="baseline"),
        pytest.param("baseline", ["--trainer.val_check_interval", "4"], id="in mid-epoch"),
        pytest.param("baseline", ["--fast_loop", "false"], id="Lightning's loop", marks=of_test_all),
        *(
            pytest.param(strategy, [], id=strategy, marks=[of_test_all, pytest.mark.distributed])
            for strategy in ("deepspeed_stage_2", "deepspeed_stage_3", "fsdp2")
        ),
    ],
)
def test_a_best_checkpoint_resumes_after_its_validation(
    strategy: str, more: list[str], tmp_path: Path, small_data: list[str]
):
    ranks = 1 if strategy == "baseline" else 2
    same = [*small_data, *SHORT, *RECORDS, "--strategy", strategy, "--devices", str(ranks), "--save_top_k", "-1", *more]
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    train_all({whole: same})
    best = sorted(run_folder_of(whole).rglob("best-*.ckpt"))
    assert len(best) == (4 if more[:1] == ["--trainer.val_check_interval"] else 2)
    train_all({ended: [*same, "--resume", str(best[0])]})
    assert_continued(ended, whole, read(best[0])["global_step"])
    assert [file.name for file in sorted(run_folder_of(ended).rglob("best-*.ckpt"))] == [file.name for file in best[1:]]


EARLY = ["--epochs", "9", "--early_stopping", "1", "--optimizer.lr", "0"]  # stops after a step without a point


@pytest.mark.parametrize("length", [["--epochs", "2"], ["--max_steps", "13"], EARLY], ids=" ".join)
def test_a_run_without_a_step_left_reports_its_training(length: list[str], tmp_path: Path, small_data: list[str]):
    """It was killed between its last checkpoint and its metrics.json."""
    same = [*small_data, *SHORT, *length]
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    train_all({whole: same, ended: [*same, "--resume", str(whole)]})
    actual, expected = metrics_of(ended), metrics_of(whole)
    for key in ("epochs", "steps", "train/loss", "val/acc", "test/acc"):
        assert actual[key] == expected[key] is not None, key


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=of_test_all)])
def test_the_shards_that_were_checked_are_loaded(stage: int, tmp_path: Path, small_data: list[str]):
    """The file `latest`, by which DeepSpeed chooses a folder, names the folder of another run."""
    same = [*small_data, *SHORT, "--strategy", f"deepspeed_stage_{stage}", "--devices", "1", "--max_steps"]
    whole, begun, other, ended = (tmp_path / part for part in ("whole", "begun", "other", "ended"))
    train_all({whole: [*same, "6"], begun: [*same, "3"], other: [*same, "3", "--seed", "1"]})
    own, foreign = (run_folder_of(out) / "checkpoints" / "last.ckpt" for out in (begun, other))
    (own / "latest").write_text(os.path.relpath(foreign / "checkpoint", own))
    train_all({ended: [*same, "6", "--resume", str(own)]})
    assert largest_difference(last_weights(ended), last_weights(whole)) == 0


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=of_test_all)])
def test_a_resumed_run_clips_at_its_own_limit(stage: int, tmp_path: Path, small_data: list[str]):
    """DeepSpeed's shards contain the limit of the run that wrote them. The new limit is so low that no weight moves."""
    same = [*small_data, *SHORT, "--strategy", f"deepspeed_stage_{stage}", "--devices", "1"]
    same += ["--optimizer.lr", "0.1", "--optimizer.momentum", "0", "--gradient_clip_val"]
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    train_all({begun: [*same, "1", "--max_steps", "2"]})
    train_all({ended: [*same, "1e-9", "--max_steps", "4", "--resume", str(begun)]})
    assert largest_difference(last_weights(ended), last_weights(begun)) < 1e-9


def batches(out: Path) -> dict[int, list[str]]:
    """Returns the checksums of rank 0's batches by optimizer step."""
    checksums: dict[int, list[str]] = {}
    for line in (run_folder_of(out) / "batches").read_text().splitlines():
        step, checksum = line.split()
        checksums.setdefault(int(step), []).append(checksum)
    return checksums


def validations(out: Path) -> list[int]:
    """Returns the number of steps done before each validation."""
    return [int(line) for line in (run_folder_of(out) / "validations").read_text().splitlines()]


def restored(out: Path) -> dict[str, Any]:
    """Returns the values that a run which resumes from the last checkpoint restores, by their path."""
    checkpoint = last_checkpoint(out)
    parts = {key: checkpoint[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "epoch")}
    parts["random_states"] = checkpoint[RECORD]["random_states"]
    return {keystr(path): value for path, value in tree_leaves_with_path(parts)}


def assert_continued(ended: Path, whole: Path, saved: int) -> None:
    """Checks that a run which was resumed after the step `saved` did what the whole run did from then on."""
    for values in (batches, losses):
        assert values(ended) == {step: value for step, value in values(whole).items() if step > saved}
    expected, actual = restored(whole), restored(ended)
    assert actual.keys() == expected.keys()
    assert [key for key, value in expected.items() if torch.is_tensor(value) and not value.equal(actual[key])] == []
    assert [key for key, value in expected.items() if not torch.is_tensor(value) and value != actual[key]] == []
