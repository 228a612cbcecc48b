"""Writes and reads the files of DeepSpeed's checkpoints, and restores an engine from a checkpoint of another strategy
or number of ranks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor

from cifar_zero.checkpoints.io import save
from cifar_zero.checkpoints.safe_load import load_safely
from cifar_zero.checkpoints.zero_folder import LATEST, LAYOUT, ON_DISK, PARTS, PROGRESS, TAG, TIED, Parts
from cifar_zero.core import atomic
from cifar_zero.core.atomic import failure_of
from cifar_zero.launch.collectives import gather
from cifar_zero.optimizers.groups import by_name
from cifar_zero.strategies.deepspeed.experts import names_of_parameters, plain_names_of
from cifar_zero.strategies.deepspeed.hooks import rewriting
from stepcheck.engines.deepspeed import flat_groups, stage_3_part

MOVED = ("lr", "momentum", "betas")
"""Options of a parameter group that are restored from the checkpoint, because a schedule in a user's module may change
them. The schedules of cifar_zero/schedules change only the learning rate, so `optimizers.groups.keep_own_options`
restores no other option."""


class GuardedCheckpointEngine(TorchCheckpointEngine):
    """Writes and reads DeepSpeed's files. The first error while writing is stored in `failure`. It is not raised,
    because the other ranks would wait for this one. `notes` are added to each file that is written, except the experts'
    files. For `trust` see `safe_load.load_safely`."""

    failure = ""  # the first error while writing

    def __init__(self, trust: bool = False, notes: Mapping[str, Any] | None = None):
        super().__init__()
        self._trust, self._notes = trust, notes or {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._try(lambda: super(GuardedCheckpointEngine, self).makedirs(path, exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        if not Path(path).name.startswith("layer_"):  # not a file of an expert
            state_dict = {**state_dict, **self._notes}
        self._try(lambda: save(state_dict, Path(path)))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads a file, whose checksums were compared when the run started. Raises UsageError if the file is damaged or
        `safe_load.load_safely` refuses it."""
        return load_safely(Path(path), self._trust, verify=False)

    def _try(self, write: Callable[[], Any]) -> None:
        self.failure = self.failure or failure_of(write)


def write_folder(engine: Any, final: Path, progress: dict[str, Any], layout: dict[str, Any]) -> str:
    """Writes a checkpoint folder under a temporary name, each rank its own files. If none failed, rank 0 then renames
    the folder to `final`. Returns the first error of any rank, or an empty string. An error of the rename is returned
    on rank 0 only. Every rank must call it.

    Args:
        progress: What Lightning and the callbacks save in addition to the weights and the optimizer's state.
        layout: What a shard depends on. Only an engine with an equal layout can load a shard as it is.
    """
    folder = atomic.staged(final)
    notes: dict[str, Any] = {PARTS: _parts_of_groups(engine), TIED: _tied_names(engine), PROGRESS: [*progress]}
    if engine.zero_nvme_offload_optimizer():
        notes[ON_DISK] = [flat.ds_id for flat in engine.optimizer.fp32_partitioned_groups_flat]
    guard = engine.checkpoint_engine = GuardedCheckpointEngine(notes=notes)
    engine._copy_recovery_script = lambda save_path: None  # it would write outside of the guard
    engine.save_checkpoint(str(folder), tag=TAG, client_state={**progress, LAYOUT: layout}, save_latest=False)

    def finish() -> None:
        (folder / LATEST).write_text(TAG)
        atomic.put_in_place(final)

    failure = next(filter(None, gather(guard.failure)), "")
    if engine.global_rank == 0 and not failure:
        return failure_of(finish)
    return failure


def _parts_of_groups(engine: Any) -> list[Parts]:
    """Returns a dict for each flat tensor that this rank's optimizer updates. It maps the plain name of each parameter
    to the part of the parameter that the tensor has."""
    names = names_of_parameters(engine)
    of_groups: list[Any] = []
    for _, parts in flat_groups(engine):
        of_groups.append({names[each]: (getattr(each, "ds_shape", each.shape), *rest) for each, *rest in parts})
    return of_groups


def _tied_names(engine: Any) -> dict[str, str]:
    """Maps each additional plain name of a tied weight to its first plain name."""
    first = names_of_parameters(engine)
    every = dict(engine.module.named_parameters(remove_duplicate=False))
    plain = plain_names_of(engine, every)
    return {plain[name]: first[each] for name, each in every.items() if plain[name] != first[each]}


def with_names(state: dict[str, Any], group_names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns an optimizer's state in which each group has the names of its parameters. If a group lacks them, as in
    checkpoints of other programs, all groups get the names in `group_names`."""
    groups = state["param_groups"]
    if all("param_names" in group for group in groups):
        return state
    named = [{**group, "param_names": names} for group, names in zip(groups, group_names, strict=True)]
    return {**state, "param_groups": named}


def restore(engine: Any, checkpoint: dict[str, Any], group_names: Sequence[Sequence[str]]) -> None:
    """Loads a plain checkpoint, as `checkpoints.read.read` returns it, into an engine of any ZeRO stage and number of
    ranks: weights, optimizer state, the options in MOVED and the step count. If it has no names of parameters, they are
    those in `group_names`, one list for each of the optimizer's groups. Every rank must call it."""
    weights: dict[str, Tensor] = checkpoint["state_dict"]
    saved = by_name(with_names(checkpoint["optimizer_states"][0], group_names))
    plain, names = plain_names_of(engine, engine.module.state_dict()), names_of_parameters(engine)
    stage, base = engine.zero_optimization_stage(), engine.basic_optimizer
    with rewriting(engine):
        if stage == 3:
            buffers = dict(engine.module.named_buffers())  # not sharded
            for name in plain.keys() & buffers.keys():
                buffers[name].copy_(weights[plain[name]])
            for parameter, name in names.items():
                shard: Any = parameter.ds_tensor  # pyright: ignore[reportAttributeAccessIssue]
                start, length = stage_3_part(parameter)
                shard.data[:length] = weights[name].flatten()[start : start + length]
        else:
            engine.module.load_state_dict({name: weights[plain[name]] for name in plain})
        for (target, _), parts in zip(flat_groups(engine), _parts_of_groups(engine), strict=True):
            _fill(target.data, parts, weights)
            _set_state(base, target, parts, {name: saved[name][1] for name in parts})
    for group in base.param_groups:
        options, _ = next(saved[plain[name]] for name in group["param_names"] if plain[name] in saved)
        group.update({key: options[key] for key in MOVED if key in options})
    engine.global_steps = checkpoint["global_step"]
    engine.global_samples = engine.global_steps * engine.train_batch_size()


def _fill(target: Tensor, parts: Parts, full: Mapping[str, Tensor]) -> Tensor:
    """Copies into the flat tensor `target` the `parts` of the unsharded tensors `full`, which are keyed by name.
    Returns `target`."""
    flat = target.view(-1)
    for name, (_, start, offset, length) in parts.items():
        flat[offset : offset + length] = full[name].flatten()[start : start + length]
    return target


def _set_state(base: Any, target: Tensor, parts: Parts, states: Mapping[str, dict[str, Any]]) -> None:
    """Sets the base optimizer's state of the flat tensor `target`. `states` has the unsharded state of each parameter
    of which `target` may have a part, keyed by name. If the state of a parameter is empty, because it never had a
    gradient, its part in `target` is zero, as if DeepSpeed had trained from the start."""
    states = {name: each for name, each in states.items() if each}
    parts = {name: part for name, part in parts.items() if name in states}
    state: dict[str, Any] = {}
    for key, value in next(iter(states.values()), {}).items():
        if key == "step":
            state[key] = _step(base, target, float(value))
        elif isinstance(value, Tensor):
            full = {name: each[key] for name, each in states.items()}
            state[key] = _fill(torch.zeros_like(target), parts, full)
        else:
            state[key] = value
    if state:
        base.state[target] = state


def _step(base: Any, target: Tensor, step: float) -> Tensor | int:
    """Returns the step count as the base optimizer keeps it: an int in DeepSpeed's Adam, a tensor in torch's
    optimizers."""
    if isinstance(base, DeepSpeedCPUAdam):
        return int(step)
    counted = torch.tensor(step)
    if any(group.get("fused") or group.get("capturable") for group in base.param_groups):
        return counted.to(target.device)
    return counted
