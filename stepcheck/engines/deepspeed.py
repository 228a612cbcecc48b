"""Defines the adapter of a DeepSpeedEngine at ZeRO 0 to 3.

Follows the sources of DeepSpeed 0.16.0 to 0.19.8. Which tensors the optimizer updates depends on the ZeRO stage and on
DeepSpeed's wrapper of the optimizer (`flat_groups`).
"""

import importlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepcheck.engines.adapter import EngineAdapter, NotAuditable, Part, Target
from stepcheck.engines.deepspeed_step import EngineStep

ONE_BIT = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
"""DeepSpeed's optimizers that send one bit of each element (up to 0.19.6)."""


class DeepSpeedAdapter(EngineAdapter):
    owns_step = True

    def __init__(self, engine: Any):
        self.engine, self.stage = engine, _stage(engine)
        self._refuse_unreadable()
        super().__init__(engine.module, engine.basic_optimizer)
        self.gathers = self.stage == 3
        ids = {id(each) for _, parts in flat_groups(engine) for each, *_ in parts}
        self.trained = {self.index_of[each] for each in self.index_of.keys() & ids}
        self._give_experts_rows()

    def _refuse_unreadable(self) -> None:
        engine, config = self.engine, self.engine._config
        zero, optimizer = config.zero_config, engine.optimizer
        quantized = [f"zero_quantized_{what}" for what in ("gradients", "weights", "nontrainable_weights")]
        offload = zero.offload_optimizer
        reasons = {
            "PipelineEngine calls the stages of a model itself": type(engine).__name__ == "PipelineEngine",
            "SuperOffload updates the weights in another process": type(optimizer).__name__.startswith("SuperOffload"),
            # With an offload ratio below 1 (zero/stage3.py).
            "a second optimizer updates the part of the weights that is not offloaded": hasattr(
                optimizer, "backup_optimizer"
            ),
            "tensor parallelism gives the ranks different parts of a weight under one name": engine.mp_world_size > 1,
            "the optimizer's tensors are on NVMe": offload is not None
            and str(getattr(offload.device, "value", offload.device)) == "nvme",
            "ZeRO++ sends quantized weights or gradients": any(getattr(zero, name, False) for name in quantized),
            "ZenFlow updates most weights with gradients of earlier steps": bool(getattr(zero, "zenflow", None)),
            # Up to 0.19.6. Without MiCS it is -1.
            "MiCS shards in groups of ranks": getattr(config, "mics_shard_size", -1) > 0,
            # Since 0.16.6.
            "DeepCompile replaces the gathering and reducing by compiled code": getattr(
                getattr(config, "compile_config", None), "deepcompile", False
            ),
            "1-bit optimizers send compressed gradients": type(engine.basic_optimizer).__name__ in ONE_BIT,
        }
        for why, applies in reasons.items():
            if applies:
                raise NotAuditable(why)

    def _give_experts_rows(self) -> None:
        """Gives each parameter of an expert one row in the matrix of sketches for each rank of its expert-parallel
        group, because these ranks have different experts under one name."""
        self._expert_ranks = {}
        for index, parameter in enumerate(self.parameters):
            if getattr(parameter, "allreduce", True):
                continue
            groups = importlib.import_module("deepspeed.utils.groups")
            size, own = (
                getattr(groups, f"_get_expert_parallel_{what}")(parameter.group_name) for what in ("world_size", "rank")
            )
            self._expert_ranks[index] = size
            self.rows[index] = len(self.row_names) + own
            self.row_names += [f"{self.names[index]} of expert rank {rank}" for rank in range(size)]
            self.index_of_row += [index] * size

    @property
    def label(self) -> str:
        dtype = str(self.engine.get_data_types()[0]).removeprefix("torch.")
        stage = self.engine.zero_optimization_stage()
        return f"DeepSpeed {deepspeed.__version__}, ZeRO {stage}, {dtype}, {self.ranks}"

    @property
    def device(self) -> torch.device:
        return torch.device(self.engine.device)

    def find_targets(self) -> Iterator[Target]:
        for tensor, parts in flat_groups(self.engine):
            own = [Part(self.index_of[id(each)], *rest) for each, *rest in parts if id(each) in self.index_of]
            yield Target(tensor, tuple(part for part in own if part.length))

    def parameter_groups(self) -> dict[int, dict[str, Any]]:
        if self.stage < 3:
            return super().parameter_groups()
        # Between two steps, the groups have no tensors.
        numbers = self.engine.optimizer.sub_group_to_group_id
        groups = ((self.optimizer.param_groups[numbers[n]], target) for n, target in enumerate(self.targets.values()))
        return {part.index: group for group, target in groups for part in target.parts}

    def shape(self, index: int) -> torch.Size:
        parameter = self.parameters[index]
        return getattr(parameter, "ds_shape", parameter.shape)

    def full_weight(self, index: int) -> Tensor:
        with deepspeed.zero.GatheredParameters([self.parameters[index]], enabled=self.stage == 3):
            return super().full_weight(index)

    def prepare_copy(self, copy: nn.Module) -> None:
        """Sets the process groups in the copy's layers of experts, and makes its forward pass autocast if the engine's
        does."""
        knows_autocast = hasattr(self.engine, "torch_autocast_enabled")  # since 0.17.2
        if knows_autocast and self.engine.torch_autocast_enabled():
            autocast = torch.autocast(self.device.type, self.engine.torch_autocast_dtype())
            vars(copy)["forward"] = autocast(copy.forward)
        parts: Iterator[Any] = copy.modules()
        for part in parts:
            if hasattr(part, "set_deepspeed_parallelism"):
                part.set_deepspeed_parallelism(getattr(self.engine._config, "use_data_before_expert_parallel_", False))

    def own_part(self, index: int) -> tuple[Tensor, int]:
        parameter = self.parameters[index]
        if not hasattr(parameter, "ds_tensor"):
            return parameter.detach(), 0
        start, length = stage_3_part(parameter)
        return parameter.ds_tensor.detach()[:length], start

    def replica(self, index: int) -> tuple[int, int]:
        experts = self._expert_ranks.get(index, 1)
        return (0, 1) if self.stage else (self.ranks.rank // experts, self.ranks.size // experts)

    def weight_replicas(self, index: int) -> int:
        sharded = self.stage == 3 or (self.stage and index in self.trained)
        return 1 if sharded else self.ranks.size // self._expert_ranks.get(index, 1)

    def rounding_dtypes(self) -> set[torch.dtype]:
        trained = [self.parameters[index] for index in self.trained]
        own = {each.dtype for each in trained}
        if self.stage:
            own |= {_sent_dtype(each) for each in trained}
        return own | {self.engine.communication_data_type, *self.engine.get_data_types()}

    def compute_dtype(self, index: int) -> torch.dtype:
        parameter = self.parameters[index]
        gathered = self.stage == 3 and dist.get_world_size(parameter.ds_process_group) > 1
        return _sent_dtype(parameter) if gathered else parameter.dtype

    modified_because = "ZeRO replaces them with the updates of Muon"

    def modified_gradients(self) -> set[int]:
        muon = bool(self.stage) and "Muon" in type(self.optimizer).__name__
        return {index for index in self.trained if muon and getattr(self.parameters[index], "use_muon", False)}

    def loss_scale(self) -> float:
        return loss_scale(self.engine)

    def reduction_factor(self) -> float:
        if not getattr(self.engine, "gradient_average", True):
            return float(self.ranks.size)
        return float(self.engine.sequence_parallel_size)  # ranks that share a sequence are not divided by

    def clip_limit(self) -> float:
        return float(self.engine._config._param_dict.get("gradient_clipping", 0.0) or 0.0)

    def given_options(self) -> dict[int, dict[str, Any]]:
        """Returns lr, betas, eps, weight_decay and momentum as DeepSpeed's configuration gives them, by parameter
        index. Leaves out the value "auto", and lr if there is a schedule. Returns an empty dictionary if DeepSpeed has
        not built the optimizer."""
        section = self.engine._config._param_dict.get("optimizer") or {}
        if self.engine.client_optimizer is not None or not section.get("params"):
            return {}
        known = ("lr", "betas", "eps", "weight_decay", "momentum")
        given = {key: value for key, value in section["params"].items() if key in known and value != "auto"}
        if self.engine.lr_scheduler is not None:
            given.pop("lr", None)
        return dict.fromkeys(self.trained, given)

    def attach(self, audit: Any) -> None:
        super().attach(audit)
        EngineStep(self, audit)


def loss_scale(engine: Any) -> float:
    """Returns the loss scale that is in the gradients until the optimizer's step, or 1 if the engine does not scale the
    loss."""
    for owner, name in ((engine.optimizer, "torch_autocast_gradscaler"), (engine, "torch_autocast_z0_gradscaler")):
        if scaler := getattr(owner, name, None):  # with torch_autocast in float16; up to 0.17.5 in each dtype
            has_old_name = any(hasattr(each, "autocast_dtype") for each in engine.module.parameters())
            return 1.0 if has_old_name and _stage(engine) == 3 else scaler.get_scale()  # ZeRO 3 ignored it
    return float(getattr(engine.optimizer, "loss_scale", 1.0) or 1.0)


def _sent_dtype(parameter: Any) -> torch.dtype:
    """Returns the dtype in which ZeRO sends a weight and its gradient. With torch_autocast, it is the low precision for
    the layers that compute in it."""
    before_0_17_6 = getattr(parameter, "autocast_dtype", parameter.dtype)
    return getattr(parameter, "comm_dtype", before_0_17_6)


def stage_3_part(parameter: Any) -> tuple[int, int]:
    """Returns the start and the length, without padding, of this rank's shard in the flattened parameter at ZeRO 3."""
    size = parameter.ds_tensor.ds_numel
    start = dist.get_rank(parameter.ds_process_group) * size
    return start, max(0, min(size, parameter.ds_numel - start))


def _stage(engine: Any) -> int:
    """Returns the ZeRO stage by which the optimizer shards. In bfloat16 it may differ from the configured stage. ZeRO 0
    of 0.17.5 and older has BF16_Optimizer, which shards as ZeRO 1 does. ZeRO 1 of 0.17.6 to 0.18.4 with
    grad_accum_dtype fp32 has FP16_UnfusedOptimizer, which does not shard."""
    if hasattr(engine.optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer
        return 1
    sharded = ("round_robin_bit16_groups", "fp32_partitioned_groups_flat")  # ZeRO 1 and 2, ZeRO 3
    return engine.zero_optimization_stage() if any(hasattr(engine.optimizer, name) for name in sharded) else 0


FlatGroups = Iterator[tuple[Tensor, list[tuple[nn.Parameter, int, int, int]]]]
"""Tensors of an optimizer, each with a part for each parameter of its group, in order. A part is the parameter, the
part's start in the flattened parameter and in the flattened tensor, and its length, all in elements. The length is 0 if
only other ranks have the parameter."""


def flat_groups(engine: Any) -> FlatGroups:
    """Yields each tensor that this rank's inner optimizer updates, with its parts. Raises NotAuditable if DeepSpeed's
    wrapper of the optimizer is unknown."""
    optimizer, stage = engine.optimizer, _stage(engine)
    if stage == 3:
        yield from _stage_3_groups(optimizer)
    elif hasattr(optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer
        yield from _partitions(optimizer, optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)
    elif stage:
        groups, targets = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
        yield from _partitions(optimizer, groups, targets)
    elif optimizer is engine.basic_optimizer:
        for group in optimizer.param_groups:
            yield from ((each, [(each, 0, 0, each.numel())]) for each in group["params"])
    elif hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer
        for group, target in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            offsets = accumulate((each.numel() for each in group), initial=0)
            yield target, [(each, 0, offset, each.numel()) for each, offset in zip(group, offsets, strict=False)]
    elif hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer
        for group, targets in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            yield from ((t, [(each, 0, 0, each.numel())]) for each, t in zip(group, targets, strict=True))
    else:
        raise NotAuditable(f"{type(optimizer).__name__} is an optimizer that the audit cannot read")


def _stage_3_groups(optimizer: Any) -> FlatGroups:
    for group, target in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        offsets = accumulate((each.ds_tensor.ds_numel for each in group), initial=0)
        shards = ((each, offset, *stage_3_part(each)) for each, offset in zip(group, offsets, strict=False))
        yield target, [(each, start, offset, length) for each, offset, start, length in shards]


def _partitions(optimizer: Any, groups: Any, targets: Any) -> FlatGroups:
    """Yields this rank's partition of each flat group of ZeRO 1 and 2 or of BF16_Optimizer."""
    paddings = getattr(optimizer, "round_robin_bit16_padding", None) or [[0] * len(group) for group in groups]
    for number, (group, target) in enumerate(zip(groups, targets, strict=True)):
        first = dist.get_rank(optimizer.real_dp_process_group[number]) * target.numel()
        lengths = (each.numel() + padding for each, padding in zip(group, paddings[number], strict=True))
        offsets = accumulate(lengths, initial=0)
        parts = []
        for each, offset in zip(group, offsets, strict=False):
            begin, end = max(offset, first), min(offset + each.numel(), first + target.numel())
            parts.append((each, begin - offset, begin - first, max(0, end - begin)))
        yield target, parts


def free(engine: Any) -> None:
    """Destroys an engine, and drops references to its tensors that DeepSpeed would keep: in gradient hooks, and at ZeRO
    3 also in a stack and in the cache of a method (0.16.0 to 0.19.8). Also resets a global flag of DeepSpeed, by which
    an engine with torch_autocast makes all later engines of the process autocast (0.17.2 to 0.19.8)."""
    with suppress(ModuleNotFoundError):
        vars(importlib.import_module("deepspeed.runtime.torch_autocast"))["TORCH_AUTOCAST_INITIALIZED"] = False
    engine.destroy()
    with suppress(ImportError, AttributeError, KeyError, TypeError):  # another release may have other names
        importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()
        coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
        methods = vars(coordinator.PartitionedParameterCoordinator)
        cached = methods["_PartitionedParameterCoordinator__params_to_release"]
        cached.__closure__[0].cell_contents.cache_clear()


def compile_no_collective() -> None:
    """Keeps DeepSpeed from compiling its shared-memory collective for CPUs, which only its inference uses. Does not
    read the table of operators first. Reading it would make DeepSpeed (0.19.8, ops/__init__.py) compile and link a test
    program for each operator, and a notebook would show the linker's errors."""
    operators: Any = vars(deepspeed.ops)
    operators.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
