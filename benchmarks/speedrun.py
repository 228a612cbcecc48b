"""Measures configs/speedrun.yaml run after run in one process: accuracy, time, FLOPs, and what each trick is worth.
All other flags are train.py's.

The clock is that of the records (airbench94_muon.py): the whitening, the training, and the test with its views, on
images that are on the device already. A short warm-up run comes first and is not timed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from statistics import fmean, median, stdev

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.loops import speedrun as eager
from benchmarks.loops.common import now
from cifar_module import CIFARModule
from cifar_zero.config import command_line
from cifar_zero.config.settings import Settings, make_settings
from cifar_zero.core import exits
from cifar_zero.core.console import quieten
from cifar_zero.core.errors import UsageError
from cifar_zero.training import fast_loop
from cifar_zero.training.callbacks.averaging import BatchNormStatistics
from cifar_zero.training.callbacks.cpu_kernels import CPUKernels
from cifar_zero.training.callbacks.flops import training_flops
from cifar_zero.training.resolve import make_run, resolve
from datamodule import CIFARDataModule

RECIPE = ["--config", "configs/speedrun.yaml", "--logger", "none"]

WHOLE = "the recipe"
"""The recipe's row in the table."""

UNUSED = ["ema", "swa_from", "early_stopping", "weights", "delta", "resume", "bench_steps", "plot_schedule"]
UNUSED += ["save_every_n_steps", "save_every_minutes", "save_weights", "on_nan"]
"""Options of train.py that do nothing here: runs have no validation, start from fresh weights and write no files."""

TRICKS = {
    "without: weight decay": "--optimizer.weight_decay 0",
    "without: linear schedule": "--schedule constant",
    "without: label smoothing": "--label_smoothing 0",
    "without: alternating flip, not random": "--augment.flip random",
    "without: any flip": "--augment.flip none",
    "without: translation": "--augment.crop 0 --augment.padding black",
    "without: reflected border, not black": "--augment.padding black",
    "without: the head's own learning rate": "--optimizer.head_lr {bias_lr}",
    "the recipe, --tta none": "--tta none",
}
"""The other rows of the table: flags added to the recipe's, with numbers of the recipe in braces."""


@dataclass
class Result:
    """The figures of one run."""

    accuracy: float
    """Test accuracy, in percent."""
    seconds: float
    """Seconds by the records' clock."""
    epochs: list[float]
    """Seconds of each epoch."""
    steps: int
    """Optimizer steps."""


class Clock(Callback):
    """Times the epochs and the test; on a GPU it first waits until all queued work is done."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        """Seconds of each epoch."""
        self.test = 0.0
        """Seconds of the test."""
        self._begun = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock of the first epoch, or of the test."""
        self._begun = now(pl_module.device)

    on_test_start = on_train_start

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes an epoch's time and starts the next one's clock."""
        ended = now(pl_module.device)
        self.epochs.append(ended - self._begun)
        self._begun = ended

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the test's time."""
        self.test = now(pl_module.device) - self._begun


def main() -> int:
    """Measures and prints; returns the exit code."""
    given, flags = options()
    quieten()
    recipe = settled(flags)
    configs = {WHOLE: recipe}
    if given.table:
        configs |= {name: settled([*flags, *switch]) for name, switch in tricks(recipe).items()}
    warm_up(list(configs.values()))
    results: dict[str, list[Result]] = {name: [] for name in configs}
    loops: list[list[float]] = []
    for number, (name, config) in itertools.product(range(given.runs), configs.items()):
        own, with_loop = config.changed(seed=config.recipe.seed + number), given.loop and name == WHOLE
        # The two alternate which comes first: the second reuses memory that the first has freed.
        if with_loop and number % 2:
            loops.append(loop_of(own))
        result = run(own)
        results[name].append(result)
        figures = f"{result.accuracy:.2f} %, {result.seconds:.2f} s"
        print(f"run {number + 1} of {given.runs}: {name}: {figures}", file=sys.stderr, flush=True)
        if with_loop and not number % 2:
            loops.append(loop_of(own))
    show(recipe, results[WHOLE], loops)
    if given.table:
        print(table(results))
    return 0


def options() -> tuple[argparse.Namespace, list[str]]:
    """Parses the command line into this program's options and train.py's flags."""
    parser = exits.Parser(prog="python -m benchmarks.speedrun", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="timed runs, with consecutive seeds (default: 5)")
    parser.add_argument("--loop", action="store_true", help="compare each run with an eager loop over the same model")
    parser.add_argument("--table", action="store_true", help="measure what each trick is worth, switching it off")
    given, flags = parser.parse_known_args()
    if given.runs < 1:
        raise UsageError(f"--runs must be at least 1, not {given.runs}")
    return given, [*RECIPE, *flags]


def settled(flags: list[str]) -> Settings:
    """Returns the configuration of a run on one device, checked as train.py checks it."""
    config = command_line.parse(flags)
    for name in UNUSED:
        if config.option(name) != make_settings().option(name):
            raise UsageError(f"--{name} does nothing in this benchmark: leave it out, or use train.py")
    resolved = resolve(config)
    if config.placement.strategy != "baseline" or resolved.placement.world_size > 1:
        raise UsageError("the speedrun is measured on one device: leave --strategy and --devices out")
    return resolved


def tricks(settings: Settings) -> dict[str, list[str]]:
    """Returns the flags of each of the table's other rows."""
    bias_lr = settings.recipe.optimizer.options.get("bias_lr")
    return {name: flags.format(bias_lr=bias_lr).split() for name, flags in TRICKS.items()}


def warm_up(configs: list[Settings]) -> None:
    """Runs what is not timed: memory allocation, and on a GPU each variant's compilation and cuDNN's trials."""
    first = configs[0]
    if first.placement.compile or first.placement.cuda_graphs:
        import torch._dynamo

        # Each variant compiles one function twice (training, test); torch (2.15) keeps eight
        # compilations of a function and then gives up.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    all_of_them = first.placement.compile or first.placement.cuda_graphs or first.placement.accelerator == "gpu"
    for config in configs if all_of_them else [first]:
        run(config.changed(max_steps=3, epochs=1))


def run(settings: Settings) -> Result:
    """Trains and tests once with train.py's module, images and loop, and writes no files."""
    resolved = make_run(settings)
    module, images = CIFARModule(resolved, resolved.num_classes), CIFARDataModule(settings)
    clock = Clock()
    callbacks: list[Callback] = [BatchNormStatistics(), clock]
    if settings.placement.accelerator == "cpu":
        flops = training_flops(settings.recipe.model, resolved.num_classes, resolved.micro_batch)
        callbacks.append(CPUKernels(flops, settings.placement.precision))
    trainer = Trainer(
        accelerator=settings.placement.accelerator,
        devices=1,
        precision=settings.placement.precision,  # pyright: ignore[reportArgumentType]
        max_epochs=settings.recipe.epochs,
        max_steps=settings.recipe.max_steps,
        accumulate_grad_batches=settings.placement.accumulate,
        gradient_clip_val=settings.recipe.gradient_clip_val or None,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **settings.recipe.trainer,
    )
    fast_loop.install(trainer)
    trainer.fit(module, datamodule=images)
    begun = now(module.device)
    module.starting_weights()  # again, to time it: the run computed them before its first hook
    seconds, training = now(module.device) - begun, sum(clock.epochs)
    trainer.test(module, datamodule=images, verbose=False)
    accuracy = 100 * float(trainer.callback_metrics["test/acc"])
    return Result(accuracy, seconds + training + clock.test, clock.epochs, trainer.global_step)


def loop_of(settings: Settings) -> list[float]:
    """Returns the seconds of each epoch of the eager loop."""
    images = CIFARDataModule(settings)
    images.setup()
    return eager.train(
        settings, images.dataset, torch.device("cuda" if settings.placement.accelerator == "gpu" else "cpu")
    )


def show(settings: Settings, results: list[Result], loops: list[list[float]]) -> None:
    """Prints the figures of the recipe."""
    images = CIFARDataModule(settings)
    images.setup()
    steps, per_step = (
        results[0].steps,
        training_flops(settings.recipe.model, len(images.classes), settings.recipe.batch_size),
    )
    cpu = f"the CPU, {torch.get_num_threads()} threads"
    device = torch.cuda.get_device_name() if settings.placement.accelerator == "gpu" else cpu
    print(f"{len(results)} runs on {device}, {settings.placement.precision}, torch {torch.__version__}")
    print(f"{images.dataset.name}: {images.num_train:,} images to train, {images.num_test:,} to test")
    print(f"{steps} steps of {settings.recipe.batch_size} images, {per_step * steps:.3g} FLOPs of training")
    print(f"accuracy {spread([result.accuracy for result in results])} %")
    print(f"time {spread([result.seconds for result in results])} s: whitening, training and test")
    print(f"an epoch {median(itertools.chain(*(result.epochs for result in results))):.3f} s, the median")
    if loops:
        # Epochs are compared one by one: a run's first epoch allocates memory on both sides.
        ours = itertools.chain(*(result.epochs for result in results))
        ratios = [theirs / own for own, theirs in zip(ours, itertools.chain(*loops), strict=True)]
        bounds = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"an epoch of the eager loop takes {median(ratios):.2f} times as long ({bounds})")


def table(results: dict[str, list[Result]]) -> str:
    """Returns a Markdown table of the variants; differences and ratios are to the recipe's run with the same seed."""
    lines = ["| | test accuracy, % | difference | time |", "|---|---|---|---|"]
    for name, own_results in results.items():
        pairs = list(zip(own_results, results[WHOLE], strict=True))
        difference = fmean(own.accuracy - base.accuracy for own, base in pairs)
        ratio = median(own.seconds / base.seconds for own, base in pairs)
        accuracy = spread([result.accuracy for result in own_results])
        lines.append(f"| {name} | {accuracy} | {difference:+.2f} | {ratio:.2f} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Formats the mean and the standard deviation."""
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
