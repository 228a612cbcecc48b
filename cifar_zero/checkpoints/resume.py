"""Finds the checkpoint that a run resumes, before the ranks are launched. On several nodes and under torchrun, rank 0
finds it after the launch. Also defines the checks that refuse a checkpoint of a run with other options or classes.
Imports torch only to read the options in a checkpoint that has no run folder.

`config/strategy_rules.py` refuses strategies that cannot resume. `training/starting.py` refuses checkpoints with other
weights and damaged ones.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cifar_zero import data
from cifar_zero.checkpoints import run_folder
from cifar_zero.config import command_line
from cifar_zero.config.recipe import DataConfig
from cifar_zero.config.run import Run
from cifar_zero.config.settings import FALLBACK_SUFFIX, Settings, flat, may_change_on_resume, settings_of
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.core import atomic, plain_data
from cifar_zero.core.console import command, say
from cifar_zero.core.errors import UsageError
from cifar_zero.launch import rank_environment
from cifar_zero.models import MODELS
from cifar_zero.models.user_model import UserModel

IF_ANY = "auto"  # value of --resume: like last, but starts a new run if there is no checkpoint


def saved_config(settings: Settings) -> dict[str, Any] | None:
    """Returns the options of the run that --resume names, keyed by flag, for `command_line.parse`. Returns None for a
    new run, or if the checkpoint does not have them. If it is in this run's own folder, `out` and `name` come from
    `settings`. Raises UsageError if there is no such checkpoint, if it cannot be read, or if --resume last with
    --strategy auto lacks --name."""
    if settings.output.resume == "last" and settings.placement.strategy == AUTO and not settings.output.name:
        raise UsageError("--resume last with --strategy auto: also give --name, the name of the run to resume")
    checkpoint = _checkpoint_of(settings)
    if checkpoint is None:
        return None
    tree = config_of_checkpoint(checkpoint, settings.consent.trust)
    if tree is not None and checkpoint.is_relative_to(Path(settings.output.out, settings.run_name)):
        # The saved values are out of date if the folder was moved.
        tree |= {"out": settings.output.out, "name": settings.output.name}
    return tree


def config_of_checkpoint(
    checkpoint: Path, trust: bool = False, content: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Returns the options of the run that wrote a checkpoint, keyed by flag: those in the run folder or else in the
    checkpoint, or None if neither has them. Raises UsageError if they cannot be read.

    Args:
        trust: see `safe_load.load_safely`.
        content: content of the checkpoint, if it has been read. The options then come from it, not from the run folder.
    """
    recipe = run_folder.recipe_of(checkpoint)
    if recipe is not None and content is None:
        return command_line.read_recipe(recipe)
    from cifar_zero.checkpoints.read import RECORD, read  # which imports torch

    record = (content or read(checkpoint, trust, device="meta")).get(RECORD)
    if record is None:
        return None
    plain_data.check(record["config"], f"the configuration in {checkpoint}")
    return flat(settings_of(record["config"]))


def checkpoint_to_resume(settings: Settings) -> str:
    """Returns the path of the checkpoint that --resume names, or "" for a new run. If it is in a run folder, removes
    unfinished files that killed processes left next to it. The checkpoint is not read here, but later by rank 0
    (`training.starting.check_checkpoint`). Raises UsageError if there is no such checkpoint."""
    checkpoint = _checkpoint_of(settings)
    if checkpoint is None:
        return ""
    if run_folder.recipe_of(checkpoint) is not None:
        atomic.remove_unfinished(checkpoint.parent)
    return str(checkpoint)


def _checkpoint_of(settings: Settings) -> Path | None:
    """Returns the checkpoint that --resume names, or None for a new run, also if `auto` finds no checkpoint. First
    completes interrupted renames (see `atomic.recover`). Raises UsageError if there is no such checkpoint.

    In a job that SLURM has requeued, a command resumes the newest checkpoint that it has written itself, whatever
    --resume names. If it fell back to the digits, this may be a checkpoint on the digits. If it has written none, it
    starts as it did the first time.
    """
    restarts = rank_environment.whole_number("SLURM_RESTART_COUNT", os.environ.get("SLURM_RESTART_COUNT", "0"))
    requeued = restarts > 0 and not settings.recipe.only_measures
    resume, out, name = settings.output.resume, Path(settings.output.out), settings.run_name
    if resume.endswith(".safetensors"):
        raise UsageError(f"--resume {resume} contains only weights: start a run from them with --weights {resume}")
    if not resume and not requeued:
        return None
    named = Path(resume or out / name)
    named = named.parent if named.suffix == ".ckpt" else named
    for folder in (named, out / name, out / (name + FALLBACK_SUFFIX)):
        atomic.recover(folder)
    if requeued:
        if own := newest_of({rank_environment.slurm_job()}, str(out), name):
            return own
        if rank_environment.global_rank() == 0:
            say("SLURM has requeued the job before this command wrote a checkpoint: it starts as the first time")
    if resume in ("last", IF_ANY):
        try:
            return run_folder.last_checkpoint(str(out), name, settings.data.source == "digits")
        except UsageError:
            if resume == "last":
                raise
    if resume in ("", IF_ANY):
        return None
    return run_folder.find_checkpoint(resume)


def newest_of(launchers: Collection[str], out: str, name: str) -> Path | None:
    """Returns the newest checkpoint in the run folders of `starts_of`, or None if they have none."""
    candidates: list[Path] = []
    for folder in starts_of(launchers, out, name):
        atomic.recover(folder)
        candidates += run_folder.checkpoints(folder)
    return run_folder.newest(candidates) if candidates else None


def starts_of(launchers: Collection[str], out: str, name: str) -> list[Path]:
    """Returns the folders of the runs named `name` under `out` whose ranks were started by the same torchrun processes
    or in the same SLURM job.

    `launchers` are names as `rank_environment.torchrun_agent` and `slurm_job` return them.
    torchrun's restart count does not show a restart, because it stays the same when a node joins, and is 0 on the new
    node.
    """
    folders: list[Path] = []
    for suffix in ("", FALLBACK_SUFFIX):
        for file in Path(out, name + suffix).glob(f"version_*/{run_folder.RANKS}"):
            try:
                places = plain_data.read_json(file, str(file))
                earlier = {place[kind] for place in places for kind in ("agent", "job") if kind in place}
            except (UsageError, TypeError):  # damaged, for example by a full disk
                continue
            if earlier.intersection(launchers) - {""}:
                folders.append(file.parent)
    return folders


def command_to_resume(run: Run, checkpoint: Path | str) -> str:
    """Returns the command that resumes a run from a checkpoint or run folder. It repeats the flags with which the user
    consents to run code, because no file can give this consent. If another launcher started the ranks, a note on the
    launcher follows the command."""
    model, transform, flags = run.recipe.model.name, run.recipe.augment.transform, [*run.consent.callbacks]
    if issubclass(MODELS[model], UserModel):
        flags += ["--model", model]
    if transform:
        flags += ["--augment.transform", transform]
    if run.consent.trust:
        flags.append("--trust")
    line = command("train", "--resume", checkpoint, *flags)
    if rank_environment.is_rank() and not rank_environment.by_local_launcher():
        line += ", started by the same launcher"
    return line


def command_to_resume_newest(run: Run, run_dir: Path) -> str:
    """Returns the command that resumes a run from the newest checkpoint in its folder `run_dir`, or else from the
    checkpoint that it resumed itself, or "" if there is neither."""
    checkpoint = run_dir if run_folder.checkpoints(run_dir) else run.output.resume
    if checkpoint:
        return command_to_resume(run, checkpoint)
    return ""


def check_same_run(settings: Settings, recipe: dict[str, Any]) -> None:
    """Raises UsageError for the first option that differs from the saved configuration `recipe` although a resumed run
    must not change it. Also raises UsageError if --weights is given and did not already start the saved run."""
    resume, weights = settings.output.resume, settings.recipe.weights
    if weights and not Path(recipe.get("weights", "")).is_relative_to(Path(weights).absolute()):
        raise UsageError(f"--resume {resume} continues with the weights of its checkpoint: remove --weights")
    before, now = flat(recipe), flat(settings)
    source, asked = before.get("data.source", "auto"), settings.data.source
    if source != asked and (asked != "auto" or source not in ("cifar10", "digits")):
        raise UsageError(
            f"--resume {resume}: its run has --data.source {source}, not {asked}: "
            f"continue it with --data.source {source}, or fine-tune it with --weights {resume} and without --resume"
        )
    for option, value in now.items():
        saved = before.get(option, value)
        if saved != value and not may_change_on_resume(option):
            raise UsageError(f"--resume {resume}: its run has --{option} {saved}, not {value}")


def check_classes(images: DataConfig, record: dict[str, Any], checkpoint: object) -> None:
    """Raises UsageError if the classes of the images, or their order, differ from those in the `record` of the
    checkpoint."""
    names, known = [*data.class_names(images)], record["classes"]
    if names != known:
        differing = ", ".join(sorted({*names} ^ {*known})[:6]) or "their order"
        raise UsageError(
            f"{checkpoint} was trained on other classes than --data.source {images.source} ({differing}): give its "
            f"training data, or fine-tune it with --weights {checkpoint}"
        )
