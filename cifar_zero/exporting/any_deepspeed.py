"""Exports the weights of any DeepSpeed checkpoint, whether Lightning, Accelerate, transformers or
`engine.save_checkpoint` wrote it.

checkpoints/zero_folder.py describes the files. They are mapped into memory, so that only the exported weights occupy
memory. DeepSpeed's `zero_to_fp32` (0.19.8) does not suffice. It loads files that could run code. It omits frozen
parameters at stage 1, and the weights of a shared module under the module's second name. It cannot read checkpoints of
stage 0, or checkpoints in bfloat16 with `grad_accum_dtype` fp32.
"""

from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from cifar_zero.checkpoints.read import RECORD
from cifar_zero.checkpoints.safe_load import load
from cifar_zero.checkpoints.zero_folder import files_of, read_folder
from cifar_zero.core import atomic


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
    content = read_folder(folder, trust, verify=False, mapped=True)
    tensors: dict[str, Tensor] = {}
    for name, value in content["state_dict"].items():
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        # Lightning before 2.1 added a prefix to all names. Tied weights are copied, because safetensors stores each.
        tensors[name.removeprefix("_forward_module.")] = value.to(dtype, copy=True)
    with atomic.replacing(output) as new:
        safetensors.torch.save_file(tensors, new, {"format": "pt"})
        new.chmod(folder.stat().st_mode & 0o666)  # safetensors (0.8.0) makes a file that only its owner can read
    print(f"{output}: {len(tensors)} tensors, {output.stat().st_size / 1e6:,.2f} MB")
    if missing := content["missing"]:
        print(f"left out, because DeepSpeed stored no values for them: {', '.join(missing)}")
