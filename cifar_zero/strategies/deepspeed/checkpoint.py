"""Writes and reads the files of DeepSpeed's checkpoints, and restores an engine from a checkpoint of another strategy
or number of ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed.comm
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor
from torch.nn import Parameter

from cifar_zero.checkpoints.io import save
from cifar_zero.checkpoints.safe_load import load
from cifar_zero.checkpoints.zero_folder import plain_names
from cifar_zero.core.atomic import failure_of
from cifar_zero.optimizers.groups import by_name
from cifar_zero.strategies.deepspeed.experts import ep_size

Shard = Callable[[Sequence[Tensor]], Tensor]
"""Function that returns this rank's flat part, given the whole tensors of a group's parameters."""


class GuardedCheckpointEngine(TorchCheckpointEngine):
    """Writes and reads DeepSpeed's files. Reading runs no code; for `trust` see `safe_load.load`. An error while
    writing is stored in `failure` and not raised, because the other ranks would wait for this one. Each file that is
    written, except the experts' files, also gets the `notes`."""

    failure = ""  # the first error while writing

    def __init__(self, trust: bool = False, notes: Mapping[str, Any] | None = None):
        super().__init__()
        self._trust, self._notes = trust, notes or {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a folder."""
        self._try(lambda: super(GuardedCheckpointEngine, self).makedirs(path, exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file."""
        optimizer = state_dict.get("optimizer_state_dict")
        if isinstance(optimizer, dict) and "zero_stage" in optimizer:
            # Python 3.11.2 (Debian 12) pickles an Enum as a call of getattr, which no reader should allow.
            plain = {**optimizer, "zero_stage": int(optimizer["zero_stage"])}
            state_dict = {**state_dict, "optimizer_state_dict": plain}
        if not Path(path).name.startswith("layer_"):  # not a file of an expert
            state_dict = {**state_dict, **self._notes}
        self._try(lambda: save(state_dict, Path(path)))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads a file, whose checksums were compared at the start. Raises UsageError if it is damaged or
        `safe_load.load` refuses it."""
        return load(Path(path), self._trust, verify=False)

    def _try(self, write: Callable[[], Any]) -> None:
        self.failure = self.failure or failure_of(write)


MOVED = ("lr", "momentum", "betas")  # options of a parameter group that schedules change


def restore(engine: Any, checkpoint: dict[str, Any], group_names: Sequence[Sequence[str]]) -> bool:
    """Loads a plain checkpoint into an engine of any ZeRO stage and number of ranks.

    Returns whether the checkpoint had the optimizer's state. `group_names` are the names of the parameters in each of
    the optimizer's groups, for a checkpoint without names.
    """
    weights: dict[str, Tensor] = checkpoint["state_dict"]
    carried = bool(checkpoint.get("optimizer_states"))
    saved = by_name(_named(checkpoint["optimizer_states"][0], group_names)) if carried else {}
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    plain, names = plain_names_of(engine, engine.module.state_dict()), _names_of_parameters(engine)
    if stage == 3:
        optimizer.checkpoint_event_prologue()  # shards every parameter, including those that are kept whole
        buffers = dict(engine.module.named_buffers())  # whole on every rank
        for name in plain.keys() & buffers.keys():
            buffers[name].copy_(weights[plain[name]])
    else:
        engine.module.load_state_dict({name: weights[plain[name]] for name in plain})
    for parameters, target, shard in optimizer_groups(engine):
        own = [names[parameter] for parameter in parameters]
        _fill(target.data, shard([weights[name] for name in own]))
        if carried:
            _set_state(engine.basic_optimizer, target, [saved[name][1] for name in own], shard)
    if carried:
        for group in engine.basic_optimizer.param_groups:
            of_names = [saved[plain[name]][0] for name in group["param_names"] if plain[name] in saved]
            group.update({key: of_names[0][key] for key in MOVED if key in of_names[0]})
    if stage == 3:
        for parameter, name in names.items():
            _fill(parameter.ds_tensor.data, cut(weights[name], parameter))  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.checkpoint_event_epilogue()
        forget_second_copies(engine.module)
    engine.global_steps = checkpoint["global_step"]
    engine.global_samples = engine.global_steps * engine.train_batch_size()
    return carried


def _named(state: dict[str, Any], group_names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns an optimizer's state with the names of its parameters. Optimizers of other programs do not store
    names."""
    groups = state["param_groups"]
    if all("param_names" in group for group in groups):
        return state
    named = [{**group, "param_names": names} for group, names in zip(groups, group_names, strict=True)]
    return {**state, "param_groups": named}


def group_shapes(engine: Any) -> list[dict[str, torch.Size]]:
    """Returns, for each tensor that this rank's optimizer updates, the plain names and unsharded shapes of its
    parameters."""
    names = _names_of_parameters(engine)
    shapes: list[dict[str, torch.Size]] = []
    for parameters, *_ in optimizer_groups(engine):
        shapes.append({names[each]: getattr(each, "ds_shape", each.shape) for each in parameters})
    return shapes


def tied_names(engine: Any) -> dict[str, str]:
    """Maps each additional plain name of a tied weight to its first plain name."""
    first: dict[Parameter, str] = _names_of_parameters(engine)
    every = dict(engine.module.named_parameters(remove_duplicate=False))
    plain = plain_names_of(engine, every)
    return {plain[name]: first[each] for name, each in every.items() if plain[name] != first[each]}


def plain_names_of(engine: Any, names: Iterable[str]) -> dict[str, str]:
    """Maps the name of each weight on this rank to its name in the plain model. The rank may have only some of all
    experts."""
    return plain_names(names, engine.global_rank % ep_size(engine.module))


def _names_of_parameters(engine: Any) -> dict[Parameter, str]:
    own = dict(engine.module.named_parameters())
    plain = plain_names_of(engine, own)
    return {parameter: plain[name] for name, parameter in own.items()}


def optimizer_groups(engine: Any) -> Iterator[tuple[list[Parameter], Tensor, Shard]]:
    """Yields a tuple for each float32 tensor that the optimizer updates: its parameters in order, the tensor, and the
    function that cuts this rank's part."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        for group, target in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            yield group, target, lambda wholes, group=group: torch.cat([*map(cut, wholes, group)])
    elif stage:
        # With grad_accum_dtype fp32, ZeRO 1 uses another optimizer class, deepspeed/runtime/bf16_optimizer.py.
        if hasattr(optimizer, "fp32_groups_flat_partition"):
            groups, targets = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
        else:
            groups, targets = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
        paddings = getattr(optimizer, "round_robin_bit16_padding", None)  # present with parameter_alignment
        for number, (group, target) in enumerate(zip(groups, targets, strict=True)):
            start = deepspeed.comm.get_rank(group=optimizer.real_dp_process_group[number]) * target.numel()
            part = slice(start, start + target.numel())
            padding = paddings and paddings[number]
            yield group, target, lambda wholes, part=part, padding=padding: _flat(wholes, padding)[part]
    elif optimizer is engine.basic_optimizer:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield [parameter], parameter, _flat
    elif hasattr(optimizer, "fp32_groups_flat"):
        for group, target in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            yield group, target, _flat
    else:
        for group, targets in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, target in zip(group, targets, strict=True):
                yield [parameter], target, _flat


def _fill(target: Tensor, part: Tensor) -> Tensor:
    """Copies a flat part into a tensor in place, and returns the tensor, which may end with padding."""
    target.view(-1)[: part.numel()].copy_(part)
    return target


def _flat(wholes: Sequence[Tensor], paddings: Sequence[int] | None = None) -> Tensor:
    parts: list[Tensor] = []
    for whole, padding in zip(wholes, paddings or [0] * len(wholes), strict=True):
        parts.append(torch.nn.functional.pad(whole.flatten(), (0, padding)))
    return torch.cat(parts)


def cut(whole: Tensor, parameter: Any) -> Tensor:
    """Returns this rank's flat part of a parameter at ZeRO 3. The last rank's part is padded with zeros."""
    size = parameter.ds_tensor.ds_numel
    rank = deepspeed.comm.get_rank(group=parameter.ds_process_group)
    part = whole.flatten()[rank * size : (rank + 1) * size]
    return torch.nn.functional.pad(part, (0, size - part.numel()))


def forget_second_copies(module: torch.nn.Module) -> None:
    """Drops the secondary copies of zero_hpz_partition_size after the parameters of ZeRO 3 were overwritten. Otherwise
    the old copies would be gathered until the next step (DeepSpeed 0.19.8, partition_parameters.py)."""
    for parameter in module.parameters():
        parameter.ds_secondary_tensor = None  # pyright: ignore[reportAttributeAccessIssue]


def _set_state(base: Any, target: Tensor, entries: list[dict[str, Any]], shard: Shard) -> None:
    """Sets the base optimizer's state of a flat tensor, given the state of each of its parameters in `entries`."""
    state: dict[str, Any] = {}
    for key, value in entries[0].items():
        if key == "step":
            state |= _step(base, target, float(value))
        elif isinstance(value, Tensor):
            state[key] = _fill(torch.zeros_like(target), shard([entry[key] for entry in entries]))
        else:
            state[key] = value
    if state:
        base.state[target] = state


def _step(base: Any, target: Tensor, step: float) -> dict[str, Any]:
    """Returns the step count as optimizer state, which is an int for DeepSpeed's Adam and a tensor for torch's
    optimizers."""
    if isinstance(base, DeepSpeedCPUAdam):
        return {"step": int(step)}
    counted = torch.tensor(step)
    if any(group.get("fused") or group.get("capturable") for group in base.param_groups):
        counted = counted.to(target.device)
    return {"step": counted}
