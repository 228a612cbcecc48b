"""Trains several cases in the same ranks, one after the other, and checks every step. Each rank executes this code.
`case_program` starts the ranks."""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import cpuinfo
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from cifar_zero.build_model import on_meta
from cifar_zero.checkpoints.weights import encode
from cifar_zero.comparison.baseline import SKETCHES
from cifar_zero.comparison.cases import resolved
from cifar_zero.comparison.recording import RECORDING, Recording
from cifar_zero.comparison.result import Variant
from cifar_zero.comparison.resuming import SAVED
from cifar_zero.config.run import Run
from cifar_zero.core import atomic
from cifar_zero.core.console import quieten
from cifar_zero.core.errors import RunError
from cifar_zero.core.hardware import gpu_count
from cifar_zero.launch import collectives, rank_environment
from cifar_zero.step_check.callback import StepCheck
from cifar_zero.step_check.outputs import OutputCheck
from cifar_zero.step_check.recorded import Recorded
from cifar_zero.step_check.resume_check import STATE, ResumeCheck
from cifar_zero.step_check.script_check import ScriptCheck
from cifar_zero.step_check.sketches import SketchCheck
from cifar_zero.step_check.verdict import Verdict
from cifar_zero.strategies import hooks_of
from cifar_zero.training import DATAMODULE, MODULE, build, starting

Train = Callable[[list[str], Path, StepCheck], None]
"""A function that trains a case. It takes the flags of the case, a folder for temporary files, and the check of its
steps."""


def train_recipe(flags: list[str], folder: Path, check: StepCheck) -> None:
    """Trains a case on this rank, without output, and checks its steps.

    Args:
        flags: Flags of the train command.
        folder: Folder for temporary files.
        check: Callback that checks the steps. If it has a checkpoint, training resumes from this checkpoint. If it is a
            `ScriptCheck`, training starts from the script's weights and uses the script's batches.
    """
    if check.checkpoint is not None:
        flags = [*flags, "--resume", str(check.checkpoint)]
    run = resolved(flags)
    identity = starting.check_checkpoint(run)
    trainer = quiet_trainer(run, folder, [*build.maths_callbacks(run.recipe), check])
    weights, data, steps = None, resolve_name(DATAMODULE)(run, identity), run.recipe.max_steps - check.resumed_at
    if isinstance(check, ScriptCheck):
        weights = check.recorded.weights(on_meta(run.recipe, run.num_classes))
        data, steps = check.recorded.loader(trainer.strategy), check.recorded.count
    trainer.fit(resolve_name(MODULE)(run, run.num_classes, weights), data, ckpt_path=check.checkpoint)
    if len(check.verdict.steps) < steps:
        check.verdict.note(f"{steps - len(check.verdict.steps)} of {steps} steps")


def quiet_trainer(run: Run, folder: Path, callbacks: Sequence[Any], elements: int = 0, **more: Any) -> Trainer:
    """Returns a Trainer that neither validates nor writes anything, unless `more` turns this on.

    Args:
        run: The run whose placement and Trainer options are used.
        folder: Lightning's default folder.
        callbacks: Callbacks of the Trainer.
        elements: Number of parameters of the model, if it is not the run's own model.
        **more: Options of Lightning's Trainer.
    """
    quiet = {"enable_checkpointing": False, "limit_val_batches": 0, "logger": False, "default_root_dir": folder}
    run = run.changed(trainer={**run.recipe.trainer, **quiet, **more})
    return build.trainer(run, None, [*callbacks, Free()], elements)


class Free(Callback):
    """Frees the strategy's engine and all its tensors at the end of a case, before this process trains the next
    case."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        hooks_of(trainer.strategy).free()


def check_of(case: Variant, folder: Path, sketches: bool) -> StepCheck:
    """Returns the callback that checks the steps of a case. Raises RunError if the case resumes a run that was not
    saved.

    Args:
        case: The case.
        folder: Holds the saved runs and the recorded steps of a script, if there are any.
        sketches: Whether to keep the sketches that a baseline needs, see `SketchCheck`.
    """
    if case.saved_as:
        saved = folder / SAVED / case.saved_as
        if case.continues and not (saved / STATE).is_file():
            raise RunError("the training to resume was not saved, or did not finish")
        return ResumeCheck(saved, case.save_at)
    if sketches:
        return SketchCheck()
    if not (folder / RECORDING).is_dir():
        return StepCheck(every=1, on_fault="warn")
    recording = Recording.read(folder / RECORDING)
    return ScriptCheck(Recorded(folder / RECORDING, recording.steps, recording.renames, recording.own_data))


def train_jobs(jobs: Mapping[Path, Variant], train: Train, folder: Path, sketches: bool) -> None:
    """Trains cases one after the other. Rank 0 writes the verdict of each case. If a fault is found, the case is
    trained once more, to find the first module whose output is wrong. Cases that are saved, resumed or compared with a
    script are trained only once.

    Args:
        jobs: The cases to train, keyed by the paths of the files that receive their verdicts.
        train: The function that trains a case.
        folder: Receives temporary files and saved runs, and may hold the recorded steps of a script.
        sketches: Whether to write the sketches of each case next to its verdict, see `SketchCheck`.
    """
    quieten()
    # Each CPU optimizer of DeepSpeed starts a process that reads the CPU's vendor, which takes 1.1 s (0.19.8,
    # cpu_adam.py).
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    # ZeRO 3 (DeepSpeed 0.19.8, defragment) runs gc.collect() at each start, which takes 0.35 s with all imports.
    gc.freeze()
    if gpu_count() == 0:
        # One thread is enough for these models, and on a busy machine several threads wait for one another. Under
        # strategies of several ranks Lightning (2.6.6) uses all cores unless the variable is set.
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
    environment, rank = dict(os.environ), rank_environment.global_rank()
    if rank_environment.by_local_launcher():
        collectives.connect(on_cpu=gpu_count() == 0)

    def train_and_check(flags: list[str], check: StepCheck) -> Verdict:
        os.environ.update(environment)  # Lightning removes WORLD_SIZE at the end of a run
        # With TF32, the error bounds of a float32 case would be a thousand times as wide on a GPU (torch's "CUDA
        # semantics").
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
            train(flags, folder, check)
        return check.verdict

    for verdict_file, case in jobs.items():
        check = check_of(case, folder, sketches)
        verdict = train_and_check(case.flags, check)
        if verdict.faults and not isinstance(check, (ResumeCheck, ScriptCheck)):
            again = train_and_check(case.flags, OutputCheck(every=1, on_fault="warn"))
            verdict = again if again.faults else verdict
        if rank == 0:
            found = verdict.as_dict()
            if isinstance(check, SketchCheck):
                found[SKETCHES] = f"{verdict_file}.safetensors"
                steps = {key: torch.stack(values) for key, values in check.sketches.items()}
                atomic.write(Path(found[SKETCHES]), encode(steps, {}))
            atomic.write_json(verdict_file, found)
