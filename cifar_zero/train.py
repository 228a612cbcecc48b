"""Trains and tests a CIFAR classifier: resolve -> prepare the data -> build -> fit -> test -> report; see --help."""

import os
from functools import partial
from pkgutil import resolve_name
from typing import Any

from cifar_zero.checkpoints import resume, run_folder
from cifar_zero.config import command_line
from cifar_zero.config.run import Run, run_of_bytes
from cifar_zero.core.console import quieten, torchrun
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.launch import local_launcher, rank_environment
from cifar_zero.planning import estimates
from cifar_zero.training import DATAMODULE, MODULE
from cifar_zero.training.resolve import announce, resolve


def main() -> int:
    """Parses the command line, and trains the run in this process or in ranks that it starts. Returns the exit code.

    Ranks that this program starts read the resolved run from it. Ranks of another launcher, such as torchrun, each
    parse the command line. Raises UsageError if a run on several nodes is started without such a launcher.
    """
    if rank_environment.by_local_launcher():
        run = run_of_bytes(rank_environment.content_of(int(os.environ[rank_environment.RUN_FILE])))
        command_line.allow_code(run.recipe.model.name, run.recipe.augment.transform)
        train(run)
        return 0
    rank_environment.set_torchrun_variables()
    run = resolve(estimates.without_auto(command_line.parse(earlier_run=resume.saved_config)))
    if rank_environment.global_rank() == 0:
        announce(run)
    if run.placement.world_size == 1 or rank_environment.is_rank():
        train(run)
        return 0
    if run.placement.num_nodes > 1:
        raise UsageError(f"--num_nodes {run.placement.num_nodes}: start it on each node with {torchrun('train')} ...")
    how_to_resume = partial(resume.command_to_resume_newest, run)
    return local_launcher.run_ranks(run.placement.world_size, run.on_cpu, run.to_bytes(), how_to_resume)


def train(run: Run) -> dict[str, Any]:
    """Trains and tests a resolved run. Every rank of the run must call it. Rank 0 writes the run folder, and every rank
    returns the content of metrics.json. At the end the process group is destroyed. If the run fails before the
    training, or later with UsageError, its folder is removed unless it has a checkpoint.

    Raises:
        UsageError: If the options, checkpoint, weights or images do not fit the run, or if no step was trained.
        RunError: If ranks do not connect or images cannot be prepared, or if the run diverges. On rank 0 also if
            metrics.json or the newest checkpoint could not be written.
        FaultFound: On rank 0, if --audit or --check_steps has found a fault.
        Stopped: If a signal has stopped the run.
    """
    # Imported here, so that --help and errors in the command line do not wait for torch and Lightning.
    from cifar_zero.launch import collectives
    from cifar_zero.training import build, loggers, results, starting
    from cifar_zero.training.callbacks import stop

    quieten()
    build.check_trainer_options(run)
    rank_infos = collectives.init_process_group(run)
    run = starting.agree_on_checkpoint(run, rank_infos)
    identity = starting.check_checkpoint(run)
    weights = starting.pretrained_weights(run)
    run = starting.agree_on_images(run)

    # Lightning calls the data module's methods again, which then do nothing. They are called here first, so that
    # bad images end the run before its folder exists.
    datamodule = resolve_name(DATAMODULE)(run, identity)
    if rank_environment.local_rank() == 0:
        datamodule.prepare_data()
    collectives.gather(None)  # waits until rank 0 of each node has prepared the images
    datamodule.setup()
    is_rank_0 = rank_environment.global_rank() == 0
    run_dir = starting.open_run(run, weights) if is_rank_0 else None

    with run_folder.removed_on_failure(run_dir):
        starting.record_ranks(run, rank_infos, run_dir)
        collectives.await_training(run)
        module = resolve_name(MODULE)(run, run.num_classes, weights and weights.loaded)
        trainer = build.trainer(run, run_dir)

    with run_folder.removed_on_failure(run_dir, UsageError), stop.reported(trainer, run, run_dir):
        with build.refusals(run):
            trainer.fit(module, datamodule=datamodule, ckpt_path=run.output.resume or None)
        stop.check_stopped(trainer, run, run_dir)
        if not trainer.global_step:
            raise UsageError("no step was trained: check the options of --trainer and the number of training images")
        if not run.recipe.only_measures:
            with build.refusals(run):
                trainer.test(module, datamodule=datamodule, verbose=False)

        metrics = results.collect(trainer, module, datamodule, run)
        unwritten = ""
        if run_dir is not None:
            unwritten = results.report(metrics, run_dir)
            loggers.log_results(trainer, run, metrics)
        stop.shutdown(trainer)
    stop.check_saved(trainer)
    if unwritten:
        raise RunError(unwritten)
    launchers = {name for info in rank_infos for name in (info.agent, info.job)}
    build.check_audited(trainer, run_dir, resume.starts_of(launchers, run.output.out, run.run_name))
    return metrics
