"""Assembles a folder of DeepSpeed's files, from all ranks, into the form of Lightning's plain checkpoints. Imports
torch only when a file is read.

DeepSpeed's own tools do not suffice: zero_to_fp32 loads files that could run code, and drops the optimizer's state, and
universal checkpoints support only Adam. DeepSpeed (0.19.8) writes these files into the folder TAG:

- `mp_rank_00_model_states.pt` at stages 0 to 2: the model in the dtype in which it computes, and at stage 0 also the
  optimizer.
- `zero_pp_rank_<rank>_mp_rank_00_model_states.pt` at stage 3: the model without the sharded parameters.
- `[bf16_]zero_pp_rank_<rank>_mp_rank_00_optim_states.pt` at stages 1 to 3: the rank's shard of the float32 weights and
  of the optimizer's state. Each parameter group (at stage 3 each sub-group) is one flat tensor. A group of experts is
  sharded over the ranks that have the same experts.
- `layer_<mixture>_expert_<number>_mp_rank_00_model_states.pt`: an expert of a mixture of experts.
- `expp_rank_<index>_mp_rank_00_optim_states.pt` at stage 0 with experts: the optimizer of one of the ep_size ranks that
  together have all experts.
- `offloaded_tensors/rank<rank>/` for an optimizer on NVMe: the flat tensors that are empty in the other files, in
  float32. `<group>.tensor.swp` are the weights and `<key>-<group>.tensor.swp` is the state.

To each file, except the experts' files, the strategy adds PARTS, TIED and PROGRESS, and for NVMe also ON_DISK. A folder
without them, of another program, is refused.
"""

from __future__ import annotations

import math
import re
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar_zero.checkpoints.safe_load import load_safely
from cifar_zero.core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TAG = "checkpoint"  # folder inside a DeepSpeed checkpoint, as Lightning names it
LATEST = "latest"  # file next to the folder TAG, with the text TAG; it is written last
LAYOUT = "zero_layout"  # key of what a shard depends on, such as the number of ranks

PARTS = "zero_parts"
"""Key of a list with the `Parts` of each flat tensor of the rank."""

ON_DISK = "zero_on_disk"  # key of the names of this rank's groups in DeepSpeed's files on NVMe

AVERAGE = "average"
"""Key under which training/callbacks/averaging.py adds `count`, `weights` and `sharded` to the checkpoints of every
strategy. `weights` are the averages over `count` steps, keyed as in state_dict. If `sharded` is set, the averages of
parameters are this rank's shards (stage 3), without padding."""

TIED = "zero_tied"
"""Key of a dict that maps each additional plain name of a tied weight to its first plain name, under which the shards
contain it."""

PROGRESS = "zero_progress"
"""Key of the names of all entries that Lightning and the run's callbacks have added to the files of the model."""

DEEPSPEED_GROUP_KEYS = {"params", "param_names", "name", "moe"}
"""Keys of a parameter group that only DeepSpeed's engine uses, or that `_as_torch` replaces."""

EXPERT = re.compile(r"(.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.*)")
"""DeepSpeed's name of an expert's weight. The groups are the mixture, the expert's number and the weight's own name."""

Parts = Mapping[str, tuple["torch.Size", int, int, int]]
"""The parts of parameters that lie in a flat tensor, by the parameter's plain name. A part is the parameter's shape,
the part's start in the flattened parameter and in the flat tensor, and its length. All numbers count elements."""

MASTER = "master weight"  # key of the float32 weights that the optimizer updates, next to its state


def is_checkpoint_folder(path: Path) -> bool:
    """Returns whether a folder is a checkpoint of DeepSpeed. A file `latest` alone may belong to another program."""
    return (path / LATEST).is_file() and (path / TAG).is_dir()


def read_folder(folder: Path, trust: bool = False, verify: bool = True, device: str = "cpu") -> dict[str, Any]:
    """Returns the content of the folder TAG as Lightning's plain strategies write it: state_dict, optimizer_states and
    the entries of PROGRESS. The state_dict has DeepSpeed's float32 master weights, if there are any. For the arguments
    see `safe_load.load_safely`. Raises UsageError if a file is missing, damaged, of another program or would need
    `trust`."""
    paths = files_of(folder)
    files = [[load_safely(file, trust, verify, device) for file in kind] for kind in paths]
    models, experts, shards, of_expert_ranks = files
    main = models[0]
    if PROGRESS not in main:
        raise UsageError(f"{folder} was not written by this program: DeepSpeed's zero_to_fp32.py reads its weights")
    try:
        stage = 2 if shards else 0  # stage 1 has the same files
        if paths[0][0].name.startswith("zero_pp_rank"):
            stage = 3
        _check_complete(folder, stage, files)
        for rank, shard in enumerate(shards):
            if ON_DISK in shard:
                _fill_from_disk(shard["optimizer_state_dict"], folder, rank, shard[ON_DISK], device)
        return _content(models, experts, shards or of_expert_ranks or models[:1], stage)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{folder} is not a complete DeepSpeed checkpoint: {type(error).__name__}: {error}") from error


def layout_of(folder: Path, trust: bool) -> Any:
    """Returns the record under LAYOUT in the folder TAG, or None if there is none. Raises UsageError if the file cannot
    be read."""
    return load_safely(files_of(folder)[0][0], trust, verify=False, device="meta").get(LAYOUT)


def plain_names(names: Iterable[str], rank: int = 0) -> dict[str, str]:
    """Returns the plain name for each of DeepSpeed's `names` of weights. It is the name in the model without
    DeepSpeed's layers. On each rank, DeepSpeed numbers the experts from 0.

    `names` are the names of one rank, whose index among the ranks that share the experts of a mixture is `rank`. They
    may also be the names of all weights, with the experts of all ranks.
    """
    matches = {name: EXPERT.fullmatch(name) for name in names}
    numbers: dict[str, set[str]] = {}
    for expert in filter(None, matches.values()):
        numbers.setdefault(expert[1], set()).add(expert[2])
    plain: dict[str, str] = {}
    for name, expert in matches.items():
        plain[name] = name.replace(".deepspeed_moe.gate.", ".gate.")
        if expert:
            number = rank * len(numbers[expert[1]]) + int(expert[2])
            plain[name] = f"{expert[1]}.experts.{number}.{expert[3]}"
    return plain


def files_of(folder: Path) -> tuple[list[Path], ...]:
    """Returns the files of the model, its experts, the optimizer's shards, and the `expp_rank` files. Each list is
    sorted by the numbers in the names. Raises UsageError if no file of the model exists."""

    def sorted_files(pattern: str) -> list[Path]:
        return sorted(folder.glob(pattern), key=lambda file: [*map(int, re.findall(r"\d+", file.stem))])

    models = sorted_files("mp_rank_*model_states.pt") or sorted_files("zero_pp_rank_*model_states.pt")
    if not models:
        raise UsageError(f"{folder} contains no checkpoint: *model_states.pt is missing")
    experts = sorted_files("layer_*_expert_*model_states.pt")
    return models, experts, sorted_files("*zero_pp_rank_*optim_states.pt"), sorted_files("expp_rank_*optim_states.pt")


def _check_complete(folder: Path, stage: int, files: Sequence[Sequence[Any]]) -> None:
    models, experts, shards, of_expert_ranks = files
    main = models[0]
    ranks, num_experts = main["dp_world_size"], sum(main.get("num_experts") or [])
    sharing = main[LAYOUT]["ep_size"] if num_experts and not stage else 0
    for actual, expected, what in (
        (models, ranks if stage == 3 else 1, "model files"),
        (experts, num_experts, "expert files"),
        (shards, ranks if stage else 0, "optimizer files"),
        (of_expert_ranks[:sharing], sharing, "expp_rank files"),
    ):
        if len(actual) != expected:
            raise UsageError(f"{folder} is incomplete: it has {len(actual)} {what}, not {expected}")


def _fill_from_disk(optimizer: dict[str, Any], folder: Path, rank: int, names: Sequence[str], device: str) -> None:
    """Replaces the empty tensors of a rank's shard, in place, by the tensors that DeepSpeed kept on NVMe and copied
    into the checkpoint. `names` has the <group> of the file names for each sub-group."""
    import torch

    files = folder / "offloaded_tensors" / f"rank{rank:02d}"  # DeepSpeed's dp_index_to_str

    def read(stem: str) -> Tensor:
        file = files / f"{stem}.tensor.swp"
        return torch.from_file(str(file), size=file.stat().st_size // 4, dtype=torch.float32).to(device)

    weights, state = optimizer["fp32_flat_groups"], optimizer["optimizer_state_dict"]["state"]
    for number, name in enumerate(names):
        if not weights[number].numel():
            weights[number] = read(name)
            empty = [
                key for key, value in state[number].items() if isinstance(value, torch.Tensor) and value.shape == (0,)
            ]
            state[number] |= {key: read(f"{key}-{name}") for key in empty}


def _flat_weights(optimizer: Mapping[str, Any], stage: int) -> Sequence[Tensor]:
    """Returns the float32 weights that a rank's optimizer updates, one flat tensor for each group, or nothing if it
    updates the model's own weights."""
    if stage:
        return optimizer["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
    return optimizer.get("fp32_groups_flat") or [*chain(*optimizer.get("fp32_groups", ()))]


def _base_state(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the state_dict of the optimizer that DeepSpeed's optimizer wraps, if it wraps one."""
    return optimizer.get("base_optimizer_state") or optimizer.get("optimizer_state_dict") or optimizer


def _unshard(optimizers: Sequence[Any], stage: int) -> dict[str, dict[str, Any]]:
    """Returns the full optimizer state, joined from all ranks, as {state key: {plain parameter name: value}}, with the
    master weights under MASTER. Raises ValueError if a part of a parameter is in no file."""
    full: dict[str, dict[str, Any]] = defaultdict(dict)
    missing: dict[str, int] = {}  # number of elements that no rank has
    for file in optimizers:
        optimizer = file["optimizer_state_dict" if stage else "optimizer"]
        weights, state = _flat_weights(optimizer, stage), _base_state(optimizer)["state"]
        for number, parts in enumerate(file[PARTS]):
            values = {**state.get(number, {}), **({MASTER: weights[number]} if weights else {})}
            for key, value in values.items():
                _add_parts(full[key], key, value, parts)
            for name, (shape, *_, length) in parts.items():
                missing[name] = missing.get(name, math.prod(shape)) - length
    if max(missing.values(), default=0) > 0:
        raise ValueError(f"a part of {max(missing, key=missing.__getitem__)} is missing")
    return full


def _add_parts(full: dict[str, Any], key: str, value: Any, parts: Parts) -> None:
    """Adds one rank's `value`, the state under `key` of a flat tensor, to `full` in place. `full` maps the names of
    parameters to their full values. A flat tensor is divided into its `parts`, and any other value is given to each
    parameter in `parts`."""
    import torch

    for name, (shape, start, offset, length) in parts.items():
        if isinstance(value, torch.Tensor) and value.dim():
            if name not in full:
                full[name] = torch.empty(shape, dtype=value.dtype, device=value.device)
            full[name].view(-1)[start : start + length] = value.detach().flatten()[offset : offset + length]
        elif key == "step":  # a number in the state of DeepSpeed's Adam
            full[name] = torch.as_tensor(value, dtype=torch.float32).clone()
        else:
            full[name] = value


def _model_weights(
    models: Sequence[Any], experts: Sequence[Any], masters: Mapping[str, Tensor], tied: Mapping[str, str], stage: int
) -> dict[str, Tensor]:
    """Returns all weights and buffers by plain name, in the model's order, with the experts last."""
    main = models[0]
    stored = {name: value for name, value in main["module"].items() if stage < 3 or name in main["buffer_names"]}
    for expert in experts:
        stored |= expert
    plain = plain_names({**main["module"], **stored})
    weights = {**{plain[name]: value for name, value in stored.items()}, **masters}
    frozen: Mapping[str, torch.Size] = (stage == 3 and main.get("frozen_param_shapes")) or {}
    for name, shape in frozen.items():
        weights[name] = _join([model["frozen_param_fragments"][name] for model in models], shape)
    weights |= {name: weights[first] for name, first in tied.items() if first in weights}
    return {name: weights[name] for name in plain.values()}


def _join(shards: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Returns the tensor of shape `shape` of which each rank has a flat shard. The last shard may be padded."""
    import torch

    return torch.cat([*map(torch.flatten, shards)])[: math.prod(shape)].reshape(shape)


def _content(models: Sequence[Any], experts: Sequence[Any], optimizers: Sequence[Any], stage: int) -> dict[str, Any]:
    main, full = models[0], _unshard(optimizers, stage)
    names: dict[int, dict[str, Any]] = defaultdict(dict)  # parts by flat tensor and name; ranks have other experts
    for file in optimizers:
        for number, parts in enumerate(file[PARTS]):
            names[number] |= parts
    weights = _model_weights(models, experts, full.pop(MASTER, {}), main[TIED], stage)
    progress = {key: main[key] for key in main[PROGRESS]}
    if AVERAGE in main and main[AVERAGE]["sharded"]:
        average = {**main[AVERAGE]["weights"]}
        for name, (shape, *_) in ChainMap(*names.values()).items():
            if name in average:  # it is missing if a callback has frozen the parameter from the first step on
                average[name] = _join([model[AVERAGE]["weights"][name] for model in models], shape)
        progress[AVERAGE] = {**main[AVERAGE], "weights": average, "sharded": False}
    groups = _base_state(optimizers[0]["optimizer_state_dict" if stage else "optimizer"])["param_groups"]
    return {**progress, "state_dict": weights, "optimizer_states": [_as_torch(full, names, groups)]}


def _as_torch(
    full: Mapping[str, Mapping[str, Any]], names: Mapping[int, Iterable[str]], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns an optimizer state in the form of torch's `state_dict`, with the names of the parameters in each group.

    Args:
        full: see `_unshard`.
        names: the names of the parameters in each flat tensor.
        groups: DeepSpeed's parameter groups, whose `params` are indices of flat tensors.
    """
    state: dict[int, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    first = 0
    for group in groups:
        numbered = dict(enumerate((name for flat in group["params"] for name in names[flat]), first))
        first += len(numbered)
        for number, name in numbered.items():
            if own := {key: values[name] for key, values in full.items() if name in values}:
                state[number] = own
        options = {key: value for key, value in group.items() if key not in DEEPSPEED_GROUP_KEYS}
        param_groups.append({**options, "params": [*numbered], "param_names": [*numbered.values()]})
    return {"state": state, "param_groups": param_groups}
