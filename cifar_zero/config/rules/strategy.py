"""What a strategy can do: optimizers, averages of the weights, CUDA graphs, models that it splits, resuming, and
DeepSpeed's switches of ZeRO (--zero) and of offloading (--offload)."""

from dataclasses import fields

from cifar_zero.config.flags import OffloadConfig, ZeROConfig, flat
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count
from cifar_zero.models import MODELS, ViT
from cifar_zero.optimizers import OFFLOADED_BY

STAGES = {"overlap_comm": (1, 2, 3), "reduce_bucket_size": (1, 2, 3), "round_robin_gradients": (1, 2)}
"""Stages that have a switch of --zero; the others are of stage 3."""

BETWEEN_RANKS = ("overlap_comm", "round_robin_gradients", "quantized_weights", "quantized_gradients")
"""Switches of --zero without effect on a single rank."""


def check_optimizer(run: Run) -> None:
    """Refuses an optimizer that the strategy, the schedule or the device cannot run."""
    config, name = run.config, run.config.optimizer.name
    if name not in OFFLOADED_BY and run.spec.shards_tensors:
        raise UsageError(
            f"--optimizer {name} needs whole tensors, and {config.strategy_name} shards them: "
            "use deepspeed_stage_0, ddp or baseline, or --optimizer adamw"
        )
    if name == "muon_sgd" and config.schedule.name == "range_test":
        given = "--find_lr" if config.find_lr else "--schedule range_test"
        raise UsageError(f"{given} gives all groups one learning rate, but --optimizer muon_sgd has three: use muon")
    if name == "muon_sgd" and config.optimizer.options["first_bias_share"] < 1 and config.schedule.name == "constant":
        raise UsageError("--optimizer.first_bias_share needs a schedule that ends at 0: add --schedule linear")
    if name == "adam8bit" and run.on_cpu:
        raise UsageError("--optimizer adam8bit needs a CUDA GPU: use --optimizer adam")
    if run.spec.super_offload and name not in ("adam", "adamw"):
        raise UsageError(f"--strategy {config.strategy_name} runs only Adam and AdamW: add --optimizer adam")
    if run.spec.super_offload and name == "adam" and config.optimizer.options["weight_decay"]:
        # Its process makes a DeepSpeedCPUAdam without adamw_mode=False (DeepSpeed 0.19.8, superoffload_utils.py).
        raise UsageError(f"--strategy {config.strategy_name} applies weight decay as AdamW does: use --optimizer adamw")
    if run.spec.super_offload and config.precision == "16-mixed" and not config.gradient_clip_val:
        # It updates before it looks for an overflow, and cannot take that back (superoffload_stage3.py).
        raise UsageError(f"--strategy {config.strategy_name} in 16-mixed needs --gradient_clip_val: use bf16-mixed")


def check_averaging(run: Run) -> None:
    """Refuses --ema and --swa_from if the strategy cannot average its weights in place."""
    if run.spec.averages:
        return
    flag, strategy = "--ema" if run.config.ema else "--swa_from", run.config.strategy_name
    if run.spec.offload_parameters == "nvme":
        raise UsageError(f"{flag}: {strategy} keeps the weights on disk, use deepspeed_stage_3_offload")
    raise UsageError(f"{flag} cannot average the shards of {strategy}: use deepspeed_stage_3")


def check_cuda_graphs(run: Run) -> None:
    """Refuses --cuda_graphs if steps do not run the same kernels on the same addresses, which a graph replays."""
    if run.on_cpu:
        raise UsageError("--cuda_graphs needs a GPU: --compile compiles the model on the CPU too")
    if run.config.activation_offload:
        raise UsageError("--cuda_graphs keeps activations in the graph's memory: leave out --activation_offload")
    if run.config.accumulate > 1:
        raise UsageError("--cuda_graphs cannot accumulate gradients over --accumulate micro-batches: use --compile")
    if not run.spec.graphs:
        strategy = run.config.strategy_name
        raise UsageError(f"--cuda_graphs: {strategy} may move the parameters in every step: use --compile")


def check_compiled_step(run: Run) -> None:
    """Refuses --compile step if something must happen within the step."""
    config, alone = run.config, "use --compile, which compiles the model alone"
    if run.spec.family != "baseline":
        raise UsageError(f"--compile step is for baseline and ddp: {alone}")
    if config.precision not in ("32-true", "bf16-mixed"):
        raise UsageError(f"--compile step needs --precision 32-true or bf16-mixed, or {alone}")
    needed = {"accumulate": 1, "on_nan": "stop", "fast_loop": True, "data.loader": "memory"}
    for name, value in needed.items():
        if flat(config)[name] != value:
            raise UsageError(f"--compile step needs --{name} {str(value).lower()}, or {alone}")


def check_model_parallel(run: Run) -> None:
    """Refuses a model that cannot be split over the ranks, and float16 without loss scaling."""
    config, spec, ranks, model = run.config, run.spec, run.ranks_per_model, run.config.model.name
    given = f"--strategy {config.strategy}"
    if not spec.scales_loss and config.precision == "16-mixed":
        raise UsageError(f"{given} has no loss scaling for float16: use --precision bf16-mixed")
    for flag in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(config, flag) and spec.size != flag:
            names = ", ".join(name for name, other in STRATEGIES.items() if other.size == flag)
            raise UsageError(f"--{flag} is for {names}, not for {config.strategy_name}")
    if ranks == 1 and not spec.one_replica:
        return
    entry = MODELS[model]
    if not issubclass(entry, ViT):
        known = ", ".join(name for name, other in MODELS.items() if issubclass(other, ViT))
        raise UsageError(f"{given} cannot split --model {model}: it splits {known}")
    if config.devices % ranks:
        raise UsageError(f"{given} splits a model within one node: --{spec.size} must divide --devices")
    alone = "use fsdp2 alone or ZeRO"
    if config.trainable or config.lora.rank:
        raise UsageError(f"{given} trains split models whole: {alone} with --trainable and --lora.rank")
    if spec.family != "pipeline" and config.activation_offload:
        raise UsageError(f"{given} splits the activations: use --activation_checkpointing, or {alone}")
    if config.compile:
        raise UsageError(f"{given} exchanges tensors within the model: leave --compile out, or {alone}")
    shape = entry(**config.model.options).shape
    if spec.family != "pipeline" and shape.heads % ranks:
        fit = " or ".join(str(number) for number in range(1, shape.heads + 1) if shape.heads % number == 0)
        raise UsageError(f"{given}: {ranks} ranks cannot divide the {shape.heads} heads of {model}: {fit} can")
    if spec.family == "fsdp2" and shape.width % run.replicas:
        raise UsageError(f"{given}: {run.replicas} ranks cannot divide the width {shape.width} of {model}")
    if spec.family == "pipeline" and ranks > shape.depth:
        raise UsageError(f"{given}: {model} has {shape.depth} blocks for {ranks} ranks: use {shape.depth} at most")


def check_can_resume(run: Run) -> None:
    """Refuses --resume if the checkpoints of the strategy lack part of the state."""
    if run.config.resume and (why := why_not_resumed(run)):
        raise UsageError(f"--resume: {why}")


def why_not_resumed(run: Run) -> str:
    """Returns why a run cannot be resumed from its own checkpoint; empty if it can.

    DeepSpeed 0.19.8 keeps the state of Adam in SuperOffload's process, or in the `backup_optimizer` of a ratio, and
    writes neither into a checkpoint (superoffload_utils.py, zero/stage3.py). Of a checkpoint of an optimizer on NVMe it
    loads neither the parameters nor the groups that are too small for the disk (engine.py, `load_checkpoint`).
    """
    config, spec = run.config, run.spec
    if spec.super_offload or config.offload.ratio < 1:
        what = "--offload.ratio" if config.offload.ratio < 1 else config.strategy_name
        return f"under {what} DeepSpeed does not save Adam's state: start again with --weights"
    if "nvme" in (spec.offload_optimizer, spec.offload_parameters):
        return f"{config.strategy_name} cannot be resumed, use --strategy deepspeed_stage_3_offload"
    return ""


def check_switches(run: Run) -> None:
    """Refuses a switch that would have no effect, or another effect than its name says."""
    config, spec = run.config, run.spec
    switches = (("zero", config.zero, ZeROConfig()), ("offload", config.offload, OffloadConfig()))
    given = [
        f"--{section}.{field.name}"
        for section, chosen, default in switches
        for field in fields(chosen)
        if getattr(chosen, field.name) != getattr(default, field.name)
    ]
    if not given:
        return
    if spec.raw is not None:
        raise UsageError(f"{given[0]} goes into {config.ds_config}, under DeepSpeed's own name")
    for flag in (flag for flag in given if flag.startswith("--zero.") or flag == "--offload.ratio"):
        switch = flag.removeprefix("--zero.")
        stages = STAGES.get(switch, (3,))
        if spec.stage not in stages:
            raise UsageError(
                f"{flag} is for ZeRO {', '.join(map(str, stages))}, not for {config.strategy}: "
                f"use deepspeed_stage_{stages[-1]} or its offload"
            )
        if switch in BETWEEN_RANKS and config.world_size == 1:
            raise UsageError(f"{flag} only affects communication between ranks: it needs --devices 2 or more")
    if config.zero.overlap_comm and run.on_cpu:
        raise UsageError("--zero.overlap_comm needs a GPU: on the CPU communication does not overlap")
    if config.zero.hpz_partition_size > 1:
        _check_second_copy(run)
    if config.zero.quantized_weights or config.zero.quantized_gradients:
        _check_quantized(run)
    if config.offload != OffloadConfig():
        _check_offload(run)


def _check_second_copy(run: Run) -> None:
    flag, ranks = f"--zero.hpz_partition_size {run.config.zero.hpz_partition_size}", run.config.world_size
    if ranks % run.config.zero.hpz_partition_size:
        raise UsageError(f"{flag} does not divide the {ranks} rank{'s'[: ranks > 1]} of --devices")
    if run.spec.offload_parameters:  # zero.Init (DeepSpeed 0.19.8) would put the copy next to the parameters
        raise UsageError(f"{flag}: {run.config.strategy} has no parameters on the GPU, use deepspeed_stage_3")


def _check_quantized(run: Run) -> None:
    """Refuses what DeepSpeed 0.19.8 cannot do (partition_parameters.py; all_to_all_quant_reduce in
    coalesced_collectives.py needs the groups `global_*`, which utils/groups.py makes only for several nodes)."""
    config = run.config
    flag = "--zero.quantized_weights" if config.zero.quantized_weights else "--zero.quantized_gradients"
    if run.on_cpu:
        raise UsageError(f"{flag} needs CUDA: DeepSpeed has its kernels for no other device")
    if not config.zero.quantized_gradients:
        return
    flag, gpus = "--zero.quantized_gradients", gpu_count()
    if config.num_nodes == 1:
        raise UsageError(f"{flag} needs two nodes or more (--num_nodes): on one use --zero.quantized_weights")
    if config.devices != gpus:
        raise UsageError(f"{flag} needs all {gpus} GPUs of each node: --devices {gpus}")


def _check_offload(run: Run) -> None:
    offload, default, strategy = run.config.offload, OffloadConfig(), run.config.strategy
    if offload.cpuadam_cores_perc != default.cpuadam_cores_perc and not run.spec.super_offload:
        raise UsageError(f"--offload.cpuadam_cores_perc is for deepspeed_stage_3_superoffload, not for {strategy}")
    flag = "--offload.pin_memory" if offload.pin_memory else "--offload.ratio"
    if not run.spec.offload_optimizer:
        raise UsageError(f"{flag}: {strategy} offloads nothing")
    if run.on_cpu:
        raise UsageError(f"{flag} needs a GPU: without one, offloaded tensors stay in the same memory")
    if offload.ratio == 1:
        return
    # DeepSpeed (0.19.8, zero/stage3.py, `backup_optimizer`) updates the part on the GPU by a torch.optim.AdamW with the
    # learning rate of the first step, which a schedule does not reach.
    if run.spec.offload_optimizer != "cpu":
        raise UsageError(
            "--offload.ratio needs an optimizer offloaded to the CPU; "
            f"{run.config.strategy} offloads it to NVMe: use deepspeed_stage_3_offload"
        )
    if run.config.optimizer.name != "adamw":
        raise UsageError("--offload.ratio below 1 runs only AdamW: add --optimizer adamw")
    if run.config.schedule.name != "constant" or run.config.reduce_on_plateau:
        fix = "use --schedule constant without --reduce_on_plateau"
        raise UsageError(f"--offload.ratio below 1 needs a constant learning rate: {fix}")
