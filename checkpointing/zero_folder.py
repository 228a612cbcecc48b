"""A DeepSpeed checkpoint folder, put together from the files of all ranks into Lightning's own form of a checkpoint.

DeepSpeed (0.19.8) writes, in the folder TAG:
- stages 0 to 2: `mp_rank_00_model_states.pt`, the network as it computes, and what the run adds;
- stage 3: the same as `zero_pp_rank_<rank>_mp_rank_00_model_states.pt` for each rank, without the sharded parameters;
- stages 1 to 3: `[bf16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt`: the rank's shard of the float32 weights and of
  the optimizer's state, as flat tensors, one for each parameter group (at stage 3 each sub-group).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.safe_load import load
from errors import UsageError

TAG = "checkpoint"
"""Folder inside a DeepSpeed checkpoint, as Lightning names it."""

SHAPE = "zero_shape"
"""Key of what the strategy notes of its ranks and shards."""

DEEPSPEED_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "ds_checkpoint_parallel_dims", "ds_config", "ds_version"),
}
"""What of a model states file is DeepSpeed's; the rest is Lightning's."""

Shapes = Mapping[str, torch.Size]


def read_folder(folder: Path, trust: bool = False) -> dict[str, Any]:
    """The checkpoint as Lightning's plain strategies write it: state_dict, optimizer_states and the run's progress.

    Weights are the float32 ones that the optimizer updates, where DeepSpeed keeps such beside the network.

    Args:
        folder: that Lightning was asked to save to, with `latest` and TAG in it.
        trust: see `safe_load.load`.

    Raises:
        UsageError: a file is missing, damaged or of another kind.
    """
    model_files, shard_files = _files(folder)
    models = [load(file, trust) for file in model_files]
    try:
        return _together(folder, models, [load(file, trust)["optimizer_state_dict"] for file in shard_files])
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{folder} is no checkpoint of DeepSpeed that is known here: {why}") from error


def shape_of(folder: Path, trust: bool = False) -> Any:
    """What the strategy noted of its ranks and shards when it wrote the checkpoint; None where it noted nothing.

    Raises:
        UsageError: as `read_folder` does.
    """
    return load(_files(folder)[0][0], trust).get(SHAPE)


def _stage(model_states: Mapping[str, Any]) -> int:
    return int(model_states["ds_config"].get("zero_optimization", {}).get("stage", 0))


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    files = sorted((folder / TAG).glob("*.pt"), key=_rank)
    model_files = [file for file in files if file.name.endswith("model_states.pt")]
    if not model_files:
        raise UsageError(f"{folder} holds no checkpoint: no {TAG}/*model_states.pt")
    return model_files, [file for file in files if file.name.endswith("optim_states.pt")]


def _rank(file: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", file.name)
    return int(found[1]) if found else 0


def _together(folder: Path, models: list[dict[str, Any]], shards: list[dict[str, Any]]) -> dict[str, Any]:
    main = models[0]
    stage, ranks = _stage(main), main["dp_world_size"]
    expected = (ranks if stage == 3 else 1, ranks if stage else 0)
    if (len(models), len(shards)) != expected:
        raise UsageError(
            f"{folder} is not whole: {len(models)} files of the network and {len(shards)} of the optimizer, "
            f"of {expected[0]} and {expected[1]} that stage {stage} wrote on {ranks} ranks"
        )
    weights = {name: value for name, value in main["module"].items() if stage < 3 or name in main["buffer_names"]}
    if stage:
        masters, optimizer = _of_shards(main["param_shapes"], shards, stage)
    else:
        masters, optimizer = _of_stage_0(main)
    frozen = _frozen(models) if stage == 3 else {}
    order = {name: {**weights, **masters, **frozen}[name] for name in main["module"]}
    progress = {key: value for key, value in main.items() if key not in DEEPSPEED_KEYS}
    return {**progress, "state_dict": order, "optimizer_states": [] if optimizer is None else [optimizer]}


def _of_shards(
    groups: Sequence[Shapes], shards: list[dict[str, Any]], stage: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Float32 weights by name, and the optimizer's state as torch numbers it: parameters in the order of the groups."""
    flat, base = ("fp32_flat_groups", "optimizer_state_dict") if stage == 3 else (
        "single_partition_of_fp32_groups", "base_optimizer_state"
    )  # fmt: skip
    weights: dict[str, Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    numbers: list[range] = []
    for number, shapes in enumerate(groups):
        weights |= _whole([shard[flat][number] for shard in shards], shapes, stage)
        numbers.append(range(len(weights) - len(shapes), len(weights)))
        of_ranks = [shard[base]["state"].get(number, {}) for shard in shards]
        for key, value in of_ranks[0].items():
            if isinstance(value, Tensor) and value.dim() > 0:
                values: Sequence[Any] = [*_whole([rank[key] for rank in of_ranks], shapes, stage).values()]
            else:
                values = [value] * len(shapes)
            for parameter, whole in zip(numbers[number], values, strict=True):
                state.setdefault(parameter, {})[key] = whole
    param_groups = [
        {**group, "params": [parameter for number in group["params"] for parameter in numbers[number]]}
        for group in shards[0][base]["param_groups"]
    ]
    return weights, _as_torch(state, param_groups)


def _whole(shards: list[Tensor], shapes: Shapes, stage: int) -> dict[str, Tensor]:
    """A group's tensors, out of the flat shard of each rank.

    Stages 1 and 2 lay all parameters end to end and cut the whole into one piece for each rank; stage 3 cuts each
    parameter. Either fills up at the end.
    """
    found: dict[str, Tensor] = {}
    offset = 0
    whole = torch.cat([shard.flatten() for shard in shards]) if stage < 3 else None
    for name, shape in shapes.items():
        numel = math.prod(shape)
        if whole is not None:
            values, step = whole.narrow(0, offset, numel), numel
        else:
            step = math.ceil(numel / len(shards))
            values = torch.cat([shard.narrow(0, offset, step) for shard in shards]).narrow(0, 0, numel)
        found[name] = values.reshape(shape).clone()
        offset += step
    return found


def _of_stage_0(main: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """DeepSpeed's consolidation does not know this stage (DeepSpeed issue 6699).

    In float32 the optimizer is torch's own; in a lower precision its float32 weights lie beside it, flat or one by one.
    """
    optimizer = main["optimizer"]
    masters = optimizer.get("fp32_groups_flat") or optimizer.get("fp32_groups")
    if masters is None:
        return {}, _as_torch(optimizer["state"], optimizer["param_groups"])
    if len(masters) > 1:  # which parameter is of which group is not written down
        return {}, None
    shapes = {name: value.shape for name, value in main["module"].items() if name not in main["buffer_names"]}
    base = optimizer["optimizer_state_dict"]
    if "fp32_groups" in optimizer:
        return dict(zip(shapes, masters[0], strict=True)), _as_torch(base["state"], base["param_groups"])
    shard = {"single_partition_of_fp32_groups": masters, "base_optimizer_state": base}
    return _of_shards([shapes], [shard], stage=1)


def _frozen(models: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Parameters that are not trained, which stage 3 keeps in the ranks' model states, cut as the others are."""
    shapes: Shapes = models[0].get("frozen_param_shapes") or {}
    return {
        name: torch.cat([model["frozen_param_fragments"][name].flatten() for model in models])
        .narrow(0, 0, math.prod(shape))
        .reshape(shape)
        for name, shape in shapes.items()
    }


def _as_torch(state: Mapping[int, dict[str, Any]], param_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The optimizer's state in torch's own form: DeepSpeed's Adams count the steps as a number, or in the group."""
    found = {number: dict(entry) for number, entry in state.items()}
    for group in param_groups:
        for number in group["params"]:
            entry = found.get(number, {})
            step = entry.get("step", group.get("step"))
            if entry and step is not None:
                entry["step"] = torch.tensor(float(step))
    return {"state": found, "param_groups": [{k: v for k, v in group.items() if k != "step"} for group in param_groups]}
