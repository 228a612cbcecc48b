"""Refuses what a strategy cannot do. The rules are about devices and number formats, optimizers, weight averaging,
splitting a model, experts, resuming, and DeepSpeed's options for ZeRO (--zero) and offloading (--offload)."""

from cifar_zero.config.placement import OffloadConfig, ZeROConfig
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.core.usage import Rules, refuse
from cifar_zero.models import MODELS, ViT
from cifar_zero.optimizers import OPTIMIZERS


def check_strategy(run: Run) -> None:
    """Raises UsageError for the first rule of the strategy that the run breaks. These rules hold on every computer."""
    for rules in (_devices, _graphs, _optimizers, _switches, _splitting, _experts):
        refuse(rules(run))


def _devices(run: Run) -> Rules:
    placement, name = run.placement, run.placement.strategy_name
    # torch (2.15) has synchronised batch norms for GPUs only; Lightning (2.6.6) applies them under DDP only.
    syncs = run.recipe.trainer.get("sync_batchnorm")
    return {
        "--precision 16-mixed needs a GPU: on the CPU use bf16-mixed": run.on_cpu and placement.precision == "16-mixed",
        # It never scales the loss, and divides the gradients by the scale (DeepSpeed 0.19.8, pull request 8393).
        f"{name} does not scale losses in float16: use deepspeed_stage_1, or --precision bf16-mixed": (
            run.spec.family == "deepspeed" and not run.spec.stage and placement.precision == "16-mixed"
        ),
        "--activation_offload needs a GPU: use --activation_checkpointing": run.on_cpu and placement.activation_offload,
        f"{name} needs a CUDA GPU: on the CPU use deepspeed_stage_3_offload": run.on_cpu and run.spec.super_offload,
        "--zero.overlap_comm needs a GPU: leave it out": run.on_cpu and placement.zero.overlap_comm,
        "--offload.* needs a GPU: leave it out": run.on_cpu and placement.offload != OffloadConfig(),
        "--trainer.sync_batchnorm works only with ddp on GPUs": syncs and (run.on_cpu or run.spec.family != "baseline"),
        f"--ema cannot average weights of {name}: use deepspeed_stage_3 or deepspeed_stage_3_offload": (
            run.recipe.ema and not run.spec.averages
        ),
    }


def _graphs(run: Run) -> Rules:
    """A CUDA graph replays the same kernels on the same memory addresses."""
    placement = run.placement
    if not placement.cuda_graphs:
        return {}
    return {
        "--cuda_graphs needs a GPU: on the CPU use --compile": run.on_cpu,
        "--cuda_graphs keeps activations on the GPU: leave out --activation_offload": placement.activation_offload,
        "--cuda_graphs cannot accumulate gradients (--accumulate): use --compile": placement.accumulate > 1,
        f"--cuda_graphs: {placement.strategy_name} may move parameters, so use --compile": not run.spec.graphs,
        "--cuda_graphs cannot replay the routing of experts: use --compile": "ep_size" in run.recipe.model.options,
    }


def _optimizers(run: Run) -> Rules:
    optimizer, strategy = run.recipe.optimizer, run.placement.strategy_name
    rules: Rules = {
        f"--optimizer {optimizer.name} needs full tensors, and {strategy} shards them: use deepspeed_stage_0, ddp or "
        "baseline, or --optimizer adamw": run.spec.shards_tensors and not OPTIMIZERS[optimizer.name].shardable,
        "--schedule range_test sets one learning rate, but --optimizer muon_sgd has three: use --optimizer muon": (
            optimizer.name == "muon_sgd" and run.recipe.schedule.name == "range_test"
        ),
    }
    if run.spec.super_offload:
        loss_scaling = run.placement.precision == "16-mixed"
        decays_as_l2 = optimizer.name == "adam" and optimizer.options["weight_decay"]
        rules |= {
            f"{strategy} runs only Adam and AdamW: add --optimizer adam": optimizer.name not in ("adam", "adamw"),
            # SuperOffload creates DeepSpeedCPUAdam without adamw_mode=False (DeepSpeed 0.19.8, superoffload_utils.py).
            f"{strategy} applies weight decay as AdamW does: use --optimizer adamw": decays_as_l2,
            # SuperOffload updates before it checks for an overflow, and cannot undo it (superoffload_stage3.py).
            f"{strategy} with 16-mixed needs --gradient_clip_val: set it, or use bf16-mixed": (
                loss_scaling and not run.recipe.gradient_clip_val
            ),
        }
    return rules


def _switches(run: Run) -> Rules:
    """Refuses options of --zero.* and --offload.* that would have no effect."""
    spec, placement = run.spec, run.placement
    zero, offload = placement.zero != ZeROConfig(), placement.offload != OffloadConfig()
    return {
        f"instead of --zero.* and --offload.*, set DeepSpeed's options in {placement.ds_config}": (
            spec.raw is not None and (zero or offload)
        ),
        f"--zero.* works only with ZeRO 1 to 3, not with {placement.strategy}": zero and not spec.stage,
        f"--offload.*: {placement.strategy} does not offload: use deepspeed_stage_3_offload": (
            offload and not spec.offload_optimizer
        ),
    }


def _splitting(run: Run) -> Rules:
    spec, placement, model = run.spec, run.placement, run.recipe.model
    given, ranks = f"--strategy {placement.strategy}", placement.ranks_per_model
    rules: Rules = {
        f"{given} has no loss scaling for float16: use --precision bf16-mixed": (
            spec.splits_model and placement.precision == "16-mixed"
        )
    }
    for flag in ("tensor_parallel_size", "pipeline_parallel_size"):
        names = ", ".join(name for name, other in STRATEGIES.items() if other.size == flag)
        rules[f"--{flag} works only with {names}, not with {placement.strategy_name}"] = (
            getattr(placement, flag) and spec.size != flag
        )
    if ranks == 1 and not spec.one_replica:
        return rules
    entry = MODELS[model.name]
    if not issubclass(entry, ViT):
        return rules | {f"{given} cannot split --model {model.name}: use a vit_* model": True}
    assert placement.devices != "auto"
    layout, is_pipeline = entry(**model.options).layout, spec.family == "pipeline"
    tuned = run.recipe.trainable or run.recipe.lora.rank
    return rules | {
        f"{given} splits a model within one node: --{spec.size} must divide --devices": placement.devices % ranks,
        f"{given} trains all weights of a split model: leave out --trainable and --lora.rank": tuned,
        f"{given} exchanges tensors within the model: leave out --compile": placement.compile,
        f"{given} splits the activations and cannot offload them: use --activation_checkpointing": (
            placement.activation_offload and not is_pipeline
        ),
        f"{given}: {model.name} has only {layout.depth} blocks for {ranks} ranks": is_pipeline and ranks > layout.depth,
        f"{given}: {ranks} ranks cannot divide the {layout.heads} heads of {model.name}": (
            not is_pipeline and layout.heads % ranks
        ),
        f"{given}: {placement.replicas} ranks cannot divide the width {layout.width} of {model.name}": (
            spec.family == "fsdp2" and layout.width % placement.replicas
        ),
    }


def _experts(run: Run) -> Rules:
    ep_size, placement = run.recipe.model.options.get("ep_size"), run.placement
    if ep_size is None:
        return {}
    ranks, spread = placement.world_size, ep_size > 1
    return {
        f"{placement.strategy_name}: DeepSpeed has no mixture of experts with ZeRO 3: use deepspeed_stage_2": (
            run.spec.stage == 3
        ),
        f"--model.ep_size {ep_size}: {placement.strategy_name} keeps all experts on each rank: add --model.ep_size 1, "
        "or use deepspeed_stage_0, 1 or 2, which distribute the experts": spread and run.spec.family != "deepspeed",
        f"--model.ep_size {ep_size} does not divide the number of ranks, {ranks}": ranks % ep_size,
        f"--init {run.recipe.init} needs all experts on each rank: add --model.ep_size 1": (
            spread and run.recipe.init != "default"
        ),
    }


def check_can_resume(run: Run) -> None:
    """Raises UsageError if --resume is given and checkpoints of the strategy lack part of the state.

    DeepSpeed 0.19.8 keeps Adam's state in SuperOffload's process, and does not write it into a checkpoint
    (superoffload_utils.py). With an optimizer on NVMe, loading a checkpoint restores neither the parameters nor the
    optimizer's sub-groups that are too small to be swapped to disk (engine.py, `load_checkpoint`).
    """
    spec, name = run.spec, run.placement.strategy_name
    on_nvme = "nvme" in (spec.offload_optimizer, spec.offload_parameters)
    if run.output.resume:
        refuse(
            {
                f"--resume: DeepSpeed does not save Adam's state under {name}: start again with --weights": (
                    spec.super_offload
                ),
                f"--resume: {name} cannot be resumed: use --strategy deepspeed_stage_3_offload": on_nvme,
            }
        )


def check_micro_batch(run: Run) -> None:
    """Raises UsageError if the batch size cannot be divided into micro-batches, or if the raw DeepSpeed configuration
    sets a different micro-batch size."""
    micro_batch, ranks = run.micro_batch, run.placement.replicas
    in_file = (run.spec.raw or {}).get("train_micro_batch_size_per_gpu", micro_batch)
    if in_file != micro_batch:
        raise UsageError(
            f"--ds_config {run.placement.ds_config}: a micro-batch of {in_file} x {ranks} ranks x --accumulate "
            f"{run.placement.accumulate} is not --batch_size {run.recipe.batch_size}: change one of these flags"
        )
