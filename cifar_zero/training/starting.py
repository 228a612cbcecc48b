"""Prepares the start of a run: makes the ranks agree on its checkpoint, weights and images, and creates the run
folder."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn

from cifar_zero import data
from cifar_zero.build_model import check_patterns, create_meta_model
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.read import RECORD, check_resumable, read
from cifar_zero.checkpoints.resume import check_classes, check_same_run, checkpoint_to_resume, newest_of
from cifar_zero.checkpoints.weights import Match, load_weights, match, net_weights, read_plain
from cifar_zero.config import command_line, ds_config
from cifar_zero.config.recipe import LoRAConfig
from cifar_zero.config.run import Run
from cifar_zero.core.atomic import write, write_json
from cifar_zero.core.console import say
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_memory_bytes, memory_bytes
from cifar_zero.launch import rank_environment
from cifar_zero.launch.collectives import RankInfo, call_on_rank_0, ranks_on_another_disk
from cifar_zero.models import MODELS, External
from cifar_zero.models.external import pretrained
from cifar_zero.training.resolve import rank_0_decides, with_checkpoint


def agree_on_checkpoint(run: Run, rank_infos: Sequence[RankInfo]) -> Run:
    """Returns the run with the path of the checkpoint that it resumes. On several nodes or under torchrun, rank 0
    chooses it for all ranks. Otherwise `resolve` has already chosen it. Every rank must call it. Raises UsageError if
    there is no checkpoint to resume, or if the strategy cannot resume.

    After torchrun has restarted the ranks, the run resumes from the newest checkpoint that it has written itself, or,
    if there is none, as --resume says.
    """
    if not rank_0_decides(run):
        return run

    def choose() -> str:
        own = newest_of({info.agent for info in rank_infos}, run.output.out, run.run_name)
        if own is None:
            return checkpoint_to_resume(run)
        say(f"torchrun has restarted the run: it resumes from {own}")
        return checkpoint_to_resume(run.changed(resume=str(own)))

    return with_checkpoint(run, call_on_rank_0(choose))


def check_checkpoint(run: Run) -> Mapping[str, int] | None:
    """Checks the checkpoint to resume, and returns the `Dataset.identity` of the images on which its run was trained,
    which the data module compares with that of its own images. Returns None for a new run, or if another program wrote
    the checkpoint. Every rank must call it.

    Rank 0 verifies the checksums, and reads the names and shapes of tensors but not their values. Raises UsageError if
    the checkpoint is damaged, incomplete or not trusted, or if its version, recipe, model or classes differ.
    """

    def checked_identity() -> Mapping[str, int] | None:
        resume = run.output.resume
        checkpoint = read(Path(resume), run.consent.trust, device="meta")
        check_resumable(checkpoint, resume, run.recipe.epochs)
        record = checkpoint.get(RECORD)
        if record is not None:
            check_same_run(run, record["config"])
            check_classes(run.data, record, resume)
        load_weights(create_meta_model(run.recipe, run.num_classes), net_weights(checkpoint), resume)
        return record and record["image_identity"]

    if run.output.resume:
        return call_on_rank_0(checked_identity)
    return None


def agree_on_images(run: Run) -> Run:
    """Returns the run with a fixed image source instead of --data.source auto. Rank 0 prepares CIFAR-10 or, if it is
    not available, the embedded digits, which add a suffix to the name of the run. If the source is already fixed,
    returns the run unchanged. Every rank must call it."""
    if run.data.source != "auto":
        return run
    return run.with_images_of(call_on_rank_0(lambda: data.prepare(run.data)))


def pretrained_weights(run: Run) -> Match | None:
    """Returns the weights from which the training starts, or None for fresh weights or a resumed run. Every rank must
    call it. Raises UsageError if the weights are damaged or belong to another model. Whatever the run starts from, also
    raises UsageError if a pattern of --trainable or --lora.target does not fit the model, or if the model is larger
    than the memory."""
    model = create_meta_model(run.recipe, run.num_classes)
    _check_size(model, run)
    check_patterns(model, run.recipe.trainable, run.recipe.model.options.get("ep_size", 1))
    if run.output.resume:
        return None
    source = run.recipe.weights
    if source:
        weights = read_plain(Path(source), run.consent.trust)
    else:
        entry = MODELS[run.recipe.model.name](**run.recipe.model.options)
        if not isinstance(entry, External) or not entry.weights:
            return None
        weights, source = call_on_rank_0(lambda: pretrained(entry)), entry.weights
    return match(create_meta_model(replace(run.recipe, lora=LoRAConfig()), run.num_classes), weights, source)


def _check_size(model: nn.Module, run: Run) -> None:
    """Raises UsageError if the weights of a model, counted in 16 bits, are larger than the memory of the nodes, so that
    no strategy can train it. With NVMe offload, any size is allowed."""
    elements, nodes = sum(parameter.numel() for parameter in model.parameters()), run.placement.num_nodes
    weights_bytes = 2 * elements
    if weights_bytes <= nodes * memory_bytes() or run.spec.offload_parameters == "nvme":
        return  # the GPUs are not asked, because that starts CUDA in this process
    both_bytes = nodes * (memory_bytes() + sum(gpu_memory_bytes()))
    if weights_bytes > both_bytes:
        raise UsageError(
            f"--model {run.recipe.model.name} has {elements:,} parameters, and they take {weights_bytes / 1e9:,.0f} GB "
            f"of {both_bytes / 1e9:,.0f} GB of memory even in 16 bits: make the model smaller"
        )


def open_run(run: Run, weights: Match | None) -> Path:
    """Creates the run folder, with a recipe file that repeats the run and copies of the files with the user's model and
    transform, and returns its path. Tells `local_launcher` the path, if it started this rank. Prints messages about the
    start of the run, such as how many of the pretrained weights fit. Only rank 0 calls it. Raises UsageError if the
    folder cannot be written."""
    folder = run_folder.claim(run.output.out, run.run_name)
    if rank_environment.by_local_launcher():
        os.write(int(os.environ[rank_environment.FOLDER_FILE]), os.fsencode(folder))
    # Absolute paths: the recipe repeats the run from any directory.
    cache = run.data.cache and os.path.abspath(run.data.cache)
    images = replace(run.data, root=os.path.abspath(run.data.root), cache=cache)
    raw = run.placement.ds_config and os.path.abspath(run.placement.ds_config)
    with run_folder.removed_on_failure(folder):
        recipe = command_line.dump(run.changed(data=images, ds_config=raw))
        write(folder / run_folder.CONFIG, recipe.encode())
        for code in (run.recipe.model.name, run.recipe.augment.transform):
            run_folder.keep_code(folder, code)
    if raw:
        say(ds_config.summary(run.placement.ds_config))
    if run.fell_back and run.output.resume:
        say(
            "WARNING: this run continues on the embedded handwritten digits INSTEAD OF CIFAR-10, because it began on "
            "them."
        )
    if weights is not None:
        say(weights.summary(folder))
    return folder


def record_ranks(run: Run, rank_infos: Sequence[RankInfo], run_dir: Path | None) -> None:
    """Writes the `RankInfo` of each rank into the run folder on several nodes, under torchrun and under SLURM. Raises
    UsageError on all ranks if the nodes do not share the directory --out. Every rank must call it. `run_dir` is None on
    all ranks but rank 0."""
    if run_dir is not None and (rank_0_decides(run) or rank_environment.slurm_job()):
        write_json(run_dir / run_folder.RANKS, [asdict(info) for info in rank_infos])
    if not rank_0_decides(run):
        return
    if hosts := sorted({rank_infos[rank].host for rank in ranks_on_another_disk(run_dir)}):
        raise UsageError(
            f"--out {run.output.out} is not the same directory on {rank_infos[0].host} and {', '.join(hosts)}: name a "
            "directory that all nodes share"
        )
