"""Tests a checkpoint of any strategy on one device: the same metrics as at the end of its run; see --help."""

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from pkgutil import resolve_name

from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.resume import config_of_checkpoint, other_classes
from cifar_zero.config import command_line
from cifar_zero.config.arguments import Arguments, read_arguments
from cifar_zero.config.placement import Placement
from cifar_zero.config.recipe import Choice
from cifar_zero.config.run import Run, with_accelerator
from cifar_zero.config.settings import Settings
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.console import command, quieten
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.training import DATAMODULE, MODULE
from cifar_zero.training.resolve import make_run, resolve_devices


def main() -> int:
    """Prints the test table of a checkpoint; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=command("evaluate"),
        usage="%(prog)s RUN_OR_CHECKPOINT [--<option of train> VALUE ...]",
        description="Tests a checkpoint of any strategy on one device.",
        epilog="Data, model and precision are those of the run; options of train override them, "
        "for example --data.root DIR or --accelerator cpu. If the run averaged its weights, the averages are tested; "
        "--ema 0 --swa_from 0 tests the newest weights.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="a run folder (its newest checkpoint), or a .ckpt file or folder")
    if len(sys.argv) < 2 or (sys.argv[1].startswith("-") and sys.argv[1] not in ("-h", "--help")):
        usage = command("evaluate", "RUN_OR_CHECKPOINT")
        raise UsageError(f"the first argument must be a run folder or a checkpoint: {usage} ...")
    arguments, overrides = parser.parse_known_args()
    checkpoint = run_folder.find_checkpoint(arguments.checkpoint)
    given = read_arguments(overrides)
    config = configuration(checkpoint, given)
    trained_cast = bool(config.placement.ds_config) or STRATEGIES[config.placement.strategy].casts
    run = make_run(resolve_devices(on_one_device(config)))
    # A CPU has no float16.
    precision = with_accelerator(config, not run.on_cpu).placement.precision
    precision = "32-true" if precision == "16-mixed" and run.on_cpu else precision
    evaluate(run, checkpoint, precision, trained_cast)
    return 0


def on_one_device(settings: Settings) -> Settings:
    """Returns the recipe of a run on the default placement: one device, float32. Nothing of it trains: the optimizer is
    replaced, and neither a checkpoint nor weights to start from are looked for."""
    model = settings.recipe.model
    ranks = {"ep_size": 1} if "ep_size" in model.options else {}
    recipe = replace(
        settings.recipe,
        model=replace(model, options={**model.options, **ranks}),
        optimizer=Choice("sgd", asdict(OPTIMIZERS["sgd"]())),
        weights="",
    )
    placement = Placement(devices=1, accelerator=settings.placement.accelerator, data=settings.placement.data)
    return Settings(recipe, placement, replace(settings.output, logger=["none"], resume=""), settings.consent)


def configuration(checkpoint: Path, given: Arguments) -> Settings:
    """Returns the run's configuration, from its folder or from the checkpoint itself, changed by train's flags.
    Raises UsageError: neither has one."""
    if (tree := config_of_checkpoint(checkpoint, given.consent.trust)) is None:
        raise UsageError(f"{checkpoint} is not in a run folder, and was not written by cifar-zero train")
    return command_line.settings_of_arguments(given, lambda _: tree)


def evaluate(run: Run, checkpoint: Path, precision: str, cast: bool) -> dict[str, object]:
    """Tests a checkpoint, prints its table and returns the test/* of metrics.json.

    `run` is resolved for one device; `precision` is in Lightning's terms, and `cast` says whether mixed precision means
    a model cast to the format, as in DeepSpeed and fsdp2, and not autocast.
    """
    import torch
    from lightning.pytorch import Trainer

    from cifar_zero.checkpoints.read import RECORD, load_weights, network, read
    from cifar_zero.models.cast import cast_buffers, keep_batch_norm_float32
    from cifar_zero.reports.summary import print_test_table
    from cifar_zero.training.callbacks.stop import keep_handlers
    from cifar_zero.training.callbacks.summary import test_metrics

    quieten()
    content = read(checkpoint, run.consent.trust)
    if RECORD in content and (differing := other_classes(run.data, content[RECORD])):
        raise UsageError(f"{checkpoint} was trained on other classes than --data.source has ({differing})")
    module, datamodule = resolve_name(MODULE)(run, run.num_classes), resolve_name(DATAMODULE)(run)
    module.configure_model()
    assert module.net is not None
    averaged = bool(run.recipe.ema or run.recipe.swa_from)
    load_weights(module.net, network(content, averaged), str(checkpoint))
    if cast and "mixed" in precision:
        dtype = torch.bfloat16 if "bf16" in precision else torch.float16
        for parameter in module.net.parameters():
            parameter.data = parameter.data.to(dtype)
        cast_buffers(module.net, dtype)
        keep_batch_norm_float32(module.net)
        precision = "32-true"
    trainer = Trainer(
        accelerator=run.placement.accelerator,
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
