"""Reads the weights that a run starts from, compares them with the model and loads them."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cifar_zero.checkpoints.read import RECORD, plain_network, read
from cifar_zero.checkpoints.safe_load import load
from cifar_zero.checkpoints.safetensors_file import read_safetensors
from cifar_zero.core.errors import UsageError
from cifar_zero.models.moe import whole_names

BASE = "base"
"""Key of a delta's metadata, see delta.py."""

FILE = "weights.txt"
"""File in the run folder with all that was loaded, initialised and not used."""

LISTED = 4
"""Maximum number of names of each kind in a line on the console."""

WRAPPERS = ("state_dict", "model")
"""Keys of the weights in files of Lightning and timm, and in those of torchvision's references and DeiT."""


@dataclass(frozen=True)
class Match:
    """The weights in a file that fit a model.

    Attributes:
        loaded: by the model's own names.
        initialised: names and shapes of what the file lacks, or has in another shape.
        unused: names and shapes of what the model lacks, or has in another shape.
    """

    loaded: dict[str, Tensor]
    initialised: list[str]
    unused: list[str]

    def summary(self, run_dir: Path) -> str:
        """Returns a line for the console; if it leaves names out, writes all of them into the run folder."""
        parts = [f"loaded {len(self.loaded)} of {len(self.loaded) + len(self.initialised)} tensors"]
        parts += [f"initialised: {_few(self.initialised)}"] if self.initialised else []
        parts += [f"not used: {_few(self.unused)}"] if self.unused else []
        if max(len(self.initialised), len(self.unused)) > LISTED:
            lists = {"loaded": self.loaded, "initialised": self.initialised, "not used": self.unused}
            text = "".join(f"{title}:\n" + "".join(f"  {name}\n" for name in names) for title, names in lists.items())
            (run_dir / FILE).write_text(text)
            parts.append(f"all names in {run_dir / FILE}")
        return "; ".join(parts)


def read_plain(file: Path, trust: bool = False) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint of any strategy, a safetensors file or a state_dict, with adapters merged.

    Raises:
        UsageError: it is damaged, of another kind, or would need `trust`.
    """
    if file.is_dir():
        return plain_network(read(file, trust))
    if file.suffix == ".safetensors":
        weights, metadata = read_safetensors(file)
        if BASE in metadata:
            raise UsageError(f"{file} holds only what was trained: use --weights BASE --delta {file}")
        return weights
    content: Any = load(file, trust)
    if isinstance(content, dict) and RECORD in content:
        return plain_network(content)
    for wrapper in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise UsageError(f"{file} holds no weights: it must be a checkpoint, a safetensors file or a dict of tensors")
    return content


def match(net: nn.Module, weights: Mapping[str, Tensor], file: str) -> Match:
    """Returns the weights that fit the plain model, which may be on torch's meta device, by name and shape.

    Raises:
        UsageError: none fits.
    """
    wanted = net.state_dict()
    loaded = {name: value for name, value in weights.items() if name in wanted and value.shape == wanted[name].shape}
    if not loaded:
        theirs = _few([*weights]) if weights else "nothing"
        raise UsageError(
            f"--weights {file}: no tensor has a name and shape of the model's ({_few([*wanted])}): {theirs}"
        )
    return Match(
        loaded,
        [_with_shape(name, value) for name, value in wanted.items() if name not in loaded],
        [_with_shape(name, value) for name, value in weights.items() if name not in loaded],
    )


def put(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Puts weights into a model of which each rank may have only its share; the rest stays. All ranks call it."""
    whole = whole_names(net)
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if whole[name] in weights:
            with torch.no_grad(), _gathered(tensor):
                tensor.copy_(weights[whole[name]])


def _gathered(tensor: Any) -> AbstractContextManager[Any]:
    """Returns a context in which a parameter that ZeRO-3 has sharded is whole; what rank 0 writes is sharded again."""
    if not hasattr(tensor, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([tensor], modifier_rank=0)


def _with_shape(name: str, tensor: Tensor) -> str:
    return f"{name} ({'x'.join(map(str, tensor.shape)) or 'scalar'})"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
