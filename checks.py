"""What can be refused before anything is launched is refused here, in one line that says what to use instead.

Nothing here imports torch, but on a machine with a GPU driver, and for a network of torchvision or timm.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import run_folder
import sources
from batch import micro_batch_size
from config import Choice, Config, LoRAConfig
from errors import UsageError
from hardware import free_memory_bytes, gpu_count
from models import MODELS, ViT
from models.vit_shapes import SHAPES
from optimizers import BY_DEEPSPEED, OFFLOADED_BY
from resume import settle_resume
from schedules import SCHEDULES
from strategies import STRATEGIES, replicas

CPU_RANK_BYTES = 1_000_000_000
"""Memory of one CPU rank of the smallest run (measured: 0.9 to 1.1 GB resident, torch 2.15 with DeepSpeed 0.19)."""

# Keys of a raw DeepSpeed configuration that have another owner, and that owner.
OWNED_BY_FLAGS = {
    "train_batch_size": "--batch_size",
    "train_micro_batch_size_per_gpu": "--batch_size and --devices",
    "gradient_accumulation_steps": "--accumulate",
    "gradient_clipping": "--gradient_clip_val",
    "optimizer": "--optimizer",
    "scheduler": "--schedule",
    "fp16": "--precision 16-mixed",
    "bf16": "--precision bf16-mixed",
}


def settle(config: Config) -> None:
    """Settles what the configuration leaves to the machine (accelerator, devices, precision); refuses what cannot run.

    Raises:
        UsageError: says what is wrong and what to use instead.
    """
    settle_machine(config)
    micro_batch = micro_batch_size(config.batch_size, replicas(config), config.accumulate)
    num_classes = len(sources.class_names(config.data))
    raw = _raw_config(config.ds_config) if config.ds_config else {}
    settle_resume(config)
    if config.find_lr and config.schedule.name != "range_test":
        config.schedule = Choice("range_test", asdict(SCHEDULES["range_test"]()))
    _settle_finetuning(config)
    check_strategy(config, raw)
    _check_network(config, micro_batch, num_classes)
    if config.trainer.get("sync_batchnorm"):
        _check_sync_batch_norm(config)


def settle_machine(config: Config) -> None:
    """Settles what the configuration leaves to the machine: accelerator, devices, precision.

    Raises:
        UsageError: there are not so many devices.
    """
    gpus = gpu_count() if config.accelerator != "cpu" else 0
    if config.accelerator == "gpu" and gpus == 0:
        raise UsageError("--accelerator gpu: no GPU here that torch can use; --accelerator cpu trains on the CPU")
    config.accelerator = "gpu" if gpus else "cpu"
    if config.precision == "auto":
        config.precision = "16-mixed" if gpus else "32-true"
    _settle_devices(config, gpus)


def check_strategy(config: Config, raw: dict[str, Any]) -> None:
    """Refuses what the strategy cannot do; `raw` as in `_check_experts`.

    Raises:
        UsageError: names what to use instead.
    """
    if config.accelerator == "cpu":
        _check_on_cpu(config)
    if config.cuda_graphs:
        _check_cuda_graphs(config)
    _check_optimizer(config, raw)
    _check_offload(config)
    if not config.ds_config:
        _check_parts(config)
    if "ep_size" in config.model.options:
        _check_experts(config, raw)
    if config.ema or config.swa_from:
        _check_averaging(config, raw)


def _settle_devices(config: Config, gpus: int) -> None:
    if "LOCAL_WORLD_SIZE" in os.environ:  # started by torchrun, or by our own launcher: the ranks are there already
        config.devices = int(os.environ["LOCAL_WORLD_SIZE"])
        config.num_nodes = int(os.environ["WORLD_SIZE"]) // config.devices
    elif config.devices == "auto":
        config.devices = max(1, gpus)
    if gpus and config.devices > gpus:
        raise UsageError(f"--devices {config.devices}: this machine has {gpus} GPU{'s'[: gpus > 1]}")


def _settle_finetuning(config: Config) -> None:
    """Puts the file's own path for what --weights names."""
    lora = config.lora
    if lora != LoRAConfig() and lora.rank < 1:
        raise UsageError(f"--lora.rank must be at least 1, not {lora.rank}")
    if lora.rank and not lora.target:
        raise UsageError("--lora.rank needs --lora.target, names of linear layers such as 'blocks.*.attention.qkv'")
    if not 0 <= lora.dropout < 1:
        raise UsageError(f"--lora.dropout must be at least 0 and under 1, not {lora.dropout}")
    if config.delta and not config.weights:
        raise UsageError(f"--delta {config.delta} needs --weights, what the run that wrote it started from")
    if config.delta and not Path(config.delta).is_file():
        raise UsageError(f"--delta {config.delta} is no file")
    if config.weights:
        file = Path(config.weights) if config.resume else run_folder.find_checkpoint(config.weights, "", "")
        config.weights = str(file.absolute())
        config.delta = config.delta and str(Path(config.delta).absolute())


def _check_on_cpu(config: Config) -> None:
    assert config.devices != "auto"
    launched = "LOCAL_WORLD_SIZE" in os.environ  # the ranks have taken their memory already
    if config.devices > 1 and not launched and config.devices * CPU_RANK_BYTES > (free := free_memory_bytes()):
        fit = max(1, free // CPU_RANK_BYTES)
        raise UsageError(f"--devices {config.devices}: a CPU rank takes about 1 GB, and there is room for {fit} here")
    if config.precision == "16-mixed":
        raise UsageError("--precision 16-mixed needs a GPU: on the CPU use bf16-mixed or 32-true")
    if config.strategy == "fsdp" and not config.ds_config:
        raise UsageError("--strategy fsdp needs a GPU: on the CPU deepspeed_stage_3 shards in the same way")
    if config.activation_offload:
        raise UsageError("--activation_offload needs a GPU: on the CPU --activation_checkpointing saves activations")
    if STRATEGIES[config.strategy].super_offload and not config.ds_config:
        raise UsageError(f"--strategy {config.strategy} needs a CUDA GPU: on the CPU use deepspeed_stage_3_offload")


def _check_cuda_graphs(config: Config) -> None:
    """A graph replays the same kernels on the same addresses."""
    spec = STRATEGIES[config.strategy]
    if config.accelerator == "cpu":
        raise UsageError("--cuda_graphs needs a GPU: --compile compiles the network on the CPU too")
    if config.activation_offload:
        raise UsageError(
            "--cuda_graphs keeps the activations in the graph's own memory: leave out --activation_offload"
        )
    if config.accumulate > 1:
        raise UsageError("--cuda_graphs cannot add gradients up over --accumulate micro-batches: use --compile")
    if spec.stage == 3 or spec.family not in ("baseline", "deepspeed") or config.ds_config:
        raise UsageError(f"--cuda_graphs: {config.strategy_name} may move the parameters in every step: use --compile")


def _check_parts(config: Config) -> None:
    """What a network whose tensors, or whose layers, lie on several ranks needs."""
    spec, ranks, model = STRATEGIES[config.strategy], config.world_size, config.model.name
    given = f"--strategy {config.strategy}"
    if spec.family in ("fsdp2", "tensor_parallel", "pipeline") and config.precision == "16-mixed":
        raise UsageError(f"{given} has no loss scaling for float16: use --precision bf16-mixed")
    if not spec.one_replica:
        return
    entry = MODELS[model]
    if not issubclass(entry, ViT):
        known = ", ".join(name for name, other in MODELS.items() if issubclass(other, ViT))
        raise UsageError(f"{given} has no plan how to cut --model {model}: it has one for {known}")
    if config.num_nodes > 1:
        raise UsageError(f"{given} is for the ranks of one machine: over several use fsdp2 or deepspeed_stage_3")
    if config.trainable or config.lora.rank:
        raise UsageError(f"{given} trains whole networks alone: --trainable and --lora.rank go with fsdp2 or ZeRO")
    if spec.family == "tensor_parallel" and config.activation_offload:
        raise UsageError(f"{given} cuts the activations: use --activation_checkpointing, or fsdp2")
    if config.compile:
        raise UsageError(f"{given} exchanges tensors within the network: leave --compile out, or use fsdp2")
    heads, depth = SHAPES[entry.size].heads, SHAPES[entry.size].depth
    if spec.family == "tensor_parallel" and heads % ranks:
        fit = " or ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise UsageError(f"{given}: the {heads} heads of {model} cannot be shared out among {ranks}: --devices {fit}")
    if spec.family == "pipeline" and ranks > depth:
        raise UsageError(f"{given}: {model} has {depth} blocks for {ranks} ranks: --devices {depth} at most")


def _check_experts(config: Config, raw: dict[str, Any]) -> None:
    """What a network with mixtures of experts needs of the ranks and the strategy.

    Args:
        config: of the run.
        raw: the content of --ds_config, empty without one.
    """
    ep_size, ranks = config.model.options["ep_size"], config.world_size
    spec = STRATEGIES[config.strategy]
    given = f"--ds_config {config.ds_config}" if config.ds_config else f"--strategy {config.strategy}"
    stage = raw.get("zero_optimization", {}).get("stage", 0) if config.ds_config else spec.stage
    spreads = spec.family == "deepspeed" or bool(config.ds_config)
    if stage == 3:
        raise UsageError(
            f"{given}: DeepSpeed does not support its mixture of experts with ZeRO stage 3, use deepspeed_stage_2"
        )
    if ep_size > 1 and not spreads:
        raise UsageError(
            f"--model.ep_size {ep_size}: {given} keeps all experts on each rank, add --model.ep_size 1; "
            "deepspeed_stage_0, 1 and 2 spread them"
        )
    if ranks % ep_size:
        raise UsageError(f"--model.ep_size {ep_size} does not divide the {ranks} rank{'s'[: ranks > 1]} of --devices")
    for key in ("reduce_scatter", "contiguous_gradients"):
        if raw.get("zero_optimization", {}).get(key) is False:
            raise UsageError(f"{given} sets {key} to false: DeepSpeed needs it for mixtures of experts, take it out")
    if raw.get("use_data_before_expert_parallelism"):
        raise UsageError(f"{given} sets use_data_before_expert_parallelism: take it out, neighbours share experts here")
    if config.init != "default" and ep_size > 1:
        raise UsageError(f"--init {config.init} draws the experts of all ranks: add --model.ep_size 1")
    if config.cuda_graphs:
        raise UsageError(f"--cuda_graphs cannot replay the routing of --model {config.model.name}: use --compile")


def _check_optimizer(config: Config, raw: dict[str, Any]) -> None:
    """What an optimizer needs of the machine and the strategy; `raw` as in `_check_experts`."""
    name, spec = config.optimizer.name, STRATEGIES[config.strategy]
    zero = raw.get("zero_optimization", {})
    stage = zero.get("stage", 0) if config.ds_config else spec.stage
    cuts = spec.family not in ("baseline", "deepspeed") and not config.ds_config
    if name not in OFFLOADED_BY and (stage or cuts):
        raise UsageError(
            f"--optimizer {name} needs whole tensors, and {config.strategy_name} cuts them: "
            "use deepspeed_stage_0, ddp or baseline, or --optimizer adamw"
        )
    if name == "adam8bit":
        _check_bitsandbytes(config)
    offloads = zero.get("offload_optimizer", {}).get("device", "none") != "none" or spec.offload_optimizer
    if offloads and OFFLOADED_BY[name] == BY_DEEPSPEED and not (shutil.which("g++") or shutil.which("c++")):
        raise UsageError(
            f"--strategy {config.strategy_name} compiles DeepSpeed's CPU {name}: install g++ or use --optimizer sgd"
        )


def _check_bitsandbytes(config: Config) -> None:
    if config.accelerator != "gpu":
        raise UsageError("--optimizer adam8bit needs a CUDA GPU: use --optimizer adam")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError("--optimizer adam8bit needs bitsandbytes: pip install bitsandbytes, or use --optimizer adam")


def _check_averaging(config: Config, raw: dict[str, Any]) -> None:
    """The average lies where the weights lie, and is taken after a step; `raw` as in `_check_experts`."""
    flag = "--ema" if config.ema else "--swa_from"
    spec, offloaded_to = STRATEGIES[config.strategy], STRATEGIES[config.strategy].offload_parameters
    if config.ds_config:
        offloaded_to = raw.get("zero_optimization", {}).get("offload_param", {}).get("device")
    if offloaded_to == "nvme":
        raise UsageError(f"{flag}: {config.strategy_name} keeps the weights on disk, use deepspeed_stage_3_offload")
    if spec.family not in ("baseline", "deepspeed") and not config.ds_config:
        raise UsageError(f"{flag}: the shards of {config.strategy} cannot be averaged here, use deepspeed_stage_3")


def _check_network(config: Config, micro_batch: int, num_classes: int) -> None:
    if config.model.options.get("batch_norm") and micro_batch == 1:
        raise UsageError("--model.batch_norm normalises over a micro-batch, here a single image: raise --batch_size")
    if ":" not in config.model.name:
        return
    from models.external import check
    from sources.dataset import IMAGE_SHAPE

    entry = MODELS[config.model.name](**config.model.options)
    try:
        check(entry, num_classes, (micro_batch, *IMAGE_SHAPE))
    except ValueError as error:
        raise UsageError(f"--model {config.model.name}: {error}") from error


def _check_sync_batch_norm(config: Config) -> None:
    """torch's SyncBatchNorm (2.15) is for GPUs, and Lightning (2.6.6) puts it in for DDP and FSDP alone."""
    if config.accelerator == "cpu":
        raise UsageError("--trainer.sync_batchnorm needs a GPU: on the CPU each rank normalises by its micro-batch")
    if config.ds_config or STRATEGIES[config.strategy].family not in ("baseline", "fsdp"):
        raise UsageError(f"--trainer.sync_batchnorm is for ddp and fsdp, not for {config.strategy_name}")


def _check_offload(config: Config) -> None:
    spec = STRATEGIES[config.strategy]
    if config.ds_config or not spec.offload_optimizer:
        return
    if spec.super_offload and config.optimizer.name not in ("adam", "adamw"):
        raise UsageError(f"--strategy {config.strategy} runs Adam alone: add --optimizer adam")
    if spec.offload_optimizer == "nvme":
        _check_nvme(config.nvme_path)


def _check_nvme(path: str) -> None:
    if not path:
        raise UsageError("--strategy deepspeed_stage_3_offload_nvme needs --nvme_path DIRECTORY on a local disk")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--nvme_path {path} is not a directory that can be written")
    if not ctypes.util.find_library("aio") or not Path("/usr/include/libaio.h").exists():
        raise UsageError(
            "NVMe offload needs libaio (Debian: apt-get install libaio-dev); without it use deepspeed_stage_3_offload"
        )


def _raw_config(file: str) -> dict[str, Any]:
    """What a raw DeepSpeed configuration holds, where a run can be given it."""
    try:
        raw: Any = json.loads(Path(file).read_text())
    except OSError as error:
        raise UsageError(f"--ds_config {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--ds_config {file} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"--ds_config {file} must hold a JSON object")
    for key, owner in OWNED_BY_FLAGS.items():
        if key in raw:
            raise UsageError(f"--ds_config {file} sets {key!r}: take it out and use {owner}")
    zero = raw.get("zero_optimization", {})
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (0, 1, 2, 3):
        raise UsageError(f"--ds_config {file}: zero_optimization must be an object with a stage from 0 to 3")
    for key in ("offload_optimizer", "offload_param"):
        if not isinstance(zero.get(key, {}), dict):
            raise UsageError(f"--ds_config {file}: {key} must be an object with a device")
    return raw
