"""What a model needs of the micro-batch and the images, mixtures of experts, and fine-tuning."""

from pathlib import Path

from cifar_zero.config.flags import Config
from cifar_zero.config.run import Run
from cifar_zero.core.errors import UsageError
from cifar_zero.models import IMAGE_SHAPE, MODELS

LEAST_SIDE = 12  # smallest side of downscaled images, in pixels


def check_model(run: Run) -> None:
    """Refuses a model that cannot train on these micro-batches; runs a model of another package to find out."""
    config, side = run.config, run.config.data.image_size
    if config.model.options.get("batch_norm") and run.micro_batch == 1:
        raise UsageError("--model.batch_norm normalises over the micro-batch, a single image here: raise --batch_size")
    if config.model.name == "speednet" and config.init != "default":
        raise UsageError(f"--model speednet has its own initialisation: leave --init {config.init} out")
    if config.augment.low_resolution or config.augment.low_epochs:
        _check_resolution(run)
    if ":" in config.model.name or side != IMAGE_SHAPE[1]:
        try:
            _try_out(run, side)
        except ValueError as error:
            raise UsageError(f"--model {config.model.name}: {error}") from error


def check_experts(run: Run) -> None:
    """Refuses a mixture of experts that the strategy or the number of ranks does not allow."""
    config, ranks = run.config, run.config.world_size
    ep_size = config.model.options["ep_size"]
    if config.tta == "uncertain":
        raise UsageError("--tta uncertain: the last views of a mixture of experts must be of all images, use mirror")
    given = f"--ds_config {config.ds_config}" if config.ds_config else f"--strategy {config.strategy}"
    if run.spec.stage == 3:
        raise UsageError(f"{given}: DeepSpeed has no mixture of experts at ZeRO stage 3, use deepspeed_stage_2")
    if ep_size > 1 and not run.spec.spreads_experts:
        raise UsageError(
            f"--model.ep_size {ep_size}: {given} keeps all experts on each rank, add --model.ep_size 1; "
            "deepspeed_stage_0, 1 and 2 spread them"
        )
    if ranks % ep_size:
        raise UsageError(f"--model.ep_size {ep_size} does not divide the {ranks} rank{'s'[: ranks > 1]} of --devices")
    raw = run.spec.raw or {}
    for key in ("reduce_scatter", "contiguous_gradients"):
        if raw.get("zero_optimization", {}).get(key) is False:
            raise UsageError(f"{given} sets {key} to false: DeepSpeed needs it for mixtures of experts, take it out")
    if raw.get("use_data_before_expert_parallelism"):
        raise UsageError(f"{given} sets use_data_before_expert_parallelism: take it out, neighbours share experts")
    if config.init != "default" and ep_size > 1:
        raise UsageError(f"--init {config.init} initialises the experts of all ranks: add --model.ep_size 1")
    if config.cuda_graphs:
        raise UsageError(f"--cuda_graphs cannot replay the routing of --model {config.model.name}: use --compile")


def check_finetuning(config: Config) -> None:
    """Refuses options of fine-tuning that cannot be combined."""
    lora = config.lora
    if lora.rank and not lora.target:
        raise UsageError("--lora.rank needs --lora.target: names of linear layers such as 'blocks.*.attention.qkv'")
    if config.delta and not config.weights:
        raise UsageError(f"--delta {config.delta} needs --weights: those that the run which wrote it started from")
    if config.delta and not Path(config.delta).is_file():
        raise UsageError(f"--delta {config.delta} is not a file")


def _check_resolution(run: Run) -> None:
    """Refuses smaller images in the first epochs for a model that cannot take them."""
    augment, whole = run.config.augment, run.config.data.image_size
    side = augment.low_resolution
    if not LEAST_SIDE <= side < whole or augment.low_epochs < 1:
        raise UsageError(
            f"--augment.low_resolution {side} --augment.low_epochs {augment.low_epochs}: give a side from {LEAST_SIDE} "
            f"to {whole - 1} pixels and a number of epochs"
        )
    try:
        _try_out(run, side)
    except ValueError as error:
        raise UsageError(
            f"--augment.low_resolution {side}: --model {run.config.model.name} takes images of {whole} x {whole} "
            "pixels only: use speednet or resnet18"
        ) from error


def _try_out(run: Run, side: int) -> None:
    from cifar_zero.models.external import check

    model = MODELS[run.config.model.name](**run.config.model.options)
    check(model, run.num_classes, (run.micro_batch, IMAGE_SHAPE[0], side, side))
