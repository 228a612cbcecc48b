"""Finds the checkpoint that a run resumes and refuses one of another run, before anything is launched; no torch.

`config/rules/strategy.py` refuses strategies that cannot resume, `training/starting.py` other weights and damage.
"""

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cifar_zero import data
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.safe_load import check_records
from cifar_zero.config import command_line
from cifar_zero.config.flags import Config, DataConfig, config_of, flat
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.core import atomic, plain_data
from cifar_zero.core.errors import UsageError
from cifar_zero.core.programs import command
from cifar_zero.launch import heartbeat, rank_environment
from cifar_zero.models import MODELS, OfUser

KEPT = ("model", "optimizer", "batch_size", "seed", "data.val_fraction", "data.image_size", "data.normalize")
KEPT += ("trainable", "lora.rank", "lora.alpha", "lora.target", "lora.dropout")
"""What a resumed run must keep: otherwise it is another run, and trains on images that were held out before."""

IF_ANY = "auto"  # value of --resume: as last, but starts a run if there is no checkpoint


def before(config: Config, trust: bool = False) -> dict[str, Any] | None:
    """Returns the configuration of the run that --resume names, see `command_line.parse`; None for a new run. Raises
    UsageError: there is no such checkpoint, or it cannot be read."""
    if config.resume == "last" and config.strategy == AUTO and not config.name:
        raise UsageError("--resume last with --strategy auto needs --name: the default name contains the strategy")
    if not (given := restarted(config)):
        return None
    checkpoint = find_recovered(config, given)
    if (tree := recorded(checkpoint, trust)) is None:
        return None
    recipe, images = run_folder.recipe_of(checkpoint), tree.get("data", {})
    fell_back = recipe is None or recipe.parents[1].name.endswith(run_folder.FALLBACK_SUFFIX)
    if fell_back and images.get("source") in ("cifar10", "digits"):
        images["source"] = "auto"  # the checkpoint says which of them it was, and the new run is named for it too
    return tree if Path(given).exists() else {**tree, "out": config.out, "name": config.name}


def recorded(checkpoint: Path, trust: bool = False, content: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Returns the configuration of a checkpoint's run from its run folder, or else from the checkpoint itself, whose
    `content` may be read already; None: neither has one."""
    recipe = run_folder.recipe_of(checkpoint)
    if recipe is not None and content is None:
        return command_line.read_recipe(recipe)
    from cifar_zero.checkpoints.read import RECORD, read  # which imports torch

    record = (content or read(checkpoint, trust, device="meta")).get(RECORD)
    if record is None:
        return None
    plain_data.check(record["config"], f"the configuration in {checkpoint}")
    return yaml.safe_load(command_line.dump(config_of(record["config"])))


def checkpoint_to_resume(config: Config) -> str:
    """Returns the path of the checkpoint that --resume names; empty for a new run. Reads no weights: rank 0 compares
    checksums, names and shapes later, see `training.starting.check_checkpoint`. Raises UsageError: there is none, it is
    incomplete, or of another run."""
    given = restarted(config)
    if not given:
        return ""
    checkpoint = find_recovered(config, given)
    for file in sorted(checkpoint.rglob("*.pt")) if checkpoint.is_dir() else [checkpoint]:
        check_records(file, checksums=False)
    recipe = run_folder.recipe_of(checkpoint)
    if recipe is not None:
        check_same_run(replace(config, resume=given), command_line.read_recipe(recipe))
        atomic.remove_unfinished(checkpoint.parent)
    return str(checkpoint)


def restarted(config: Config) -> str:
    """Replaces `auto` by the newest checkpoint of the run's name; after a SLURM requeue, replaces any --resume value. A
    requeued job resumes its own checkpoint, on the digits too if it fell back to them. Before it has written one,
    `auto` becomes empty and any other value stays."""
    restarts = rank_environment.whole_number("SLURM_RESTART_COUNT", os.environ.get("SLURM_RESTART_COUNT", "0"))
    requeued = restarts > 0 and not config.only_measures
    if not requeued and config.resume != IF_ANY:
        return config.resume
    try:
        return str(find_recovered(config, "last", requeued))
    except UsageError:
        return "" if config.resume == IF_ANY else config.resume


def newest_of(agents: Collection[str], out: str, name: str) -> Path | None:
    """Returns the newest checkpoint that earlier ranks of the same torchrun processes wrote; None before the first one.
    torchrun's restart count does not show a restart: it stays the same when a node joins, and is 0 on the new node. For
    the names of its processes see `rank_environment.torchrun_agent`."""
    found: list[Path] = []
    folders = (Path(out, name + suffix) for suffix in ("", run_folder.FALLBACK_SUFFIX))
    for file in (file for folder in folders for file in folder.glob(f"version_*/{run_folder.RANKS}")):
        try:
            earlier = {place["agent"] for place in plain_data.read_json(file, str(file))}
        except (UsageError, TypeError, KeyError):  # damaged, by a full disk for example
            continue
        if earlier.intersection(agents) - {""}:
            atomic.recover(file.parent)
            found += run_folder.checkpoints(file.parent)
    return run_folder.newest(found) if found else None


def resuming(run: Run, checkpoint: Path | str) -> str:
    """Returns the command that resumes a run; consent to run its code must be on the command line."""
    model, transform, flags = run.config.model.name, run.config.augment.transform, [*run.consent.callbacks]
    flags += ["--model", model] if issubclass(MODELS[model], OfUser) else []
    flags += ["--augment.transform", transform] if transform else []
    flags += ["--trust"] if run.consent.trust else []
    launched = rank_environment.is_rank() and heartbeat.VARIABLE not in os.environ  # and not by this program
    return command("train", "--resume", checkpoint, *flags) + ", started by the same launcher" * launched


def from_newest(run: Run, run_dir: Path) -> str:
    """Returns the command that resumes a run from its newest checkpoint, or from the one that it resumed itself; empty
    if there is none."""
    checkpoint = run_dir if run_folder.checkpoints(run_dir) else run.config.resume
    return resuming(run, checkpoint) if checkpoint else ""


def find_recovered(config: Config, given: str, fallback: bool = False) -> Path:
    """Returns the checkpoint that a value of --resume names, after interrupted renames of checkpoints were completed;
    see `run_folder.last_checkpoint` for `fallback`, which --data.source digits implies."""
    if given.endswith(".safetensors"):
        raise UsageError(f"--resume {given} is a file of weights only: start a run from it with --weights {given}")
    out, name = Path(config.out), config.run_name
    for folder in (Path(given), out / name, out / (name + run_folder.FALLBACK_SUFFIX)):
        if folder.is_dir():
            atomic.recover(folder)
    if given == "last":
        return run_folder.last_checkpoint(config.out, name, fallback or config.data.source == "digits")
    return run_folder.find_checkpoint(given)


def check_same_run(config: Config, recipe: dict[str, Any]) -> None:
    """Refuses to continue a run with another `recipe`. Raises UsageError: names the first option that differs."""
    if config.weights and not Path(recipe.get("weights", "")).is_relative_to(Path(config.weights).absolute()):
        raise UsageError(f"--resume {config.resume} continues with the weights of its checkpoint: remove --weights")
    before, now = flat(recipe), flat(config)
    source = before.get("data.source", "auto")
    may_continue = ("cifar10", "digits") if config.data.source == "auto" else (config.data.source,)
    if source not in ("auto", *may_continue):
        raise UsageError(
            f"--resume {config.resume}: that run trained on --data.source {source}, this one has {config.data.source}: "
            f"--data.source {source} continues it, --weights {config.resume} without --resume fine-tunes it"
        )
    for option in now:
        kept = any(option == key or option.startswith(f"{key}.") for key in KEPT)
        kept = kept and option != "model.ep_size"  # it says where the run is, not what it is
        if kept and option in before and before[option] != now[option]:
            raise UsageError(f"--resume {config.resume}: that run had --{option} {before[option]}, not {now[option]}")


def other_classes(images: DataConfig, record: dict[str, Any]) -> str:
    """Returns which classes of the images are not those of the run that left the record; empty if all are the same."""
    names, known = [*data.class_names(images)], record["classes"]
    return "" if names == known else ", ".join(sorted({*names} ^ {*known})[:6]) or "their order"


def source_of(config: Config, record: dict[str, Any]) -> Any:
    """Returns the source of images that a resumed run continues on: the one that it had, also for --data.source auto.
    `record` is the checkpoint's, checked by `check_same_run`. Raises UsageError: the source has other classes."""
    source = record["config"]["data"]["source"]
    if differing := other_classes(replace(config.data, source=source), record):
        raise UsageError(
            f"--resume {config.resume}: that run had other classes than --data.source {source} now has ({differing}): "
            f"give the data that it had, or fine-tune it with --weights {config.resume} without --resume"
        )
    return source
