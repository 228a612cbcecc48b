"""Exports the weights of any DeepSpeed checkpoint, whether Lightning, Accelerate, transformers or
`engine.save_checkpoint` wrote it.

checkpoints/zero_folder.py describes the files. They are mapped into memory, so that only the exported weights occupy
memory. DeepSpeed's `zero_to_fp32` (0.19.8) does not suffice. It loads files that could run code. It omits frozen
parameters at stage 1, and the weights of a shared module under the module's second name. It cannot read checkpoints of
stage 0, or checkpoints in bfloat16 with `grad_accum_dtype` fp32.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from cifar_zero.checkpoints.read import RECORD
from cifar_zero.checkpoints.safe_load import load
from cifar_zero.checkpoints.zero_folder import Shapes, files_of, uncut, whole_tensors
from cifar_zero.core import atomic
from cifar_zero.core.errors import UsageError


def is_of_another_program(folder: Path, trust: bool = False) -> bool:
    """Returns whether a program other than cifar-zero train wrote a folder of DeepSpeed's files. Raises UsageError if a
    file is missing or damaged, or can be loaded only with `trust`."""
    return RECORD not in load(files_of(folder)[0][0], trust, verify=False, device="meta")


def export(folder: Path, output: Path, trust: bool = False) -> None:
    """Writes the weights in a folder of DeepSpeed's files as safetensors, in float32.

    At stages 1 to 3, DeepSpeed stores the names of the float32 weights that the optimizer updates, so these weights are
    written. At stage 0, the model's weights are written.

    Args:
        folder: The folder of DeepSpeed's files.
        output: The file to write.
        trust: Whether to load files that could run code.

    Raises:
        UsageError: If a file is missing or damaged, can be loaded only with `trust`, or has only a part of the model.
        OSError: If the export cannot be written.
        SafetensorError: If the export cannot be written.
    """
    try:
        tensors, missing = _read(folder, trust)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{folder} is not a complete DeepSpeed checkpoint: {type(error).__name__}: {error}") from error
    with atomic.replacing(output) as new:
        safetensors.torch.save_file(tensors, new, {"format": "pt"})
        new.chmod(folder.stat().st_mode & 0o666)  # safetensors (0.8.0) makes a file that only its owner can read
    print(f"{output}: {len(tensors)} tensors, {output.stat().st_size / 1e6:,.2f} MB")
    if missing:
        print(f"left out, because DeepSpeed stored no values for them: {', '.join(missing)}")


def _read(folder: Path, trust: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the model's parameters and buffers, keyed by their names in its state dict, and the names of tensors
    whose values DeepSpeed has not stored."""
    file = files_of(folder)[0][0]
    main = load(file, trust, mapped=True)
    module, ranks = main["module"], range(main["dp_world_size"])
    if main.get("num_experts") or module is None or any(folder.glob("*mp_rank_01_*")):
        raise UsageError(f"{folder} has experts, or pipeline or tensor parallelism, which export cannot assemble")
    found: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = module
    cut = file.name.startswith("zero_pp_rank")  # stage 3: each rank has a part of each parameter
    if cut:
        stored = {name: module[name] for name in main["buffer_names"]}
        models = [_of_rank(folder, "model", rank, trust) for rank in ranks]
        for name, shape in (main["frozen_param_shapes"] or {}).items():
            found[name] = uncut([model["frozen_param_fragments"][name] for model in models], shape)
    if main["param_shapes"] is not None:
        shards = [_of_rank(folder, "optim", rank, trust)["optimizer_state_dict"] for rank in ranks]
        found |= _optimized(main["param_shapes"], shards, cut)
    # Two names of one parameter share memory at stages 0 to 2, and are listed in shared_params.
    trained = {stored[name].data_ptr(): found[name] for name in found if name in stored}
    for name, value in stored.items():
        if name not in found:
            found[name] = trained.get(value.data_ptr(), value).clone()
    for name, first in (main["shared_params"] or {}).items():
        if first in found:
            found[name] = found[first].clone()
    for name, value in found.items():
        if value.is_floating_point():
            found[name] = value.float()
    # Lightning before 2.1 added a prefix to all names.
    tensors = {name.removeprefix("_forward_module."): found[name] for name in module if name in found}
    return tensors, [name for name in module if name not in found]


def _optimized(groups: Sequence[Shapes], shards: Sequence[Mapping[str, Any]], cut: bool) -> dict[str, Tensor]:
    """Returns the float32 weights that the optimizer updates, keyed by name.

    Args:
        groups: The names and shapes of the parameters in each parameter group.
        shards: The optimizer state of each rank.
        cut: Whether each rank has a part of each parameter, as at stage 3.
    """
    found: dict[str, Tensor] = {}
    key = "fp32_flat_groups" if cut else "single_partition_of_fp32_groups"
    paddings = shards[0].get("param_alignment_paddings")
    for number, shapes in enumerate(groups):
        flat = [shard[key][number] for shard in shards]
        if cut and len(flat[0]) != sum(math.ceil(math.prod(shape) / len(flat)) for shape in shapes.values()):
            raise ValueError(f"the weights are on NVMe, or not sharded over all {len(flat)} ranks")
        found |= whole_tensors(flat, shapes, 3 if cut else 2, paddings and paddings[number])
    return found


def _of_rank(folder: Path, kind: str, rank: int, trust: bool) -> dict[str, Any]:
    name = f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
    files = [*folder.glob(f"*{name}")]  # bf16_zero_pp_rank_... in bfloat16
    if len(files) != 1:
        raise UsageError(f"{folder} is incomplete: it has {len(files)} files {name} of rank {rank}, not 1")
    return load(files[0], trust, mapped=True)
