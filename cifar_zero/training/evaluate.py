"""Tests a checkpoint of any strategy on one device: the same figures as at the end of its run.

python evaluate.py RUN_OR_CHECKPOINT [--data.root DIR] [--accelerator cpu]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cifar_zero.checkpoints import run_folder
from cifar_zero.config import command_line, rules
from cifar_zero.config.flags import Choice, Config, config_of
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers import OPTIMIZERS


def main(classes: Callable[[], tuple[Any, Any]]) -> int:
    """Prints the test table of a checkpoint; returns the exit code.

    Args:
        classes: imports and returns the LightningModule and the LightningDataModule.
    """
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        usage="%(prog)s RUN_OR_CHECKPOINT [--<option of train.py> VALUE ...]",
        description="Tests a checkpoint of any strategy on one device.",
        epilog="Data, network and precision are the run's own; options of train.py override them, "
        "for instance --data.root DIR or --accelerator cpu. Of a run with averaged weights these are tested; "
        "--ema 0 --swa_from 0 tests the newest.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="a run folder (its newest checkpoint), or a .ckpt file or folder")
    if len(sys.argv) < 2 or (sys.argv[1].startswith("-") and sys.argv[1] not in ("-h", "--help")):
        raise UsageError("say first what to test, a run folder or a checkpoint: evaluate.py RUN_OR_CHECKPOINT ...")
    parser.add_argument("--delta", metavar="FILE", help="what a run trained over it (export.py --to delta)")
    arguments, overrides = parser.parse_known_args()
    checkpoint = run_folder.find_checkpoint(arguments.checkpoint, out="", name="")
    content: dict[str, Any] | None = None
    if arguments.delta:
        from cifar_zero.checkpoints.finetuning.delta import together

        content = together(checkpoint, Path(arguments.delta), command_line.trusts(overrides))
        checkpoint = Path(arguments.delta)
    config = configuration(checkpoint, overrides, content)
    trained_cast = bool(config.ds_config) or STRATEGIES[config.strategy].family in ("deepspeed", "fsdp2")
    # One device and one micro-batch, whatever the run had: its batch size need not divide here.
    config.strategy, config.ds_config, config.devices, config.num_nodes = "baseline", "", 1, 1
    config.accumulate, config.logger, config.resume = 1, ["none"], ""
    # What is of the training alone need not be here.
    config.activation_offload = config.activation_checkpointing = config.cuda_graphs = False
    config.optimizer = Choice("sgd", asdict(OPTIMIZERS["sgd"]()))
    config.trainer.pop("sync_batchnorm", None)
    config.weights = config.delta = ""  # the checkpoint has them
    if "ep_size" in config.model.options:
        config.model.options["ep_size"] = 1
    wanted = config.precision
    config.precision = "32-true"
    rules.settle(config)
    precision = "32-true" if wanted == "16-mixed" and config.accelerator == "cpu" else wanted  # it has no float16
    evaluate(classes(), config, checkpoint, precision, trained_cast, content)
    return 0


def configuration(checkpoint: Path, overrides: list[str], content: dict[str, Any] | None = None) -> Config:
    """The run's own, of its folder or of what the checkpoint itself keeps of it, with train.py's flags laid over it.

    Raises:
        UsageError: there is neither.
    """
    recipe = run_folder.recipe_of(checkpoint)
    if recipe is not None and content is None:
        return command_line.parse(["--config", str(recipe), *overrides])
    from cifar_zero.checkpoints.read import RECORD, read

    record = (content or read(checkpoint, command_line.trusts(overrides))).get(RECORD)
    if record is None:
        raise UsageError(f"{checkpoint} lies in no run folder, and was not written by train.py")
    with TemporaryDirectory() as folder:
        recipe = Path(folder) / run_folder.CONFIG
        recipe.write_text(command_line.dump(config_of(record["config"])))
        return command_line.parse(["--config", str(recipe), *overrides])


def evaluate(
    classes: tuple[Any, Any],
    config: Config,
    checkpoint: Path,
    precision: str,
    cast: bool,
    content: dict[str, Any] | None = None,
) -> dict[str, object]:
    """Tests a checkpoint and prints its table.

    Args:
        classes: the LightningModule and the LightningDataModule.
        config: of the run, settled for one device.
        checkpoint: file or folder.
        precision: Lightning's name of the number format that the network runs in.
        cast: whether mixed precision is a network cast to the format, as DeepSpeed's and fsdp2's is, and not autocast.
        content: of the checkpoint, where it was read or put together already.

    Returns:
        The test/* of metrics.json.
    """
    import torch
    from lightning.pytorch import Trainer

    from cifar_zero.checkpoints.read import read
    from cifar_zero.checkpoints.weights import check_fits, network
    from cifar_zero.core.quiet import quieten
    from cifar_zero.models.cast import cast_buffers, cast_parameters, compute_with_statistics
    from cifar_zero.reports.summary import print_test_table
    from cifar_zero.training import build
    from cifar_zero.training.callbacks.summary import test_metrics

    quieten()
    module = build.module(classes[0], config)
    module.configure_model()
    assert module.net is not None
    averaged = bool(config.ema or config.swa_from)
    weights = network(content or read(checkpoint, config.trust), averaged)
    check_fits(module.net, weights, str(checkpoint))
    module.net.load_state_dict(weights)
    if cast and "mixed" in precision:
        dtype = torch.bfloat16 if "bf16" in precision else torch.float16
        cast_parameters(module.net, dtype)
        cast_buffers(module.net, dtype)
        compute_with_statistics(module.net)
        precision = "32-true"
    trainer = Trainer(
        accelerator=config.accelerator,
        devices=1,
        precision=precision,  # pyright: ignore[reportArgumentType]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    datamodule = build.datamodule(classes[1], config)
    trainer.test(module, datamodule=datamodule, verbose=False)
    metrics = test_metrics(module, datamodule)
    print(f"{checkpoint}: {datamodule.num_test:,} test images of {datamodule.dataset.name}")
    print_test_table(metrics)
    print(f"test loss {metrics['test/loss']:.4f}")
    return metrics
