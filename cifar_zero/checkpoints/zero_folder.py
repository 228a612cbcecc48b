"""A DeepSpeed checkpoint folder, put together from the files of all ranks into Lightning's own form of a checkpoint.

DeepSpeed (0.19.8) writes, in the folder TAG:
- stages 0 to 2: `mp_rank_00_model_states.pt`, the network as it computes, and what the run adds;
- stage 3: the same as `zero_pp_rank_<rank>_mp_rank_00_model_states.pt` for each rank, without the sharded parameters;
- stages 1 to 3: `[bf16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt`: the rank's shard of the float32 weights and of
  the optimizer's state, as flat tensors, one for each parameter group (at stage 3 each sub-group);
- of a network with mixtures of experts, `layer_<mixture>_expert_<number>_mp_rank_00_model_states.pt` for each expert,
  and at stage 0 `expp_rank_<rank>_mp_rank_00_optim_states.pt`: the optimizer of each of the ranks that share a
  mixture's experts out. At stages 1 and 2 a group of experts is sharded over the ranks that hold the same ones;
- of an optimizer on NVMe, `offloaded_tensors/rank<rank>/`: in a file each of the flat tensors that are empty among the
  others, `<group>.tensor.swp` of the weights and `<key>-<group>.tensor.swp` of the state, in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cifar_zero.checkpoints.expert_names import in_order, plain_names
from cifar_zero.checkpoints.safe_load import load
from cifar_zero.core.errors import UsageError

TAG = "checkpoint"
"""Folder inside a DeepSpeed checkpoint, as Lightning names it."""

SHAPE = "zero_shape"
"""Key of what the strategy notes of its ranks and shards."""

GROUPS = "zero_groups"
"""Key of what it notes at stage 0: the names of the parameters of each group, which DeepSpeed does not write down."""

ON_DISK = "zero_on_disk"
"""Key of what it notes of an optimizer on NVMe: the names that DeepSpeed's files have for this rank's groups."""

AVERAGE = "average"
"""Key of what callbacks/averaging.py adds to the checkpoints of every strategy: `kind` and `count`, and `weights`, the
averages by the names of state_dict; `sharded` where these are this rank's parts, cut as stage 3 cuts the parameters."""

DEEPSPEED_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "ds_checkpoint_parallel_dims", "ds_config", "ds_version"),
    *("num_experts", "ds_autoep_layers", GROUPS, ON_DISK),
}
"""What of a model states file is DeepSpeed's, or for reading its files; the rest is Lightning's."""

DEEPSPEED_GROUP_KEYS = {"params", "param_names", "step", "name", "moe"}
"""What of a parameter group is an engine's, or is told anew."""

Shapes = Mapping[str, torch.Size]

State = dict[str, Any]
"""An optimizer's state of one parameter."""


@dataclass
class _Trained:
    """What the optimizer keeps, by the names of the plain network."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    """In float32, where there are such beside the network's own."""

    state: dict[str, State] = field(default_factory=dict)

    names: dict[int, list[str]] = field(default_factory=dict)
    """Of the parameters that the optimizer knows by each of its numbers."""


def read_folder(folder: Path, trust: bool = False, verify: bool = True, device: str = "cpu") -> dict[str, Any]:
    """The checkpoint as Lightning's plain strategies write it: state_dict, optimizer_states and the run's progress.

    Weights are the float32 ones that the optimizer updates, where DeepSpeed keeps such beside the network.

    Args:
        folder: that Lightning was asked to save to, with `latest` and TAG in it.
        trust: see `safe_load.load`, as for the others.
        verify: whether checksums are compared.
        device: of the tensors.

    Raises:
        UsageError: a file is missing, damaged or of another kind.
    """
    models, experts, shards, of_expert_ranks = (
        [load(file, trust, verify, device) for file in files] for files in _files(folder)
    )
    try:
        _check_whole(folder, models, experts, shards, of_expert_ranks)
        if shards:
            optimizers = [shard["optimizer_state_dict"] for shard in shards]
            for rank, model in enumerate(models if ON_DISK in models[0] else []):
                _fill_from_disk(optimizers[rank], folder / TAG / "offloaded_tensors", rank, model[ON_DISK], device)
        else:
            optimizers = [states["optimizer"] for states in of_expert_ranks or models]
        return _together(models, experts, optimizers)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{folder} is no checkpoint of DeepSpeed that is known here: {why}") from error


def _fill_from_disk(optimizer: dict[str, Any], folder: Path, rank: int, names: Sequence[str], device: str) -> None:
    """Puts into a rank's shard what DeepSpeed has left on its NVMe disk, and copied from there into the checkpoint."""
    (files,) = (found for found in folder.glob("rank*") if int(found.name.removeprefix("rank")) == rank)

    def read(stem: str) -> Tensor:
        file = files / f"{stem}.tensor.swp"
        return torch.from_file(str(file), size=file.stat().st_size // 4, dtype=torch.float32).to(device)

    weights, state = optimizer["fp32_flat_groups"], optimizer["optimizer_state_dict"]["state"]
    for number, name in enumerate(names):
        if not weights[number].numel():
            weights[number] = read(name)
            empty = [key for key, value in state[number].items() if isinstance(value, Tensor) and value.shape == (0,)]
            state[number] |= {key: read(f"{key}-{name}") for key in empty}


def shape_of(folder: Path, trust: bool = False) -> Any:
    """What the strategy noted of its ranks and shards when it wrote the checkpoint; None where it noted nothing.

    Raises:
        UsageError: as `read_folder` does.
    """
    return load(_files(folder)[0][0], trust, verify=False, device="meta").get(SHAPE)


def _files(folder: Path) -> tuple[list[Path], ...]:
    """Those of the network, of its experts, of the shards, and of the ranks that share experts out at stage 0."""

    def found(*patterns: str) -> list[Path]:
        files = [file for pattern in patterns for file in (folder / TAG).glob(pattern)]
        return sorted(files, key=lambda file: [int(number) for number in re.findall(r"\d+", file.stem)])

    models = found("mp_rank_*model_states.pt", "zero_pp_rank_*model_states.pt")
    if not models:
        raise UsageError(f"{folder} holds no checkpoint: no {TAG}/*model_states.pt")
    experts = found("layer_*_expert_*model_states.pt")
    return models, experts, found("*zero_pp_rank_*optim_states.pt"), found("expp_rank_*optim_states.pt")


def _stage(model_states: Mapping[str, Any]) -> int:
    return int(model_states["ds_config"].get("zero_optimization", {}).get("stage", 0))


def _check_whole(
    folder: Path, models: list[Any], experts: list[Any], shards: list[Any], of_expert_ranks: list[Any]
) -> None:
    main = models[0]
    stage, ranks = _stage(main), main["dp_world_size"]
    found = (len(models), len(experts), len(shards))
    expected = (ranks if stage == 3 else 1, sum(main.get("num_experts", [])), ranks if stage else 0)
    if found != expected:
        raise UsageError(
            f"{folder} is not whole: {found[0]} files of the network, {found[1]} of experts and {found[2]} of the "
            f"optimizer, of {expected[0]}, {expected[1]} and {expected[2]} that stage {stage} wrote on {ranks} ranks"
        )
    sharing = main.get(SHAPE, {}).get("ep_size", 1) if experts and not stage else 0
    if len(of_expert_ranks) < sharing:
        raise UsageError(
            f"{folder} is not whole: {len(of_expert_ranks)} expp_rank files, of {sharing} ranks that share the experts"
        )


def _together(
    models: list[dict[str, Any]], experts: list[dict[str, Tensor]], optimizers: list[dict[str, Any]]
) -> dict[str, Any]:
    main = models[0]
    stage = _stage(main)
    dense = {name: value for name, value in main["module"].items() if stage < 3 or name in main["buffer_names"]}
    of_experts = {name: value for expert in experts for name, value in expert.items()}
    plain = plain_names([*main["module"], *of_experts])
    weights = {plain[name]: value for name, value in {**dense, **of_experts}.items()}
    order = in_order((plain[name] for name in main["module"]), (plain[name] for name in of_experts))
    if stage:
        key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        trained = _of_flat(main["param_shapes"], [(shard[_masters(stage)], shard[key]) for shard in optimizers], stage)
        param_groups = optimizers[0][key]["param_groups"]
    else:
        trained, param_groups = _of_stage_0(main, {**dense, **of_experts}, optimizers)
    frozen = _frozen(models) if stage == 3 else {}
    state_dict = {**weights, **trained.weights, **frozen}
    progress = {key: value for key, value in main.items() if key not in DEEPSPEED_KEYS}
    if AVERAGE in main:
        progress[AVERAGE] = _averaged(models)
    optimizer_states = [_as_torch(trained, param_groups, order)] if trained.names else []
    return {**progress, "state_dict": {name: state_dict[name] for name in order}, "optimizer_states": optimizer_states}


def _masters(stage: int) -> str:
    return "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"


def _of_flat(groups: Sequence[Shapes], shards: list[tuple[list[Tensor], dict[str, Any]]], stage: int) -> _Trained:
    """Out of flat tensors, one for each group; of each rank its float32 weights and its optimizer's state."""
    trained = _Trained()
    moe = {number: group for group in shards[0][1]["param_groups"] for number in group["params"] if group.get("moe")}
    ranks = range(_ep_size(moe.values()))
    # Of all groups at once: DeepSpeed cuts a large group of experts into several, through the middle of a mixture.
    plain = [plain_names([name for shapes in groups for name in shapes], rank) for rank in ranks]
    for number, shapes in enumerate(groups):
        # Of experts there is a part for each of the ranks that share them out; the others are their copies, or shards.
        parts = len(ranks) if number in moe else 1
        trained.names[number] = []
        for part in range(parts):
            named = {plain[part][name]: shape for name, shape in shapes.items()}
            owners = shards[part::parts] if stage else [shards[part]]
            trained.weights |= _whole([weights[number] for weights, _ in owners], named, stage)
            trained.names[number] += named
            of_ranks = [optimizer["state"].get(number, {}) for _, optimizer in owners]
            for key, value in of_ranks[0].items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    values: Mapping[str, Any] = _whole([rank[key] for rank in of_ranks], named, stage)
                else:
                    values = dict.fromkeys(named, value)
                for name, whole in values.items():
                    trained.state.setdefault(name, {})[key] = whole
    return trained


def _ep_size(groups: Iterable[Mapping[str, Any]]) -> int:
    """Ranks that share the experts of a mixture out, which DeepSpeed names a group of experts after."""
    return max((int(group["name"].removeprefix("ep_size_")) for group in groups if group.get("moe")), default=1)


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
        found[name] = values.detach().reshape(shape).clone()
        offset += step
    return found


def _of_stage_0(
    main: dict[str, Any], weights: dict[str, Tensor], optimizers: list[dict[str, Any]]
) -> tuple[_Trained, list[dict[str, Any]]]:
    """Out of the optimizers of the ranks that share experts out, or of the only one; and its groups.

    DeepSpeed's consolidation does not know this stage (DeepSpeed issue 6699). In float32 the optimizer is torch's own;
    in a lower precision its float32 weights lie beside it, flat or one by one.
    """
    param_groups = optimizers[0].get("optimizer_state_dict", optimizers[0])["param_groups"]
    optimizers = optimizers[: _ep_size(param_groups)]
    bases = [optimizer.get("optimizer_state_dict", optimizer) for optimizer in optimizers]
    if GROUPS not in main and len(param_groups) > 1:
        return _Trained(), param_groups
    in_network = [name for name in main["module"] if name not in main["buffer_names"]]
    groups: list[list[str]] = main.get(GROUPS, [in_network])
    if "fp32_groups_flat" in optimizers[0]:
        shapes = [{name: weights[name].shape for name in group} for group in groups]
        shards = [(own["fp32_groups_flat"], base) for own, base in zip(optimizers, bases, strict=True)]
        return _of_flat(shapes, shards, stage=0), param_groups
    trained = _Trained()
    names = [name for group in groups for name in group]
    for part, (own, base) in enumerate(zip(optimizers, bases, strict=True)):
        plain = plain_names(names, part)
        for number, name in enumerate(names):
            known = trained.names.setdefault(number, [])
            if plain[name] not in known:
                known.append(plain[name])
            trained.state[plain[name]] = base["state"].get(number, {})
        if "fp32_groups" in own:
            masters = [master for group in own["fp32_groups"] for master in group]
            trained.weights |= zip((plain[name] for name in names), masters, strict=True)
    return trained, param_groups


def _frozen(models: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Parameters that are not trained, which stage 3 keeps in the ranks' model states, cut as the others are."""
    shapes: Shapes = models[0].get("frozen_param_shapes") or {}
    return {
        name: torch.cat([model["frozen_param_fragments"][name].flatten() for model in models])
        .narrow(0, 0, math.prod(shape))
        .reshape(shape)
        for name, shape in shapes.items()
    }


def _averaged(models: list[dict[str, Any]]) -> dict[str, Any]:
    """The averaged weights, put together where each rank has kept its own part."""
    average: dict[str, Any] = models[0][AVERAGE]
    if not average["sharded"]:
        return average
    weights: dict[str, Tensor] = dict(average["weights"])
    for name, shape in (item for group in models[0]["param_shapes"] for item in group.items()):
        parts = [model[AVERAGE]["weights"][name] for model in models]
        weights[name] = torch.cat(parts).narrow(0, 0, math.prod(shape)).reshape(shape)
    return {**average, "weights": weights, "sharded": False}


def _as_torch(trained: _Trained, groups: list[dict[str, Any]], order: Iterable[str]) -> dict[str, Any]:
    """The optimizer's state in torch's own form, experts in the group that they were taken from: of the same options.

    DeepSpeed's Adams count the steps as a number, or in the group. Of several groups `param_names` tells the order.
    """
    places = {name: place for place, name in enumerate(order)}
    merged: list[tuple[dict[str, Any], list[str]]] = []
    for group in groups:
        options = {key: value for key, value in group.items() if key not in DEEPSPEED_GROUP_KEYS}
        if not group.get("moe") or options not in [before for before, _ in merged]:
            merged.append((options, []))
        own = [name for number in group["params"] for name in trained.names[number]]
        next(names for before, names in reversed(merged) if before == options).extend(own)
        for entry in (trained.state.get(name) for name in own):
            if entry and (step := entry.get("step", group.get("step"))) is not None:
                known = not isinstance(step, Tensor) or not step.is_meta
                entry["step"] = torch.tensor(float(step)) if known else step
    state: dict[int, State] = {}
    param_groups: list[dict[str, Any]] = []
    for options, names in merged:
        first = sum(len(group["params"]) for group in param_groups)
        numbered = dict(enumerate(sorted(names, key=places.__getitem__), first))
        state |= {number: trained.state[name] for number, name in numbered.items() if trained.state.get(name)}
        told = {"param_names": [*numbered.values()]} if len(merged) > 1 else {}
        param_groups.append({**options, "params": [*numbered], **told})
    return {"state": state, "param_groups": param_groups}
