"""Trains and tests a CIFAR classifier: parse -> build -> fit -> test -> summary. Wiring only; see --help."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cifar_zero.checkpoints import run_folder
from cifar_zero.config import command_line, rules
from cifar_zero.config.flags import Config, SourceName
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.core import exits, start_time
from cifar_zero.core.errors import RunError, Stopped, UsageError
from cifar_zero.launch import local_launcher, rank_environment
from cifar_zero.planning import automatic

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from cifar_module import CIFARModule

start_time.note()


def main(figures: bool = True) -> int:
    """Parses the command line and trains, in this process or in the ranks that it starts; returns the exit code.

    Args:
        figures: whether the test's are drawn.
    """
    rank_environment.adopt()
    config = command_line.parse(rank_environment.arguments(sys.argv[1:]))
    if config.strategy == AUTO:
        automatic.settle(config)
    rules.settle(config)
    if config.plot_schedule:
        return plot_schedule(config)
    if config.world_size > 1 and not rank_environment.is_rank():
        if config.num_nodes > 1:
            raise UsageError(
                f"--num_nodes {config.num_nodes}: start it on each machine with {local_launcher.TORCHRUN} ..."
            )
        told = {automatic.VARIABLE: config.strategy}  # what auto has come to
        return local_launcher.run(config.world_size, on_cpu=config.accelerator == "cpu", told=told)
    train(config, figures=figures)
    return 0


def train(
    config: Config,
    module_class: type[CIFARModule] | None = None,
    figures: bool = True,
    last: bool = True,
) -> dict[str, Any]:
    """Trains and tests as one rank; rank 0 leaves the run folder behind.

    Args:
        config: settled by `rules.settle`.
        module_class: makes the module; CIFARModule by default.
        figures: whether the test's are drawn.
        last: whether no other run follows in this process, in the same process group.

    Returns:
        What metrics.json holds, on every rank.
    """
    from cifar_zero.core.console import say
    from cifar_zero.core.quiet import quieten
    from cifar_zero.launch import rendezvous
    from cifar_zero.reports.summary import print_summary, write_json
    from cifar_zero.training import build
    from cifar_zero.training.callbacks.interrupt import SLURM_REQUEUE
    from cifar_zero.training.callbacks.summary import collect, log_hparams
    from datamodule import CIFARDataModule

    quieten()
    build.check_trainer_options(config)
    places = rendezvous.meet(config)
    rendezvous.settle_resume(config, places)
    source = build.check_resume(config)
    start = build.finetuning(config)
    datamodule = build.datamodule(CIFARDataModule, config, source)
    run_dir: Path | None = None
    if rank_environment.local_rank() == 0:
        datamodule.prepare_data()  # before the run is named: auto may have fallen back to the digits
    if rank_environment.global_rank() == 0:
        fell_back = config.data.source == "auto" and datamodule.source == "digits"
        run_dir = run_folder.claim(config.out, config.run_name + run_folder.FALLBACK_SUFFIX * fell_back)
        write_config(config, datamodule.source, run_dir)
        if fell_back and config.resume:
            say("WARNING: this run continues on the embedded handwritten digits INSTEAD OF CIFAR-10, as it began.")
        if start is not None:
            say(start.told(run_dir))
    with run_folder.removed_on_failure(run_dir):
        rendezvous.record(config, places, run_dir)
        rendezvous.limit(config)
        module = build.module(module_class or CIFARModule, config, start)
        trainer = build.trainer(config, run_dir, figures)
    trainer.fit(module, datamodule=datamodule, ckpt_path=config.resume or None)
    if (signal := build.stopped_by(trainer)) is not None:
        trainer.strategy.barrier()
        check_saved(trainer)
        saved = run_dir is not None and not config.only_measures
        if saved and signal == SLURM_REQUEUE:
            requeue()  # while the others wait: srun --kill-on-bad-exit ends the step with the first rank that leaves
        leave(trainer, last)
        raise Stopped(signal, f"the run goes on with --resume {run_dir}" if saved else "")
    if not config.only_measures:
        trainer.test(module, datamodule=datamodule, verbose=False)
    metrics = collect(trainer, module, datamodule, config)
    if run_dir is not None:
        write_json(run_dir / run_folder.METRICS, metrics)
        log_hparams(trainer, config, metrics)
        if not config.find_lr:
            print_summary(metrics, run_dir)
    leave(trainer, last)
    check_saved(trainer)
    return metrics


def plot_schedule(config: Config) -> int:
    """Draws the learning rate over the steps of the run, on rank 0 where others were started beside it."""
    from cifar_zero.reports.learning_rate import draw_schedule
    from cifar_zero.training import build
    from cifar_zero.training.run_steps import run_steps
    from datamodule import CIFARDataModule

    if rank_environment.global_rank() == 0:
        file = Path(config.plot_schedule)
        draw_schedule(
            config.schedule, config.optimizer, run_steps(config, build.datamodule(CIFARDataModule, config)), file
        )
        print(f"the learning rate of {config.schedule.name} is drawn in {file}")
    return 0


def write_config(config: Config, source: str, run_dir: Path) -> None:
    """Writes the recipe that repeats the run from anywhere, with the source that was really used."""
    root, cache = os.path.abspath(config.data.root), config.data.cache and os.path.abspath(config.data.cache)
    data = replace(config.data, source=cast(SourceName, source), root=root, cache=cache)
    (run_dir / run_folder.CONFIG).write_text(command_line.dump(replace(config, data=data)))


def check_saved(trainer: Trainer) -> None:
    """Raises RunError where the newest checkpoint could not be written; called on every rank, known to rank 0."""
    failure = getattr(trainer.strategy.checkpoint_io, "failure", "")
    if failure:
        raise RunError(failure)


def requeue() -> None:
    """Has SLURM start this job again; --resume last is understood there."""
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)


def leave(trainer: Trainer, last: bool) -> None:
    """Waits for the other ranks; after the last run takes down the process group, which complains otherwise."""
    import torch.distributed

    trainer.strategy.barrier()
    if last and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
