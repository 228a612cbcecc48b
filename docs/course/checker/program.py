"""Checks answers with commands and modules of this program, which need Linux or macOS. Each check returns what is
right, or raises Wrong."""

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from checker.comparing import Wrong, assert_same, random_images
from cifar_zero.core.errors import short

ROOT = Path(__file__).resolve().parents[3]


def training_step(answer: Callable[..., Tensor]) -> str:
    """Exercise 7: trains the tutorial's Net with the answer as training_step, and with CIFARModule's own."""
    from cifar_module import CIFARModule
    from cifar_zero.config import command_line

    config, batches = command_line.parse(["--accelerator", "cpu"]), DataLoader(TensorDataset(*random_images(32)), 4)
    answered = type("Answered", (CIFARModule,), {"training_step": answer})
    actual, expected = (_losses(module(config, 10), batches) for module in (answered, CIFARModule))
    for step in range(8):
        hint = "the mean cross-entropy of the scores, which applies the softmax itself; only Lightning updates weights"
        assert_same(f"the loss of step {step + 1}", actual[step], expected[step], hint, tolerance=0)
    return "the losses of 8 steps are CIFARModule's, bit for bit"


def batch_for_zero(answer: Callable[[], int]) -> str:
    """Exercise 13: compares the global batch with the largest micro-batches that fit by cifar-zero plan."""
    flags = "--model vit_base --optimizer adamw --precision 32-true --devices 8 --device_memory 16GB --json"
    plan = subprocess.check_output([sys.executable, "-m", "cifar_zero", "plan", *flags.split()], cwd=ROOT)
    most = {need["strategy"]: need["most_images"] for need in json.loads(plan)["strategies"]}
    batch = answer()
    ddp, zero = ("fits" if batch / 8 <= most[name] else "does not fit" for name in ("ddp", "deepspeed_stage_2"))
    said = f"{batch:,} images are {batch / 8:g} on each rank: cifar-zero plan says that DDP {ddp}, ZeRO 2 {zero}"
    if batch / 8 != most["ddp"] + 1:
        raise Wrong(f"{said}: try a {'larger' if ddp == 'fits' else 'smaller'} batch")
    return said


def broken(answer: Any) -> str:
    """Exercise 17: lets `stepcheck module` look for the first step and tensor that ZeRO 2 changes."""
    from stepcheck.testing import assert_agrees

    losses = _losses(answer())
    if not losses[-1] < losses[0]:
        raise Wrong(f"it does not learn: the loss is {losses[0]:.3g} at step 1 and {losses[-1]:.3g} at step 8")
    try:
        assert_agrees(answer, strategies=["deepspeed_stage_2"], devices=2, steps=8)
    except AssertionError as failure:
        if "different: step" in str(failure):
            return short(failure, 300)
        raise Wrong(short(failure, 300)) from failure
    raise Wrong("on two ranks ZeRO 2 trains it as DDP does, for 8 steps")


def _losses(module: Any, batches: DataLoader | None = None) -> list[Tensor]:
    """Returns the losses of 8 steps in a Trainer on the CPU, without `batches` on those of the module."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import LambdaCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    losses: list[Any] = []
    record = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: losses.append(outputs.get("loss")))
    Trainer(barebones=True, accelerator="cpu", max_steps=8, callbacks=record).fit(module, batches)
    return losses
