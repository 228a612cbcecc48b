"""Trains and tests a CIFAR classifier: resolve -> prepare the data -> build -> fit -> test -> report; see --help."""

from cifar_zero.core.interrupt import start

if __name__ == "__main__":
    start("train")  # imports this file with all that it imports, and runs `main`

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cifar_zero.checkpoints import resume, run_folder
from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import AUTO
from cifar_zero.core import start_time
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.core.programs import torchrun
from cifar_zero.launch import local_launcher, other_programs, rank_environment
from cifar_zero.planning import automatic
from cifar_zero.training.resolve import resolve

start_time.note()


def main() -> int:
    """Parses the command line and trains, in this process or in the ranks that it starts; returns the exit code."""
    rank_environment.adopt()
    consent = command_line.consent()
    config = command_line.parse(before=partial(resume.before, trust=consent.trust))
    chosen = ["--strategy", automatic.choose(config)] if config.strategy == AUTO else []
    config = replace(config, strategy=chosen[-1]) if chosen else config
    run = resolve(config, consent, starts=not (config.plot_schedule or config.check_gradients))
    if config.plot_schedule:
        return plot_schedule(run)
    if config.check_gradients:
        from cifar_zero.training.gradient_check import check_gradients

        return check_gradients(run)
    if run.config.world_size > 1 and not rank_environment.is_rank():
        if run.config.num_nodes > 1:
            raise UsageError(f"--num_nodes {config.num_nodes}: start it on each node with {torchrun('train')} ...")
        how_to_resume = partial(resume.from_newest, run)
        return local_launcher.run(run.config.world_size, run.on_cpu, chosen, how_to_resume)
    train(run)
    return 0


def train(run: Run, module_class: Callable[..., Any] | None = None, last: bool = True) -> dict[str, Any]:
    """Trains and tests as one rank; rank 0 leaves the run folder behind. Returns metrics.json's content on every rank.
    `module_class` makes the module in place of CIFARModule; after the `last` run the process group is destroyed."""
    before = other_programs.usage()
    # Here, as they import torch and Lightning: --help and errors in the command line come at once.
    from cifar_module import CIFARModule
    from cifar_zero.checkpoints.io import failure_of
    from cifar_zero.core.console import quieten
    from cifar_zero.launch import rendezvous
    from cifar_zero.reports.summary import print_summary, write_json
    from cifar_zero.training import build, starting
    from cifar_zero.training.callbacks import stop
    from cifar_zero.training.callbacks.summary import collect, log_results
    from datamodule import CIFARDataModule

    quieten()
    build.check_trainer_options(run.config)
    places = rendezvous.meet(run)
    run = starting.agree_on_checkpoint(run, places)
    source, images = starting.check_checkpoint(run)
    weights = starting.pretrained_weights(run)

    datamodule = CIFARDataModule(run.config, source, images)
    if rank_environment.local_rank() == 0:
        datamodule.prepare_data()  # before the run is named: auto may fall back to the digits
    is_rank_0 = rank_environment.global_rank() == 0
    run_dir = starting.open_run(run, datamodule.source, weights) if is_rank_0 else None

    with run_folder.removed_on_failure(run_dir):
        starting.record_places(run, places, run_dir)
        rendezvous.limit(run)
        module = (module_class or CIFARModule)(run.config, run.num_classes, weights and weights.loaded)
        trainer = build.trainer(run, run_dir)
    if is_rank_0 and run.on_cpu:
        other_programs.warn(before, other_programs.usage())

    with stop.reported(trainer, run, run_dir):
        trainer.fit(module, datamodule=datamodule, ckpt_path=run.config.resume or None)
        stop.check_stopped(trainer, run, run_dir, last)
        if not run.config.only_measures:
            trainer.test(module, datamodule=datamodule, verbose=False)

        metrics = collect(trainer, module, datamodule, run.config)
        unwritten = ""
        if run_dir is not None:
            file = run_dir / run_folder.METRICS
            failure = failure_of(lambda: write_json(file, metrics))
            unwritten = f"{file} could not be written: {failure}" if failure else ""
            log_results(trainer, run.config, metrics)
            if not run.config.find_lr:
                print_summary(metrics, run_dir)
        stop.leave(trainer, last)
    stop.check_saved(trainer)
    if unwritten:
        raise RunError(unwritten)
    return metrics


def plot_schedule(run: Run) -> int:
    """Draws the learning rate over the steps of the run, on rank 0; returns the exit code."""
    from cifar_zero.reports.figures import draw_schedule
    from cifar_zero.training import build
    from datamodule import CIFARDataModule

    config = run.config
    if rank_environment.global_rank() == 0:
        steps = build.run_steps(config, CIFARDataModule(config))
        file = Path(config.plot_schedule)
        file.parent.mkdir(parents=True, exist_ok=True)
        draw_schedule(config.schedule, config.optimizer, steps, file)
        print(f"the learning rate of {config.schedule.name} is drawn in {config.plot_schedule}")
    return 0
