"""Runs your own copy of airbench94_muon.py (github.com/KellerJordan/cifar10-airbench), the reference of
configs/speedrun.yaml, on the CPU in float32: its GPU calls are replaced, and nothing else of it.

At other widths than 1 its scores are divided as ours are, by 16 times the root of the last layer's channels. Learning
rates of ours follow from --batch_size. Other flags are train.py's, for ours (--optimizer.momentum 0.5) or for the
images of both (--data.cache DIR). The file is Python code that this program executes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor

from benchmarks import speedrun
from cifar_zero.config.flags import Config
from cifar_zero.core import exits
from cifar_zero.core.console import quieten
from cifar_zero.core.errors import UsageError
from cifar_zero.models import scaled
from cifar_zero.models.speednet import CHANNELS, SCORE_SCALE
from datamodule import CIFARDataModule

ON_A_CPU = {
    "@torch.compile\n": "\n",
    ".bfloat16()": ".float()",
    ".half()": ".float()",
    "torch.cuda": "CLOCK",
    "os.path.exists(data_path)": "True",
    'torch.load(data_path, map_location=torch.device("cuda"))': "IMAGES[train]",
}
"""What a CPU needs: text of the program, and its replacement."""


class Event:
    """torch.cuda.Event on a CPU, where nothing is queued."""

    def __init__(self, enable_timing: bool) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Returns the milliseconds from this event to `end`."""
        return 1000 * (end.seconds - self.seconds)


class Record(Callback):
    """Keeps the weights before the first step and the loss of each step."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.losses: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = [value.clone() for value in pl_module.net.state_dict().values()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def main() -> int:
    """Trains and prints; returns the exit code."""
    parser = exits.Parser(prog="python -m benchmarks.airbench", description=__doc__)
    parser.add_argument("file", type=Path, help="your copy of airbench94_muon.py")
    parser.add_argument("--images", metavar="DIR", help="a folder source, see --data.source; default: CIFAR-10")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, with consecutive seeds (default: 5)")
    parser.add_argument("--width", type=float, default=1.0, help="width, as --model.width (default: 1)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs (default: 8)")
    parser.add_argument("--batch_size", type=int, default=2000, help="images per step (default: 2000)")
    parser.add_argument("--ours", action="store_true", help="train configs/speedrun.yaml after each run, and compare")
    parser.add_argument("--same", action="store_true", help="give the file our weights and batches: the losses of both")
    given, flags = parser.parse_known_args()
    if given.runs < 1:
        raise UsageError(f"--runs must be at least 1, not {given.runs}")
    quieten()
    config = speedrun.settled([*speedrun.RECIPE, *our_flags(given), *flags])
    program = load(given.file, config)
    theirs, ours = list[float](), list[float]()
    for seed in range(config.seed, config.seed + given.runs):
        record = Record()
        if given.ours or given.same:
            own = replace(config, seed=seed)
            ours.append(speedrun.run(own, [record]).accuracy)
            if given.same:
                take_over(program, own, record.weights)
        torch.manual_seed(seed)
        losses = list[float]()
        theirs.append(100 * train(program, losses))
        print(f"seed {seed}: theirs {theirs[-1]:.2f} %" + (f", ours {ours[-1]:.2f} %" if ours else ""), flush=True)
        if given.same:
            differences = [abs(one / other - 1) for one, other in zip(losses, record.losses, strict=True)]
            shown = {min(step, len(losses)) for step in (1, 2, 5, 10, 20, 50, len(losses))}
            for step in sorted(shown):
                print(f"step {step}: loss {losses[step - 1]:.7f}, relative difference {differences[step - 1]:.1e}")
    print(f"theirs {speedrun.spread(theirs)} %")
    if ours:
        difference = fmean(ours) - fmean(theirs)
        error = ((stdev(ours) ** 2 + stdev(theirs) ** 2) / len(ours)) ** 0.5 if len(ours) > 1 else float("nan")
        print(f"ours {speedrun.spread(ours)} %\ndifference {difference:+.2f} ± {error:.2f} (standard error)")
    return 0


def our_flags(given: argparse.Namespace) -> list[str]:
    """Returns train.py's flags for the same training by our recipe."""
    flags = {"accelerator": "cpu", "precision": "32-true", "model.width": given.width, "epochs": given.epochs}
    flags |= {"batch_size": given.batch_size, "optimizer.weight_decay": 2e-6 * given.batch_size}
    flags |= {"optimizer.bias_lr": 0.053 * given.batch_size, "optimizer.head_lr": 0.67 * given.batch_size}
    flags |= {"data.source": "folder", "data.root": given.images} if given.images else {}
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def load(file: Path, config: Config) -> dict[str, Any]:
    """Returns the names that the program defines. Raises UsageError: it cannot be read, or is another program."""
    widths = [scaled(channels, config.model.options["width"]) for channels in CHANNELS["small"]]
    replaced = {
        **ON_A_CPU,
        "dict(block1=64, block2=256, block3=256)": "dict(block1={}, block2={}, block3={})".format(*widths),
        "/ x.size(-1)\n": f"/ ({SCORE_SCALE} * x.size(-1) ** 0.5)\n",  # the same for 256 channels
        " batch_size = 2000\n": f" batch_size = {config.batch_size}\n",
        "ceil(8 *": f"ceil({config.epochs} *",
        "ceil(3 *": f"({3 / 8 * config.epochs} *",  # not rounded up: ours is not
    }
    try:
        code = file.read_text()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    for old, new in replaced.items():
        if old not in code:
            raise UsageError(f"{file} is not airbench94_muon.py, or another version: it has no {old.strip()}")
        code = code.replace(old, new)
    program: dict[str, Any] = {"__name__": file.stem, "IMAGES": stored(config)}
    program["CLOCK"] = SimpleNamespace(Event=Event, synchronize=lambda: None)
    exec(compile(code, str(file), "exec"), program)
    program["F"] = SimpleNamespace(**vars(torch.nn.functional))
    return program


def stored(config: Config) -> dict[bool, dict[str, Any]]:
    """Returns the training and the test images as the program's train.pt and test.pt have them.

    The training images are shuffled, as those of CIFAR-10 are: the program whitens the first 5,000, and those of a
    folder are sorted by class.
    """
    module = CIFARDataModule(config)
    module.setup()
    data = module.dataset
    order = np.random.default_rng(0).permutation(len(data.train_labels))
    train, test = (data.train_images[order], data.train_labels[order]), (data.test_images, data.test_labels)
    return {
        split: {"images": torch.tensor(images.transpose(0, 2, 3, 1)), "labels": torch.tensor(labels), "classes": []}
        for split, (images, labels) in ((True, train), (False, test))
    }


def take_over(program: dict[str, Any], config: Config, weights: list[Tensor]) -> None:
    """Makes the program begin with our weights, in the order of the model, and train on our batches."""
    images = CIFARDataModule(config)
    images.setup()
    batches = images.train_dataloader()

    def ours(loader: Any) -> Iterator[Any]:
        batches.sampler.set_epoch(loader.epoch)
        loader.epoch += 1
        yield from batches

    def reset(model: Any) -> None:
        model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))

    program["CifarLoader"].__iter__ = ours
    program["CifarNet"].reset, program["CifarNet"].init_whiten = reset, lambda model, images: None


def train(program: dict[str, Any], losses: list[float]) -> float:
    """Runs the program's training once, appends the mean loss of each step and returns the test accuracy."""

    def cross_entropy(scores: Tensor, labels: Tensor, **options: Any) -> Tensor:
        loss = torch.nn.functional.cross_entropy(scores, labels, **options)
        losses.append(float(loss.detach()) / len(labels))
        return loss

    program["F"].cross_entropy = cross_entropy
    model = program["CifarNet"]().to(memory_format=torch.channels_last)
    with contextlib.redirect_stdout(sys.stderr):
        return program["main"](0, model)


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
