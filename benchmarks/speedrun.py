"""Measures accuracy, time and FLOPs of configs/speedrun.yaml, run after run in one process. All flags but --runs are
flags of train.py.

The time is measured as in the speed records (airbench94_muon.py). It includes the whitening, the training, and the test
with several views of each image. The images are on the device already. A short warm-up run comes first and is not
timed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
import torch._dynamo
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.loops.common import now
from cifar_module import CIFARModule
from cifar_zero.config import command_line
from cifar_zero.config.run import Run
from cifar_zero.config.settings import flat, make_settings
from cifar_zero.core import exits
from cifar_zero.core.console import quieten
from cifar_zero.core.errors import UsageError
from cifar_zero.training import build
from cifar_zero.training.callbacks.averaging import BatchNormStatistics
from cifar_zero.training.callbacks.cpu_kernels import CPUKernels
from cifar_zero.training.callbacks.throughput import training_flops
from cifar_zero.training.resolve import resolve
from datamodule import CIFARDataModule

RECIPE = ["--config", "configs/speedrun.yaml", "--logger", "none"]

UNUSED = (
    *("ema", "early_stopping", "monitor", "save_top_k", "weights", "resume", "bench_steps", "save_every_n_steps"),
    *("audit", "check_steps", "log_gradients"),
)
"""Options of train.py that do nothing in this benchmark, because its runs have no validation, start from fresh weights,
write no files and have no callbacks for these options."""


@dataclass
class Result:
    """The figures of one run."""

    accuracy: float  # accuracy on the test set, in percent
    seconds: float  # measured as in the speed records
    steps: int  # optimizer steps


class Clock(Callback):
    """Times the training and the test, in sum. On a GPU, each reading of the clock waits until all queued work is
    done."""

    seconds = 0.0
    _started = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = now(pl_module.device)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds += now(pl_module.device) - self._started

    on_test_start = on_train_start
    on_test_end = on_train_end


def main() -> int:
    parser = exits.Parser(prog="python -m benchmarks.speedrun", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="timed runs, with consecutive seeds (default: 5)")
    arguments, flags = parser.parse_known_args()
    if arguments.runs < 1:
        raise UsageError(f"--runs must be at least 1, not {arguments.runs}")
    quieten()
    recipe = resolved([*RECIPE, *flags])
    # Each run's training and test compile the same function, and torch (2.15) keeps only eight compilations of a
    # function.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    train(recipe.changed(max_steps=3, epochs=1))  # warm-up: allocates, compiles, on a GPU tries cuDNN's algorithms
    results: list[Result] = []
    for number in range(arguments.runs):
        result = train(recipe.changed(seed=recipe.recipe.seed + number))
        results.append(result)
        figures = f"{result.accuracy:.2f} %, {result.seconds:.2f} s"
        print(f"run {number + 1} of {arguments.runs}: {figures}", file=sys.stderr, flush=True)
    show(recipe, results)
    return 0


def resolved(flags: Sequence[str]) -> Run:
    """Returns the resolved run on one device, without checkpoints. It is checked as in train.py. Raises UsageError if a
    flag does nothing in this benchmark, or if the run is not on one device."""
    settings = command_line.parse(flags)
    values, defaults = flat(settings), flat(make_settings())
    for name in UNUSED:
        if values[name] != defaults[name]:
            raise UsageError(f"--{name} does nothing in this benchmark: leave it out, or use train.py")
    run = resolve(settings)
    if run.placement.strategy != "baseline" or run.placement.world_size > 1:
        raise UsageError("the speedrun is measured on one device: leave --strategy and --devices out")
    return run.changed(trainer={**run.recipe.trainer, "enable_checkpointing": False})


def train(run: Run) -> Result:
    """Trains and tests once with train.py's module, images, Trainer and loop. Writes no files."""
    module, images, clock = CIFARModule(run, run.num_classes), CIFARDataModule(run), Clock()
    callbacks: list[Callback] = [BatchNormStatistics(), clock]
    if run.on_cpu:
        flops = training_flops(run.recipe, run.num_classes, run.micro_batch)
        callbacks.append(CPUKernels(flops, run.placement.precision))
    trainer = build.trainer(run, None, callbacks)
    trainer.fit(module, datamodule=images)
    started = now(module.device)
    module.starting_weights()  # computed again to be timed, because the run computes them before its first hook
    seconds = now(module.device) - started
    trainer.test(module, datamodule=images, verbose=False)
    accuracy = 100 * float(trainer.callback_metrics["test/acc"])
    return Result(accuracy, seconds + clock.seconds, trainer.global_step)


def show(run: Run, results: Sequence[Result]) -> None:
    images = CIFARDataModule(run)
    images.setup()
    steps, batch_size = results[0].steps, run.recipe.batch_size
    flops = steps * training_flops(run.recipe, run.num_classes, batch_size)
    device = f"the CPU, {torch.get_num_threads()} threads" if run.on_cpu else torch.cuda.get_device_name()
    print(f"{len(results)} runs on {device}, {run.placement.precision}, torch {torch.__version__}")
    print(f"{images.dataset.name}: {images.num_train:,} images to train, {images.num_test:,} to test")
    print(f"{steps} steps of {batch_size} images, {flops:.3g} FLOPs of training")
    print(f"accuracy {mean_and_deviation([result.accuracy for result in results])} %")
    print(f"time {mean_and_deviation([result.seconds for result in results])} s: whitening, training and test")


def mean_and_deviation(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{fmean(values):.2f} ± {stdev(values):.2f}"


if __name__ == "__main__":
    exits.run(main)
