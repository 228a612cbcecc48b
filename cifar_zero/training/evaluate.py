"""Tests a checkpoint of any strategy on one device: the same metrics as at the end of its run; see --help."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.resume import other_classes, recorded
from cifar_zero.config import command_line
from cifar_zero.config.flags import Choice, Config
from cifar_zero.config.run import Run, with_accelerator
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.console import quieten, say
from cifar_zero.core.errors import UsageError
from cifar_zero.core.programs import command
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.training.resolve import of_machine, on_this_machine


def main(classes: Callable[[], tuple[Any, Any]]) -> int:
    """Prints the test table of a checkpoint; `classes` imports and returns the LightningModule and DataModule."""
    parser = argparse.ArgumentParser(
        prog=command("evaluate"),
        usage="%(prog)s RUN_OR_CHECKPOINT [--<option of train.py> VALUE ...]",
        description="Tests a checkpoint of any strategy on one device.",
        epilog="Data, model and precision are those of the run; options of train.py override them, "
        "for example --data.root DIR or --accelerator cpu. If the run averaged its weights, the averages are tested; "
        "--ema 0 --swa_from 0 tests the newest weights.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="a run folder (its newest checkpoint), or a .ckpt file or folder")
    if len(sys.argv) < 2 or (sys.argv[1].startswith("-") and sys.argv[1] not in ("-h", "--help")):
        usage = command("evaluate", "RUN_OR_CHECKPOINT")
        raise UsageError(f"the first argument must be a run folder or a checkpoint: {usage} ...")
    parser.add_argument("--delta", metavar="FILE", help="delta of a run that started from it (export.py --to delta)")
    arguments, overrides = parser.parse_known_args()
    checkpoint = run_folder.find_checkpoint(arguments.checkpoint)
    consent = command_line.consent(overrides)
    content: dict[str, Any] | None = None
    if arguments.delta:
        from cifar_zero.checkpoints.finetuning.load import together

        content = together(checkpoint, Path(arguments.delta), consent.trust)
        checkpoint = Path(arguments.delta)
    config = configuration(checkpoint, overrides, consent.trust, content)
    if run_folder.code_has_changed(checkpoint, config.model.name):
        say(f"{config.model.name} has changed since the run, whose folder has a copy of what was trained.")
    trained_cast = bool(config.ds_config) or STRATEGIES[config.strategy].casts
    run = of_machine(on_this_machine(for_one_device(config)), consent)
    # A CPU has no float16.
    precision = with_accelerator(config, not run.on_cpu).precision
    precision = "32-true" if precision == "16-mixed" and run.on_cpu else precision
    evaluate(classes(), run, checkpoint, precision, trained_cast, content)
    return 0


def for_one_device(config: Config) -> Config:
    """Returns a run's configuration without its options of the training, and without its strategy."""
    model = config.model
    if "ep_size" in model.options:
        model = replace(model, options={**model.options, "ep_size": 1})
    return replace(
        config,
        **{"strategy": "baseline", "ds_config": "", "devices": 1, "num_nodes": 1, "precision": "32-true"},
        **{"accumulate": 1, "logger": ["none"], "resume": "", "weights": "", "delta": ""},
        **{"activation_offload": False, "activation_checkpointing": False, "cuda_graphs": False},
        model=model,
        optimizer=Choice("sgd", asdict(OPTIMIZERS["sgd"]())),
    )


def configuration(
    checkpoint: Path, overrides: list[str], trust: bool = False, content: dict[str, Any] | None = None
) -> Config:
    """Returns the run's configuration, from its folder or from the checkpoint itself, changed by train.py's flags.
    Raises UsageError: neither has one."""
    if (tree := recorded(checkpoint, trust, content)) is None:
        raise UsageError(f"{checkpoint} is not in a run folder, and was not written by train.py")
    return command_line.parse(overrides, lambda _: tree)


def evaluate(
    classes: tuple[Any, Any],
    run: Run,
    checkpoint: Path,
    precision: str,
    cast: bool,
    content: dict[str, Any] | None = None,
) -> dict[str, object]:
    """Tests a checkpoint, prints its table and returns the test/* of metrics.json.

    `classes` are the LightningModule and the LightningDataModule; `run` is resolved for one device; `precision` is in
    Lightning's terms, and `cast` says whether mixed precision means a model cast to the format, as in DeepSpeed and
    fsdp2, and not autocast; `content` is that of the checkpoint, if it was read already.
    """
    import torch
    from lightning.pytorch import Trainer

    from cifar_zero.checkpoints.read import RECORD, load_weights, network, read
    from cifar_zero.models.cast import cast_buffers, compute_with_statistics
    from cifar_zero.reports.summary import print_test_table
    from cifar_zero.training.callbacks.stop import keep_handlers
    from cifar_zero.training.callbacks.summary import test_metrics

    quieten()
    content = content or read(checkpoint, run.consent.trust)
    if RECORD in content and (differing := other_classes(run.config.data, content[RECORD])):
        raise UsageError(f"{checkpoint} was trained on other classes than --data.source has ({differing})")
    module, datamodule = classes[0](run.config, run.num_classes), classes[1](run.config)
    module.configure_model()
    assert module.net is not None
    averaged = bool(run.config.ema or run.config.swa_from)
    load_weights(module.net, network(content, averaged), str(checkpoint))
    if cast and "mixed" in precision:
        dtype = torch.bfloat16 if "bf16" in precision else torch.float16
        for parameter in module.net.parameters():
            parameter.data = parameter.data.to(dtype)
        cast_buffers(module.net, dtype)
        compute_with_statistics(module.net)
        precision = "32-true"
    trainer = Trainer(
        accelerator=run.config.accelerator,
        devices=1,
        precision=precision,  # pyright: ignore[reportArgumentType]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    keep_handlers(trainer)
    trainer.test(module, datamodule=datamodule, verbose=False)
    metrics = test_metrics(module, datamodule)
    print(f"{checkpoint}: {datamodule.num_test:,} test images of {datamodule.dataset.name}")
    print_test_table(metrics)
    print(f"test loss {metrics['test/loss']:.4f}")
    return metrics
