"""The start of a run on all ranks: its checkpoint or weights, its folder, and what the nodes must agree on."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.finetuning.load import Match, match, read_plain, together
from cifar_zero.checkpoints.finetuning.network import check_patterns, on_meta
from cifar_zero.checkpoints.read import RECORD, check_resumable, load_weights, network, plain_network, read
from cifar_zero.checkpoints.resume import check_same_run, checkpoint_to_resume, newest_of, source_of
from cifar_zero.config import command_line, ds_config
from cifar_zero.config.flags import SourceName
from cifar_zero.config.run import Run
from cifar_zero.core.console import say
from cifar_zero.core.errors import UsageError
from cifar_zero.core.programs import command
from cifar_zero.launch import rank_environment
from cifar_zero.launch.collectives import by_rank_0, ranks_on_another_disk
from cifar_zero.launch.rendezvous import Place
from cifar_zero.models import MODELS, External
from cifar_zero.models.external import pretrained
from cifar_zero.reports.summary import write_json
from cifar_zero.training.resolve import rank_0_decides, with_checkpoint


def agree_on_checkpoint(run: Run, places: Sequence[Place]) -> Run:
    """Returns the run with the checkpoint that it resumes, the same on all ranks, if that is not resolved yet. After
    torchrun has restarted the ranks it is the newest checkpoint of this very run, whatever --resume names. Before the
    first one is written, the run begins again. Raises UsageError: there is none, or of another run."""
    if not rank_0_decides(run.config):
        return run

    def found() -> str:
        config = run.config
        if own := newest_of({place.agent for place in places}, config.out, config.run_name):
            config = replace(config, resume=str(own))
            say(f"torchrun has restarted the run: it resumes from {own}")
        return checkpoint_to_resume(config)

    return with_checkpoint(run, by_rank_0(found))


def check_checkpoint(run: Run) -> tuple[SourceName | None, Mapping[str, int] | None]:
    """Refuses a checkpoint that cannot be resumed, and returns the source of its images and their `Dataset.identity`;
    None for a run that begins. Every rank must call it. Only rank 0 reads: it compares the checksums, and reads names
    and shapes without the tensors' values. Raises UsageError: it is damaged, incomplete, of another version, another
    model or other images, or cannot be trusted."""
    config = run.config

    def images() -> tuple[SourceName | None, Mapping[str, int] | None]:
        model = on_meta(config.model, run.num_classes, config.trainable, config.lora)
        checkpoint = read(Path(config.resume), run.consent.trust, device="meta")
        check_resumable(checkpoint, config.resume)
        load_weights(model, network(checkpoint), config.resume)
        if RECORD in checkpoint:
            check_same_run(config, checkpoint[RECORD]["config"])
            return source_of(config, checkpoint[RECORD]), checkpoint[RECORD]["images"]
        return None, None

    return by_rank_0(images) if config.resume else (None, None)


def pretrained_weights(run: Run) -> Match | None:
    """Returns the weights to start from; None for fresh ones or a resumed run. Raises UsageError: they are damaged or
    of another model, or --trainable or --lora.target names nothing."""
    config = run.config
    model = on_meta(config.model, run.num_classes, config.trainable, config.lora)
    check_patterns(model, config.trainable, config.model.options.get("ep_size", 1))
    entry, file, source = MODELS[config.model.name](**config.model.options), Path(config.weights), config.weights
    if config.resume:
        return None
    if config.delta:
        weights = plain_network(together(file, Path(config.delta), run.consent.trust))
    elif source:
        weights = read_plain(file, run.consent.trust)
    elif isinstance(entry, External) and entry.weights:
        weights, source = by_rank_0(lambda: pretrained(entry)), entry.weights
    else:
        return None
    return match(on_meta(config.model, run.num_classes), weights, source)


def open_run(run: Run, source: str, weights: Match | None) -> Path:
    """Returns the new run folder, and prints what a user should know of the run's start; for rank 0. The folder has the
    recipe that repeats the run. If --data.source auto fell back to the digits (`source`), its name says so. Raises
    UsageError: the folder cannot be written."""
    config = run.config
    fell_back = config.data.source == "auto" and source == "digits"
    folder = run_folder.claim(config.out, config.run_name + run_folder.FALLBACK_SUFFIX * fell_back)
    if file := os.environ.get(rank_environment.RUN_FILE):
        Path(file).write_text(str(folder))
    # Absolute paths: the recipe repeats the run from any directory.
    cache = config.data.cache and os.path.abspath(config.data.cache)
    data = replace(config.data, source=cast(SourceName, source), root=os.path.abspath(config.data.root), cache=cache)
    raw = config.ds_config and os.path.abspath(config.ds_config)
    (folder / run_folder.CONFIG).write_text(command_line.dump(replace(config, data=data, ds_config=raw)))
    if raw:
        flags = ds_config.flags_of(ds_config.options(ds_config.read(raw), vars(config), ()))
        say(f"{config.ds_config} stands for {command('train', *flags)}; the rest goes to DeepSpeed")
    for code in (config.model.name, config.augment.transform):
        run_folder.keep_code(folder, code)
    if fell_back and config.resume:
        say("WARNING: this run continues on the embedded handwritten digits INSTEAD OF CIFAR-10, as it began.")
    if weights is not None:
        say(weights.summary(folder))
    return folder


def record_places(run: Run, places: Sequence[Place], run_dir: Path | None) -> None:
    """Writes the places of the ranks into the run folder of rank 0, and checks that all nodes share --out. Raises
    UsageError: they do not; on all ranks."""
    if not rank_0_decides(run.config):
        return
    if run_dir is not None:
        write_json(run_dir / run_folder.RANKS, [asdict(place) for place in places])
    if hosts := sorted({places[rank].host for rank in ranks_on_another_disk(run_dir)}):
        raise UsageError(
            f"--out {run.config.out}: {', '.join(hosts)} cannot see what {places[0].host} writes there: name a "
            "directory that all nodes share"
        )
