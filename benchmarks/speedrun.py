"""configs/speedrun.yaml again and again in one process: mean accuracy, time, FLOPs, and what each trick is worth.

python -m benchmarks.speedrun --runs 5 [--loop] [--table] [--<option of train.py> VALUE ...]
On a CPU, for instance: --accelerator cpu --precision 32-true --model.width 0.25 --epochs 2 --batch_size 500
--optimizer.bias_lr 26.5 --optimizer.head_lr 335 --optimizer.weight_decay 0.001

The clock is that of the records (airbench94_muon.py): the whitening, the training, and the test with its views, on
images that lie on the device already; a short run before the first, which warms up, is left out. The whole command's
time is printed beside it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
from typing import get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.loops import speedrun as eager
from benchmarks.others import Others
from cifar_module import CIFARModule
from cifar_zero.config import command_line, rules
from cifar_zero.config.flags import Config, Views
from cifar_zero.core import exits, start_time
from cifar_zero.core.errors import UsageError
from cifar_zero.core.quiet import quieten
from cifar_zero.training import build, fast_loop
from cifar_zero.training.callbacks.batch_norm import BatchNormStatistics
from cifar_zero.training.callbacks.counts import training_flops
from cifar_zero.training.callbacks.cpu_kernels import CPUKernels
from datamodule import CIFARDataModule

RECIPE = ["--config", "configs/speedrun.yaml", "--logger", "none"]

WHOLE = "the recipe"
"""Its row in the table."""

VIEWS: tuple[Views, ...] = get_args(Views)

UNUSED = {
    **dict.fromkeys(("ema", "swa_from", "early_stopping"), "the records have no validation and no averages"),
    **dict.fromkeys(("weights", "delta", "resume"), "each run starts from fresh weights"),
    **dict.fromkeys(("bench_steps", "find_lr", "plot_schedule"), "each run trains and tests"),
    **dict.fromkeys(("save_every_n_steps", "save_every_minutes", "save_weights"), "nothing is written"),
    "on_nan": "a loss that is no number only spoils the accuracy",
}
"""Options of train.py that would do nothing here, and why."""

TRICKS: dict[str, list[str]] = {
    "whitened first layer": ["--model.whitening", "false"],
    "identity at first": ["--model.identity_init", "false"],
    "statistics of the last few batches": ["--model.norm_momentum", "0.1"],
    "orthogonal steps (Muon)": ["--optimizer.ns_steps", "0"],
    "filters of one length": ["--optimizer.normalize", "false"],
    "whitening bias for 3/8 of the steps": ["--optimizer.first_bias_share", "1"],
    "weight decay": ["--optimizer.weight_decay", "0"],
    "linear schedule (nor 3/8 for the whitening bias)": ["--schedule", "constant", "--optimizer.first_bias_share", "1"],
    "label smoothing": ["--label_smoothing", "0"],
    "alternating flip, not random": ["--augment.flip", "random"],
    "any flip": ["--augment.flip", "none"],
    "translation": ["--augment.crop", "0", "--augment.padding", "black"],
    "reflected border, not black": ["--augment.padding", "black"],
}
"""What switches each of them off; see `tricks`."""

GPU_TRICKS: dict[str, list[str]] = {
    "channels last": ["--channels_last", "false"],
    "cuDNN's algorithms by trial": ["--trainer.benchmark", "false"],
}
"""Those that a CPU knows nothing of."""

ADDED: dict[str, list[str]] = {
    "brightness 0.14 and contrast 0.13": ["--augment.brightness", "0.14", "--augment.contrast", "0.13"],
}
"""What is not in the recipe: its flags switch it on, with the rounded values of github.com/hiverge/cifar10-speedrun."""


@dataclass
class Result:
    """Of one run."""

    accuracy: dict[Views, float]
    """On the test images, by views: those of the recipe, and with --table all others."""
    seconds: float
    """By the records' clock."""
    epochs: list[float]
    """Seconds of each epoch."""
    steps: int
    """Optimizer steps."""


@dataclass
class Variant:
    """The recipe as it is, or with something switched off or on."""

    config: Config
    results: list[Result] = field(default_factory=list)

    @property
    def accuracies(self) -> list[float]:
        """With the recipe's views, in percent."""
        return [100 * result.accuracy[self.config.tta] for result in self.results]


class Clock(Callback):
    """Notes when what matters begins and ends, on a GPU with the work that was queued before."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        """Seconds of each epoch."""
        self.test = 0.0
        """Seconds of the last test."""
        self._begun = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first epoch begins."""
        self._begun = now(pl_module.device)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An epoch ends, and another may begin."""
        ended = now(pl_module.device)
        self.epochs.append(ended - self._begun)
        self._begun = ended

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A test begins."""
        self._begun = now(pl_module.device)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """It ends."""
        self.test = now(pl_module.device) - self._begun


def main() -> int:
    """Measures and prints; returns the exit code."""
    given, flags = options()
    quieten()
    config = settled(flags)
    measured = {WHOLE: Variant(config)}
    if given.table:
        switches = {f"- {name}": off for name, off in tricks(config).items()}
        switches |= {f"+ {name}": on for name, on in added(config).items()}
        measured |= {name: Variant(settled([*flags, *own])) for name, own in switches.items()}
    warm_up([variant.config for variant in measured.values()])
    others, loops = Others(), list[list[float]]()
    for number, (name, variant) in itertools.product(range(given.runs), measured.items()):
        own, whole = replace(variant.config, seed=config.seed + number), name == WHOLE
        # Who comes second finds memory that the other has let go of: they take turns at that.
        if given.loop and whole and number % 2:
            loops.append(loop_of(own))
        result = run(own, given.table and whole)
        variant.results.append(result)
        figures = f"{variant.accuracies[-1]:.2f} %, {result.seconds:.2f} s"
        print(f"run {number + 1} of {given.runs}: {name}: {figures}", file=sys.stderr, flush=True)
        if given.loop and whole and not number % 2:
            loops.append(loop_of(own))
    tell(measured[WHOLE], loops)
    if given.table:
        print(table(measured))
    print(f"the whole command: {time.time() - start_time.command_given():.1f} s")
    print(f"other programs took {100 * others.share():.0f} % of the cores meanwhile")
    return 0


def options() -> tuple[argparse.Namespace, list[str]]:
    """What this program is told, and what train.py would be."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speedrun",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--runs", type=int, default=5, help="timed runs, with seeds one after the other (default: 5)")
    parser.add_argument("--loop", action="store_true", help="beside each run an eager loop over the same network")
    parser.add_argument("--table", action="store_true", help="what each trick is worth: each switched off in turn")
    given, flags = parser.parse_known_args()
    if given.runs < 1:
        raise UsageError(f"--runs must be at least 1, not {given.runs}")
    return given, [*RECIPE, *flags]


def settled(flags: list[str]) -> Config:
    """The configuration of a run on one device, checked as train.py does it."""
    config = command_line.parse(flags)
    for name, why in UNUSED.items():
        if getattr(config, name) != getattr(Config(), name):
            raise UsageError(f"--{name} does nothing here ({why}): leave it out, or use train.py")
    rules.settle(config)
    if config.strategy != "baseline" or config.world_size > 1:
        raise UsageError("the records are of one device: leave --strategy and --devices out")
    return config


def tricks(config: Config) -> dict[str, list[str]]:
    """What switches each trick of a recipe off, on its device."""
    found = {**TRICKS, **(GPU_TRICKS if config.accelerator == "gpu" else {})}
    if "bias_lr" in config.optimizer.options:
        found["the head's own learning rate"] = ["--optimizer.head_lr", str(config.optimizer.options["bias_lr"])]
    return found


def added(config: Config) -> dict[str, list[str]]:
    """What is switched on; smaller images in the first 3/8 of the epochs."""
    low = max(1, round(3 / 8 * config.epochs))
    flags = ["--augment.low_resolution", "24", "--augment.low_epochs", str(low)]
    return {**ADDED, f"24 x 24 pixels in {low} of {config.epochs} epochs": flags}


def warm_up(configs: list[Config]) -> None:
    """Short runs that are not timed: for allocation one, for a compiler and cuDNN's trials one of each variant."""
    first = configs[0]
    if first.compile or first.cuda_graphs:
        import torch._dynamo

        # Networks that are alike share their compilations. Each variant has three (training, its smaller images, the
        # test) of one function, of which torch (2.15) keeps eight and then gives up.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    all_of_them = first.compile or first.cuda_graphs or first.accelerator == "gpu"
    for config in configs if all_of_them else [first]:
        run(replace(config, max_steps=3, epochs=1))


def run(config: Config, every_view: bool = False) -> Result:
    """Trains and tests once, with train.py's module, images and loop, and nothing that writes files."""
    module, images, clock = build.module(CIFARModule, config), build.datamodule(CIFARDataModule, config), Clock()
    callbacks: list[Callback] = [BatchNormStatistics(), clock]
    if config.accelerator == "cpu":
        flops = training_flops(config.model, build.num_classes(config), build.micro_batch(config))
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
    fast_loop.install(trainer)
    trainer.fit(module, datamodule=images)
    begun = now(module.device)
    module.starting_weights()  # once more: the run's own came before its first hook
    seconds = now(module.device) - begun + sum(clock.epochs)
    accuracy: dict[Views, float] = {}
    own: Views = config.tta
    others: list[Views] = [views for views in VIEWS if views != own and every_view]
    tested: list[Views] = [own, *others]
    for views in tested:
        module.tta = views
        trainer.test(module, datamodule=images, verbose=False)
        accuracy[views] = float(trainer.callback_metrics["test/acc"])
        seconds += clock.test if views == own else 0.0
    return Result(accuracy, seconds, clock.epochs, trainer.global_step)


def loop_of(config: Config) -> list[float]:
    """Seconds of each epoch of the eager loop."""
    images = build.datamodule(CIFARDataModule, config)
    images.setup()
    return eager.train(config, images.dataset, torch.device("cuda" if config.accelerator == "gpu" else "cpu"))


def tell(variant: Variant, loops: list[list[float]]) -> None:
    """Prints the figures of the recipe."""
    config, results = variant.config, variant.results
    images = build.datamodule(CIFARDataModule, config)
    images.setup()
    per_step = training_flops(config.model, len(images.classes), config.batch_size)
    steps = results[0].steps
    print(f"{len(results)} runs on {device_name(config)}, {config.precision}, torch {torch.__version__}")
    print(f"{images.dataset.name}: {images.num_train:,} images to train, {images.num_test:,} to test")
    print(f"{steps} steps of {config.batch_size} images, {per_step * steps:.3g} FLOPs of training")
    print(f"accuracy {spread(variant.accuracies)} %")
    print(f"time {spread([result.seconds for result in results])} s: whitening, training and test")
    print(f"an epoch {median(itertools.chain(*(result.epochs for result in results))):.3f} s, the median")
    if loops:
        # The first epoch of a run allocates; the same ones of both sides, in one run of this program.
        ratios = [
            theirs / ours
            for result, loop in zip(results, loops, strict=True)
            for ours, theirs in zip(result.epochs, loop, strict=True)
        ]
        bounds = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"an epoch of the eager loop takes {median(ratios):.2f} times as long ({bounds})")


def table(measured: dict[str, Variant]) -> str:
    """What each trick is worth, in Markdown: accuracy, and time against the recipe's run of the same round."""
    whole = measured[WHOLE]
    lines = ["| | test accuracy, % | difference | time |", "|---|---|---|---|"]
    for name, variant in measured.items():
        differences = [own - base for own, base in zip(variant.accuracies, whole.accuracies, strict=True)]
        ratios = [own.seconds / base.seconds for own, base in zip(variant.results, whole.results, strict=True)]
        lines.append(f"| {name} | {spread(variant.accuracies)} | {fmean(differences):+.2f} | {median(ratios):.2f} |")
    for views in whole.results[0].accuracy:
        seen = [100 * result.accuracy[views] for result in whole.results]
        difference = fmean(seen) - fmean(whole.accuracies)
        lines.append(f"| the recipe, --tta {views} | {spread(seen)} | {difference:+.2f} | |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def device_name(config: Config) -> str:
    """Of the one that trains."""
    return (
        torch.cuda.get_device_name() if config.accelerator == "gpu" else f"the CPU, {torch.get_num_threads()} threads"
    )


def now(device: torch.device) -> float:
    """The time in seconds when all that was queued is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
