"""Refuses what a strategy cannot do: devices and formats, optimizers, averages of the weights, models that it splits,
experts, resuming, and DeepSpeed's switches of ZeRO (--zero) and of offloading (--offload)."""

from dataclasses import fields
from typing import Any

from cifar_zero.config.placement import OffloadConfig, ZeROConfig
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count
from cifar_zero.models import MODELS, ViT
from cifar_zero.optimizers import OFFLOADED_BY

STAGES = {"overlap_comm": (1, 2, 3), "reduce_bucket_size": (1, 2, 3), "round_robin_gradients": (1, 2)}
"""Stages that have a switch of --zero; the others are of stage 3."""


def check_devices(run: Run) -> None:
    """Refuses what needs a GPU, and --cuda_graphs if steps do not run the same kernels on the same addresses, which a
    graph replays."""
    placement, name = run.placement, run.placement.strategy_name
    if run.on_cpu and placement.precision == "16-mixed":
        raise UsageError("--precision 16-mixed needs a GPU: on the CPU use bf16-mixed or 32-true")
    if run.on_cpu and placement.activation_offload:
        raise UsageError("--activation_offload needs a GPU: on the CPU --activation_checkpointing saves memory")
    if run.on_cpu and run.spec.super_offload:
        raise UsageError(f"{name} needs a CUDA GPU: on the CPU use deepspeed_stage_3_offload")
    if run.recipe.trainer.get("sync_batchnorm") and (run.on_cpu or run.spec.family != "baseline"):
        # torch (2.15) has it for GPUs only; Lightning (2.6.6) applies it under DDP only.
        raise UsageError("--trainer.sync_batchnorm is for ddp on GPUs: leave it out")
    if not placement.cuda_graphs:
        return
    if run.on_cpu:
        raise UsageError("--cuda_graphs needs a GPU: --compile compiles the model on the CPU too")
    if placement.activation_offload:
        raise UsageError("--cuda_graphs keeps activations in the graph's memory: leave out --activation_offload")
    if placement.accumulate > 1:
        raise UsageError("--cuda_graphs cannot accumulate gradients over --accumulate micro-batches: use --compile")
    if not run.spec.graphs:
        raise UsageError(f"--cuda_graphs: {name} may move the parameters in every step: use --compile")


def check_optimizer(run: Run) -> None:
    """Refuses an optimizer that the strategy, the schedule or the device cannot run."""
    optimizer, strategy = run.recipe.optimizer, run.placement.strategy_name
    if optimizer.name not in OFFLOADED_BY and run.spec.shards_tensors:
        raise UsageError(
            f"--optimizer {optimizer.name} needs whole tensors, and {strategy} shards them: "
            "use deepspeed_stage_0, ddp or baseline, or --optimizer adamw"
        )
    if optimizer.name == "muon_sgd" and run.recipe.schedule.name == "range_test":
        raise UsageError(
            "--schedule range_test gives all groups one learning rate, but --optimizer muon_sgd has three: use muon"
        )
    if optimizer.name == "adam8bit" and run.on_cpu:
        raise UsageError("--optimizer adam8bit needs a CUDA GPU: use --optimizer adam")
    if not run.spec.super_offload:
        return
    if optimizer.name not in ("adam", "adamw"):
        raise UsageError(f"--strategy {strategy} runs only Adam and AdamW: add --optimizer adam")
    if optimizer.name == "adam" and optimizer.options["weight_decay"]:
        # Its process makes a DeepSpeedCPUAdam without adamw_mode=False (DeepSpeed 0.19.8, superoffload_utils.py).
        raise UsageError(f"--strategy {strategy} applies weight decay as AdamW does: use --optimizer adamw")
    if run.placement.precision == "16-mixed" and not run.recipe.gradient_clip_val:
        # It updates before it looks for an overflow, and cannot take that back (superoffload_stage3.py).
        raise UsageError(f"--strategy {strategy} in 16-mixed needs --gradient_clip_val: use bf16-mixed")


def check_averaging(run: Run) -> None:
    """Refuses --ema and --swa_from if the strategy cannot average its weights in place."""
    if run.spec.averages or not (run.recipe.ema or run.recipe.swa_from):
        return
    flag = "--ema" if run.recipe.ema else "--swa_from"
    instead = "deepspeed_stage_3_offload" if run.spec.offload_parameters == "nvme" else "deepspeed_stage_3"
    raise UsageError(f"{flag} cannot average the weights of {run.placement.strategy_name}: use {instead}")


def check_model_parallel(run: Run) -> None:
    """Refuses a model that cannot be split over the ranks, and float16 without loss scaling."""
    spec, ranks, model = run.spec, run.placement.ranks_per_model, run.recipe.model.name
    given = f"--strategy {run.placement.strategy}"
    if not spec.scales_loss and run.placement.precision == "16-mixed":
        raise UsageError(f"{given} has no loss scaling for float16: use --precision bf16-mixed")
    for flag in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(run.placement, flag) and spec.size != flag:
            names = ", ".join(name for name, other in STRATEGIES.items() if other.size == flag)
            raise UsageError(f"--{flag} is for {names}, not for {run.placement.strategy_name}")
    if ranks == 1 and not spec.one_replica:
        return
    entry = MODELS[model]
    if not issubclass(entry, ViT):
        known = ", ".join(name for name, other in MODELS.items() if issubclass(other, ViT))
        raise UsageError(f"{given} cannot split --model {model}: it splits {known}")
    if run.placement.devices % ranks:
        raise UsageError(f"{given} splits a model within one node: --{spec.size} must divide --devices")
    alone = "use fsdp2 alone or ZeRO"
    if run.recipe.trainable or run.recipe.lora.rank:
        raise UsageError(f"{given} trains split models whole: {alone} with --trainable and --lora.rank")
    if spec.family != "pipeline" and run.placement.activation_offload:
        raise UsageError(f"{given} splits the activations: use --activation_checkpointing, or {alone}")
    if run.placement.compile:
        raise UsageError(f"{given} exchanges tensors within the model: leave --compile out, or {alone}")
    shape = entry(**run.recipe.model.options).shape
    if spec.family == "pipeline":
        if ranks > shape.depth:
            raise UsageError(f"{given}: {model} has {shape.depth} blocks for {ranks} ranks: use {shape.depth} at most")
        return
    if shape.heads % ranks:
        fit = " or ".join(str(number) for number in range(1, shape.heads + 1) if shape.heads % number == 0)
        raise UsageError(f"{given}: {ranks} ranks cannot divide the {shape.heads} heads of {model}: {fit} can")
    if spec.family == "fsdp2" and shape.width % run.placement.replicas:
        raise UsageError(f"{given}: {run.placement.replicas} ranks cannot divide the width {shape.width} of {model}")


def check_experts(run: Run) -> None:
    """Refuses a mixture of experts that the strategy or the number of ranks does not allow."""
    ep_size = run.recipe.model.options.get("ep_size")
    if ep_size is None:
        return
    placement = run.placement
    given = f"--ds_config {placement.ds_config}" if placement.ds_config else f"--strategy {placement.strategy}"
    if run.spec.stage == 3:
        raise UsageError(f"{given}: DeepSpeed has no mixture of experts at ZeRO stage 3, use deepspeed_stage_2")
    if ep_size > 1 and not run.spec.spreads_experts:
        raise UsageError(
            f"--model.ep_size {ep_size}: {given} keeps all experts on each rank, add --model.ep_size 1; "
            "deepspeed_stage_0, 1 and 2 spread them"
        )
    if placement.world_size % ep_size:
        raise UsageError(f"--model.ep_size {ep_size} does not divide the number of ranks, {placement.world_size}")
    if run.recipe.init != "default" and ep_size > 1:
        raise UsageError(f"--init {run.recipe.init} initialises the experts of all ranks: add --model.ep_size 1")
    if placement.cuda_graphs:
        raise UsageError(f"--cuda_graphs cannot replay the routing of --model {run.recipe.model.name}: use --compile")


def check_can_resume(run: Run) -> None:
    """Refuses --resume if the checkpoints of the strategy lack part of the state."""
    if run.output.resume and (why := why_not_resumed(run)):
        raise UsageError(f"--resume: {why}")


def why_not_resumed(run: Run) -> str:
    """Returns why a run cannot be resumed from its own checkpoint; empty if it can.

    DeepSpeed 0.19.8 keeps the state of Adam in SuperOffload's process, or in the `backup_optimizer` of a ratio, and
    writes neither into a checkpoint (superoffload_utils.py, zero/stage3.py). Of a checkpoint of an optimizer on NVMe it
    loads neither the parameters nor the groups that are too small for the disk (engine.py, `load_checkpoint`).
    """
    spec = run.spec
    if spec.super_offload or run.placement.offload.ratio < 1:
        what = "--offload.ratio" if run.placement.offload.ratio < 1 else run.placement.strategy_name
        return f"under {what} DeepSpeed does not save Adam's state: start again with --weights"
    if "nvme" in (spec.offload_optimizer, spec.offload_parameters):
        return f"{run.placement.strategy_name} cannot be resumed, use --strategy deepspeed_stage_3_offload"
    return ""


def check_switches(run: Run) -> None:
    """Refuses a switch that would have no effect, or another effect than its name says."""
    spec, strategy = run.spec, run.placement.strategy
    zero, offload = _changed(run.placement.zero, ZeROConfig()), _changed(run.placement.offload, OffloadConfig())
    switches = [*(f"--zero.{name}" for name in zero), *(f"--offload.{name}" for name in offload)]
    if switches and spec.raw is not None:
        raise UsageError(f"{switches[0]} goes into {run.placement.ds_config}, under DeepSpeed's own name")
    for name in zero:
        stages = STAGES.get(name, (3,))
        if spec.stage not in stages:
            raise UsageError(
                f"--zero.{name} is for ZeRO {', '.join(map(str, stages))}, not for {strategy}: "
                f"use deepspeed_stage_{stages[-1]} or its offload"
            )
    if offload and not spec.offload_optimizer:
        raise UsageError(f"--offload.{offload[0]}: {strategy} offloads nothing, use deepspeed_stage_3_offload")
    if run.on_cpu and (offload or "overlap_comm" in zero):
        raise UsageError(f"{[*switches][-1]} needs a GPU: on the CPU there is nothing to offload from or to overlap")
    ranks, copies = run.placement.world_size, run.placement.zero.hpz_partition_size
    if ranks % copies:
        raise UsageError(f"--zero.hpz_partition_size {copies} does not divide the number of ranks, {ranks}")
    _check_quantized(run)
    if run.placement.offload.ratio < 1:
        _check_ratio(run)


def _changed(options: Any, default: Any) -> list[str]:
    """Returns the names of the options that are not the default."""
    names = [field.name for field in fields(options)]
    return [name for name in names if getattr(options, name) != getattr(default, name)]


def _check_quantized(run: Run) -> None:
    """Refuses what DeepSpeed 0.19.8 cannot do (partition_parameters.py; all_to_all_quant_reduce in
    coalesced_collectives.py needs the groups `global_*`, which utils/groups.py makes only for several nodes)."""
    zero, placement = run.placement.zero, run.placement
    if run.on_cpu and (zero.quantized_weights or zero.quantized_gradients):
        raise UsageError("--zero.quantized_* need CUDA: DeepSpeed has their kernels for no other device")
    if not zero.quantized_gradients:
        return
    if placement.num_nodes == 1:
        raise UsageError(
            "--zero.quantized_gradients needs two nodes or more (--num_nodes): on one use --zero.quantized_weights"
        )
    if placement.devices != (gpus := gpu_count()):
        raise UsageError(f"--zero.quantized_gradients needs all {gpus} GPUs of each node: --devices {gpus}")


def _check_ratio(run: Run) -> None:
    """Refuses what would train wrong: DeepSpeed (0.19.8, zero/stage3.py, `backup_optimizer`) updates the part on the
    GPU by a torch.optim.AdamW with the learning rate of the first step, which a schedule does not reach."""
    if run.spec.stage != 3 or run.spec.offload_optimizer != "cpu":
        raise UsageError(
            f"--offload.ratio is for ZeRO 3 with an optimizer on the CPU, not for {run.placement.strategy}: "
            "use deepspeed_stage_3_offload"
        )
    if run.recipe.optimizer.name != "adamw":
        raise UsageError("--offload.ratio below 1 runs only AdamW: add --optimizer adamw")
    if run.recipe.schedule.name != "constant" or run.recipe.reduce_on_plateau:
        fix = "use --schedule constant without --reduce_on_plateau"
        raise UsageError(f"--offload.ratio below 1 needs a constant learning rate: {fix}")


def check_micro_batch(run: Run) -> None:
    """Refuses a batch size that does not divide, or gives another micro-batch than a raw DeepSpeed configuration."""
    ours, ranks = run.micro_batch, run.placement.replicas
    theirs = (run.spec.raw or {}).get("train_micro_batch_size_per_gpu", ours)
    if theirs != ours:
        raise UsageError(
            f"--ds_config {run.placement.ds_config}: a micro-batch of {theirs} x {ranks} ranks x --accumulate "
            f"{run.placement.accumulate} is not --batch_size {run.recipe.batch_size}: give the flags that fit"
        )
