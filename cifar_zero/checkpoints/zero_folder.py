"""Assembles a DeepSpeed checkpoint folder, with the files of all ranks, into the form of Lightning's plain checkpoints.

DeepSpeed's own tools do not suffice. zero_to_fp32 loads files that could run code, and drops the optimizer's state.
Universal checkpoints support only Adam. DeepSpeed (0.19.8) writes these files into the folder TAG:

- `mp_rank_00_model_states.pt` at stages 0 to 2, with the model in the dtype in which it computes and whatever the run
  adds. At stage 0 it also contains the optimizer.
- `zero_pp_rank_<rank>_mp_rank_00_model_states.pt` of each rank at stage 3, without the sharded parameters.
- `[bf16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt` of each rank at stages 1 to 3, with the rank's shard of the
  float32 weights and of the optimizer's state. Each parameter group (at stage 3 each sub-group) is one flat tensor. A
  group of experts is sharded over the ranks that have the same experts.
- `layer_<mixture>_expert_<number>_mp_rank_00_model_states.pt` for each expert of a mixture of experts.
- `expp_rank_<rank>_mp_rank_00_optim_states.pt` at stage 0 with experts, with the optimizer of each rank that has other
  experts.
- `offloaded_tensors/rank<rank>/` for an optimizer on NVMe, with the flat tensors that are empty in the other files, in
  float32. `<group>.tensor.swp` are the weights and `<key>-<group>.tensor.swp` is the state.

To each file, except the experts' files, the strategy adds GROUPS, TIED and PROGRESS, and for NVMe also ON_DISK.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cifar_zero.checkpoints.safe_load import load
from cifar_zero.core.errors import UsageError

TAG = "checkpoint"  # folder inside a DeepSpeed checkpoint, as Lightning names it
LAYOUT = "zero_layout"  # key of what a shard depends on, such as the number of ranks

GROUPS = "zero_groups"
"""Key of the plain names and the shapes of the parameters in each of a rank's flat tensors, in the order of the
tensor."""

ON_DISK = "zero_on_disk"  # key of the names of this rank's groups in DeepSpeed's files on NVMe

AVERAGE = "average"
"""Key under which callbacks/averaging.py adds `kind`, `count`, `weights` and `sharded` to the checkpoints of every
strategy. `weights` are the averages, keyed by the names in state_dict. If `sharded` is set, they are only this rank's
parts, cut as stage 3 cuts the parameters."""

TIED = "zero_tied"
"""Key of a dict that maps each additional plain name of a tied weight to its first plain name, which a shard
contains."""

PROGRESS = "zero_progress"
"""Key of the names of all entries that Lightning and the run's callbacks have added to the files of the model."""

DEEPSPEED_GROUP_KEYS = {"params", "param_names", "name", "moe"}
"""Keys of a parameter group that only an engine uses, or that `_as_torch` replaces."""

EXPERT = re.compile(r"(.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.*)")
"""DeepSpeed's name of an expert's weight, with groups for the mixture, the expert's number and the weight's own
name."""

Shapes = Mapping[str, torch.Size]

State = dict[str, Any]  # an optimizer's state for one parameter


class _Shard(NamedTuple):
    """A rank's part of the weights and state that the optimizer keeps."""

    groups: Sequence[Shapes]  # names and shapes of the parameters in each flat tensor
    weights: Sequence[Tensor]  # the flat tensors in float32; empty if the optimizer updates the model's own weights
    state: Mapping[int, State]  # the optimizer's flat state for each flat tensor
    param_groups: list[dict[str, Any]]  # the optimizer's groups of flat tensors
    paddings: Sequence[Sequence[int] | None]  # padding elements after each parameter, with parameter_alignment


def read_folder(folder: Path, trust: bool = False, verify: bool = True, device: str = "cpu") -> dict[str, Any]:
    """Returns the content of a DeepSpeed checkpoint folder in the form in which Lightning's plain strategies write it,
    with state_dict, optimizer_states and progress.

    If DeepSpeed keeps float32 master weights in addition to the model's own weights, the state_dict has the master
    weights. For the arguments see `safe_load.load`. Raises UsageError if a file is missing, damaged or of another kind.
    """
    models, experts, shards, of_expert_ranks = (
        [load(file, trust, verify, device) for file in files] for files in files_of(folder / TAG)
    )
    try:
        _check_complete(folder, models, experts, shards, of_expert_ranks)
        for rank, shard in enumerate(shards):
            if ON_DISK in shard:
                _fill_from_disk(shard["optimizer_state_dict"], folder, rank, shard[ON_DISK], device)
        stage = _stage(models[0])
        return _assembled(models, experts, [_shard(states, stage) for states in shards or of_expert_ranks or models])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{folder} is not a DeepSpeed checkpoint of this program: {why}") from error


def layout_of(folder: Path, trust: bool = False) -> Any:
    """Returns what the shards of a checkpoint depend on, such as the number of ranks, as the strategy recorded it under
    LAYOUT. Returns None if there is no such record. Raises UsageError if the file cannot be read."""
    return load(files_of(folder / TAG)[0][0], trust, verify=False, device="meta").get(LAYOUT)


def plain_names(names: Iterable[str], rank: int = 0) -> dict[str, str]:
    """Maps DeepSpeed's names of weights to the names in the plain model. DeepSpeed numbers the experts of each rank
    from 0.

    `names` are the names of one rank, whose index among the ranks that share the experts of a mixture is `rank`. They
    may also be the names of all weights, with the experts of all ranks.
    """
    found = {name: EXPERT.fullmatch(name) for name in names}
    numbers: dict[str, set[str]] = {}
    for expert in filter(None, found.values()):
        numbers.setdefault(expert[1], set()).add(expert[2])
    plain: dict[str, str] = {}
    for name, expert in found.items():
        plain[name] = name.replace(".deepspeed_moe.gate.", ".gate.")
        if expert:
            number = rank * len(numbers[expert[1]]) + int(expert[2])
            plain[name] = f"{expert[1]}.experts.{number}.{expert[3]}"
    return plain


def files_of(folder: Path) -> tuple[list[Path], ...]:
    """Returns four lists of files: the model's files, its experts' files, the optimizer's shards, and the `expp_rank`
    files, which exist only at stage 0 with experts. Raises UsageError if no file of the model exists."""

    def found(pattern: str) -> list[Path]:
        return sorted(folder.glob(pattern), key=lambda file: [*map(int, re.findall(r"\d+", file.stem))])

    models = found("mp_rank_*model_states.pt") or found("zero_pp_rank_*model_states.pt")
    if not models:
        raise UsageError(f"{folder} contains no checkpoint: *model_states.pt is missing")
    experts = found("layer_*_expert_*model_states.pt")
    return models, experts, found("*zero_pp_rank_*optim_states.pt"), found("expp_rank_*optim_states.pt")


def _stage(model_states: Mapping[str, Any]) -> int:
    return int(model_states["ds_config"].get("zero_optimization", {}).get("stage", 0))


def _check_complete(
    folder: Path, models: list[Any], experts: list[Any], shards: list[Any], of_expert_ranks: list[Any]
) -> None:
    main = models[0]
    stage, ranks = _stage(main), main["dp_world_size"]
    num_experts = sum(main.get("num_experts", []))
    sharing = main[LAYOUT]["ep_size"] if num_experts and not stage else 0
    for found, expected, what in (
        (models, ranks if stage == 3 else 1, "model files"),
        (experts, num_experts, "expert files"),
        (shards, ranks if stage else 0, "optimizer files"),
        (of_expert_ranks[:sharing], sharing, "expp_rank files"),
    ):
        if len(found) != expected:
            raise UsageError(f"{folder} is incomplete: it has {len(found)} {what}, not {expected} (stage {stage})")


def _fill_from_disk(optimizer: dict[str, Any], folder: Path, rank: int, names: Sequence[str], device: str) -> None:
    """Fills a rank's shard with the tensors that DeepSpeed kept on NVMe and copied from there into the checkpoint."""
    files = folder / TAG / "offloaded_tensors" / f"rank{rank:02d}"  # DeepSpeed's dp_index_to_str

    def read(stem: str) -> Tensor:
        file = files / f"{stem}.tensor.swp"
        return torch.from_file(str(file), size=file.stat().st_size // 4, dtype=torch.float32).to(device)

    weights, state = optimizer["fp32_flat_groups"], optimizer["optimizer_state_dict"]["state"]
    for number, name in enumerate(names):
        if not weights[number].numel():
            weights[number] = read(name)
            empty = [key for key, value in state[number].items() if isinstance(value, Tensor) and value.shape == (0,)]
            state[number] |= {key: read(f"{key}-{name}") for key in empty}


def _shard(states: Mapping[str, Any], stage: int) -> _Shard:
    if stage:
        own = states["optimizer_state_dict"]
        base = own["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        weights = own["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
    else:  # float32: torch's own optimizer; else one with float32 weights, flat or per parameter
        own = states["optimizer"]
        base = own.get("optimizer_state_dict", own)
        weights = own.get("fp32_groups_flat") or [*chain(*own.get("fp32_groups", ()))]
    paddings = own.get("param_alignment_paddings") or [None] * len(states[GROUPS])
    return _Shard(states[GROUPS], weights, base["state"], base["param_groups"], paddings)


def _assembled(
    models: list[dict[str, Any]], experts: list[dict[str, Tensor]], shards: Sequence[_Shard]
) -> dict[str, Any]:
    main = models[0]
    stage = _stage(main)
    stored = {name: value for name, value in main["module"].items() if stage < 3 or name in main["buffer_names"]}
    for expert in experts:
        stored |= expert
    plain = plain_names({**main["module"], **stored})
    weights = {plain[name]: value for name, value in stored.items()}
    state: dict[str, State] = {}
    names: dict[int, list[str]] = {}
    for number in range(len(shards[0].groups)):
        # Ranks with the same parameters have copies of them (stage 0) or shards of them. Other ranks have other
        # experts.
        holders: dict[tuple[str, ...], list[_Shard]] = {}
        for shard in shards:
            holders.setdefault((*shard.groups[number],), []).append(shard)
        names[number] = [*chain(*holders)]
        for holding in holders.values():
            owners, shapes = holding if stage else holding[:1], holding[0].groups[number]
            padding = owners[0].paddings[number]
            if owners[0].weights:
                weights |= whole_tensors([owner.weights[number] for owner in owners], shapes, stage, padding)
            states = [owner.state.get(number, {}) for owner in owners]
            for key, value in states[0].items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    values: Mapping[str, Any] = whole_tensors([own[key] for own in states], shapes, stage, padding)
                elif key == "step":  # a number in the state of DeepSpeed's Adam
                    values = {name: torch.as_tensor(value, dtype=torch.float32).clone() for name in shapes}
                else:
                    values = dict.fromkeys(shapes, value)
                for name, whole in values.items():
                    state.setdefault(name, {})[key] = whole
    frozen: Shapes = main.get("frozen_param_shapes") or {} if stage == 3 else {}
    for name, shape in frozen.items():
        weights[name] = uncut([model["frozen_param_fragments"][name].flatten() for model in models], shape)
    for name, first_name in main[TIED].items():
        weights[name] = weights[first_name]
    progress = {key: main[key] for key in main[PROGRESS]}
    if AVERAGE in main:
        progress[AVERAGE] = _averaged([model[AVERAGE] for model in models], shards[0].groups)
    optimizer_states = [_as_torch(state, names, shards[0].param_groups)]
    state_dict = {name: weights[name] for name in plain.values()}  # in the model's order, but for experts
    return {**progress, "state_dict": state_dict, "optimizer_states": optimizer_states}


def whole_tensors(
    shards: Sequence[Tensor], shapes: Shapes, stage: int, paddings: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Returns the whole tensors of a parameter group, keyed by name, given the flat shard of each rank.

    Stages 1 and 2 concatenate all parameters and cut the result into one piece for each rank. Stage 3 cuts each
    parameter. In both cases the last shard is padded. `paddings` has the number of padding elements after each
    parameter, if DeepSpeed's `parameter_alignment` is on. Raises RuntimeError if a shard is too short.
    """
    found: dict[str, Tensor] = {}
    offset = 0
    for (name, shape), padding in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
        step = math.prod(shape)
        if stage < 3:
            found[name] = uncut(shards, shape, offset)
            step += padding
        else:
            step = math.ceil(step / len(shards))
            found[name] = uncut([shard.narrow(0, offset, step) for shard in shards], shape)
        offset += step
    return found


def uncut(parts: Sequence[Tensor], shape: torch.Size, start: int = 0) -> Tensor:
    """Returns a copy of a tensor of this shape, cut out of the concatenation of `parts` from the element `start` on."""
    numel = math.prod(shape)
    own: list[Tensor] = []
    for part in parts:
        own.append(part.flatten()[start : start + numel])
        start = max(start - part.numel(), 0)
        numel -= own[-1].numel()
    return torch.cat(own).detach().reshape(shape)


def _averaged(averages: list[dict[str, Any]], groups: Iterable[Shapes]) -> dict[str, Any]:
    """Returns the entry AVERAGE of a checkpoint. The averaged weights in it are assembled if each rank has stored only
    its own part. `averages` has the entry of each rank."""
    average = averages[0]
    if not average["sharded"]:
        return average
    weights: dict[str, Tensor] = dict(average["weights"])
    for group in groups:
        for name, shape in group.items():
            weights[name] = uncut([of_rank["weights"][name] for of_rank in averages], shape)
    return {**average, "weights": weights, "sharded": False}


def _as_torch(
    states: Mapping[str, State], names: Mapping[int, list[str]], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns an optimizer state in the form of torch's `state_dict`, with DeepSpeed's parameter groups.

    Args:
        states: the state of each parameter, keyed by name.
        names: the names of the parameters in each flat tensor, keyed by the index of the flat tensor.
        groups: DeepSpeed's parameter groups, whose `params` are indices of flat tensors.
    """
    state: dict[int, State] = {}
    param_groups: list[dict[str, Any]] = []
    first = 0
    for group in groups:
        numbered = dict(enumerate((name for flat in group["params"] for name in names[flat]), first))
        first += len(numbered)
        state |= {number: states[name] for number, name in numbered.items() if name in states}
        options = {key: value for key, value in group.items() if key not in DEEPSPEED_GROUP_KEYS}
        param_groups.append({**options, "params": [*numbered], "param_names": [*numbered.values()]})
    return {"state": state, "param_groups": param_groups}
