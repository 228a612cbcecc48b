"""Measures configs/speedrun.yaml run after run in one process: accuracy, time, FLOPs, and what each trick is worth.
All other flags are train.py's.

The clock is that of the records (airbench94_muon.py): the whitening, the training, and the test with its views, on
images that are on the device already. A short warm-up run comes first and is not timed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.loops import speedrun as eager
from benchmarks.loops.common import now
from cifar_module import CIFARModule
from cifar_zero.config import command_line
from cifar_zero.config.flags import Config
from cifar_zero.core import exits
from cifar_zero.core.console import quieten
from cifar_zero.core.errors import UsageError
from cifar_zero.training import fast_loop
from cifar_zero.training.callbacks.averaging import BatchNormStatistics
from cifar_zero.training.callbacks.cpu_kernels import CPUKernels
from cifar_zero.training.callbacks.flops import training_flops
from cifar_zero.training.resolve import of_machine, resolve
from datamodule import CIFARDataModule

RECIPE = ["--config", "configs/speedrun.yaml", "--logger", "none"]

WHOLE = "the recipe"
"""The recipe's row in the table."""

COMPILING_STEPS = 5
"""Steps that are not timed with `--compile step`, as each run compiles its own: one as usual, the compilation, the
recording of a CUDA graph."""

UNUSED = ["ema", "swa_from", "early_stopping", "weights", "delta", "resume", "bench_steps", "find_lr", "plot_schedule"]
UNUSED += ["save_every_n_steps", "save_every_minutes", "save_weights", "on_nan"]
"""Options of train.py that do nothing here: runs have no validation, start from fresh weights and write no files."""

TRICKS = {
    "without: whitened first layer": "--model.whitening false",
    "without: identity at first": "--model.identity_init false",
    "without: statistics of the last few batches": "--model.norm_momentum 0.1",
    "without: orthogonal steps (Muon)": "--optimizer.ns_steps 0",
    "without: filters of one length": "--optimizer.normalize false",
    "without: whitening bias for 3/8 of the steps": "--optimizer.first_bias_share 1",
    "without: weight decay": "--optimizer.weight_decay 0",
    "without: linear schedule (nor 3/8 for the whitening bias)": "--schedule constant --optimizer.first_bias_share 1",
    "without: label smoothing": "--label_smoothing 0",
    "without: alternating flip, not random": "--augment.flip random",
    "without: any flip": "--augment.flip none",
    "without: translation": "--augment.crop 0 --augment.padding black",
    "without: reflected border, not black": "--augment.padding black",
    "without: the head's own learning rate": "--optimizer.head_lr {bias_lr}",
    # rounded values of github.com/hiverge/cifar10-speedrun
    "with: brightness 0.14 and contrast 0.13": "--augment.brightness 0.14 --augment.contrast 0.13",
    "with: SiLU, not GELU": "--model.activation silu",
    "with: filters of one length every 4 steps": "--optimizer.normalize_every 4",
    "with: 24 x 24 pixels in 3/8 of the epochs": "--augment.low_resolution 24 --augment.low_epochs {low_epochs}",
    "the recipe, --tta none": "--tta none",
    "the recipe, --tta uncertain": "--tta uncertain",
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

    def __init__(self, compiles: bool = False) -> None:
        self._compiles = compiles
        self.epochs: list[float] = []
        """Seconds of each epoch."""
        self.first_steps = 0.0
        """Seconds of the first steps, with the compilation of a step."""
        self.test = 0.0
        """Seconds of the test."""
        self._begun = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock of the first epoch, or of the test."""
        self._begun = now(pl_module.device)

    on_test_start = on_train_start

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Notes the time of the first steps, only if it counts: to read the clock waits for the GPU."""
        if self._compiles and trainer.global_step == COMPILING_STEPS:
            self.first_steps = sum(self.epochs) + now(pl_module.device) - self._begun

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
        own, with_loop = replace(config, seed=config.seed + number), given.loop and name == WHOLE
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


def settled(flags: list[str]) -> Config:
    """Returns the configuration of a run on one device, checked as train.py checks it."""
    config = command_line.parse(flags)
    for name in UNUSED:
        if getattr(config, name) != getattr(Config(), name):
            raise UsageError(f"--{name} does nothing in this benchmark: leave it out, or use train.py")
    resolved = resolve(config)
    if config.strategy != "baseline" or resolved.config.world_size > 1:
        raise UsageError("the speedrun is measured on one device: leave --strategy and --devices out")
    return resolved.config


def tricks(config: Config) -> dict[str, list[str]]:
    """Returns the flags of each of the table's other rows."""
    numbers = {"low_epochs": max(1, round(3 / 8 * config.epochs)), "bias_lr": config.optimizer.options.get("bias_lr")}
    return {name: flags.format(**numbers).split() for name, flags in TRICKS.items()}


def warm_up(configs: list[Config]) -> None:
    """Runs what is not timed: memory allocation, and on a GPU each variant's compilation and cuDNN's trials."""
    first = configs[0]
    if first.compile or first.cuda_graphs:
        import torch._dynamo

        # Each variant compiles one function three times (training, smaller images, test); torch (2.15) keeps eight
        # compilations of a function and then gives up.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    all_of_them = first.compile or first.cuda_graphs or first.accelerator == "gpu"
    for config in configs if all_of_them else [first]:
        run(replace(config, max_steps=3, epochs=1))


def run(config: Config, more: Sequence[Callback] = ()) -> Result:
    """Trains and tests once with train.py's module, images and loop, and writes no files; `more`: other callbacks."""
    resolved = of_machine(config)
    module, images = CIFARModule(resolved.config, resolved.num_classes), CIFARDataModule(config)
    compiles = config.compile == "step"
    clock = Clock(compiles)
    callbacks: list[Callback] = [BatchNormStatistics(), clock, *more]
    if config.accelerator == "cpu":
        flops = training_flops(config.model, resolved.num_classes, resolved.micro_batch)
        callbacks.append(CPUKernels(flops, config.precision))
    trainer = Trainer(
        accelerator=config.accelerator,
        devices=1,
        precision=config.precision,  # pyright: ignore[reportArgumentType]
        max_epochs=config.epochs,
        max_steps=config.max_steps,
        accumulate_grad_batches=config.accumulate,
        gradient_clip_val=config.gradient_clip_val or None,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **config.trainer,
    )
    fast_loop.install(trainer, compiles=compiles, cuda_graph=config.cuda_graphs)
    trainer.fit(module, datamodule=images)
    begun = now(module.device)
    module.starting_weights()  # again, to time it: the run computed them before its first hook
    seconds, training = now(module.device) - begun, sum(clock.epochs)
    if compiles and trainer.global_step > COMPILING_STEPS:  # as many steps as all, in the time of the others
        training = (training - clock.first_steps) * trainer.global_step / (trainer.global_step - COMPILING_STEPS)
    trainer.test(module, datamodule=images, verbose=False)
    accuracy = 100 * float(trainer.callback_metrics["test/acc"])
    return Result(accuracy, seconds + training + clock.test, clock.epochs, trainer.global_step)


def loop_of(config: Config) -> list[float]:
    """Returns the seconds of each epoch of the eager loop."""
    images = CIFARDataModule(config)
    images.setup()
    return eager.train(config, images.dataset, torch.device("cuda" if config.accelerator == "gpu" else "cpu"))


def show(config: Config, results: list[Result], loops: list[list[float]]) -> None:
    """Prints the figures of the recipe."""
    images = CIFARDataModule(config)
    images.setup()
    steps, per_step = results[0].steps, training_flops(config.model, len(images.classes), config.batch_size)
    cpu = f"the CPU, {torch.get_num_threads()} threads"
    device = torch.cuda.get_device_name() if config.accelerator == "gpu" else cpu
    print(f"{len(results)} runs on {device}, {config.precision}, torch {torch.__version__}")
    print(f"{images.dataset.name}: {images.num_train:,} images to train, {images.num_test:,} to test")
    print(f"{steps} steps of {config.batch_size} images, {per_step * steps:.3g} FLOPs of training")
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
